"""Arrays, Datasets and sheets that hold less, or other things, than they seem to."""

from __future__ import annotations

import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyperkron.cleaning.arguments import read_parts
from hyperkron.cleaning.data import InputForm, read
from hyperkron.cleaning.folder import shown
from hyperkron.solution import HyperkronError

X = np.arange(24.0).reshape(12, 2)
Y = np.arange(12) % 2
HIDDEN = np.arange(12) % 3 == 0


def test_what_a_masked_array_hides_is_missing() -> None:
    train = read_parts((np.ma.masked_array(X, HIDDEN[:, None] & [True, False]), Y), (X + 100, Y), None, {})[0]
    np.testing.assert_array_equal(np.isnan(train.inputs[:, 0]), HIDDEN)
    assert not np.isnan(train.inputs[:, 1]).any()
    for y in (Y, np.array(["no", "yes"])[Y]):
        train = read_parts((X, np.ma.masked_array(y, HIDDEN)), (X + 100, y), None, {})[0]
        assert train.left_out["no label"].tolist() == HIDDEN.nonzero()[0].tolist()
    votes = np.ma.masked_array(np.stack([Y, Y, 1 - Y], 1), np.stack([HIDDEN] * 3, 1) & [True, False, True])
    train = read_parts((X, votes), (X + 100, Y), None, {})[0]
    assert train.votes is not None
    np.testing.assert_array_equal(train.votes == -1, votes.mask)


def test_what_a_masked_column_hides_is_missing() -> None:
    for values in ([1.0, 2.0, 999.0, 4.0], [1, 2, 999, 4]):
        column = np.ma.masked_array(values, [False, False, True, False])
        found = read({"a": column, "b": [1, 2, 3, 4], "label": ["x", "y", "x", "y"]}).inputs
        np.testing.assert_array_equal(found, [[1, 1], [2, 2], [np.nan, 3], [4, 4]])


@pytest.mark.parametrize("value", [1.5, "Rome", None, np.array(1.5), np.ones((2, 2)), {1.5, 2.5}, {"a": 1, "b": 2}])
def test_a_column_must_be_a_list_of_values(value: Any) -> None:
    """Of one text each letter would be a row, and a set has no order."""
    train = read({"a": [1.0, 2.0], "t": ["p", "q"], "label": [0, 1]})
    with pytest.raises(HyperkronError, match=r"column 't' of rows is a .*; give a list with one value for each row"):
        InputForm.of(train).read({"a": [1.0, 2.0], "t": value})
    with pytest.raises(HyperkronError, match=r"column 't' of source is a .*; give a list with one value for each row"):
        read({"a": [1.0, 2.0], "t": value, "label": [0, 1]})
    kept = {"p": 0, "q": 1}
    assert read({"t": kept.keys(), "label": kept.values()}).labels.tolist() == [0, 1], "these have an order"


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: int) -> Any:
        return self.items[at]


def test_votes_of_a_torch_dataset() -> None:
    items = [(torch.tensor([float(i), 1.0]), torch.tensor([i % 2, i % 2, -1])) for i in range(6)]
    train = read_parts(Items(*items), (X[:, :2] + 100, Y), None, {})[0]
    assert train.votes is not None and train.votes[:3].tolist() == [[0, 0, -1], [1, 1, -1], [0, 0, -1]]


REFUSED: dict[str, tuple[Any, str]] = {
    "pictures of PIL": (Items((object(), 0), (object(), 1)), r"first a object, make no array .* np\.asarray\(picture"),
    "several sizes": (Items((torch.ones(2, 3), 0), (torch.ones(2, 4), 1)), r"make no array .*of one shape"),
    "one-hot labels": (Items(*[(torch.ones(2), torch.eye(2)[i % 2]) for i in range(4)]), r"one-hot labels have; pass"),
    "a sparse tensor": ((torch.eye(2).to_sparse(), [0, 1]), r"layout torch\.sparse_coo; pass x\.to_dense\(\)"),
    "rows of several lengths": (([[1.0, 2.0], [3.0]], [0, 1]), "x has rows of different lengths"),
    "labels of several lengths": ((X, [[0], [0, 1]] * 6), "y has rows of different lengths"),
    "dictionaries": (([{"a": 1}, {"a": 2}], [0, 1]), "x is of type object"),
    "a column of vectors": ({"v": [[0.5, 1.0], [1.5, 2.0]], "label": [0, 1]}, r"'v' of train holds lists of numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_rows_is_refused(name: str) -> None:
    train, why = REFUSED[name]
    with pytest.raises(HyperkronError, match=why):
        read_parts(train, (X, Y), None, {})


def test_datasets_that_are_streams_or_without_their_labels() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one text", "another text"], "label": [0, 1]})
    with pytest.raises(HyperkronError, match=r"an IterableDataset; give datasets\.Dataset\.from_list\(list\(it\)\)"):
        read(rows.to_iterable_dataset())
    with pytest.raises(HyperkronError, match=r"labels apart from it; put them in: dataset\.add_column"):
        read_parts((rows.remove_columns("label"), [0, 1]), rows, None, {})


def test_columns_of_lists_of_names_stay_names() -> None:
    train = read({"tags": [["a", "b"], ["c"], ["a", "b"], ["c"]], "n": [1, 2, 3, 4], "label": [0, 1, 1, 0]})
    assert train.encoding is not None and train.encoding.names[0] == "tags=['a', 'b']"


def _sheet(path: Path, formula: bool) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("xl/worksheets/sheet1.xml", "<c><f>1+1</f></c>" if formula else "<c><v>1</v></c>")
    return path


def test_formulas_that_were_never_computed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cells are empty in the file. Opened by stand-ins: openpyxl is not needed by the tests."""
    pandas = pytest.importorskip("pandas")
    values = {"text": ["a text", None, None, "more text"], "label": ["x", "y", "x", "y"]}
    written = {**values, "text": ["=A1", '=B1&" c"', None, "=A4"]}  # of the first and last the value is there
    asked: list[Any] = []

    def opened(path: Path, **how: Any) -> Any:
        asked.append(how)
        return pandas.DataFrame(written if how.get("engine_kwargs") == {"data_only": False} else values, dtype=object)

    monkeypatch.setitem(sys.modules, "openpyxl", types.ModuleType("openpyxl"))
    monkeypatch.setattr(pandas, "read_excel", opened)
    told = [m for m in read(_sheet(tmp_path / "book.xlsx", True), text="text").messages if "formula" in m]
    assert told[0].startswith("book.xlsx: 1 cell with a formula whose value the file does not hold, taken as empty: ")
    assert """'=B1&" c"' in column 'text'. Open the file in a spreadsheet program and save it""" in told[0]
    asked.clear()
    assert not any("formula" in m for m in read(_sheet(tmp_path / "plain.xlsx", False), text="text").messages)
    assert len(asked) == 1


def test_a_title_above_the_names_of_a_sheet_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    titled = pandas.DataFrame({"Report": ["text", "a"], "Unnamed: 1": ["label", "x"]})
    monkeypatch.setitem(sys.modules, "openpyxl", types.ModuleType("openpyxl"))
    monkeypatch.setattr(pandas, "read_excel", lambda path, **how: titled)
    with pytest.raises(HyperkronError, match="if its first line is a title, remove it, so that the names"):
        read(_sheet(tmp_path / "book.xlsx", False))


TOWNS = [f"town {i % 60}" for i in range(240)]  # more than max_categories
TABLE = {"town": TOWNS, "n": list(range(240)), "customer": list(range(240)), "label": ["a", "b", "b"] * 80}


def test_rare_names_are_shown_as_they_are_written() -> None:
    train, trusted, test = read_parts(
        TABLE, {**TABLE, "n": [n + 0.5 for n in TABLE["n"]]}, {**TABLE, "town": ["Oslo"] * 240}, {"id": ["customer"]}
    )
    for part, towns in ((train, TOWNS), (trusted, TOWNS), (test, ["Oslo"] * 240)):
        assert [shown(train, part, i)["features"]["town"] for i in range(240)] == towns
    picked = train.take([7, 59])
    assert [shown(train, picked, i)["features"]["town"] for i in range(2)] == ["town 7", "town 59"]


def test_ids_of_other_files_are_known() -> None:
    """Of trusted and test rows they were told as columns that are not used."""
    whole = {**TABLE, "n": [n + 0.5 for n in TABLE["n"]]}
    without = {name: values for name, values in whole.items() if name != "customer"}
    for other in (whole, without):
        parts = read_parts(TABLE, other, {**other, "n": [n + 900 for n in TABLE["n"]]}, {"id": ["customer"]})
        assert not any("not used" in message for part in parts for message in part.messages)
        assert all(part.roles.features == ("town", "n") for part in parts)
        assert all(("customer" in part.ids) == ("customer" in other) for part in parts[1:])
