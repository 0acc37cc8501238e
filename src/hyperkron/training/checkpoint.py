"""Checkpoints: folders that are complete or absent, verified before they are read, and never executed.

``docs/checkpoints.md`` describes the format and what is guaranteed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import secrets
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hyperkron.collectives import Group
from hyperkron.solution import HyperkronWarning, warn_once
from hyperkron.training import files, program
from hyperkron.training.encoding import CheckpointError, DamagedCheckpoint, join, split
from hyperkron.training.sharded_checkpoint import reader
from hyperkron.training.writing import flush_folder

FORMAT = 1
"""The format this version writes."""

MANIFEST, STATE, TENSORS = "manifest.json", "state-rank00000.json", "tensors-rank00000.safetensors"
MAX_MANIFEST = 2**26
_STEP = re.compile(r"step-(\d{8,12})(\.replaced)?\Z")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class About:
    """A description of the run that a state belongs to."""

    model: Mapping[str, str] = field(default_factory=dict)  # dtype and shape of every parameter and buffer
    hyper: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)  # the settings of the run, a line each
    world_size: int = 1  # over how many processes it is spread
    program: Mapping[str, str] = field(default_factory=dict)  # what the run computes, a line each

    def differences(self, now: About) -> list[str]:
        """The differences to ``now``, one line each."""
        lines: list[str] = []
        for part in ("model", "hyper", "config", "program"):
            lines += program.differences(part, getattr(self, part), getattr(now, part))
        if self.world_size != now.world_size:
            lines.append(f"world size: {self.world_size} in the checkpoint, {now.world_size} in this run")
        return lines


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been read."""

    path: Path
    step: int
    state: dict[str, Any]
    about: About
    versions: Mapping[str, str]  # of hyperkron, torch and Python when it was written


# --- writing -----------------------------------------------------------------------------------------------


def write(
    folder: str | Path,
    step: int,
    state: dict[str, Any],
    about: About | None = None,
    rows: tuple[Path, Mapping[str, Any]] | None = None,
) -> Path:
    """Save ``state`` as ``folder/step-…``: written beside it, flushed to the disk, then renamed.

    If it is interrupted by a kill or a full disk, earlier checkpoints stay intact. ``rows`` are the files of other
    processes (:mod:`hyperkron.training.sharded_checkpoint`): their folder, and the records of their contents.
    """
    folder, about = Path(folder), about or About()
    tree, tensors = split(state)
    refuse_overtaken(folder, step)
    target = place(folder, step)
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            flush_folder(folder.parent)
        staging, others = rows or (None, {})
        clean(folder, but=staging)
        temporary = folder / f"{_TEMPORARY}{target.name}-{secrets.token_hex(4)}"
        try:
            temporary.mkdir()
            records = {TENSORS: files.write_tensors(temporary / TENSORS, tensors)}
            records[STATE] = files.write(temporary / STATE, [_dump(tree)])
            for name, record in others.items():
                assert staging is not None
                (staging / name).rename(temporary / name)
                records[name] = record
            files.write(temporary / MANIFEST, [_manifest(step, about, records)])
            flush_folder(temporary)
            _put_in_place(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(
            f"step {step} could not be saved in {folder}: {error.strerror or error}. Earlier checkpoints are "
            "untouched; make room, or choose another folder."
        ) from error
    return target


def _manifest(step: int, about: About, records: Mapping[str, Any]) -> bytes:
    content = {"format": FORMAT, "step": step, "versions": _versions(), "files": dict(records)}
    return _sealed(content | vars(about))


def _sealed(content: dict[str, Any]) -> bytes:
    """A manifest with its own SHA-256 as the last entry."""
    own = hashlib.sha256(_dump(content, indent=1)).hexdigest()
    return _dump({**content, "sha256": own}, indent=1)


def _dump(content: Any, indent: int | None = None) -> bytes:
    return json.dumps(content, allow_nan=False, indent=indent).encode("ascii")


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename durably; an earlier checkpoint of the same step stays readable until the new one is in place."""
    aside = target.with_name(f"{target.name}.replaced")
    if target.exists():
        _delete(aside)
        target.rename(aside)
    temporary.rename(target)
    flush_folder(target.parent)
    _delete(aside)


def _delete(path: Path) -> None:
    """Remove a folder if it exists; if interrupted, nothing is left that looks like a checkpoint."""
    if not path.exists():
        return
    hidden = path.with_name(f"{_TEMPORARY}delete-{path.name}-{secrets.token_hex(4)}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def clean(folder: Path, but: Path | None = None) -> None:
    """Remove the rest of interrupted saves and deletions; a folder belongs to one run at a time."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def staging(folder: str | Path, step: int) -> Path:
    """Where processes put the files of a checkpoint before it is complete."""
    return Path(folder) / f"{_TEMPORARY}rows-{_name(step)}"


def prune(folder: str | Path, keep: int, protect: Iterable[int] = ()) -> None:
    """Delete all but the newest ``keep`` complete checkpoints and those of the steps in ``protect``."""
    complete = [path for path in candidates(folder) if _plausible(path)]
    kept = {path.name for path in complete[:keep]} | {_name(step) for step in protect}
    for path in complete[keep:]:
        if path.name not in kept:
            try:
                _delete(path)
            except OSError as error:
                warn_once(f"prune-{folder}", f"{path} is no longer needed but could not be deleted: {error}")


def refuse_overtaken(folder: str | Path, step: int) -> None:
    """Refuse to write step ``step`` where a verified checkpoint of a later one exists: it would be resumed instead."""
    for path in candidates(folder):
        if _step(path) <= step:
            return
        with contextlib.suppress(DamagedCheckpoint):
            check(path)
            raise CheckpointError(
                f"{path} is further than this run, which is at step {step}; continue it with "
                "fit(…, resume=folder), choose another folder, or move that checkpoint away."
            )


# --- reading -----------------------------------------------------------------------------------------------


def candidates(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, unverified, the newest first."""
    folder = Path(folder)
    if folder.is_file() or (_STEP.match(folder.name) and (folder / MANIFEST).exists()):
        raise CheckpointError(
            f"{folder} is a {'file' if folder.is_file() else 'single checkpoint'}; give the folder of the "
            f"checkpoints, such as {folder.parent} (run.resume(folder, step=…) takes a certain one)."
        )
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _STEP.match(path.name) and not path.is_symlink() and path.is_dir()]
    return sorted(found, key=lambda path: (-_step(path), path.name))


def check(path: str | Path) -> dict[str, Any]:
    """Verify all files of a checkpoint and return its manifest; raises :class:`DamagedCheckpoint`."""
    manifest = _read_manifest(Path(path))
    for name, record in manifest["files"].items():
        files.verify(Path(path) / name, record)
    return manifest


def read(path: str | Path, device: torch.device | str | None = None, group: Group | None = None) -> Saved:
    """Read one checkpoint; sizes and hashes are verified before its content is used.

    Of sharded tensors each process of ``group`` gets its rows; with ``None`` it gets the whole tensors.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    form = manifest["format"]
    if form != FORMAT:
        raise CheckpointError(
            f"{path} has format {form}, but this version of hyperkron reads formats up to {FORMAT}; it was written by "
            f"hyperkron {manifest['versions'].get('hyperkron', '?')}: install that or a newer one."
        )
    tree, _ = files.read_json(path / STATE, manifest["files"][STATE])
    records = manifest["files"]
    with files.TensorFile(path / TENSORS, records[TENSORS]) as tensors, reader(path, records, group) as rows:
        state = join(tree, tensors, device, rows)
    about = About(**{name: manifest[name] for name in vars(About())})
    return Saved(path, manifest["step"], state, about, manifest["versions"])


def newest(folder: str | Path, step: int | None = None, group: Group | None = None) -> Saved:
    """The newest intact checkpoint of a folder; damaged ones are skipped with a warning.

    With ``step``, the checkpoint of this step; it is an error if it is damaged. For ``group`` see :func:`read`.
    """
    wrong: list[str] = []
    waiting = [path for path in candidates(folder) if step is None or _step(path) == step]
    while waiting:
        path = waiting.pop(0)
        try:
            saved = read(path, group=group)
        except DamagedCheckpoint as error:
            if not path.exists():  # a running run has replaced it by a newer one
                waiting = [p for p in candidates(folder) if p != path and (step is None or _step(p) == step)]
                wrong = []
                continue
            wrong.append(f"{path.name}: {error}")
            continue
        if wrong:
            warnings.warn(
                f"damaged checkpoints in {folder} were passed over, continuing from {path.name}:"
                f"{program.listed(wrong)}",
                HyperkronWarning,
                stacklevel=3,
            )
        return saved
    asked = "" if step is None else f" of step {step}"
    if not wrong:
        raise CheckpointError(f"there is no checkpoint{asked} in {folder}.")
    raise CheckpointError(f"no checkpoint{asked} in {folder} is intact:{program.listed(wrong)}")


def differences(saved: Saved, now: About, *, allow: bool) -> list[str]:
    """The differences between a checkpoint and the run that continues it; an error unless they are allowed.

    Other versions of Python and torch are warnings.
    """
    lines = saved.about.differences(now)
    if lines and not allow:
        raise CheckpointError(
            f"{saved.path} belongs to another run:{program.listed(lines)}\n"
            "Make this run as that one was made, choose another folder, or continue with these changes by "
            "fit(…, allow_changes=True) or run.resume(folder, allow_changes=True)."
        )
    if versions := changed_versions(saved.versions):
        text = f"{saved.path} {versions}: the run continues, but perhaps not bit for bit."
        warnings.warn(text, HyperkronWarning, stacklevel=3)
    return lines


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, after checking its own hash and that it describes this folder and its files."""
    manifest, data = files.read_json(path / MANIFEST, limit=MAX_MANIFEST)
    if not isinstance(manifest, dict) or _sealed({k: v for k, v in manifest.items() if k != "sha256"}) != data:
        raise DamagedCheckpoint(f"{MANIFEST} does not agree with its own SHA-256")
    try:
        form, step, world_size = manifest["format"], manifest["step"], manifest["world_size"]
        if not all(type(n) is int for n in (form, step, world_size)):
            raise TypeError("format, step and world_size must be whole numbers")
        if step != _step(path):
            raise DamagedCheckpoint(f"{MANIFEST} is of step {step}, but the folder is {path.name}")
        others = {f"tensors-rank{rank:05d}.safetensors" for rank in range(1, len(manifest["files"]) - 1)}
        if set(manifest["files"]) != {TENSORS, STATE} | others:
            raise DamagedCheckpoint(f"{MANIFEST} lists {sorted(manifest['files'])!r:.200}")
        for record in manifest["files"].values():
            if type(record["size"]) is not int or type(record["sha256"]) is not str:
                raise TypeError("a size or hash is missing")
        for part in ("model", "hyper", "config", "program", "versions"):
            if not all(type(x) is str for x in manifest[part].values()):
                raise TypeError(f"{part} must hold strings")
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is malformed ({error})") from error
    return manifest


def _plausible(path: Path) -> bool:
    """Whether a checkpoint has its manifest and files of the right size; hashes are not checked."""
    try:
        return all((path / n).stat().st_size == r["size"] for n, r in _read_manifest(path)["files"].items())
    except (DamagedCheckpoint, OSError):
        return False


def place(folder: str | Path, step: int) -> Path:
    """Where a checkpoint of this step is written."""
    return Path(folder) / _name(step)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int:
    found = _STEP.match(path.name)
    if found is None:
        raise CheckpointError(f"{path} is not named like a checkpoint (step-00000123).")
    return int(found[1])


def changed_versions(saved: Mapping[str, str]) -> str:
    """The versions with which a checkpoint was written and is read, if they differ; else an empty string."""

    def release(name: str, text: str) -> str:
        return ".".join(text.split(".")[:2]) if name == "python" else text

    now = _versions()
    then = {name: saved.get(name, "of an unknown version") for name in now}
    names = [name for name in now if release(name, then[name]) != release(name, now[name])]
    if not names:
        return ""
    told = [", ".join(f"{name} {versions[name]}" for name in names) for versions in (then, now)]
    return f"was written with {told[0]} and is read with {told[1]}"


def _versions() -> dict[str, str]:
    try:
        own = version("hyperkron")
    except PackageNotFoundError:
        own = "unknown"
    return {"hyperkron": own, "torch": str(torch.__version__), "python": platform.python_version()}
