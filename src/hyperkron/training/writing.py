"""Writes files completely and durably, opens only ordinary files, and explains failures."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hyperkron.solution import HyperkronError

try:
    import fcntl
except ImportError:  # not a POSIX system: files that a killed process left behind cannot be told from others
    fcntl = None  # type: ignore[assignment]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_END = ".part"


# --- reading -----------------------------------------------------------------------------------------------


def open_ordinary(path: Path, flags: int, follow: bool = True) -> int:
    """The descriptor of an ordinary file; OSError for a folder, a pipe, a device or, unless ``follow``, a link.

    A pipe is not waited for.
    """
    names = ("O_NONBLOCK", "O_BINARY", "O_CLOEXEC", *(() if follow else ("O_NOFOLLOW",)))
    descriptor = os.open(path, flags | sum(getattr(os, name, 0) for name in names), 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise OSError(errno.EINVAL, f"it is {what}, not an ordinary file", str(path))
    return descriptor


def open_plain(path: Path, follow: bool = True) -> BinaryIO:
    """An ordinary file, opened for reading; see :func:`open_ordinary`."""
    return os.fdopen(open_ordinary(path, os.O_RDONLY, follow), "rb")


def read_plain(path: Path) -> bytes:
    """The bytes of an ordinary file; OSError for anything else."""
    with open_plain(path) as file:
        return file.read()


# --- writing -----------------------------------------------------------------------------------------------


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if the system supports it."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def in_words(path: Path, needed: int | None = None, then: str = "") -> Iterator[None]:
    """An OSError of the block, which writes a file of ``needed`` bytes, becomes an error with the file and a remedy.

    ``then`` tells what to do after freeing space, if that is more than trying again.

    Example:
        >>> with in_words(Path("no/such/file")):
        ...     raise OSError(errno.EACCES, "Permission denied")
        Traceback (most recent call last):
        hyperkron.solution.HyperkronError: 'no/such/file' cannot be written (Permission denied); choose another place,
            or make it writable.
    """
    try:
        yield
    except OSError as error:
        raise HyperkronError(f"{str(path)!r} cannot be written{_why(path, error, needed, then)}") from error


def _why(path: Path, error: OSError, needed: int | None, then: str) -> str:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        room = f"; {needed} bytes are needed" if needed else ""
        with contextlib.suppress(OSError):
            room += f"; {shutil.disk_usage(path.parent).free} bytes are free there"
        remedy = then or "or choose a place on another disk"
        return f": the disk is full ({reason}{room}). Free some space there, {remedy}."
    if error.errno == errno.EFBIG:
        size = f" of {needed} bytes" if needed else ""
        remedy = "raise the limit on the size of files (ulimit -f), or choose a file system without one."
        return f": the file{size} is too large ({reason}); {remedy}"
    return f" ({reason}); choose another place, or make it writable."


@contextlib.contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """A temporary file to write to, which becomes ``out`` if the block ends without an error, and is deleted otherwise.

    The content is flushed to disk before the file is renamed, and the name afterwards. The file is locked while it is
    written. Temporary files of killed processes are no longer locked and are removed first.
    """
    remove_stale(out)
    temporary, descriptor = _locked_file(out)
    try:
        yield temporary
        os.fsync(descriptor)
        if fcntl is None:
            os.close(descriptor)  # an open file cannot be renamed there
            descriptor = -1
        os.replace(temporary, out)
        flush_folder(out.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if descriptor >= 0:
            os.close(descriptor)


def put(out: Path, data: bytes, then: str = "", *, parents: bool = False) -> None:
    """Put a file in place whole, with ``parents`` also the folders above it; ``then`` is as for :func:`in_words`."""
    with in_words(out, len(data), then):
        if parents:
            out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as temporary:
            temporary.write_bytes(data)


def _stem(out: Path) -> str:
    """The start of the names of temporary files of ``out``, short enough for any file system."""
    return f".{out.name[:60]}."


def _locked_file(out: Path) -> tuple[Path, int]:
    """A new file beside ``out``, locked by this process, and its descriptor."""
    while True:
        temporary = out.with_name(f"{_stem(out)}{secrets.token_hex(4)}{_END}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        if fcntl is None:
            return temporary, descriptor
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(temporary).st_ino == os.fstat(descriptor).st_ino:
                return temporary, descriptor
        os.close(descriptor)  # taken for stale, and removed, before it was locked


def remove_stale(out: Path) -> None:
    """Remove temporary files of ``out`` that killed processes left behind; files in use are locked and stay."""
    if fcntl is None:
        return
    try:
        names = list(out.parent.glob(f"{glob.escape(_stem(out))}*{_END}"))
    except OSError:
        return
    for path in names:
        with contextlib.suppress(OSError), open_plain(path) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
