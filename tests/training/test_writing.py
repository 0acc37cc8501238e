"""Files that are put in place whole: flushed to the disk, cleaned up after, and refused in words."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import run_folder
from hyperkron.cleaning.data import export_rows
from hyperkron.cleaning.report import write_report
from hyperkron.cli import main
from hyperkron.solution import HyperkronError
from hyperkron.training.writing import open_plain, put, whole_file

TABLE = "text,label\na,x\nb,y\n"


def _full(*args: Any, **more: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_content_and_name_are_flushed_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def recorded_sync(descriptor: int) -> None:
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}") if os.path.exists("/proc/self/fd") else len(done) > 1
        done.append("folder" if is_folder else "file")
        sync(descriptor)

    def recorded_replace(*paths: Any) -> None:
        done.append("name")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    (tmp_path / "a.csv").write_text(TABLE)
    export_rows(tmp_path / "a.csv", [1], tmp_path / "b.csv")
    assert done == ["file", "name", "folder"]
    run_folder.write_run_folder(tmp_path / "run")
    done.clear()
    write_report(tmp_path / "run")
    assert done == ["file", "name", "folder"]


def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")

    def fail() -> None:
        with whole_file(tmp_path / "a") as path:
            path.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "before")]


def test_a_folder_that_is_gone_is_made_again_only_where_that_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "run" / "a"
    with pytest.raises(HyperkronError, match=r"cannot be written .*No such file"):
        put(out, b"x")
    put(out, b"x", parents=True)
    assert out.read_bytes() == b"x"


def _killed_while_writing(out: Path) -> None:
    """A process writes half of a file and is killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with whole_file(out) as path:
                path.write_text("half")
                os.write(writer, b"x")
                time.sleep(60)
        finally:
            os._exit(1)
    os.read(reader, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_files_of_killed_writers_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    out = tmp_path / "a"
    _killed_while_writing(out)
    (left,) = tmp_path.iterdir()
    (tmp_path / ".a.mine").write_text("not ours")
    with whole_file(out) as first:
        assert not left.exists()
        first.write_text("first")
        with whole_file(out) as second:
            assert first.exists()
            second.write_text("second")
        assert out.read_text() == "second"
    assert out.read_text() == "first" and sorted(p.name for p in tmp_path.iterdir()) == [".a.mine", "a"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_report_removes_what_killed_ones_left(tmp_path: Path) -> None:
    run_folder.write_run_folder(tmp_path / "run")
    before = {path.name for path in (tmp_path / "run").iterdir()}
    _killed_while_writing(tmp_path / "run" / "report.html")
    write_report(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == before | {"report.html"}


def test_only_ordinary_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe", "a pipe"), (Path(os.devnull), "a device")):
        with pytest.raises(OSError, match=what), open_plain(path):
            pass


# --- a full disk -------------------------------------------------------------------------------------------


def _write_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", _full)


def _sync_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _full)


@pytest.mark.parametrize("fail", [_write_fails, _sync_fails])
@pytest.mark.parametrize("command", ["report", "export", "clean"])
def test_a_full_disk_is_told_in_words(
    command: str,
    fail: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{i}.5,{i % 7},{'ab'[i % 2]},{'yes' if i > 20 else 'no'}\n" for i in range(40)]
    (tmp_path / "train.csv").write_text("x,z,label,checked\n" + "".join(lines))
    run_folder.write_run_folder(tmp_path / "run", rows=20)
    arguments = {
        "report": ["report", "run"],
        "export": ["export", "run", "--drop", "suspects", "-o", "b.csv"],
        "clean": ["clean", "train.csv", "--trusted-column", "checked", "--out", "new"],
    }
    before = sorted(p.name for p in [*tmp_path.iterdir(), *(tmp_path / "run").iterdir()])
    fail(monkeypatch)
    assert main(arguments[command]) == 1
    err = capsys.readouterr().err
    assert "the disk is full (No space left on device" in err and "bytes are free there" in err
    assert "Free some space there" in err and "Traceback" not in err
    named = {"report": "run/report.html", "export": "b.csv", "clean": "new/rows.hashes"}
    assert f"'{named[command]}' cannot be written" in err
    if fail is _write_fails:
        assert "bytes are needed" in err
    left = sorted(p.name for p in [*tmp_path.iterdir(), *(tmp_path / "run").iterdir()] if p.name != "new")
    assert left == before


def test_a_full_disk_in_a_stage_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hyperkron.cleaning.folder import RunFolder
    from hyperkron.cleaning.stages import Stages

    folder = RunFolder(tmp_path / "run", new=True)
    stages = Stages(folder.path / "stages")
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(HyperkronError, match=r"8 bytes are needed; .* then continue with `hyperkron resume"):
        stages("x", lambda: {"a": torch.zeros(2)})
    with pytest.raises(HyperkronError, match=r"model.safetensors' cannot be written: the disk is full"):
        folder.write_model(torch.nn.Linear(2, 2))
