"""Which rows of a source are written again, with which labels, and what becomes of cells that are formulas."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hyperkron.cleaning.data.files import listing, np, several
from hyperkron.cleaning.data.number_forms import looks_like_number
from hyperkron.cleaning.data.roles import label_column
from hyperkron.cleaning.data.values import Array, Values, cells, composed, is_missing, label_names
from hyperkron.cleaning.data.votes import are_positions
from hyperkron.solution import HyperkronError, HyperkronWarning

Formulas: TypeAlias = Literal["keep", "escape", "refuse"]
"""What becomes of such cells: they stay, get an apostrophe before them, or the export is refused."""

_MARKS = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Kept:
    """The positions of the rows to write, in order, and the new labels of some: names of classes, or their numbers."""

    rows: list[int]
    labels: Mapping[int, Any]
    out: Path
    column: str | None = None
    formulas: Formulas = "keep"
    classes: Sequence[str] = ()

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
        return self._renamed({name: i for i, name in enumerate(classes)})

    def like(self, column: Values) -> Kept:
        """With new labels as other rows of the column write them (2, true, "2.0"), so that they are read as before."""
        values = [value for value in cells(column) if not is_missing(value)]
        names = label_names(values, "the column of the labels")
        written = dict(zip(reversed(names), reversed(values), strict=True))  # the first of each class
        kinds = {type(value) for value in values}
        forms: list[Callable[[str], Any]] = [kind for kind in (int, float) if kind in kinds]
        forms += ["{}.0".format, str]

        def here(name: str) -> Any:
            if name in written:
                value = written[name]
                return composed(value.strip()) if isinstance(value, str) else value
            for form in forms:
                with suppress(ValueError):
                    if label_names([*written.values(), form(name)], "labels") == [*written, name]:
                        return form(name)
            return name

        numbered = are_positions(names, self.classes)
        number = {name: str(i) for i, name in enumerate(self.classes if numbered else ())}
        new = {name: here(number.get(name, name)) for name in set(self.labels.values()) if isinstance(name, str)}
        return self._renamed(new)

    def _renamed(self, names: Mapping[str, Any]) -> Kept:
        return replace(self, labels={row: names.get(name, name) for row, name in self.labels.items()})

    def label(self, row: int, old: Any) -> Any:
        """The label of a row.

        Where others change, one that stays is written in their form of Unicode too, or one class would have two names.
        """
        return self.labels.get(row, composed(old) if self.labels and isinstance(old, str) else old)

    def relabelled(self, row: int, record: dict[str, Any], column: str) -> dict[str, Any]:
        """A record with its label; the very same where that stays."""
        if record.get(column) == (new := self.label(row, record.get(column))):
            return record
        return {**record, column: new}


def csv_line(fields: Sequence[str], delimiter: str = ",", end: str = "\n") -> str:
    """One record as text."""
    line = io.StringIO(newline="")
    csv.writer(line, delimiter=delimiter, lineterminator="\r\n").writerow(fields)  # a lone \r is put in quotes, too
    return line.getvalue().removesuffix("\r\n") + end


def is_formula(cell: str) -> bool:
    """Whether a spreadsheet would run a cell as a formula: it begins with = + - @, tab or return, and is no amount.

    Example:
        >>> [is_formula(cell) for cell in ("=1+1", "@SUM(A1)", "-2+3", "- a list", "-5", "+3.2", "-1e-3", "-9,50 €")]
        [True, True, True, True, False, False, False, False]

    Reference: OWASP, "CSV injection".
    """
    return cell.startswith(_MARKS) and not looks_like_number(cell)


class FormulaCells:
    """Counts the formulas among the cells that are written, and escapes them where that is asked for."""

    def __init__(self, what: Formulas, columns: Sequence[str]) -> None:
        self._what, self._columns = what, columns
        self._found, self._first = 0, ""

    def row(self, cells: Sequence[str], number: int | None = None) -> list[str] | None:
        """The cells of a row (None: the header) with its formulas escaped; None where they stay as they are."""
        places = [i for i, cell in enumerate(cells) if is_formula(cell)]
        if not places:
            return None
        if not self._found:
            where = "the header" if number is None else f"row {number}"
            self._first = f"{cells[places[0]][:40]!r} in {where}, column {self._columns[places[0]]!r}"
        self._found += len(places)
        if self._what != "escape":
            return None
        return [f"'{cell}" if i in places else cell for i, cell in enumerate(cells)]

    def tell(self, name: str) -> None:
        """Warn about them; an error where they are refused."""
        if not self._found:
            return
        text = f"{name} has {several(self._found, 'cell')} that a spreadsheet takes for a formula, such as "
        text += self._first
        if self._what == "refuse":
            raise HyperkronError(f"{text}; pass formulas='escape' for an apostrophe before each, or formulas='keep'.")
        if self._what == "escape":
            text += "; an apostrophe was put before each."
        else:
            text += (
                "; they are kept as they are. Do not open the file in a spreadsheet if you do not trust the data, or "
                "pass formulas='escape'."
            )
        warnings.warn(text, HyperkronWarning, stacklevel=2)


def csv_table(header: Sequence[str], rows: Iterable[tuple[int, Sequence[str]]], formulas: Formulas, name: str) -> str:
    """Rows that have no text of their own, each with its position, as CSV."""
    cells = FormulaCells(formulas, header)
    lines = [csv_line(cells.row(header) or header)]
    lines += [csv_line(cells.row(fields, row) or fields) for row, fields in rows]
    cells.tell(name)
    return "".join(lines)
