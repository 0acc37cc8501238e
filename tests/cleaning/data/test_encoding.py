"""How tables become numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hyperkron.cleaning.data import InputForm, TableEncoding, read, read_pair
from hyperkron.cleaning.folder import shown
from hyperkron.cleaning.report import wording
from hyperkron.solution import HyperkronError


def test_closed_form() -> None:
    """Mean and standard deviation over what is there; 0 and a flag where it is not."""
    encoding, messages = TableEncoding.fit({"a": ["1", "3", "", "nan"], "b": [4.0, 4.0, 6.0, 6.0]})
    assert messages == []
    found = encoding.encode({"a": ["1", "3", "", "nan"], "b": [4.0, 4.0, 6.0, 6.0]})
    np.testing.assert_allclose(found, [[-1, -1, 0], [1, -1, 0], [0, 1, 1], [0, 1, 1]])
    assert found.dtype == np.float32
    unseen = encoding.encode({"a": ["5"], "b": [math.nan]})  # b had no gap in training: the mean, and no flag
    np.testing.assert_allclose(unseen, [[3, 0, 0]])


def test_matrix_keeps_gaps_and_names() -> None:
    encoding, _ = TableEncoding.fit({"a": [1, None, 3], "t": ["x", "", "x"]})
    assert encoding.names == ("a", "t=x", "t=(missing)")
    matrix = encoding.matrix({"a": [1, None, 3], "t": ["x", "", "new"]})
    np.testing.assert_array_equal(matrix, [[1, 1, 0], [np.nan, 0, 1], [3, 0, 0]])


def test_rare_values_share_one_input() -> None:
    values = ["a"] * 5 + ["b"] * 4 + ["c", "d"]
    encoding, messages = TableEncoding.fit({"t": values}, max_categories=2)
    assert encoding.names == ("t=a", "t=b", "t=(other)")
    assert "4 different values; the 2 most frequent" in messages[0] and "(2 rows)" in messages[0]
    np.testing.assert_array_equal(encoding.matrix({"t": ["d", "never seen", "b"]}), [[0, 0, 1], [0, 0, 1], [0, 1, 0]])


@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        ([None, "", "NaN"], (), "has no values"),
        ([2, 2, 2], (), "is 2 in every training row"),
        (["x", "x", "x"], (), "is 'x' in every training row"),
        ([f"name {i}" for i in range(60)], (), "look like names or free text"),
        ([f"{'$€'[i % 2]}{i}" for i in range(60)], (), "such as '$0', '€1', '$2' and 57 more, are numbers or dates in"),
        ([*map(str, range(39)), "n. a."], ("c",), "1 value taken as missing: 'n. a.'"),
        ([1, math.inf, 3], ("c",), ""),
        (["True", "false", "TRUE"], ("c",), ""),
        ([1e300, 1, 2], ("c",), ""),
        ([10**400, 1, 2], ("c",), ""),
        (["1_0", "2_0", "1_0"], ("c=1_0", "c=2_0"), ""),
    ],
)
def test_columns(values: list[object], names: tuple[str, ...], message: str) -> None:
    other = [float(i) for i in range(len(values))]
    encoding, messages = TableEncoding.fit({"c": values, "other": other})
    assert encoding.names == (*names, "other")
    assert (message in messages[0]) if message else messages == []
    assert np.isfinite(encoding.encode({"c": values, "other": other})).all()


def test_saved_as_json() -> None:
    encoding, _ = TableEncoding.fit({"a": ["0.1", "", "7"], "t": ["é", "b", "b"]}, max_categories=1)
    again = TableEncoding.from_json(encoding.to_json())
    assert again == encoding
    np.testing.assert_array_equal(again.encode({"a": [1], "t": ["é"]}), encoding.encode({"a": [1], "t": ["é"]}))
    for broken in ("", "[]", "{}", '{"format": 2, "columns": []}', '{"format": 1, "columns": [{"kind": "eval"}]}'):
        with pytest.raises(HyperkronError, match="is not an encoding"):
            TableEncoding.from_json(broken)


def test_learnt_on_training_rows_only() -> None:
    train, trusted = read_pair(
        {"a": [0, 2, 0, 2], "b": [0, 0, 2, 2], "label": [0, 1, 0, 1]}, {"a": [100, None], "b": [1, 3], "label": [0, 1]}
    )
    assert train.encoding is trusted.encoding and train.encoding is not None
    np.testing.assert_allclose(trusted.standardised(), [[99, 0], [0, 2]])
    assert any("missing values in 1 column: 'a' (1)" in message for message in trusted.messages)


def test_errors() -> None:
    encoding, _ = TableEncoding.fit({"a": [1, 2]})
    with pytest.raises(HyperkronError, match="lacks the column 'a'"):
        encoding.matrix({"b": [1]})
    with pytest.raises(HyperkronError, match="has 1 columns"):
        encoding.standardise(np.zeros((2, 2)))
    with pytest.raises(HyperkronError, match="no column can be used"):
        TableEncoding.fit({"a": [1, 1]})


def test_a_person_sees_dates_and_whole_numbers_as_they_are() -> None:
    table: dict[str, list[object]] = {
        "when": ["24.02.2022", "", "13.01.2021", "01.12.2020"],
        "order": [1482262, 1090954, 1779390, 1607018],
    }
    table["day"] = [20211007, 20200301, 20201231, 19991231]  # of these numbers float32 holds every other one
    rows = read({**table, "label": ["a", "b", "a", "b"]})
    seen = [shown(rows, rows, i)["features"] for i in range(len(rows))]
    assert [row["when"] for row in seen] == ["2022-02-24", None, "2021-01-13", "2020-12-01"]
    assert [wording.value(row["order"]) for row in seen][:2] == ["1482262", "1090954"]
    assert [wording.value(row["day"]) for row in seen] == [str(day) for day in table["day"]]


def test_a_person_sees_the_names_in_a_column_and_not_its_inputs() -> None:
    """A column of many names has many inputs, of which the first dozen say nothing of most rows."""
    towns = [f"town {i:02}" for i in range(20)] * 2
    table = {"town": [*towns, None], "left": [*("yes", "no") * 20, "no"], "age": range(41)}
    rows = read({**table, "label": [*("a", "b") * 20, "a"]})
    seen = [shown(rows, rows, i)["features"] for i in range(len(rows))]
    assert [row["town"] for row in seen] == [*towns, None]
    assert [row["left"] for row in seen] == table["left"] and [row["age"] for row in seen] == list(range(41))
    rare, _ = TableEncoding.fit({"town": ["Rome"] * 3 + ["Oslo"] * 2 + ["Bern"]}, max_categories=2)
    told = rare.matrix({"town": ["Rome", "Bern", None]})
    assert [rare.cells(row)["town"] for row in told] == ["Rome", "(other)", None]


def test_large_numbers_that_differ_little_keep_their_differences() -> None:
    """Times of one hour in milliseconds, and as dates: float32 has a few dozen numbers there."""
    seconds = np.random.default_rng(0).permutation(3600)[:60]
    table: dict[str, list[object]] = {
        "ms": [1_700_000_000_000 + 1000 * int(s) for s in seconds],
        "time": [f"2024-03-01 10:{s // 60:02d}:{s % 60:02d}" for s in seconds],
        "one": [1e9 + 1, None] * 30,
    }
    encoding, _ = TableEncoding.fit(table)
    exact = (seconds - seconds.mean()) / seconds.std()
    found = TableEncoding.from_json(encoding.to_json()).encode(table)
    np.testing.assert_allclose(found[:, :2], np.stack([exact, exact], axis=1), atol=2**-22, rtol=0)
    np.testing.assert_array_equal(found[:, 2:], [[0, 0], [0, 1]] * 30)  # a single number, and where it is missing
    cells = encoding.cells(encoding.matrix(table)[0])
    assert cells == {"ms": table["ms"][0], "time": "2024-03-01", "one": 1e9 + 1}


def test_ordinary_numbers_become_float32_as_they_are() -> None:
    table = {"year": [1990, 2024], "price": ["1,5", "1250,75"], "day": ["2024-01-01", "2024-01-08"], "big": [1e9, 2e9]}
    encoding, _ = TableEncoding.fit(table)
    assert not encoding.offsets.any()
    expected = np.array([[1990, 1.5, 19723, 1e9], [2024, 1250.75, 19730, 2e9]], dtype=np.float32)
    assert encoding.matrix(table).tobytes() == expected.tobytes()


def test_new_rows_of_large_numbers_are_read_alike_as_table_and_array() -> None:
    x = np.stack([1.7e12 + np.arange(40.0), np.arange(40.0) % 7], axis=1)
    train = read({"x": x, "y": np.arange(40) % 2})
    form = InputForm.of(train)
    assert train.encoding is not None and train.encoding.offsets[0] != 0
    for rows in (x[:5], {name: x[:5, i] for i, name in enumerate(train.encoding.names)}):
        np.testing.assert_array_equal(train.encoding.standardise(form.read(rows).inputs), train.standardised()[:5])


def test_many_columns_of_one_value_are_told_in_one_message() -> None:
    x = np.zeros((30, 50))
    x[:, :3], x[:, 3], x[:, 4] = np.arange(90.0).reshape(30, 3), 7, np.nan
    _, messages = TableEncoding.fit({f"x{i}": x[:, i] for i in range(50)})
    assert messages[:2] == [
        "column 'x3' is 7 in every training row and is left out.",
        "column 'x4' has no values and is left out.",
    ]
    told = "is 0 in every training row and is left out."
    assert messages[2].startswith("each of the columns 'x5', 'x6'") and messages[2].endswith(f" and 15 more {told}")
    assert len(messages) == 3


def test_rows_whose_offsets_are_taken_off_already_are_refused() -> None:
    x = np.stack([1.7e12 + np.arange(40.0), np.arange(40.0) % 7], axis=1)
    train = read({"x": x, "y": np.arange(40) % 2})
    form = InputForm.of(train)
    for rows in (train.inputs, train.inputs[:1]):
        with pytest.raises(HyperkronError, match=r"column 'x0' holds numbers near .*such as the inputs of read_pair"):
            form.read(rows)
    far = np.concatenate([x[:3], [[0.0, 1.0]]])  # one strange row among others is none of them
    assert form.read(far).inputs[3, 0] < -1.6e12
