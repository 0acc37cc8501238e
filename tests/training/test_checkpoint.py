"""Checkpoints: durable writing, and refusal of whatever is not what was written."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hyperkron as hk
from hyperkron.training import checkpoint, files

# --- damage ------------------------------------------------------------------------------------------------

STATE = {"weight": torch.arange(6.0).reshape(2, 3).T, "step": 3, "loss": math.nan}


def write(folder: Path, step: int = 3) -> Path:
    return checkpoint.write(folder, step, {**STATE, "step": step})


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = (path / "manifest.json").read_bytes()
    for place in range(0, len(data)):
        (path / "manifest.json").write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        with pytest.raises(hk.training.DamagedCheckpoint):
            checkpoint.read(path)


@pytest.mark.parametrize("name", ["manifest.json", "state-rank00000.json", "tensors-rank00000.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "grow", "link", "folder", "pipe"])
def test_damage_is_found_and_the_checkpoint_before_is_taken(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path, 3)
    path = write(tmp_path, 4) / name
    data = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "same").write_bytes(data)
        path.symlink_to(tmp_path / "same")
    elif damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage != "delete":
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]
        path.write_bytes({"flip": flipped, "cut": data[:-1], "grow": data + b" "}[damage])
    with pytest.raises(hk.training.DamagedCheckpoint, match=name):
        checkpoint.read(path.parent)
    with pytest.warns(hk.HyperkronWarning, match=f"(?s)continuing from step-00000003.*step-00000004.*{name}"):
        assert checkpoint.newest(tmp_path).state["step"] == 3
    with pytest.raises(hk.training.CheckpointError, match=r"step 4 in .* is intact"):
        checkpoint.newest(tmp_path, step=4)


def test_content_that_parses_but_differs_is_found_by_its_hash(tmp_path: Path) -> None:
    """One flipped bit of a number is well-formed everywhere: only the hash can tell."""
    path = write(tmp_path)
    tensors, state = path / "tensors-rank00000.safetensors", path / "state-rank00000.json"
    data = tensors.read_bytes()
    tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert not torch.equal(load_file(tensors)["weight"], torch.arange(6.0))
    with pytest.raises(hk.training.DamagedCheckpoint, match=r"tensors-rank00000\.safetensors has another SHA-256"):
        checkpoint.read(path)
    tensors.write_bytes(data)
    text = state.read_text()
    state.write_text(text.replace('"step": 3', '"step": 7'))
    assert state.read_text() != text
    with pytest.raises(hk.training.DamagedCheckpoint, match=r"state-rank00000\.json has another SHA-256"):
        checkpoint.read(path)
    with pytest.raises(hk.training.DamagedCheckpoint, match="SHA-256"):
        checkpoint.check(path)


def test_nothing_intact_is_an_error_that_lists_what_was_wrong(tmp_path: Path) -> None:
    with pytest.raises(hk.training.CheckpointError, match="there is no checkpoint"):
        checkpoint.newest(tmp_path / "absent")
    for step in (1, 2):
        (write(tmp_path, step) / "manifest.json").unlink()
    with pytest.raises(hk.training.CheckpointError, match=r"(?s)step-00000002.*step-00000001"):
        checkpoint.newest(tmp_path)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    write(tmp_path).rename(tmp_path / "step-00000009")
    with pytest.raises(hk.training.DamagedCheckpoint, match="is of step 3"):
        checkpoint.read(tmp_path / "step-00000009")


# --- malice: hashes that agree, content that should not be trusted -----------------------------------------


def forge(path: Path, change: Any = None, **contents: bytes) -> None:
    """Replace files and make the manifest agree with them."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    for name, data in contents.items():
        name = {"state": "state-rank00000.json", "tensors": "tensors-rank00000.safetensors"}[name]
        (path / name).unlink()
        manifest["files"][name] = files.write(path / name, [data])
    if change is not None:
        change(manifest)
    (path / "manifest.json").write_bytes(checkpoint._sealed(manifest))


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    (tmp_path / "secret.json").write_text("{}")
    for name in ("../../secret.json", "/etc/hostname", "state-rank00000.json/../../../secret.json", "other.json"):
        forge(path, lambda manifest, name=name: manifest.update(files={name: {"size": 2, "sha256": ""}}))
        with pytest.raises(hk.training.DamagedCheckpoint, match="lists"):
            checkpoint.read(path)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ((2**63).to_bytes(8, "little") + b"{}", "claims a header of 9223372036854775808 bytes"),
        ((10**8).to_bytes(8, "little") + b"{}", "claims a header of 100000000 bytes"),
        (b"", "claims a header of 0 bytes in a file of 0"),
        ((2).to_bytes(8, "little") + b"[]", "is not a safetensors file"),
        ((0).to_bytes(8, "little"), "is not a safetensors file"),
        (b"\x80\x04cos\nsystem\n(S'true'\ntR.", "claims a header"),
    ],
    ids=["8 EiB", "100 MB", "empty", "list", "no header", "pickle"],
)
def test_absurd_tensor_files_are_refused(tmp_path: Path, tensors: bytes, named: str) -> None:
    path = write(tmp_path)
    forge(path, tensors=tensors)
    with pytest.raises(hk.training.DamagedCheckpoint, match=named):
        checkpoint.read(path)


def test_offsets_outside_the_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}).encode()
    forge(path, tensors=len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(hk.training.DamagedCheckpoint, match="safetensors"):
        checkpoint.read(path)


@pytest.mark.parametrize(
    "state",
    [
        b"[" * 100_000,
        b"[" * 900 + b"]" * 900,
        b'{"a": NaN}',
        b'{"a": {"$import": "os"}}',
        b"!!python/object/apply:os.system [true]",
        b"9" * 5000,
        b'{"a": {"$tensor": "../../secret"}}',
    ],
    ids=["unclosed", "deep", "NaN", "mark", "YAML", "digits", "traversal"],
)
def test_malformed_state_files_are_refused(tmp_path: Path, state: bytes) -> None:
    path = write(tmp_path)
    forge(path, state=state)
    with pytest.raises(hk.training.DamagedCheckpoint):
        checkpoint.read(path)


def test_oversized_json_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    monkeypatch.setattr(checkpoint, "MAX_MANIFEST", 100)
    with pytest.raises(hk.training.DamagedCheckpoint, match="larger than 100 bytes"):
        checkpoint.read(path)


# --- formats -----------------------------------------------------------------------------------------------


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    forge(path, lambda manifest: manifest.update(format=checkpoint.FORMAT + 1))
    with pytest.raises(
        hk.training.CheckpointError, match=r"format 2, but this version of hyperkron reads formats up to 1"
    ):
        checkpoint.newest(tmp_path)


# --- writing -----------------------------------------------------------------------------------------------


def test_a_checkpoint_is_renamed_into_place_after_everything_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the moment of the rename all three files and the folder are flushed; the parent is flushed after it."""
    events: list[str] = []
    flush, rename = os.fsync, Path.rename

    def recorded_flush(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(self, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", recorded_flush)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    write(tmp_path)
    assert events[:3] == ["tensors-rank00000.safetensors", "state-rank00000.json", "manifest.json"]
    assert events[3].startswith(".tmp-step-00000003-")
    assert events[4:] == ["rename to step-00000003", tmp_path.name]


@pytest.mark.parametrize("place", ["write_tensors", "_dump", "flush_folder"])
def test_a_failed_save_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    first = write(tmp_path, 1)
    before = checkpoint.check(first)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files if place == "write_tensors" else checkpoint, place, full)
        with pytest.raises(hk.training.CheckpointError, match=r"step 2 could not be saved.*No space left"):
            write(tmp_path, 2)
    assert checkpoint.check(first) == before
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    write(tmp_path, 2)


def test_a_step_saved_again_is_replaced_and_never_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.write(tmp_path, 3, {"x": 1})
    checkpoint.write(tmp_path, 3, {"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert checkpoint.newest(tmp_path).state == {"x": 2}
    rename = Path.rename

    def dies(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-step"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:  # between the two renames
        patch.setattr(Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.write(tmp_path, 3, {"x": 3})
    assert checkpoint.newest(tmp_path).state == {"x": 2}
    checkpoint.write(tmp_path, 3, {"x": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_leftovers_of_killed_saves_are_ignored_and_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-00000009-abc").mkdir()
    assert checkpoint.candidates(tmp_path) == []
    path = write(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_the_newest_and_the_protected_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, step)
    (tmp_path / "step-00000005" / "manifest.json").unlink()  # damaged: does not count as one of those kept
    checkpoint.prune(tmp_path, 2, protect=[1])
    assert [path.name for path in checkpoint.candidates(tmp_path)] == [f"step-0000000{i}" for i in (6, 5, 4, 1)]


def test_a_later_checkpoint_is_not_overtaken(tmp_path: Path) -> None:
    later = write(tmp_path, 9)
    with pytest.raises(hk.training.CheckpointError, match="further than this run, which is at step 3"):
        write(tmp_path, 3)
    (later / "manifest.json").unlink()  # damaged: it would not be resumed
    write(tmp_path, 3)


def test_foreign_tensor_files_written_by_safetensors_are_read(tmp_path: Path) -> None:
    """The format is safetensors', not only our writer's."""
    path = write(tmp_path)
    save_file({"weight": torch.full((6,), 2.0)}, tmp_path / "other")
    forge(path, tensors=(tmp_path / "other").read_bytes())
    assert torch.equal(checkpoint.read(path).state["weight"], torch.full((3, 2), 2.0))
