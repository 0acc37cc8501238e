"""How sources are read, and how much of them at most: files made to fill the memory are refused."""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyperkron.solution import HyperkronError
from hyperkron.training.writing import open_plain
from hyperkron.validation import check_one_of, check_whole

CELLS_PER_BYTE, FREE_CELLS = 16, 2**20
"""A file with more cells than these for each byte of it is a compressed bomb, if they are more than ``FREE_CELLS``."""
MAX_RATIO, FREE_BYTES = 200, 2**26
"""A file that grows by more than this factor is a compressed bomb, if it grows to more than ``FREE_BYTES``."""
_GZIP = b"\x1f\x8b"
_CHUNK = 2**20


@dataclass(frozen=True)
class ReadOptions:
    """How to read, apart from which columns.

    Attributes:
        charset: of CSV and JSON files.
        image_size: the side that pictures are scaled to; None keeps them where all have one size.
        max_categories: values of a categorical column that get an input of their own; the rest share one.
        max_bytes: of a file once decompressed, and of all pictures together.
        max_pixels: of one picture.
        max_columns: of a table.
        max_cells: of a table, rows times columns.
        max_field: characters or bytes of one field of a table.
        abstain: rows without any vote of WRENCH are unlabelled, or left out (``drop``); ``first`` takes the majority
            vote as the only label of every row, and the first class for rows without a vote.
        keep_overlap: keep training rows whose input is also in the trusted set.
    """

    charset: str = "utf-8"
    image_size: int | None = None
    max_categories: int = 50
    max_bytes: int = 2**32
    max_pixels: int = 2**26
    max_columns: int = 50_000
    max_cells: int = 50_000_000
    max_field: int = 2**24
    abstain: Literal["unlabelled", "drop", "first"] = "unlabelled"
    keep_overlap: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith("max_") or (name == "image_size" and value is not None):
                check_whole(name, value)
        check_one_of("abstain", self.abstain, ("unlabelled", "drop", "first"))


_TOO_MUCH = {
    "max_columns": "has {count} columns or more; at most max_columns={most} are read. Keep those you need; if you "
    "have the memory, read it with ReadOptions(max_columns=...).",
    "max_cells": "has {count} cells (rows × columns) or more; at most max_cells={most} are read. Take fewer rows or "
    "columns; if you have the memory, read it with ReadOptions(max_cells=...).",
    "max_bytes": "holds {count} bytes or more once decompressed, more than max_bytes={most}; if you trust the file, "
    "read it with ReadOptions(max_bytes=...).",
    "max_field": "has a field of more than max_field={most} characters; is a quote missing that ends it? Shorten it, "
    "or read it with ReadOptions(max_field=...).",
}
_MADE_TO_FILL = "made to fill the memory. If you trust the file,"


class Bounds:
    """Refuses what a file holds beyond the limits of ``options``, or beyond what an honest file of its size holds."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.name, self.options = repr(str(path)), options
        try:
            self.stored = path.stat().st_size
        except OSError:
            self.stored = 0

    def check(self, limit: str, count: int, where: str = "") -> None:
        """Refuse more of something than a limit, such as ``max_cells``, allows."""
        most = getattr(self.options, limit)
        if count > most:
            raise HyperkronError(f"{self.name}{where} {_TOO_MUCH[limit].format(count=count, most=most)}")
        if limit == "max_cells" and count > max(FREE_CELLS, CELLS_PER_BYTE * self.stored):
            raise HyperkronError(
                f"{self.name} has {self.stored} bytes for {count} cells (rows × columns) or more, over "
                f"{CELLS_PER_BYTE} cells a byte, like files that are {_MADE_TO_FILL} save it as plain CSV and read "
                "that."
            )
        if limit == "max_bytes" and count > max(FREE_BYTES, MAX_RATIO * self.stored):
            raise HyperkronError(
                f"{self.name} has {self.stored} bytes and grows to {count} or more, over {MAX_RATIO} times as many, "
                f"like files that are {_MADE_TO_FILL} decompress it first and read that."
            )


def read_bounded(path: Path, options: ReadOptions) -> bytes:
    """The content of an ordinary file, decompressed if it is gzip, refused if that exceeds ``max_bytes``."""
    bounds = Bounds(path, options)
    try:
        with open_plain(path) as file:
            compressed = file.read(2) == _GZIP
            file.seek(0)
            if not compressed:
                bounds.check("max_bytes", bounds.stored)
                return file.read()
            content = io.BytesIO()
            with gzip.GzipFile(fileobj=file) as stream:
                while chunk := stream.read(_CHUNK):
                    bounds.check("max_bytes", content.tell() + len(chunk))
                    content.write(chunk)
            return content.getvalue()
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise HyperkronError(f"{str(path)!r} cannot be read ({reason}); write or fetch it again.") from error


def charset_of(data: bytes, charset: str) -> str:
    """The encoding of a file: as named, or as a byte order mark says where UTF-8 is expected."""
    if charset.lower().replace("_", "-") not in {"utf-8", "utf8"}:
        return charset
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    return "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8"


def encoded(text: str, path: Path, options: ReadOptions) -> bytes:
    """A text in the encoding of a file; an error that says what to do where that has no such letters."""
    charset = charset_of(read_bounded(path, options), options.charset)
    try:
        return text.encode(charset)
    except UnicodeEncodeError as error:
        raise HyperkronError(
            f"{text[error.start : error.end]!r:.60} of a new label cannot be written in {charset}, the encoding of "
            f"{path.name}; save that file as UTF-8 and clean it again, or use the labels of rows.csv."
        ) from error


def read_text(path: Path, options: ReadOptions) -> str:
    """The text of a file; an error that says where and what to do when it is of another encoding."""
    data = read_bounded(path, options)
    charset = charset_of(data, options.charset)
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
            f"{str(path)!r} is not encoded as charset={options.charset!r}: byte {start} (line {line}) is "
            f"0x{data[start : start + 1].hex()}. Convert the file to UTF-8, or pass charset='cp1252' or 'latin-1'."
        ) from error
    if "\0" in text:
        raise HyperkronError(
            f"{str(path)!r} has a zero byte in line {text[: text.index(chr(0))].count(chr(10)) + 1}: it is not a text "
            f"file, or not encoded as charset={options.charset!r}."
        )
    return text
