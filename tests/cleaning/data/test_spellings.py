"""Labels, cells and rows that are the same in two files though they are written differently, or look it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyperkron.cleaning.arguments import read_parts
from hyperkron.cleaning.data import export_rows, read, read_pair
from hyperkron.solution import HyperkronError

ONE, TWO = "caf\u00e9", "cafe\u0301"
"""The same word in the two forms of Unicode."""


def test_the_two_forms_of_an_accent_are_one_label_and_one_category() -> None:
    train = {"text": ["a b", "c d", "e f"], "label": [ONE, "bar", ONE]}
    for other in ({"text": ["g", "h"], "label": [TWO, "bar"]}, {"text": ["g", "h"], "label": ["bar", TWO]}):
        ours, theirs = read_pair(train, other, text="text")
        assert ours.classes == theirs.classes == ("bar", ONE)
        assert {ours.classes[k] for k in theirs.labels} == {"bar", ONE}
    table = {"town": [ONE, "bar"] * 2, "size": [1, 2, 3, 4], "label": [0, 1, 1, 0]}
    _, theirs = read_pair(table, {"town": [TWO, "bar"], "size": [5, 6], "label": [0, 1]}, label="label")
    np.testing.assert_array_equal(theirs.inputs, [[1, 0, 5], [0, 1, 6]])
    assert not theirs.messages


def test_the_two_forms_of_an_accent_are_one_folder_of_pictures(tmp_path: Path) -> None:
    for i, (part, name) in enumerate([("train", ONE), ("train", "bar"), ("trusted", TWO), ("trusted", "bar")]):
        (tmp_path / part / name).mkdir(parents=True)
        Image.fromarray(np.full((4, 4, 3), 9 * i, np.uint8)).save(tmp_path / part / name / "0.png")
    train, trusted = read_pair(tmp_path / "train", tmp_path / "trusted")
    assert train.classes == ("bar", ONE) and trusted.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ours", "theirs"), [("Spam", "spam"), ("1", "1.0"), ("1", "01"), ("a b", "a\u00a0b"), ("Strasse", "stra\u00dfe")]
)
def test_a_label_that_each_file_writes_in_its_own_way_is_refused(ours: str, theirs: str) -> None:
    """Else every row of the class would be called wrong."""
    train = {"text": ["a", "b", "c"], "label": [ours, "ham", ours]}
    said = f"the label {ours!r} of train is written {theirs!r} in trusted; use one spelling in both, or other"
    with pytest.raises(HyperkronError) as refused:
        read_pair(train, {"text": ["d", "e"], "label": [theirs, "ham"]}, text="text")
    assert said in str(refused.value)
    _, both = read_pair(train, {"text": ["d", "e", "f"], "label": [theirs, "ham", ours]}, text="text")
    assert set(both.classes) == {ours, theirs, "ham"}  # a file that has both means two classes, and is told
    told = " ".join(
        read_pair(train, {"text": ["d", "e", "f"], "label": [theirs, "ham", ours]}, text="text")[0].messages
    )
    assert "differ only in how they are written" in told


@pytest.mark.parametrize("ours", [("True", "False"), ("TRUE", "FALSE"), (True, False), (np.True_, np.False_)])
@pytest.mark.parametrize("theirs", [("true", "false"), ("True", "False"), (True, False)])
def test_true_and_false_are_those_of_the_training_rows_however_another_source_writes_them(
    ours: tuple[Any, Any], theirs: tuple[Any, Any]
) -> None:
    """pandas writes a column of booleans into a CSV file as True and False, and into JSON as true and false."""
    train, trusted = read_pair(
        {"text": ["a", "b", "c"], "label": [ours[0], ours[1], "unknown"]}, {"text": ["d", "e"], "label": [*theirs]}
    )
    names = {name.lower(): name for name in train.classes}
    assert set(names) == {"true", "false", "unknown"} and trusted.classes == train.classes
    assert [train.classes[k] for k in trusted.labels] == [names["true"], names["false"]]
    test = read({"text": ["f", "g"], "label": [theirs[1], theirs[0]]}, like=train)
    assert [train.classes[k] for k in test.labels] == [names["false"], names["true"]]


def test_true_in_a_third_spelling_is_refused_where_training_rows_have_two() -> None:
    train = {"text": ["a", "b", "c"], "label": ["true", "True", "false"]}
    with pytest.raises(HyperkronError, match="use one spelling in both"):
        read_pair(train, {"text": ["d", "e"], "label": ["TRUE", "false"]}, text="text")


def test_numbers_that_differ_are_different_labels() -> None:
    long = "900719925474099300"  # of more digits than a float has
    train = {"text": ["a", "b", "c"], "label": ["1", long, "x"]}
    for other in ("11", long[:-1] + "1"):
        read_pair(train, {"text": ["d", "e"], "label": ["x", other]}, text="text")


def test_a_label_that_looks_like_a_number_beyond_all_floats_is_a_name() -> None:
    code = "1e99999999999999999999"
    ours, theirs = read_pair({"text": ["a", "b"], "label": [code, "2"]}, {"text": ["c", "d"], "label": ["2", code]})
    assert ours.classes == theirs.classes and code in ours.classes


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.npz", "folder"])
def test_an_export_with_new_labels_has_one_form_of_an_accent(tmp_path: Path, name: str) -> None:
    """Else the rows whose label stays would be another class than those that got it."""
    path, out = tmp_path / name, tmp_path / ("out.csv" if name == "folder" else f"out-{name}")
    labels = [TWO, TWO, "bar", "bar"]
    if name == "a.csv":
        path.write_text("text,label\n" + "".join(f"t{i},{label}\n" for i, label in enumerate(labels)), "utf-8")
    elif name == "a.jsonl":
        rows = [json.dumps({"text": f"t{i}", "label": label}) for i, label in enumerate(labels)]
        path.write_text("\n".join(rows), "utf-8")
    elif name == "a.npz":
        np.savez(path, x=np.arange(8.0).reshape(4, 2), y=np.array(labels))
    for i, label in enumerate(labels if name == "folder" else ()):
        (path / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 9 * i, np.uint8)).save(path / label / f"{i}.png")
    before = read(path)
    assert before.classes == ("bar", ONE)
    given = [before.classes[k] for k in before.labels]
    row = given.index("bar")
    new = [ONE if i == row else None for i in range(4)]
    written = export_rows(path, before.rows, out, new, label="label" if name[-3:] in ("csv", "onl") else None)
    if name == "a.npz":
        found = np.load(written)["y"].tolist()
    elif name == "a.jsonl":
        found = [json.loads(line)["label"] for line in written.read_text("utf-8").splitlines()]
    else:
        found = [line.rsplit(",", 1)[1] for line in written.read_text("utf-8").splitlines()[1:]]
    assert found == [ONE if i == row else label for i, label in enumerate(given)]


def test_rows_of_the_test_set_that_a_model_has_seen_are_told() -> None:
    frame = {"a": [1.0, 2.0, 3.0, None], "t": ["p", "q", "p", "q"], "label": [0, 1, 0, 1]}
    trusted = {"a": [7.0, 8.0], "t": ["p", "q"], "label": [0, 1]}
    test = {"t": ["p", "q", "q", "p"], "a": [7, None, 2, 99], "label": [1, 1, 1, 0]}
    told = read_parts(frame, trusted, test, {"label": "label"})[2].messages
    assert "test: 2 rows with the input of a training row: rows 1, 2" in " ".join(told)
    assert "test: 1 row with the input of a trusted row: rows 0" in " ".join(told)
    texts = {"x": ["a  b", "c"], "y": [0, 1]}
    told = read_parts(texts, {"x": ["d", "e"], "y": [0, 1]}, {"x": ["a b", "f"], "y": [0, 1]}, {})[2].messages
    assert len(told) == 1 and "1 row with the input of a training row: rows 0" in told[0]
    assert not read_parts(texts, {"x": ["d", "e"], "y": [0, 1]}, {"x": ["g", "f"], "y": [0, 1]}, {})[2].messages


def test_prepared_rows_must_have_the_classes_and_the_encoding_of_the_training_rows() -> None:
    frame = {"a": [1.0, 2.0, 3.0], "t": ["p", "q", "p"], "label": ["x", "y", "z"]}
    train, trusted = read_pair(frame, {"a": [7.0, 8.0, 9.0], "t": ["p", "q", "p"], "label": ["x", "y", "z"]})
    test = {"a": [5.0, 6.0], "t": ["q", "p"], "label": ["y", "z"]}
    assert read_parts(train, trusted, read(test, like=train), {})[2].labels.tolist() == [1, 2]
    for other in (read(test), replace(read(test, like=train), classes=("z", "y", "x"))):
        with pytest.raises(HyperkronError, match=r"test must be Labelled rows with the classes and the encoding"):
            read_parts(train, trusted, other, {})
    with pytest.raises(HyperkronError, match=r"trusted must be Labelled rows with the classes and the encoding"):
        read_parts(train, replace(trusted, encoding=read(test).encoding), None, {})
    with pytest.raises(HyperkronError, match=r"label='label' holds a bytes; a label is a text or a number"):
        read({"text": ["a", "b"], "label": [b"x", b"y"]}, text="text")


def test_a_number_is_shown_as_it_stands_in_the_file() -> None:
    table = {"income": [2517.67, 1040.82, 0.1], "label": [0, 1, 0]}
    train, _ = read_pair(table, {"income": [1.0, 2.0], "label": [0, 1]}, features=["income"])
    assert train.encoding is not None
    assert [train.encoding.cells(row)["income"] for row in np.asarray(train.inputs)] == table["income"]
