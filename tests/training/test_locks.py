"""One writer for a folder: the second is refused by name, and a killed one's lock is free at once."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import hyperkron as hk
from hyperkron.training import checkpoint, locks
from hyperkron.training.locks import FolderLock
from resuming import start

HOLDER = """
import sys, time
from hyperkron.training.locks import FolderLock
FolderLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(60)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock of a folder."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_another_process_is_refused_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    with pytest.raises(hk.training.CheckpointError) as caught:
        start("SAMA", [hk.Checkpoint(tmp_path, every=1)], steps=1)
    message = str(caught.value)
    assert f"process {holder.pid} on {socket.gethostname()} since 20" in message and "choose another folder" in message
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]  # nothing was written
    with pytest.raises(hk.training.CheckpointError, match=f"process {holder.pid}"):
        start("SAMA").save(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    start("SAMA", [hk.Checkpoint(tmp_path, every=1)], steps=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log-rank00000.jsonl", "step-00000001"]


def test_a_run_holds_its_folder_from_its_first_step_to_its_last(tmp_path: Path) -> None:
    """Also against another run of the same process, and after an error it is free again."""
    refused: list[str] = []

    def intrude(run: hk.Run) -> None:
        with pytest.raises(hk.training.CheckpointError, match=f"process {os.getpid()} on"):
            start("SAMA", [hk.Checkpoint(tmp_path, every=1)], steps=1)
        refused.append("run")
        with pytest.raises(hk.training.CheckpointError, match="being written"):
            start("SAMA").save(tmp_path)
        run.save(tmp_path)  # its own lock does not stop it
        if len(run.history) == 1:
            raise KeyError("mine")

    run = start("SAMA", [hk.training.Evaluate(every=1, function=intrude), hk.Checkpoint(tmp_path, every=1)])
    with pytest.raises(KeyError):
        run.advance(5)
    assert refused == ["run", "run"]
    with FolderLock(tmp_path):
        assert checkpoint.newest(tmp_path).step == 2
    assert not (tmp_path / ".lock").exists()


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    holders, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal holders, most
        for _ in range(50):
            try:
                with FolderLock(tmp_path):
                    with lock:
                        holders += 1
                        most = max(most, holders)
                    (tmp_path / "mine").write_text("x")
                    (tmp_path / "mine").unlink()
                    with lock:
                        holders -= 1
            except hk.training.CheckpointError:
                continue

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (holders, most) == (0, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker of a DataLoader outlives a killed run for seconds."""
    reader, writer = os.pipe()
    ready, begun = os.pipe()
    held = FolderLock(tmp_path)
    held.acquire()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(begun, b"b")
        os.read(reader, 1)  # lives until the parent has closed its end
        os._exit(0)
    os.read(ready, 1)
    os.close(held._file)  # as when the holder is killed
    held._file, held._count = -1, 0
    locks._HELD.discard(held)
    with FolderLock(tmp_path):
        pass
    for end in (writer, reader, ready, begun):
        os.close(end)
    os.waitpid(child, 0)


def test_a_lock_file_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(hk.training.CheckpointError, match="could not be locked"):
        FolderLock(folder).acquire()
    (folder / ".lock").unlink()
    os.mkfifo(folder / ".lock")
    with pytest.raises(hk.training.CheckpointError, match="not an ordinary file"):
        FolderLock(folder).acquire()
    assert (tmp_path / "precious").read_text() == "precious"


# --- file systems without locks ----------------------------------------------------------------------------


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks, "_lock", unsupported)


@pytest.mark.usefixtures("no_flock")
def test_without_locks_of_the_system_the_file_is_the_lock(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        with pytest.raises(hk.training.CheckpointError, match=f"process {os.getpid()} on .* delete"):
            FolderLock(tmp_path).acquire()
        with lock:
            pass
        assert (tmp_path / ".lock-holder").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize(
    ("change", "free"),
    [({}, True), ({"host": "elsewhere"}, False), ({"pid": os.getpid()}, False), (None, False)],
    ids=["dead", "another host", "alive", "unreadable"],
)
def test_without_locks_of_the_system_only_a_dead_holder_is_replaced(tmp_path: Path, change: Any, free: bool) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    record = {"pid": ended.pid, "host": socket.gethostname(), "since": "2026-01-01 00:00:00 +0000"}
    (tmp_path / ".lock-holder").write_text("" if change is None else json.dumps({**record, **change}))
    if free:
        with FolderLock(tmp_path) as lock:
            assert locks.read_record(lock.path)["pid"] == os.getpid()
    else:
        with pytest.raises(hk.training.CheckpointError, match="being written by"):
            FolderLock(tmp_path).acquire()
    assert [path.name for path in tmp_path.iterdir()] == ([] if free else [".lock-holder"])
