"""Trusted, test and new rows that do not look like the training rows, and columns whose names are no texts."""

from __future__ import annotations

from typing import Any

import pytest

from hyperkron.cleaning.data import InputForm, read, read_pair
from hyperkron.solution import HyperkronError

TRAIN = {
    "when": [f"{1 + i}/01/2023" for i in range(20)],
    "town": ["Rome", "Oslo"] * 10,
    "size": [i / 3 for i in range(20)],
    "label": ["a", "b"] * 10,
}
OTHER = {"when": ["01/22/2023", "21/01/2023"], "town": ["Paris", "Rome"], "size": [1.25, 2.5], "label": ["a", "b"]}
TOLD = [
    "column 'when' holds '01/22/2023', taken as missing: the day is expected first, and other dates are read so, too; "
    "write all as 2021-12-31.",
    "column 'town' holds 'Paris', which no training row has: the model learns nothing from it.",
]


def test_cells_that_the_encoding_has_no_input_for_are_told_in_every_source() -> None:
    train, trusted = read_pair(TRAIN, OTHER)
    assert trusted.messages == tuple(f"trusted: {told}" for told in TOLD)
    assert not any("no training row" in message for message in train.messages)
    assert read(OTHER, like=train, argument="test").messages == tuple(f"test: {told}" for told in TOLD)
    form = InputForm.of(train)
    assert form.read(OTHER).messages == tuple(f"rows: {told}" for told in TOLD)
    blank: dict[str, Any] = {"when": ["", "2/01/2023"], "town": [None, "Rome"], "size": [None, 1e300]}
    assert form.read(blank).messages == (
        "rows: extreme values in 1 column, taken as missing: 'size' (1, such as 1e+300). Numbers must lie between "
        "-3e+38 and 3e+38; correct these, or rescale the column.",
        "rows: 1 row without a feature; do not rely on their answers.",
    )


def test_what_is_unusual_about_the_rows_of_a_matrix_is_told() -> None:
    train, _ = read_pair({"x": [[0.0, 1], [1, 1], [2, 1]], "y": [0, 1, 0]}, {"x": [[3.0, 1], [4, 1]], "y": [0, 1]})
    assert "1 row without a feature" in InputForm.of(train).read([[float("nan"), 1.0]]).messages[0]


@pytest.mark.parametrize(("names", "label"), [((0, 1, 2), 2), ((("x", 0), ("x", 1), ("z", 0)), ("z", 0))])
def test_columns_are_known_by_names_that_are_no_texts(names: tuple[Any, ...], label: Any) -> None:
    rows = {names[0]: [1.5, 2.5, 3.5], names[1]: [7, 8, 9], names[2]: ["a", "b", "a"]}
    others = {name: values[::-1] for name, values in rows.items()} | {names[1]: [1, 2, 3]}
    train, _ = read_pair(rows, others, label=label)
    assert train.classes == ("a", "b") and train.roles.features == (str(names[0]), str(names[1]))
    with pytest.raises(HyperkronError, match="label='lab' is not a column"):
        read_pair(rows, others, label="lab")


def test_an_id_that_is_the_column_0() -> None:
    rows = {0: ["r", "s", "t"], 1: [7, 8, 9], "label": ["a", "b", "a"]}
    train, _ = read_pair(rows, rows | {1: [1, 2, 3]}, id=0)  # type: ignore[arg-type]
    assert train.ids == {"0": ["r", "s", "t"]} and train.roles.features == ("1",)


def test_a_data_frame_that_names_a_column_twice() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[1, 2, "a"], [3, 4, "b"]], columns=["n", "n", "label"])
    with pytest.raises(HyperkronError, match="train names more than one column 'n'; rename them"):
        read_pair(frame, frame)


def test_the_column_that_is_taken_as_the_text_is_named() -> None:
    rows = {"note": [f"sent on day {i}" for i in range(4)], "size": [1, 2, 3, 4], "label": ["a", "b"] * 2}
    train, _ = read_pair(rows, {**rows, "note": ["x"] * 4})
    assert train.messages == ("train: column 'note' is taken as the text; columns not used: 'size'.",)


def test_columns_that_one_source_lacks_come_with_a_remedy() -> None:
    with pytest.raises(HyperkronError, match=r"'town' is not a column of trusted.*Name columns that all sources have"):
        read_pair(TRAIN, {name: values for name, values in OTHER.items() if name != "town"})
