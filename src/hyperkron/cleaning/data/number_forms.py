"""Numbers as people write them: decimal commas, commas between thousands, dates."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from hyperkron.cleaning.data.files import np
from hyperkron.cleaning.data.values import LARGEST, Array, Values, as_number, cells, is_missing, numbers

NumberForm: TypeAlias = Literal["plain", "thousands", "decimal comma", "date", "date, day first"]
"""How the cells of a column are read as numbers."""

_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
_COMMA = re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(\.\d{3})+)(,\d+)?")
_TIME = r"(?:[ T]+(\d{1,2}):(\d{2})(?::(\d{2})(?:\.\d+)?)?(?: ?Z|[+-]\d{2}:?\d{2})?)?"
_ISO = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})" + _TIME)
_OTHER = re.compile(r"(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})" + _TIME)
_EPOCH = datetime.datetime(1970, 1, 1)


def read_numbers(values: Values, form: NumberForm = "plain") -> tuple[Array, list[Any]]:
    """A column as float64, NaN where there is no number, and the cells that hold something else; dates in days.

    Example:
        >>> found, strange = read_numbers(["1,5", "2", "1.250,75", "?"], "decimal comma")
        >>> found.tolist(), strange
        ([1.5, 2.0, 1250.75, nan], ['?'])
        >>> read_numbers(["1970-01-02", "03/01/1970"], "date, day first")[0].tolist()
        [1.0, 2.0]
    """
    if form == "plain":
        return numbers(values)
    read: Callable[[Any], float | None] = {
        "thousands": _thousands,
        "decimal comma": _decimal_comma,
        "date": lambda value: _days(value, day_first=False),
        "date, day first": lambda value: _days(value, day_first=True),
    }[form]
    listed = cells(values)
    parsed = [float("nan") if is_missing(value) else read(value) for value in listed]
    strange = [value for value, number in zip(listed, parsed, strict=True) if number is None]
    found = np.array([np.nan if number is None else number for number in parsed], dtype=np.float64)
    return np.where(np.abs(found) < LARGEST, found, np.nan), strange


def detect_form(values: Values, strange: list[Any]) -> NumberForm:
    """The form under which the fewest cells are no numbers; ``strange`` are those that are none as they stand."""
    if not any(isinstance(value, datetime.date) or (isinstance(value, str) and _likely(value)) for value in strange):
        return "plain"
    best: NumberForm = "plain"
    fewest, forms = len(strange), list(get_args(NumberForm)[1:])
    if any(isinstance(value, str) and re.match(r"\d{1,2}\.\d", value.strip()) for value in strange):
        forms.reverse()  # 31.12.2020: with points the day comes first
    for form in forms:
        count = len(read_numbers(values, form)[1])
        if count < fewest:
            best, fewest = form, count
    return best


def form_note(name: str, form: NumberForm, values: Values) -> str:
    """What to say about a column that is not written plainly; nothing if it is."""
    if form == "plain":
        return ""
    odd = [str(value) for value in cells(values) if as_number(value) is None]
    example = max((value for value in odd if not read_numbers([value], form)[1]), key=len)
    number = read_numbers([example], form)[0][0]
    if form.startswith("date"):
        day = (_EPOCH + datetime.timedelta(days=float(number))).date().isoformat()
        return f"column {name!r} holds dates, read as days: {example!r} is {day}."
    return f"column {name!r} holds numbers with commas: {example!r} is read as {number:.12g}."


def _likely(value: str) -> bool:
    text = value.strip()
    return text[:1] in set("+-0123456789") and any(
        pattern.fullmatch(text) for pattern in (_THOUSANDS, _COMMA, _ISO, _OTHER)
    )


def _thousands(value: Any) -> float | None:
    if isinstance(value, str) and _THOUSANDS.fullmatch(value.strip()):
        return float(value.replace(",", ""))
    return as_number(value)


def _decimal_comma(value: Any) -> float | None:
    if isinstance(value, str) and _COMMA.fullmatch(value.strip()):
        return float(value.replace(".", "").replace(",", "."))
    return as_number(value)


def _days(value: Any, day_first: bool) -> float | None:
    """Days since 1970 of a date or a time; None of anything else."""
    if isinstance(value, datetime.datetime):
        moment = value.replace(tzinfo=None)
    elif isinstance(value, datetime.date):
        moment = datetime.datetime(value.year, value.month, value.day)
    else:
        text = str(value).strip()
        found = _ISO.fullmatch(text)
        other = None if found else _OTHER.fullmatch(text)
        if found is not None:
            year, month, day, *clock = found.groups()
        elif other is not None:
            one, two, year, *clock = other.groups()
            month, day = (two, one) if day_first else (one, two)
        else:
            return None
        try:
            hour, minute, second = (int(part or 0) for part in clock)
            moment = datetime.datetime(int(year), int(month), int(day), hour, minute, second)
        except ValueError:
            return None
    return (moment - _EPOCH).total_seconds() / 86400
