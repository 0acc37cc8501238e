"""Several labels per row: columns, long tables and arrays of votes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperkron.cleaning.data import read_pair
from hyperkron.cleaning.data.votes import majority_vote
from hyperkron.solution import HyperkronError

TRUSTED = {"text": ["one more", "and another"], "label": ["x", "y"]}
WIDE = {
    "text": ["a b", "c d", "e f", "g h"],
    "ann": ["x", "y", "", "x"],
    "bob": ["x", "x", None, "-1"],
    "cyd": ["y", "y", "", "z"],
}
LONG = {
    "doc": [7, 7, 8, 8, 9],
    "text": ["a b", "a b", "c d", "", "e f"],
    "who": ["ann", "bob", "ann", "bob", "cyd"],
    "label": ["x", "y", "x", "x", ""],
}


def test_a_column_for_each_annotator() -> None:
    train, trusted = read_pair(WIDE, TRUSTED, annotators=["ann", "bob", "cyd"])
    assert train.classes == ("x", "y", "z") and train.annotators == ("ann", "bob", "cyd")
    assert train.votes is not None and train.votes.tolist() == [[0, 0, 1], [1, 0, 1], [-1, -1, -1], [0, -1, 2]]
    assert train.labels.tolist() == [0, 1, -1, 0] and train.counts() == [2, 1, 0]
    assert train.left_out == {} and trusted.votes is None and trusted.labels.tolist() == [0, 1]
    assert any("1 row without any vote is unlabelled" in message for message in train.messages)
    assert train.take([2, 0]).votes.tolist() == [[-1, -1, -1], [0, 0, 1]]


def test_trusted_rows_of_the_same_table_have_the_label_column() -> None:
    table = {**WIDE, "gold": ["", "", "", "y"], "ok": [0, 0, 0, 1]}
    train, trusted = read_pair(table, annotators=["ann", "bob", "cyd"], label="gold", trusted_column="ok")
    assert len(train) == 3 and trusted.labels.tolist() == [1] and trusted.votes is None


def test_the_label_may_name_a_column_of_the_trusted_rows_alone() -> None:
    checked = {"text": TRUSTED["text"], "gold": TRUSTED["label"]}
    train, trusted = read_pair(WIDE, checked, annotators=["ann", "bob", "cyd"], label="gold")
    assert trusted.labels.tolist() == [0, 1] and train.labels.tolist() == [0, 1, -1, 0]
    with pytest.raises(HyperkronError, match=r"label='glod' is not a column of trusted.*Did you mean 'gold'"):
        read_pair(WIDE, checked, annotators=["ann", "bob", "cyd"], label="glod")


def test_a_label_beside_the_votes_is_not_learnt_from() -> None:
    table = {"a": [1.5, 2.5, 3.5, 4.5], "b": [1, 0, 2, 5], "label": ["x", "y", "y", "x"]}
    votes = {name: WIDE[name] for name in ("ann", "bob", "cyd")}
    checked = {"a": [1.0, 2.0], "b": [3, 4], "label": ["x", "y"]}
    for label in (None, "label"):
        train, trusted = read_pair(table | votes, checked, annotators=list(votes), label=label)
        assert train.encoding is not None and [column.name for column in train.encoding.columns] == ["a", "b"]
        assert train.labels.tolist() == [0, 1, -1, 0] and trusted.labels.tolist() == [0, 1]
        assert "train: columns not used: 'label'." in train.messages


@pytest.mark.parametrize("role", ["annotators", "features", "id"])
def test_a_column_with_a_role_is_not_taken_for_the_label_beside_the_votes(role: str) -> None:
    table = {"a": [1.5, 2.5, 3.5, 4.5], "class": [1, 0, 2, 5], **{name: WIDE[name] for name in ("ann", "bob", "cyd")}}
    checked = {"a": [1.0, 2.0], "class": [3, 4], "label": ["x", "y"]}
    roles: dict[str, Any] = {"annotators": ["ann", "bob", "cyd"]}
    if role == "annotators":
        table["y"] = table.pop("ann")
        roles["annotators"] = ["y", "bob", "cyd"]
        del table["class"], checked["class"]
    else:
        roles[role] = ["a", "class"] if role == "features" else ["class"]
    train, trusted = read_pair(table, checked, **roles)
    assert train.labels.tolist() == [0, 1, -1, 0] and trusted.labels.tolist() == [0, 1]
    assert train.encoding is not None
    assert [column.name for column in train.encoding.columns] == (["a", "class"] if role == "features" else ["a"])


def test_a_line_for_each_row_and_annotator() -> None:
    train, _ = read_pair(LONG, TRUSTED, annotator="who", id="doc")
    assert train.inputs == ["a b", "c d", "e f"] and train.rows.tolist() == [0, 2, 4]
    assert train.votes is not None and train.votes.tolist() == [[0, 1, -1], [0, 0, -1], [-1, -1, -1]]
    assert train.ids == {"doc": [7, 8, 9]} and train.left_out["further vote"].tolist() == [1, 3]
    assert any("5 lines of 3 annotators are 3 rows" in message for message in train.messages)


def test_the_last_of_two_labels_by_one_annotator_counts() -> None:
    table = {**LONG, "who": ["ann", "ann", "ann", "bob", "cyd"]}
    train, _ = read_pair(table, TRUSTED, annotator="who", id="doc")
    assert train.labels.tolist() == [1, 0, -1]
    assert any("1 line repeat a row and an annotator" in message for message in train.messages)


@pytest.mark.parametrize("silent", [-1, None, float("nan"), ""])
def test_an_array_of_votes(silent: Any) -> None:
    names = isinstance(silent, str)
    votes = [["p", "q", "p"], ["q", silent, "q"], [silent] * 3] if names else [[0, 1, 0], [1, silent, 1], [silent] * 3]
    train, _ = read_pair(
        {"x": np.eye(3), "y": np.array(votes, dtype=object if silent is None else None)},
        {"x": 2 * np.eye(3), "y": np.array(["p", "q", "p"]) if names else np.array([0, 1, 0])},
    )
    assert train.votes is not None and train.votes.tolist() == [[0, 1, 0], [1, -1, 1], [-1, -1, -1]]
    assert train.labels.tolist() == [0, 1, -1]


def test_votes_come_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,a,b\nalpha beta,x,y\ngamma delta,y,y\nmore text,,\n")
    (tmp_path / "ok.csv").write_text("text,label\none,x\ntwo,y\n")
    train, _ = read_pair(tmp_path / "t.csv", tmp_path / "ok.csv", text="text", annotators=["a", "b"])
    assert train.votes is not None and train.votes.tolist() == [[0, 1], [1, 1], [-1, -1]]
    np.savez(tmp_path / "t.npz", x=np.eye(2), y=np.array([[0, 1], [1, 1]]), classes=np.array(["no", "yes"]))
    np.savez(tmp_path / "ok.npz", x=2 * np.eye(2), y=np.array([0, 1]), classes=np.array(["no", "yes"]))
    train, _ = read_pair(tmp_path / "t.npz", tmp_path / "ok.npz")
    assert train.votes is not None and train.votes.tolist() == [[0, 1], [1, 1]] and train.classes == ("no", "yes")


def test_ties_go_to_the_sources_that_agree_more_often() -> None:
    votes = np.array([[0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, -1], [-1, -1, -1]])
    assert majority_vote(votes, 2).tolist() == [1, 1, 0, 0, -1]
    assert majority_vote(votes, 2, ties="reliable").tolist() == [1, 1, 0, 0, -1]  # the second is right in all three
    assert majority_vote(1 - np.where(votes < 0, 2, votes), 2, ties="reliable").tolist() == [0, 0, 1, 1, -1]


@pytest.mark.parametrize(
    ("table", "arguments", "said"),
    [
        (WIDE, {"annotators": ["ann"]}, "at least two annotators"),
        (WIDE, {"annotators": ["ann", "bbo"]}, r"annotators\[1\]='bbo' is not a column.*bob"),
        (WIDE, {"annotators": ["ann", "bob"], "annotator": "cyd"}, "contradict each other"),
        (LONG, {"annotator": "who"}, "name the column that tells which lines belong to one row with id="),
        ({**LONG, "who": ["ann", "", "ann", "bob", "cyd"]}, {"annotator": "who", "id": "doc"}, "fill in who gave"),
        (
            {**LONG, "doc": [7, 7, 7, 8, 9]},
            {"annotator": "who", "id": "doc"},
            "lines 0 and 2 .*different values of 'text'",
        ),
        ({"x": np.eye(2), "y": np.zeros((2, 2, 2))}, {}, r"or \(rows, annotators\)"),
    ],
)
def test_mistakes_are_named(table: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(HyperkronError, match=said):
        read_pair(table, TRUSTED, **arguments)


def test_silence_cannot_be_a_class() -> None:
    with pytest.raises(HyperkronError, match="-1 stands for silence"):
        read_pair({"x": np.eye(2), "y": np.array([[-1, 1], [1, 2]])}, {"x": 2 * np.eye(2), "y": [-1, 1]})


def test_votes_of_which_all_are_silent_are_refused() -> None:
    with pytest.raises(HyperkronError, match="no annotator gives a label, all cells are empty or -1"):
        read_pair({"x": np.eye(3), "y": np.full((3, 2), -1)}, {"x": np.eye(3) + 1, "y": [0, 1, 0]})
