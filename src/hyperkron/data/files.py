"""What every reader shares: bounded reading, decoding, safe paths, files written whole, and the wording of lists."""

from __future__ import annotations

import contextlib
import difflib
import gzip
import importlib
import io
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hyperkron.solution import HyperkronError

MAX_BYTES = 2**32
"""Bytes that one file may hold once decompressed, unless ``ReadOptions.max_bytes`` says otherwise."""

_GZIP = b"\x1f\x8b"
_CHUNK = 2**20


def need(module: str, extra: str = "data") -> Any:
    """An optional package, imported now; an error that names the extra where it is absent.

    Example:
        >>> need("no_such_package")
        Traceback (most recent call last):
        ...
        hyperkron.solution.HyperkronError: the package no_such_package is needed here and cannot be imported (...):
        pip install 'hyperkron[data]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise HyperkronError(
            f"the package {module.split('.')[0]} is needed here and cannot be imported ({error}): "
            f"pip install 'hyperkron[{extra}]'"
        ) from error


def listing(items: Iterable[object], limit: int = 5) -> str:
    """The first few of many things, and how many more there are.

    Example:
        >>> listing([3, 9, 12], limit=2)
        '3, 9 and 1 more'
    """
    found = list(items)
    text = ", ".join(str(item) for item in found[:limit])
    return f"{text} and {len(found) - limit} more" if len(found) > limit else text


def several(count: int, thing: str) -> str:
    """A count with its noun: ``1 row``, ``2 rows``, ``2 classes``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}{'es' if thing.endswith('s') else 's'}"


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence that suggests the name most like ``name``, or nothing.

    Example:
        >>> nearest("lable", ["text", "label"])
        " Did you mean 'label'?"
    """
    by_lower = {other.lower(): other for other in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def existing(path: Path, argument: str) -> Path:
    """The path, if there is something; an error that names a neighbour of like name otherwise."""
    try:
        if path.exists():
            return path
        parent = path.parent
        neighbours = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    except (OSError, ValueError) as error:  # not permitted; a name too long, or with a zero byte in it
        raise HyperkronError(f"{argument}={str(path)[:200]!r} cannot be opened ({error}).") from error
    where = "" if parent.is_dir() else f" Its folder {str(parent)!r} does not exist either."
    hint = nearest(path.name, neighbours) or where or " Check the path."
    raise HyperkronError(f"{argument}={str(path)!r} does not exist.{hint}")


def read_bounded(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file, decompressed if it is gzip, refused if that exceeds ``max_bytes``."""
    too_large = (
        f"{str(path)!r} holds more than max_bytes={max_bytes} once decompressed; if you trust the file, "
        "read it with ReadOptions(max_bytes=...)."
    )
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == _GZIP
            file.seek(0)
            stream: Any = gzip.GzipFile(fileobj=file) if compressed else file
            content = io.BytesIO()
            while chunk := stream.read(_CHUNK):
                content.write(chunk)
                if content.tell() > max_bytes:
                    raise HyperkronError(too_large)
    except (OSError, EOFError, zlib.error) as error:
        raise HyperkronError(f"{str(path)!r} cannot be read ({error}); write or fetch it again.") from error
    return content.getvalue()


def decode(data: bytes, path: Path, charset: str) -> str:
    """Text from bytes; an error that says where and what to do when they are of another encoding."""
    boms = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
    if charset.lower().replace("_", "-") in {"utf-8", "utf8"}:
        if data[:2] in boms:
            raise HyperkronError(f"{str(path)!r} is encoded as UTF-16, not charset={charset!r}; pass charset='utf-16'.")
        charset = "utf-8-sig"
    try:
        text = data.decode(charset)
    except LookupError as error:
        raise HyperkronError(
            f"charset={charset!r} is no encoding that Python knows; try 'utf-8' or 'latin-1'."
        ) from error
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        line = data[:start].count(b"\n") + 1
        raise HyperkronError(
            f"{str(path)!r} is not encoded as charset={charset.removesuffix('-sig')!r}: byte {start} (line {line}) is "
            f"0x{data[start : start + 1].hex()}. Convert the file to UTF-8, or pass charset='cp1252' or 'latin-1'."
        ) from error
    if "\0" in text:
        raise HyperkronError(
            f"{str(path)!r} has a zero byte in line {text[: text.index(chr(0))].count(chr(10)) + 1}: it is no text "
            f"file, or not encoded as charset={charset.removesuffix('-sig')!r}."
        )
    return text


def inside(folder: Path, name: str, argument: str) -> Path:
    """The file ``name`` names, relative to ``folder``; an error when it lies elsewhere, by ``..``, root or link."""
    try:
        root = folder.resolve()
        found = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise HyperkronError(f"{argument}: {name[:200]!r} is no path ({error}).") from error
    if not found.is_relative_to(root):
        raise HyperkronError(
            f"{argument}: {name[:200]!r} leads out of the folder {str(folder)!r}; only files inside it are read. "
            "Move the files there and write paths relative to it."
        )
    return found


@contextlib.contextmanager
def whole_file(out: Path, overwrite: bool) -> Iterator[Path]:
    """A path to write to that becomes ``out`` when the block is left without an error, and vanishes otherwise."""
    if out.exists() and not overwrite:
        raise HyperkronError(f"out={str(out)!r} exists already; choose another name, or pass overwrite=True.")
    if out.is_dir():
        raise HyperkronError(f"out={str(out)!r} is a folder; name a file.")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{secrets.token_hex(4)}-{out.name}")
    try:
        yield temporary
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
