"""Which rows a source held: a hash of every row, by which a later reader knows whether they are still the same."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hyperkron.cleaning.data.files import listing, several

HASH_BYTES = 8
"""Bytes of the hash of one row."""


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
    def of(cls, head: str, rows: Iterable[str | bytes]) -> RowHashes:
        """The hashes of rows.

        Args:
            head: what all rows have in common, such as the names of the columns.
            rows: the content of each.
        """
        each, whole = bytearray(), hashlib.sha256(head.encode("utf-8", "surrogatepass"))
        for row in rows:
            digest = hashlib.sha256(row.encode("utf-8", "surrogatepass") if isinstance(row, str) else row).digest()
            whole.update(digest)
            each += digest[:HASH_BYTES]
        return cls(whole.hexdigest(), bytes(each))

    @classmethod
    def of_json(cls, head: str, rows: Iterable[Any]) -> RowHashes:
        """The hashes of rows of plain values, written so that no two different rows are alike."""
        return cls.of(head, (json.dumps(row, sort_keys=True) for row in rows))

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
