"""Cells of a CSV file that a spreadsheet would take for formulas, and run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Literal, TypeAlias

from hyperkron.cleaning.data.files import several
from hyperkron.solution import HyperkronError, HyperkronWarning

Formulas: TypeAlias = Literal["keep", "escape", "refuse"]
"""What becomes of such cells: they stay, get an apostrophe before them, or the export is refused."""

_MARKS = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?(\d[\d.,]*|[.,]\d+)([eE][+-]?\d+)?\s*%?\s*\Z|[+-](inf|infinity|nan)\s*\Z", re.IGNORECASE)


def is_formula(cell: str) -> bool:
    """Whether a spreadsheet would run a cell as a formula: it begins with = + - @, tab or return, and is not a number.

    Example:
        >>> [is_formula(cell) for cell in ("=1+1", "@SUM(A1)", "-2+3", "- a list", "-5", "+3.2", "-1e-3", "plain")]
        [True, True, True, True, False, False, False, False]

    Reference: OWASP, "CSV injection".
    """
    return cell.startswith(_MARKS) and _NUMBER.match(cell) is None


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
