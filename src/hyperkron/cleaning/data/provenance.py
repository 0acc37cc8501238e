"""Which rows a source held: a hash of every row, by which a later reader knows whether they are still the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data import arrays, images, wrench
from hyperkron.cleaning.data.files import existing, listing, several
from hyperkron.cleaning.data.hub import PREFIX, load_hub
from hyperkron.cleaning.data.labelled import Raw, ReadOptions
from hyperkron.cleaning.data.sources import form_of, split_source
from hyperkron.cleaning.data.tables import parquet_table, read_csv_file, read_json, read_json_lines
from hyperkron.solution import HyperkronError
from hyperkron.training.writing import open_plain

HASH_BYTES = 8
"""Bytes of the hash of one row."""
_CHUNK = 2**20


@dataclass(frozen=True)
class RowHashes:
    """The rows of a source in their order: h_i is a hash of row i, and ``sha256`` is one of all h_i and the header.

    Attributes:
        sha256: equal for two sources exactly if they hold the same rows in the same order.
        each: h_0, h_1, …, 8 bytes each.

    Example:
        >>> a, b = RowHashes.of("names", [b"1", b"2", b"3"]), RowHashes.of("names", [b"3", b"1", b"2"])
        >>> a.sha256 == b.sha256, a.difference(b)
        (False, 'the same 3 rows stand in another order')
    """

    sha256: str
    each: bytes

    def __len__(self) -> int:
        return len(self.each) // HASH_BYTES

    @classmethod
    def of(cls, head: str, rows: Iterable[bytes]) -> RowHashes:
        """The hashes of rows, given as bytes.

        Args:
            head: what all rows have in common, such as the names of the columns.
            rows: the content of each.
        """
        each, whole = bytearray(), hashlib.sha256(head.encode("utf-8", "surrogatepass"))
        for row in rows:
            digest = hashlib.sha256(row).digest()
            whole.update(digest)
            each += digest[:HASH_BYTES]
        return cls(whole.hexdigest(), bytes(each))

    def difference(self, now: RowHashes) -> str:
        """In words, what has become of these rows.

        Args:
            now: the rows that are there now, of which ``sha256`` differs.
        """
        before, after = self._list(), now._list()
        if before == after:
            return "the names of the columns or classes have changed"
        if Counter(before) == Counter(after):
            return f"the same {several(len(before), 'row')} stand in another order"
        if len(before) != len(after):
            shared = (Counter(before) & Counter(after)).total()
            return f"there were {several(len(before), 'row')} and are {len(after)} now, {shared} of them the same"
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        return f"{several(len(changed), 'row')} of {len(before)} differ: rows {listing(changed)}"

    def _list(self) -> list[bytes]:
        return [self.each[i : i + HASH_BYTES] for i in range(0, len(self.each), HASH_BYTES)]


def row_hashes(source: str | os.PathLike[str], options: ReadOptions | None = None) -> RowHashes:
    """The hashes of all rows of a source, whether they can be used or not.

    A row of a table is its fields as they stand in the file, all columns of it; a picture in a folder is the bytes of
    its file; where a table names files of pictures, the names count and not the pictures.

    Args:
        source: a path, ``folder:part`` or ``hf:NAME:SPLIT``.
        options: how to read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.csv"
        >>> _ = path.write_text("text,label\\na,x\\nb,y\\n")
        >>> before = row_hashes(path)
        >>> _ = path.write_text("text,label\\na,x\\nc,y\\n")
        >>> before.difference(row_hashes(path))
        '1 row of 2 differ: rows 1'
    """
    options, text = options or ReadOptions(), os.fspath(source)
    if text.startswith(PREFIX):
        dataset = load_hub(text)
        return _arrow(dataset.with_format("arrow")[:], str(dataset.features))
    path, part = (Path(text), None) if isinstance(source, Path) else split_source(text)
    form = form_of(existing(path, "source"))
    readers: dict[str, Callable[[Path, str | None, ReadOptions], RowHashes]] = {
        "csv": _csv,
        "jsonl": lambda path, part, options: RowHashes.of("", _texts(t for _, t in read_json_lines(path, options))),
        "json": lambda path, part, options: _json(read_json(path, options), path),
        "parquet": lambda path, part, options: _parquet(path, options),
        "wrench": _wrench,
        "npz": _npz,
        "folder": _folder,
        "idx": lambda path, part, options: _raw(arrays.read_idx_rows(path, part, options)),
        "cifar": lambda path, part, options: _raw(arrays.read_cifar(path, part, options)),
    }
    return readers[form](path, part, options) if form in readers else _raw(images.read_sheets(path, part, options))


def _texts(rows: Iterable[str]) -> Iterator[bytes]:
    return (row.strip().encode("utf-8", "surrogatepass") for row in rows)


def _fields(values: Iterable[str]) -> bytes:
    """Fields as bytes in which no two different rows are alike."""
    return json.dumps(list(values)).encode("ascii")


def _csv(path: Path, part: str | None, options: ReadOptions) -> RowHashes:
    file = read_csv_file(path, options, texts=False)
    return RowHashes.of(repr(file.header), (_fields(fields) for fields, _ in file.records))


def _json(content: Any, path: Path) -> RowHashes:
    if isinstance(content, dict):
        content = list(content.items())
    if not isinstance(content, list):
        raise HyperkronError(f"source={str(path)!r} is not a list of JSON objects.")
    return RowHashes.of("", (json.dumps(entry, sort_keys=True).encode("ascii") for entry in content))


def _wrench(folder: Path, part: str | None, options: ReadOptions) -> RowHashes:
    path, classes = wrench.part_file(folder, part or "train"), repr(wrench.class_names(folder, options))
    if path.name.endswith(".json"):
        found = _json(read_json(path, options), path)
        return RowHashes(hashlib.sha256((classes + found.sha256).encode()).hexdigest(), found.each)
    return RowHashes.of(classes, _texts(text for _, text in read_json_lines(path, options)))


def _parquet(path: Path, options: ReadOptions) -> RowHashes:
    table = parquet_table(path, options)
    return _arrow(table, repr([(field.name, str(field.type)) for field in table.schema]))


def _arrow(table: Any, head: str) -> RowHashes:
    batches = table.to_batches(max_chunksize=4096)
    rows = (repr(tuple(row.values())) for batch in batches for row in batch.to_pylist())
    return RowHashes.of(head, (row.encode("utf-8", "surrogatepass") for row in rows))


def _npz(path: Path, part: str | None, options: ReadOptions) -> RowHashes:
    content = arrays.read_npz(path, options)
    x, y = (content[name] for name in arrays.npz_keys(content, part, path.name))
    head = repr((x.dtype, x.shape[1:], y.dtype, content["classes"].tolist() if "classes" in content else None))
    return RowHashes.of(head, (a.tobytes() + b.tobytes() for a, b in zip(x, y.reshape(len(y), -1), strict=False)))


def _folder(folder: Path, part: str | None, options: ReadOptions) -> RowHashes:
    def rows() -> Iterator[bytes]:
        for name, of_class in images.class_files(folder, part):
            yield _fields([name, of_class]) + _file_hash(folder / name)

    return RowHashes.of("", rows())


def _file_hash(path: Path) -> bytes:
    """The SHA-256 of a file; nothing where it cannot be read, which is the reader's to tell."""
    digest = hashlib.sha256()
    try:
        with open_plain(path) as file:
            while data := file.read(_CHUNK):
                digest.update(data)
    except OSError:
        return b""
    return digest.digest()


def _raw(raw: Raw) -> RowHashes:
    assert not isinstance(raw.inputs, dict)
    rows = zip(raw.rows.tolist(), raw.labels, raw.inputs, strict=True)
    return RowHashes.of(repr(raw.classes), (repr((i, name)).encode() + x.tobytes() for i, name, x in rows))
