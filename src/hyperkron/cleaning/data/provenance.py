"""Which rows a source held: a hash of every row, by which a later reader knows whether they are still the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hyperkron.cleaning.data.files import listing, several
from hyperkron.cleaning.data.labelled import Frame, Raw
from hyperkron.cleaning.data.values import cells

HASH_BYTES = 8
"""Bytes of the hash of one row."""


@dataclass(frozen=True)
class RowHashes:
    """The rows of a source in their order: h_i is a hash of row i, and ``sha256`` is one of all h_i and the header.

    Attributes:
        sha256: equal for two sources exactly if they hold the same rows in the same order.
        each: h_0, h_1, …, 8 bytes each.

    Example:
        >>> a, b = (RowHashes.of_bytes("names", rows) for rows in ([b"1", b"2", b"3"], [b"3", b"1", b"2"]))
        >>> a.sha256 == b.sha256, a.difference(b)
        (False, 'the same 3 rows stand in another order')
    """

    VERSION: ClassVar[int] = 3
    """Of what is hashed; hashes of another version say nothing."""

    sha256: str
    each: bytes

    def __len__(self) -> int:
        return len(self.each) // HASH_BYTES

    @classmethod
    def of(cls, source: Frame | Raw) -> RowHashes:
        """The hashes of what was read: all columns, or inputs and labels of every kind."""
        head: Any = (list(source.columns), source.class_names) if isinstance(source, Frame) else source.classes
        table = source.columns if isinstance(source, Frame) else source.inputs
        parts: list[Any] = [*table.values()] if isinstance(table, Mapping) else [table]
        if isinstance(source, Raw):
            parts += [part for part in (source.labels, source.gold, source.votes) if part is not None]
        wide = [part for part in parts if getattr(part, "ndim", 1) > 1]
        flat = [cells(part) for part in parts if getattr(part, "ndim", 1) == 1]
        rows = enumerate(map(repr, zip(*flat, strict=True)))
        content = (row.encode("utf-8", "surrogatepass") + b"".join(x[i].tobytes() for x in wide) for i, row in rows)
        return cls.of_bytes(repr(head), content)

    @classmethod
    def of_bytes(cls, head: str, rows: Iterable[bytes]) -> RowHashes:
        """The hashes of rows, given as bytes; ``head`` is what they have in common, such as names of columns."""
        each, whole = bytearray(), hashlib.sha256(head.encode("utf-8", "surrogatepass"))
        for row in rows:
            digest = hashlib.sha256(row).digest()
            whole.update(digest)
            each += digest[:HASH_BYTES]
        return cls(whole.hexdigest(), bytes(each))

    def difference(self, now: RowHashes) -> str:
        """In words, what has become of these rows, where there are others now."""
        before, after = self._list(), now._list()
        if before == after:
            return "the names of the columns or classes have changed"
        if Counter(before) == Counter(after):
            return f"the same {several(len(before), 'row')} stand in another order"
        if len(before) != len(after):
            shared = (Counter(before) & Counter(after)).total()
            return f"there were {several(len(before), 'row')} and are {len(after)} now, {shared} of them the same"
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        differ = "differs: row" if len(changed) == 1 else "differ: rows"
        return f"{several(len(changed), 'row')} of {len(before)} {differ} {listing(changed)}"

    def _list(self) -> list[bytes]:
        return [self.each[i : i + HASH_BYTES] for i in range(0, len(self.each), HASH_BYTES)]
