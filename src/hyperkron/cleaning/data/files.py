"""What every reader shares: bounded reading, decoding, safe paths, files written whole, and the wording of lists."""

from __future__ import annotations

import difflib
import gzip
import importlib
import io
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hyperkron.solution import HyperkronError
from hyperkron.training.writing import open_plain

MAX_BYTES = 2**32
"""Bytes that one file may hold once decompressed, unless ``ReadOptions.max_bytes`` says otherwise."""
MAX_COLUMNS = 50_000
"""Columns that a table may have, unless ``ReadOptions.max_columns`` says otherwise."""
MAX_CELLS = 50_000_000
"""Rows times columns that a table may have, unless ``ReadOptions.max_cells`` says otherwise."""
MAX_FIELD = 2**24
"""Characters or bytes that one field of a table may have, unless ``ReadOptions.max_field`` says otherwise."""
CELLS_PER_BYTE, FREE_CELLS = 16, 2**20
"""A file with more cells than these for each byte of it is a compressed bomb, if they are more than ``FREE_CELLS``."""
MAX_RATIO, FREE_BYTES = 200, 2**26
"""A file that grows by more than this factor is a compressed bomb, if it grows to more than ``FREE_BYTES``."""

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
    if module in sys.modules:
        return sys.modules[module]
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


def refuse_growth(path: Path, stored: int, size: int, max_bytes: int) -> None:
    """Refuse a compressed file that holds too much.

    Args:
        path: of the file.
        stored: bytes as they lie on the disk.
        size: bytes once decompressed, or as many of them as are known.
        max_bytes: that there may be.
    """
    if size > max_bytes:
        raise HyperkronError(
            f"{str(path)!r} holds {size} bytes or more once decompressed, more than max_bytes={max_bytes}; if you "
            "trust the file, read it with ReadOptions(max_bytes=...)."
        )
    if size > max(FREE_BYTES, MAX_RATIO * stored):
        raise HyperkronError(
            f"{str(path)!r} has {stored} bytes and grows to {size} or more, over {MAX_RATIO} times as many, as files "
            "do that are made to fill the memory. If you trust the file, decompress it first and read that."
        )


def refuse_wide(name: str, columns: int, limit: int) -> None:
    """Refuse a table of more columns than ``ReadOptions.max_columns``."""
    if columns > limit:
        raise HyperkronError(
            f"{name} has {columns} columns or more; at most max_columns={limit} are read. Keep the columns you need; "
            "if you have the memory, read it with ReadOptions(max_columns=...)."
        )


def refuse_cells(name: str, cells: int, limit: int, stored: int | None = None) -> None:
    """Refuse a table of more cells than ``ReadOptions.max_cells``, or than its file can honestly hold.

    Args:
        name: what messages call the table.
        cells: rows times columns, or as many as are known.
        limit: that there may be.
        stored: bytes of the file; None for what is in memory already.
    """
    if cells > limit:
        raise HyperkronError(
            f"{name} has {cells} cells (rows × columns) or more; at most max_cells={limit} are read. Take fewer rows "
            "or columns; if you have the memory, read it with ReadOptions(max_cells=...)."
        )
    if stored is not None and cells > max(FREE_CELLS, CELLS_PER_BYTE * stored):
        raise HyperkronError(
            f"{name} has {stored} bytes for {cells} cells (rows × columns) or more, over {CELLS_PER_BYTE} cells a "
            "byte, as files have that are made to fill the memory. If you trust the file, save it as plain CSV and "
            "read that."
        )


def stored_bytes(path: Path) -> int:
    """The size of a file on the disk; 0 where it cannot be told."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_bounded(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of an ordinary file, decompressed if it is gzip, refused if that exceeds ``max_bytes``."""
    try:
        with open_plain(path) as file:
            stored = os.fstat(file.fileno()).st_size
            compressed = file.read(2) == _GZIP
            file.seek(0)
            if not compressed:
                refuse_growth(path, stored, stored, max_bytes)
                return file.read()
            stream = gzip.GzipFile(fileobj=file)
            content = io.BytesIO()
            while chunk := stream.read(_CHUNK):
                refuse_growth(path, stored, content.tell() + len(chunk), max_bytes)
                content.write(chunk)
            return content.getvalue()
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise HyperkronError(f"{str(path)!r} cannot be read ({reason}); write or fetch it again.") from error


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
            f"charset={charset!r} is not an encoding that Python knows; try 'utf-8' or 'latin-1'."
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
            f"{str(path)!r} has a zero byte in line {text[: text.index(chr(0))].count(chr(10)) + 1}: it is not text "
            f"file, or not encoded as charset={charset.removesuffix('-sig')!r}."
        )
    return text


def inside(folder: Path, name: str, argument: str) -> Path:
    """The file ``name`` names, relative to ``folder``; an error when it lies elsewhere, by ``..``, root or link."""
    try:
        root = folder.resolve()
        found = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise HyperkronError(f"{argument}: {name[:200]!r} is not a path ({error}).") from error
    if not found.is_relative_to(root):
        raise HyperkronError(
            f"{argument}: {name[:200]!r} leads out of the folder {str(folder)!r}; only files inside it are read. "
            "Move the files there and write paths relative to it."
        )
    return found
