"""Single values of a column: which are missing, which are numbers, and what a label is called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyperkron.data.files import listing, need
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    from hyperkron.data.labelled import Array

MISSING = frozenset({"", "na", "n/a", "nan", "null", "<na>", "#n/a"})
"""Texts that mean that there is no value, in any case; a class may be called "none" or "?"."""

_TRUE = frozenset({"1", "true", "t", "yes", "y", "trusted", "clean", "gold"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "untrusted", "noisy"}) | MISSING
_LARGEST = 3e38  # about what float32 can hold
_WHOLE = re.compile(r"([+-]?\d+)\.0+\Z")


def is_missing(value: Any) -> bool:
    """Whether a cell holds no value: None, NaN, or one of the texts of ``MISSING``."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    return isinstance(value, float) and value != value


def as_number(value: Any) -> float | None:
    """The finite number a cell holds; NaN where it holds none; None where it holds something else.

    Example:
        >>> as_number("1e3"), as_number(True), as_number("n/a"), as_number("1_000")
        (1000.0, 1.0, nan, None)
    """
    if isinstance(value, str):
        return _text_number(value)
    if is_missing(value):
        return float("nan")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return float("nan")
    return number if abs(number) < _LARGEST else float("nan")


def _text_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        lowered = text.strip().lower()
        if lowered in MISSING:
            return float("nan")
        return float(lowered == "true") if lowered in ("true", "false") else None
    if "_" in text:
        return None
    return number if abs(number) < _LARGEST else float("nan")


class Cells(list[Any]):
    """A column of a table that is parsed once, however often its numbers are asked for."""

    __slots__ = ("_parsed",)

    def parsed(self) -> tuple[Array, Array] | None:
        """``_parse`` of the column."""
        if not hasattr(self, "_parsed"):
            self._parsed = _parse(self)
        return self._parsed


def _parse(values: list[Any]) -> tuple[Array, Array] | None:
    """(numbers, gaps) of a column of texts that are numbers, every one of them; None for any other."""
    np = need("numpy")
    try:
        if "_" in "".join(values):
            return None
        found: Array = np.fromiter(map(float, values), dtype=np.float64, count=len(values))
    except (TypeError, ValueError):
        return None
    return _within_float32(found), np.isnan(found)


def _parsed(values: list[Any]) -> tuple[Array, Array] | None:
    return values.parsed() if isinstance(values, Cells) else _parse(values)


def _within_float32(found: Array) -> Array:
    np = need("numpy")
    kept: Array = np.where(np.abs(found) < _LARGEST, found, np.nan)
    return kept


def gaps(values: list[Any] | Array) -> Array:
    """Which cells of a column hold no value."""
    np = need("numpy")
    if not isinstance(values, list):
        return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)
    found = _parsed(values)
    return np.array([is_missing(value) for value in values], dtype=bool) if found is None else found[1]


def numbers(values: list[Any] | Array) -> tuple[Array, list[Any]]:
    """The column as float64 with NaN where there is no finite number, and the values that are no numbers."""
    np = need("numpy")
    if not isinstance(values, list):
        return _within_float32(np.asarray(values, dtype=np.float64)), []
    found = _parsed(values)
    if found is not None:
        return found[0], []
    parsed = [as_number(value) for value in values]
    strange = [value for value, number in zip(values, parsed, strict=True) if number is None]
    return np.array([np.nan if number is None else number for number in parsed], dtype=np.float64), strange


def category(value: Any) -> str | None:
    """The value of a categorical cell as text; None where it is missing."""
    if is_missing(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def label_names(values: list[Any] | Array, where: str) -> list[str | None]:
    """The names of labels: integers, whole floats, booleans and texts; None where there is none.

    A column all of whose texts are whole numbers with zeros after the point ("3.0", as tables with gaps are often
    written) counts as one of integers.

    Example:
        >>> label_names([3, 3.0, " spam ", True, None], "here")
        ['3', '3', 'spam', 'true', None]
        >>> label_names(["3.0", "1.0", ""], "here")
        ['3', '1', None]
    """
    names: list[str | None] = []
    for value in values if isinstance(values, list) else values.tolist():
        if is_missing(value):
            names.append(None)
        elif isinstance(value, (list, dict, tuple, bytes)):
            raise HyperkronError(f"{where} holds {type(value).__name__}s; a label is a text or a number.")
        elif isinstance(value, bool):
            names.append(str(value).lower())
        else:
            names.append(category(value))
    if all(name is None or _WHOLE.match(name) for name in names):
        return [None if name is None else str(int(name.split(".")[0])) for name in names]
    return names


def ordered(names: Sequence[str]) -> tuple[str, ...]:
    """Distinct names in their order: of the numbers where all are numbers, of the alphabet otherwise.

    Example:
        >>> ordered(["10", "9", "10"]), ordered(["b", "a"])
        (('9', '10'), ('a', 'b'))
    """
    distinct = set(names)
    if all(re.fullmatch(r"[+-]?\d{1,18}", name) for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def flags(values: list[Any] | Array, column: str) -> Array:
    """Which rows a column marks as trusted: true/false, yes/no, 1/0; a gap is false."""
    np = need("numpy")
    texts = [category(value) or "" for value in (values if isinstance(values, list) else values.tolist())]
    lowered = [text.lower() for text in texts]
    strange = sorted({text for text in lowered if text not in _TRUE | _FALSE})
    if strange:
        raise HyperkronError(
            f"trusted_column={column!r} must hold true/false, yes/no or 1/0, but it also holds "
            f"{listing(map(repr, strange))}; correct these, or give the trusted rows as a second file."
        )
    return np.array([text in _TRUE for text in lowered], dtype=bool)
