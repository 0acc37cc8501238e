"""Columns of numbers and dates as people and spreadsheets write them."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from hyperkron.cleaning.data import TableEncoding, read, read_pair
from hyperkron.cleaning.data.number_forms import PLAIN, Written, day_of, detect_form, read_numbers

AMOUNTS = [float(v) for v in (-7, 0, 12.5, 780, 999.25, 1234.5, 14780, 2500000)]


def english(value: float) -> str:
    return f"{value:,.2f}"


def german(value: float) -> str:
    return english(value).translate(str.maketrans(",.", ".,"))


WRITTEN = {
    "dollars": [f"${english(v)}".replace("$-", "-$") for v in AMOUNTS],
    "dollars with a space": [f"$ {english(v)}" for v in AMOUNTS],
    "euros after": [f"{german(v)} €" for v in AMOUNTS],
    "percentages": [f"{v}%" for v in AMOUNTS],
    "percentages with commas": [f"{v} %".replace(".", ",") for v in AMOUNTS],
    "negative in parentheses": [f"({english(-v)})" if v < 0 else english(v) for v in AMOUNTS],
    "a minus of typography": [english(v).replace("-", "\u2212") for v in AMOUNTS],
    "spaces": [english(v).replace(",", " ") for v in AMOUNTS],
    "narrow spaces and commas": [english(v).replace(",", "\u202f").replace(".", ",") for v in AMOUNTS],
    "apostrophes": [english(v).replace(",", "'") for v in AMOUNTS],
    "a code": [f"{v} EUR" if i % 2 else f"EUR {v}" for i, v in enumerate(AMOUNTS)],
    "a code and a sign": [f"USD {v}" if i % 2 else f"${v}" for i, v in enumerate(AMOUNTS)],
    "a code without a sign, decimal commas": [f"{v}".replace(".", ",") + " CHF" for v in AMOUNTS],
    "some without the sign": [f"£{v}" if i % 2 else str(v) for i, v in enumerate(AMOUNTS)],
}


@pytest.mark.parametrize("name", WRITTEN)
def test_amounts_are_read_as_numbers_and_an_example_is_told(name: str) -> None:
    encoding, messages = TableEncoding.fit({"c": WRITTEN[name]})
    np.testing.assert_array_equal(encoding.matrix({"c": WRITTEN[name]})[:, 0], np.float32(AMOUNTS))
    assert "holds numbers with signs or separators" in messages[0] and " is read as " in messages[0]
    again = TableEncoding.from_json(encoding.to_json())
    assert again == encoding


@pytest.mark.parametrize(
    "values",
    [
        ["$1", "€2", "$3", "€4"],  # two currencies
        ["5%", "0.06", "7%", "0.08"],  # shares among percentages
        ["12 kg", "13 kg", "14 kg", "15 kg"],
        ["12 KGS", "13 KGS", "BMW 320", "BMW 520"],
        ["12 EUR", "13 USD", "14 EUR", "15 USD"],
        ["555-123", "555-124", "+ -5", "--6"],
        ["030 123 456", "030 123 457", "030 124 456", "040 123 456"],  # a leading zero: no number
        ["$5%", "$6%", "$7%", "$8%"],
    ],
)
def test_other_cells_stay_names(values: list[str]) -> None:
    encoding, _ = TableEncoding.fit({"c": values})
    assert encoding.names == tuple(f"c={value}" for value in values)


def test_amounts_of_another_unit_in_other_rows_are_missing_and_told() -> None:
    rates, prices = [f"{v}%" for v in range(20)], [f"${v}" for v in range(20)]
    encoding, _ = TableEncoding.fit({"rate": rates, "price": prices})
    other = {"rate": ["7 %", "0.07", 0.07], "price": ["$7", "7", "€7"]}
    np.testing.assert_array_equal(encoding.matrix(other), [[7, 7], [np.nan, 7], [np.nan, np.nan]])
    assert encoding.surprises(other) == [
        "column 'rate' holds '0.07', taken as missing: numbers with % are expected.",
        "column 'price' holds '€7', taken as missing: numbers with $ are expected.",
    ]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (["780", "14.780", "512", "1.234.567", "999", "2.500"], Written("decimal comma")),
        (["14.780 €", "2.500 €"], Written("decimal comma", "€")),  # money has no three decimals
        (["14.780 %", "2.500 %"], Written("thousands", "%")),
        (["14.780", "2.500", "1.125", "3.375"], PLAIN),  # may be decimals
        (["780", "14.780", "512", "0.125", "999", "2.500"], PLAIN),
        (["780", "14.780", "512", "2.5", "999", "2.500"], PLAIN),
        (["780", "14.780", "512", "2500", "999", "2.500"], PLAIN),
        (["0", "14.780", "1", "2.500", "2", "1.125"], PLAIN),
    ],
)
def test_points_between_thousands(values: list[str], found: Written) -> None:
    assert detect_form(values, read_numbers(values)[1]) == found


@pytest.mark.parametrize(
    "form",
    [
        "%Y-%m-%d",
        "%d.%m.%y",
        "%m/%d/%y",
        "%d/%m/%y",
        "%d %b %Y",
        "%d. %B %Y",
        "%d-%b-%y",
        "%b %d, %Y",
        "%m/%d/%Y %I:%M %p",
        "%b %d, %Y, %I:%M %p",
    ],
)
def test_dates(form: str) -> None:
    """Also months by their English names, years of two digits, and hours of half a day; a column of them is no text."""
    days = [datetime.datetime(1999, 5, 31) + datetime.timedelta(hours=1000 * i + 12) for i in range(40)]
    written = [day.strftime(form) for day in days]
    table = {"when": written, "size": list(range(40)), "label": ["a", "b"] * 20}
    train = read(table)
    assert train.kind == "table" and train.encoding is not None
    assert [column.name for column in train.encoding.columns] == ["when", "size"]
    exact = [
        (datetime.datetime.strptime(text, form) - datetime.datetime(1970, 1, 1)).total_seconds() for text in written
    ]
    np.testing.assert_array_equal(train.inputs[:, 0], np.float32(np.array(exact) / 86400))
    assert any("holds dates, read as days" in message for message in train.messages)


def test_what_is_no_date() -> None:
    strange = ["31.02.2023", "13 Foo 2023", "13/13/2023", "04/20/2023 13:00 PM", "1.2.10", "23-12-31"]
    for form in ("date", "date, day first"):
        assert read_numbers(strange, Written(form))[1] == strange
    days = read_numbers(["1/2/29", "1/2/30", "1/2/99"], Written("date"))[0]
    assert [day_of(float(day)) for day in days] == ["2029-01-02", "1930-01-02", "1999-01-02"]


@pytest.mark.parametrize(
    "values",
    [
        [f"{i % 28 + 1} {name} {i + 10}" for i in range(60) for name in ("Marble", "Juniper")],
        [f"Marigold {i % 28 + 1}, {1990 + i}" for i in range(120)],
        [f"12-{i % 28 + 1}-{5000 + 7 * i}" for i in range(120)],
    ],
)
def test_names_and_parts_are_no_dates(values: list[str]) -> None:
    encoding, messages = TableEncoding.fit({"c": values, "d": ["x", "y"] * 60})
    assert encoding.names == ("d=x", "d=y") and "column 'c' is left out" in messages[0]


@pytest.mark.parametrize("days", [("05", "07"), ("05", "07", "13")])
def test_dates_that_could_be_read_either_way_are_told(days: tuple[str, ...]) -> None:
    dates = [f"{day}/{month}/2021" for day in days for month in ("12", "03", "06")]
    _, messages = TableEncoding.fit({"c": dates})
    told = "the other way round: '07/06/2021' is read as 2021-07-06." in messages[0]
    assert told == ("13" not in days)


def test_dates_of_other_rows_in_the_other_order_are_told() -> None:
    encoding, _ = TableEncoding.fit({"c": [f"2021-03-{day:02d}" for day in range(1, 29)]})
    told = (
        "column 'c' holds '13/01/2022', taken as missing: the month is expected first, and other dates are read so, too"
    )
    assert encoding.surprises({"c": ["05/01/2022", "13/01/2022"]})[0].startswith(told)
    assert "'soon', taken as missing: dates are expected." in encoding.surprises({"c": ["soon"]})[0]


def test_dates_with_points_have_the_day_first_where_no_training_row_tells() -> None:
    for column in ([f"2022-06-{day:02}" for day in range(1, 29)], [f"{day} Jun 2022" for day in range(1, 29)]):
        encoding, messages = TableEncoding.fit({"c": column})
        again = TableEncoding.from_json(encoding.to_json())
        inputs = again.matrix({"c": ["05.06.2022", "13.06.2022", "05/06/2022", "2022-06-05", "5 Jun 22"]})[:, 0]
        assert [day_of(float(day)) for day in inputs] == [
            "2022-06-05",
            "2022-06-13",
            "2022-05-06",
            "2022-06-05",
            "2022-06-05",
        ]
        assert "other way round" not in messages[0]
        assert again.surprises({"c": ["05.06.2022", "13.06.2022", "2022-06-05", "06/06/2022", None]}) == []
        (told,) = again.surprises({"c": ["05.06.2022", "05/06/2022"]})
        assert "Day and month may be the other way round: '05/06/2022' is read as 2022-05-06." in told


def test_dates_whose_order_the_training_rows_tell_are_read_in_it() -> None:
    for column, first in (("12.31.2022", "2022-05-06"), ("12/31/2022", "2022-05-06"), ("31/12/2022", "2022-06-05")):
        encoding, _ = TableEncoding.fit({"c": [column, *(f"2022-06-{day:02}" for day in range(1, 29))]})
        new = {"c": ["05.06.2022", "05/06/2022"]}
        assert [day_of(float(day)) for day in encoding.matrix(new)[:, 0]] == [first] * 2
        assert encoding.surprises(new) == []


def test_a_few_amounts_of_another_currency_are_missing_and_told() -> None:
    prices = [f"${v}" for v in range(60)] + ["€7", "£8"]
    encoding, messages = TableEncoding.fit({"c": prices})
    np.testing.assert_array_equal(encoding.matrix({"c": prices})[:, 0], [*range(60), np.nan, np.nan])
    assert "column 'c' holds numbers but for 2 values taken as missing: '€7', '£8'" in messages[0]


def test_amounts_with_a_unit_that_is_not_read_are_left_out_with_a_remedy() -> None:
    values = {"c": [f"{v}.5 °C" for v in range(60)], "d": ["x", "y"] * 30}
    assert (
        "('0.5 °C'). Pass text='c' to learn from it as text; if they are quantities, write numbers without"
        in (TableEncoding.fit(values)[1][0])
    )


@pytest.mark.parametrize(
    "form", ["0 days 01:02:{:02d}", "1 h 5 min {} s", "+49 30 1234 56{:02d}", "DE89 3704 0044 {:04d}"]
)
def test_columns_of_durations_and_numbers_with_spaces_are_no_texts(form: str) -> None:
    table = {"took": [form.format(i) for i in range(60)], "size": list(range(60)), "label": ["a", "b"] * 30}
    train = read(table)
    assert train.kind == "table" and train.encoding is not None and train.encoding.names == ("size",)


def test_points_that_are_thousands_here_and_decimals_there_are_told() -> None:
    encoding, messages = TableEncoding.fit({"c": ["1,5", "1.250,75", "2.500", "0,125"]})
    assert "where the point" not in messages[0]
    new = {"c": ["246.913", "0.125", "3,5"]}
    np.testing.assert_array_equal(encoding.matrix(new)[:, 0], np.float32([246913, 0.125, 3.5]))
    told = "column 'c' holds '246.913', where the point is read as one between thousands, and '0.125', where it is the"
    assert encoding.surprises(new)[0].startswith(told)
    assert any(told in message for message in TableEncoding.fit({"c": [*new["c"], "4,5"]})[1])
    assert encoding.surprises({"c": ["246.913", "1.500,25"]}) == []


def test_durations_are_days() -> None:
    pandas = pytest.importorskip("pandas")
    took = pandas.to_timedelta([12, 36, None, 48], unit="h")
    frame = pandas.DataFrame({"took": took, "size": [1, 2, 3, 4], "label": [0, 1, 0, 1]})
    train, trusted = read_pair(frame, frame.assign(took=frame.took * 2, size=[4, 3, 2, 1]))
    np.testing.assert_array_equal(train.inputs[:, 0], [0.5, 1.5, np.nan, 2])
    np.testing.assert_array_equal(trusted.inputs[:, 0], [1, 3, np.nan, 4])
