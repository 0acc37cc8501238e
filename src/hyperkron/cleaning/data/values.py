"""Single values of a column: which are missing, which are numbers, also as people write them, and names of labels."""

from __future__ import annotations

import datetime
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from hyperkron.cleaning.data.files import listing, np
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]
else:
    Array = Any
Values: TypeAlias = "list[Any] | Array"
"""The cells of one column."""
Columns: TypeAlias = Mapping[str, Values]
"""The columns of a table by their names."""

MISSING = frozenset({"", "na", "n/a", "nan", "null", "<na>", "#n/a"})
"""Texts that mean that there is no value, in any case; a class may be called "none" or "?"."""

LARGEST = 3e38
"""Numbers of a table must be smaller than this: float32, in which models compute, holds up to 3.4e38."""

_TRUE = frozenset({"1", "true", "t", "yes", "y", "trusted", "clean", "gold"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "untrusted", "noisy"}) | MISSING
_WHOLE = re.compile(r"([+-]?\d+)\.0+\Z")


def is_missing(value: Any) -> bool:
    """Whether a cell holds no value: None, NaN, or one of the texts of ``MISSING``."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    return isinstance(value, float) and value != value


def as_number(value: Any) -> float | None:
    """The number a cell holds, of a duration the days; NaN where it holds none; None where it holds something else.

    Example:
        >>> as_number("1e3"), as_number(True), as_number("n/a"), as_number("1_000"), as_number(-(10**400))
        (1000.0, 1.0, nan, None, -inf)
    """
    if isinstance(value, str) and "_" in value:  # Python reads 1_000 as a number; tables do not
        return None
    if is_missing(value):
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError):
        if isinstance(value, datetime.timedelta):
            return value / datetime.timedelta(days=1)
        return {"true": 1.0, "false": 0.0}.get(str(value).strip().lower())
    except OverflowError:  # a whole number with more digits than a float can have
        return float("inf") if value > 0 else float("-inf")


class Cells(list[Any]):
    """A column of a table that is parsed once, however often its numbers are asked for."""

    __slots__ = ("floats",)
    floats: Array | None


def all_floats(values: list[Any]) -> Array | None:
    """The numbers of a column of texts that are numbers, every one of them; None for any other."""
    if isinstance(values, Cells) and hasattr(values, "floats"):
        return values.floats
    found = None
    with suppress(TypeError, ValueError):
        if "_" not in "".join(values):
            found = np.fromiter(map(float, values), dtype=np.float64, count=len(values))
    if isinstance(values, Cells):
        values.floats = found
    return found


def cells(values: Values) -> list[Any]:
    """The cells of a column as Python values."""
    return values if isinstance(values, list) else list(values.tolist())


def ids_of(values: Values) -> list[Any]:
    """The cells of a column of ids, None where there is none; a text such as "NA" is an id."""
    return [value if isinstance(value, str) or not is_missing(value) else None for value in cells(values)]


def gaps(values: Values) -> Array:
    """Which cells of a column hold no value."""
    found = all_floats(values) if isinstance(values, list) else values
    if found is None:
        return np.array([is_missing(value) for value in values], dtype=bool)
    return np.isnan(found) if found.dtype.kind == "f" else np.zeros(len(found), dtype=bool)


def exact_numbers(values: Values) -> tuple[Array, list[Any]]:
    """The column as float64 with NaN where there is no number, and the values that are no numbers."""
    if not isinstance(values, list):
        return np.asarray(values, dtype=np.float64), []
    plain = all_floats(values)
    if plain is not None:
        return plain, []
    return parsed(values, as_number)


def parsed(values: list[Any], number: Callable[[Any], float | None]) -> tuple[Array, list[Any]]:
    """The ``number`` of each cell as float64, NaN where that is None; and these cells. Each text is asked for once."""
    known = {text: number(text) for text in {value for value in values if isinstance(value, str)}}
    found = [known[value] if isinstance(value, str) else number(value) for value in values]
    strange = [value for value, here in zip(values, found, strict=True) if here is None]
    return np.array(found, dtype=np.float64), strange


def numbers(values: Values) -> tuple[Array, list[Any]]:
    """The same with NaN also where a number is extreme: infinite, or beyond ±``LARGEST``."""
    found, strange = exact_numbers(values)
    return np.where(np.abs(found) < LARGEST, found, np.nan), strange


def extremes(values: Values) -> Array:
    """The numbers of a column that are infinite or beyond ±``LARGEST``.

    Example:
        >>> extremes(["1e300", 2, "-inf", None]).tolist()
        [1e+300, -inf]
    """
    found = exact_numbers(values)[0]
    return found[np.abs(found) >= LARGEST]


def category(value: Any) -> str | None:
    """The value of a categorical cell as text; None where it is missing."""
    if is_missing(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return composed(str(value).strip())


def composed(text: str) -> str:
    """The text with one character for a letter and its accent, of which Unicode has two forms that look the same.

    Example:
        >>> len("cafe\\u0301"), len(composed("cafe\\u0301"))
        (5, 4)
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def label_names(values: Values, where: str) -> list[str | None]:
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
    for value in cells(values):
        if is_missing(value):
            names.append(None)
        elif isinstance(value, (list, dict, tuple, bytes)):
            raise HyperkronError(f"{where} holds a {type(value).__name__}; a label is a text or a number.")
        elif isinstance(value, bool):
            names.append(str(value).lower())
        else:
            names.append(category(value))
    if all(name is None or _WHOLE.match(name) for name in names):
        return [None if name is None else str(int(name.split(".")[0])) for name in names]
    return names


def spelt(name: Any, names: Collection[str | None]) -> Any:
    """A label as ``names`` have it: true and false, which programs write as "True" or "TRUE"; any other as it is.

    Example:
        >>> spelt("TRUE", ["False", "True"]), spelt("yes", ["Yes", "No"])
        ('True', 'yes')
    """
    if name in names or str(name).lower() not in ("true", "false"):
        return name
    found = {other for other in names if str(other).lower() == str(name).lower()}
    return found.pop() if len(found) == 1 else name


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct names in their order: of the numbers where all are numbers, of the alphabet otherwise.

    Example:
        >>> ordered(["10", "9", "10"]), ordered(["b", "a"])
        (('9', '10'), ('a', 'b'))
    """
    distinct = set(names)
    if all(re.fullmatch(r"[+-]?\d{1,18}", name) for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def flags(values: Values, column: str) -> Array:
    """Which rows a column marks as trusted: true/false, yes/no, 1/0; a gap is false."""
    lowered = [(category(value) or "").lower() for value in cells(values)]
    strange = sorted({text for text in lowered if text not in _TRUE | _FALSE})
    if strange:
        raise HyperkronError(
            f"trusted_column={column!r} must hold true/false, yes/no or 1/0, but it also holds "
            f"{listing(map(repr, strange))}; correct these, or give the trusted rows as a second file."
        )
    return np.array([text in _TRUE for text in lowered], dtype=bool)
