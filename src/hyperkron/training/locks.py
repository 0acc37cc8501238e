"""A lock for one writer per folder, which the operating system releases when its process ends for any reason."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from hyperkron.training.encoding import CheckpointError
from hyperkron.training.writing import open_ordinary, open_plain

NAME = ".lock"
NAME_WITHOUT_LOCKS = ".lock-holder"
MAX_RECORD = 4096
"""Bytes of a lock file that are read."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_TRIES = 100


class HeldError(CheckpointError):
    """Another holder has the lock of a folder."""


class FolderLock:
    """Lets one holder at a time write into a folder; others get an error that names the holder.

    ``folder/.lock`` is locked by the operating system (``flock``, on Windows ``msvcrt.locking``), so that the lock of a
    killed process is released immediately. On file systems without locks, the existence of ``folder/.lock-holder`` is
    the lock; it is taken over if its process on this computer has ended. The same object may be entered again while it
    is held, by the same thread. Another object is another holder, even in the same process.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / NAME
        self._count, self._file = 0, -1

    def acquire(self) -> None:
        """Take the lock; raises :class:`HeldError` if it is held, :class:`CheckpointError` if it cannot be created."""
        if self._count == 0:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._take() if self.path.name == NAME else self._take_by_name()
            except OSError as error:
                raise CheckpointError(
                    f"{self.path.parent} could not be locked for writing ({error.strerror or error}); choose a folder "
                    "that can be written to, or make room."
                ) from error
            _HELD.add(self)
        self._count += 1

    def release(self) -> None:
        """Release the lock and remove its file; does nothing if it is not held."""
        count, self._count = self._count, max(0, self._count - 1)
        if count == 1:
            self._give_back()

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *reason: object) -> None:
        self.release()

    def _take(self) -> None:
        """Lock the file; try again if its last holder removed it in between."""
        for _ in range(_TRIES):
            file = open_ordinary(self.path, os.O_RDWR | os.O_CREAT, follow=False)
            try:
                _lock(file)
                if not _same(file, self.path):
                    os.close(file)
                    continue
                self._file = file
                return _write_record(file)
            except OSError as error:
                os.close(file)
                if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                    raise self._refusal() from None
                if error.errno in _NO_LOCKS:
                    self._unlink()
                    self.path = self.path.with_name(NAME_WITHOUT_LOCKS)
                    return self._take_by_name()
                raise
        raise self._refusal()

    def _take_by_name(self) -> None:
        """Create the file; whoever creates it holds the lock."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                self._file = open_ordinary(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, follow=False)
                return _write_record(self._file)
            found = read_record(self.path)
            if _gone(found):
                _remove(self.path, found)
            elif self.path.exists():
                break
        raise self._refusal(f" If that process has ended, delete {self.path}.")

    def _refusal(self, remedy: str = "") -> HeldError:
        for _ in range(20):
            if found := read_record(self.path):
                break
            time.sleep(0.005)  # the holder may be about to write it
        who = f"process {found['pid']} on {found['host']} since {found['since']}" if found else "another process"
        return HeldError(
            f"{self.path.parent} is being written by {who}. Wait for it or end it, or choose another folder.{remedy}"
        )

    def _give_back(self) -> None:
        _HELD.discard(self)
        if os.name == "posix" and _same(self._file, self.path):  # while it is held: it is not another holder's
            self._unlink()
        os.close(self._file)
        self._file = -1
        if os.name != "posix":  # an open file cannot be removed there, nor one that another has opened since
            self._unlink()

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _forget(self) -> None:
        """In a forked process: drop the lock, which belongs to the parent and must end with it."""
        if self._file >= 0:
            os.close(self._file)
        self._count, self._file = 0, -1


def read_record(path: Path) -> dict[str, Any]:
    """Who holds a lock: ``pid``, ``host`` and ``since``; empty if the file does not say."""
    try:
        with open_plain(path, follow=False) as file:
            found = json.loads(file.read(MAX_RECORD).decode("ascii"))
        return {"pid": int(found["pid"]), "host": f"{found['host']:.100}", "since": f"{found['since']:.40}"}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _write_record(file: int) -> None:
    """Write who holds the lock; on a full disk the lock is held without this record."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode("ascii"))


def _same(file: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        here, there = os.fstat(file), os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _gone(record: dict[str, Any]) -> bool:
    """Whether the holder was a process of this computer that has ended."""
    if record.get("host") != socket.gethostname() or os.name != "posix":
        return False
    try:
        os.kill(record["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _remove(path: Path, record: dict[str, Any]) -> None:
    """Remove the file of a holder that has ended: rename it first, and put it back if it is another holder's by now."""
    aside = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.rename(aside)
        if read_record(aside) != record:
            os.link(aside, path)
        aside.unlink()


if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        os.lseek(file, MAX_RECORD, os.SEEK_SET)  # beyond the record, which others may read
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_HELD):
        lock._forget()
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
