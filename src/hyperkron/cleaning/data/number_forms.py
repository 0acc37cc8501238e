"""Columns of numbers as people write them: decimal commas, thousands, currencies, percentages and dates."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from hyperkron.cleaning.data.files import np
from hyperkron.cleaning.data.values import Array, Values, as_number, cells, is_missing, numbers, parsed

NumberForm: TypeAlias = Literal["plain", "thousands", "decimal comma", "date", "date, day first", "date, order unknown"]
"""How the cells of a column are read as numbers; of unknown order, the day comes first in dates with points only."""


class Written(NamedTuple):
    """How a column writes its numbers.

    Attributes:
        form: which mark is the decimal one, or how dates are written.
        unit: the sign of a currency, its code where it has none, or ``%``; all cells of a column carry the same one.
    """

    form: NumberForm = "plain"
    unit: str = ""

    @property
    def other_order(self) -> NumberForm:
        """Dates with day and month the other way round; of unknown order, those without points."""
        return "date" if self.form == "date, day first" else "date, day first"

    def expected(self, strange: Iterable[Any]) -> str:
        """What the cells are expected to hold, where some do not."""
        if not self.form.startswith("date"):
            return f"numbers{' with ' * bool(self.unit)}{self.unit} are expected"
        if all(_days(value, self.other_order) is None for value in strange):
            return "dates are expected"
        part = "day" if self.form == "date, day first" else "month"
        return f"the {part} is expected first, and other dates are read so, too; write all as 2021-12-31"


PLAIN = Written()
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
_COMMA = re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(\.\d{3})+)(,\d+)?")
_POINTS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")
_HUNDREDS = re.compile(r"[+-]?\d{1,3}")
_SPACED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:[ \u00a0\u2009\u202f'’]\d{3})+(?!\d)")
_CODES = {"EUR": "€", "USD": "$", "GBP": "£", "JPY": "¥", "INR": "₹"}  # others stand for themselves
_MONEY = "|".join(_CODES) + "|AUD|BRL|CAD|CHF|CNY|CZK|DKK|HKD|HUF|KRW|MXN|NOK|NZD|PLN|SEK|SGD|TRY|ZAR|[€$£¥₹]"
_AMOUNT = re.compile(rf"([+-]?)\s*({_MONEY})?\s*([+-]?\s*[\d.,]*\d[.,]?)\s*({_MONEY}|%)?")
_YEAR = "january february march april may june july august september october november december"
_MONTHS = {  # also shortened, to three letters at least
    name[:length]: number for number, name in enumerate(_YEAR.split(), 1) for length in range(3, len(name) + 1)
}
_TIME = r"(?:,?[ T]+(\d{1,2}):(\d{2})(?::(\d{2})(?:\.\d+)?)?(?: ?([AaPp])\.?[Mm]\.?)?(?: ?Z|[+-]\d{2}:?\d{2})?)?"
_DATES = tuple(
    re.compile(date + _TIME)
    for date in (
        r"(?P<year>\d{4})[-/.](?P<month>\d{1,2})[-/.](?P<day>\d{1,2})",
        r"(?P<one>\d{1,2})[-/.](?P<two>\d{1,2})[-/.](?P<year>\d{4})",
        r"(?P<one>\d{2})\.(?P<two>\d{2})\.(?P<year>\d{2})",
        r"(?P<one>\d{1,2})/(?P<two>\d{1,2})/(?P<year>\d{2})",
        r"(?P<day>\d{1,2})[-. ] ?(?P<month>[A-Za-z]{3,9})\.?[-, ] ?(?P<year>\d{4}|\d{2})",
        r"(?P<month>[A-Za-z]{3,9})\.? (?P<day>\d{1,2}),? (?P<year>\d{4})",
    )
)
_PIVOT = 30  # a year of two digits from here on is one of the last century, as in spreadsheets
_YEARS = frozenset((*range(1000, 3000), 9999))  # 12-28-7440 is a part, 9999-12-31 what has no end
_LEAST = 3  # numbers of three digits that a column of whole numbers with points for thousands has
_EPOCH = datetime.datetime(1970, 1, 1)


def read_numbers(values: Values, written: Written = PLAIN) -> tuple[Array, list[Any]]:
    """A column as float64, NaN where there is no number, and the cells that hold something else; dates in days.

    Example:
        >>> found, strange = read_numbers(["1,5", "2", "1.250,75", "?"], Written("decimal comma"))
        >>> found.tolist(), strange
        ([1.5, 2.0, 1250.75, nan], ['?'])
        >>> read_numbers(["1970-01-02", "03/01/1970", "4 Jan 70"], Written("date, day first"))[0].tolist()
        [1.0, 2.0, 3.0]
        >>> read_numbers(["$1,250", "$ 3.50", "($2)", "€1"], Written("thousands", "$"))
        (array([1250. ,    3.5,   -2. ,    nan]), ['€1'])
    """
    if written == PLAIN:
        return numbers(values)

    found, strange = parsed(cells(values), lambda cell: np.nan if is_missing(cell) else _read(cell, written))
    return numbers(found)[0], strange


def detect_form(values: Values, strange: Sequence[Any]) -> Written:
    """How a column writes its numbers: so that the fewest cells are none; ``strange`` are none as they stand.

    Amounts of another currency than the most frequent one are none, and so are bare numbers among percentages.
    """
    texts = {value for value in strange if isinstance(value, str)}
    dated = any(isinstance(value, datetime.date) for value in strange)
    if strange and not dated and not any(map(looks_like_number, texts)):
        return PLAIN
    units = Counter(sign for value in strange if isinstance(value, str) and (sign := _bare(value)[1]))
    unit = units.most_common(1)[0][0] if units else ""
    if _points_separate_thousands(values, unit):
        return Written("decimal comma", unit)
    dates: list[NumberForm] = ["date", "date, day first"]
    if any(re.match(r"\d{1,2}\.\d", value.strip()) for value in texts):
        dates.reverse()  # 31.12.2020: with points the day comes first
    best, fewest = PLAIN, len(strange)
    for written in (Written("thousands", unit), Written("decimal comma", unit), *map(Written, dates)):
        count = len(read_numbers(values, written)[1]) if fewest else 0
        if count < fewest:
            best, fewest = written, count
    both = [read_numbers(values, Written(form))[0] for form in dates if best.form.startswith("date")]
    return Written("date, order unknown") if both and np.array_equal(*both, equal_nan=True) else best


def looks_like_number(value: Any) -> bool:
    """Whether a cell that is no number as it stands is one, or a date, in some form."""
    if not isinstance(value, str):
        return isinstance(value, datetime.date)
    unit = _bare(value)[1]
    return any(pattern.fullmatch(value.strip()) for pattern in _DATES) or any(
        _amount(value, form, unit) is not None for form in ("thousands", "decimal comma")
    )


def form_note(name: str, written: Written, values: Values) -> str:
    """What to say about a column that is not written plainly; nothing if it is."""
    if written == PLAIN:
        return ""
    listed = {str(value): value for value in cells(values) if not is_missing(value)}.values()
    readable = (
        (str(value), number) for value in listed if (number := _read(value, written)) not in (None, as_number(value))
    )
    example, number = max(readable, key=lambda pair: (len(pair[0]), pair[0]))  # 31/12/2024 rather than 01/01/2024
    if written.form.startswith("date"):
        return f"column {name!r} holds dates, read as days: {example!r} is {day_of(number)}." + either_way(
            listed, written
        )
    return f"column {name!r} holds numbers with signs or separators: {example!r} is read as {number:.12g}."


def marks_note(name: str, written: Written, values: Values) -> str:
    """What to say where points separate thousands in some cells of decimal commas, and decimals in others."""
    if written.form != "decimal comma":
        return ""
    bare = {_bare(value)[0] for value in cells(values) if isinstance(value, str) and "." in value}
    groups = {text for text in bare if _POINTS.fullmatch(text)}
    decimals = {text for text in bare - groups if "," not in text and as_number(text) is not None}
    if not groups or not decimals:
        return ""
    return (
        f"column {name!r} holds {min(groups)!r}, where the point is read as one between thousands, and "
        f"{min(decimals)!r}, where it is the decimal mark; write all numbers with decimal commas, or all with points."
    )


def either_way(listed: Iterable[Any], written: Written) -> str:
    """What to say where every date would be one with day and month the other way round, too."""
    differ = ""
    for value in listed:
        here, there = _days(value, written.form), _days(value, written.other_order)
        if here is not None and there is None:
            return ""
        if here != there:
            differ = f" Day and month may be the other way round: {str(value)!r} is read as {day_of(here or 0.0)}."
    return f"{differ} If that is wrong, write such dates as 2021-12-31." if differ else ""


def day_of(days: float) -> str:
    """The date that is this many days after the first of January 1970.

    Example:
        >>> day_of(19047.6)
        '2022-02-24'
    """
    return (_EPOCH + datetime.timedelta(days=days)).date().isoformat()


def _read(value: Any, written: Written) -> float | None:
    if written.form.startswith("date"):
        return _days(value, written.form)
    return _amount(value, written.form, written.unit)


def _points_separate_thousands(values: Values, unit: str) -> bool:
    """Whether 14.780 is a whole number: a point is before every three digits of all large ones, and 780 has none.

    Amounts of money need no such small ones beside them: they have no three decimals.
    """
    small, large = set(), set()
    for value in values if isinstance(values, list) else ():
        text = _bare(value)[0] if isinstance(value, str) else ""
        if _POINTS.fullmatch(text):
            large.add(text)
        elif _HUNDREDS.fullmatch(text):
            small.update([text] if len(text.lstrip("+-")) == 3 else [])
        elif not is_missing(value):
            return False
    return bool(large) if unit not in ("", "%") else min(len(small), len(large)) >= _LEAST


def _bare(value: str) -> tuple[str, str]:
    """A number without the sign or code of a currency or a percentage, spaces and apostrophes; and that sign.

    Example:
        >>> _bare("-€ 1 250,75"), _bare("($3.50)"), _bare("12 %"), _bare("12 kg"), _bare("CHF 5"), _bare("5 EUR")
        (('-1250,75', '€'), ('-3.50', '$'), ('12', '%'), ('12 kg', ''), ('5', 'CHF'), ('5', '€'))
    """
    text = _SPACED.sub(lambda found: re.sub(r"\D", "", found[0]), value.strip().replace("\u2212", "-"))
    inner = text[1:-1] if text[:1] == "(" and text[-1:] == ")" and not text[1:].lstrip().startswith(("+", "-")) else ""
    found = _AMOUNT.fullmatch(inner.strip() or text)
    if found is None:
        return value.strip(), ""
    sign, before, number, after = found.groups(default="")
    number = number.replace(" ", "")
    if (sign and number[0] in "+-") or (before and after):
        return value.strip(), ""
    unit = before + after
    return ("-" if inner else sign) + number, _CODES.get(unit, unit)


def _amount(value: Any, form: NumberForm, unit: str) -> float | None:
    """The number of a cell; None if it is of another unit, or a bare number where percentages are expected."""
    if not isinstance(value, str):
        return None if unit == "%" else as_number(value)
    text, found = _bare(value)
    if found != unit and (found or unit == "%"):
        return None
    pattern, mark, point = (_THOUSANDS, ",", ".") if form == "thousands" else (_COMMA, ".", ",")
    if pattern.fullmatch(text):
        return float(text.replace(mark, "").replace(point, "."))
    return as_number(text)


def _days(value: Any, form: NumberForm) -> float | None:
    """Days since 1970 of a date or a time; None of anything else."""
    if isinstance(value, datetime.datetime):
        moment = value.replace(tzinfo=None)
    elif isinstance(value, datetime.date):
        moment = datetime.datetime(value.year, value.month, value.day)
    else:
        text = str(value).strip()
        found = next((match for pattern in _DATES if (match := pattern.fullmatch(text))), None)
        if found is None:
            return None
        try:
            moment = _moment(found, form)
        except ValueError:
            return None
    return (moment - _EPOCH).total_seconds() / 86400


def _moment(found: re.Match[str], form: NumberForm) -> datetime.datetime:
    """The time that a date in one of the forms names; a ValueError where there is no such day."""
    parts = found.groupdict()
    *_, hour, minute, second, half = found.groups()
    year = int(parts["year"])
    if len(parts["year"]) == 2:
        year += 1900 if year >= _PIVOT else 2000
    if year not in _YEARS:
        raise ValueError("no year of a date")
    if "month" in parts:
        day, name = int(parts["day"]), parts["month"].lower()
        month = int(name) if name.isdecimal() else _MONTHS.get(name, 0)
    else:
        month, day = int(parts["one"]), int(parts["two"])
        pointed = form == "date, order unknown" and found.string[found.end("one")] == "."
        if pointed or form == "date, day first":
            month, day = day, month
    hours = int(hour or 0)
    if half:
        if not 1 <= hours <= 12:
            raise ValueError("no hour of half a day")
        hours = hours % 12 + 12 * (half in "Pp")
    return datetime.datetime(year, month, day, hours, int(minute or 0), int(second or 0))
