"""Which rows of a source are written again, and with which labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data.files import listing, np
from hyperkron.cleaning.data.formulas import Formulas
from hyperkron.cleaning.data.roles import label_column
from hyperkron.cleaning.data.values import Array, is_missing
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class Kept:
    """The positions of the rows to write, in order, and the new labels of some: names of classes, or their numbers."""

    rows: list[int]
    labels: Mapping[int, Any]
    out: Path
    column: str | None = None
    formulas: Formulas = "keep"

    @classmethod
    def of(cls, keep: Sequence[int] | Array, labels: Sequence[str | None] | None, out: Path, *more: Any) -> Kept:
        """The rows as they are asked for, checked."""
        positions = np.asarray(keep)
        if positions.size == 0:
            positions = positions.astype(np.int64)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise HyperkronError(
                f"keep must be a list of row numbers, not {positions.dtype} of shape {positions.shape}; for a mask "
                "pass np.flatnonzero(mask)."
            )
        rows = positions.tolist()
        if len(set(rows)) != len(rows):
            raise HyperkronError("keep names a row more than once; every row is written once.")
        if labels is not None and len(labels) != len(rows):
            raise HyperkronError(
                f"labels has {len(labels)} entries but keep has {len(rows)}; give one for each kept row."
            )
        given = zip(rows, [None] * len(rows) if labels is None else labels, strict=True)
        new = {row: name for row, name in given if name is not None}
        return cls(sorted(rows), new, out, *more)

    def require_suffix(self, source: str, *suffixes: str) -> None:
        """Refuse a name of the file that does not say its format."""
        if not self.out.name.lower().endswith(suffixes):
            raise HyperkronError(
                f"out={str(self.out)!r}: rows of {source} are written as {' or '.join(suffixes)}; name it so."
            )

    def within(self, count: int, name: str) -> list[int]:
        """The rows, if the source has them all."""
        outside = [row for row in self.rows if not 0 <= row < count]
        if outside:
            raise HyperkronError(f"keep names rows {listing(outside)}, but {name} has the rows 0 to {count - 1}.")
        return self.rows

    def label_column(self, source: str, columns: Sequence[str]) -> str:
        """The column of the labels; nothing where all stay."""
        return label_column(source, columns, self.column) if self.labels else ""

    def numbered(self, classes: Sequence[str]) -> Kept:
        """With new labels as the numbers of their classes, where the source stores numbers."""
        unknown = sorted(set(self.labels.values()) - set(classes))
        if classes and unknown:
            raise HyperkronError(f"labels holds {listing(map(repr, unknown))}; the classes are {listing(classes, 20)}.")
        numbers = {name: i for i, name in enumerate(classes)}
        return replace(self, labels={row: numbers.get(name, name) for row, name in self.labels.items()})

    def label(self, row: int, old: Any) -> Any:
        """The label of a row, of the type of the old one: a number stays a number."""
        new = self.labels.get(row, old)
        if new is old or not isinstance(new, str):
            return new
        if isinstance(old, bool):
            return new == "true"
        if isinstance(old, (int, float)) and not is_missing(old):
            try:
                return type(old)(new)
            except ValueError:
                return new
        return new

    def relabelled(self, row: int, record: dict[str, Any], column: str) -> dict[str, Any]:
        """A record with its label; the very same where that stays."""
        if row not in self.labels or record.get(column) == (new := self.label(row, record.get(column))):
            return record
        return {**record, column: new}
