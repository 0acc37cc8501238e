"""Everything that can be wrong with a dataset: what is said, and what is done."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyperkron.cleaning.data import ReadOptions, read, read_pair
from hyperkron.solution import HyperkronError
from hyperkron.validation import need

GOOD = "text,label\ngood one,a\nbad one,b\n"


def _file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- messages: problem -> fragments, and the rows that remain ----------------------------------------------

SAID = {
    "missing labels": (
        "text,label\na,x\nb,\nc,y\nd,nan\n",
        GOOD,
        ["2 rows without a label were left out: rows 1, 3"],
        [0, 2],
    ),
    "missing text": ("text,label\na,x\n ,x\nc,y\n", GOOD, ["1 row without a text was left out: rows 1"], [0, 2]),
    "same input": (
        "text,label\na b,x\na  b,x\nc,y\n",
        GOOD,
        ["1 row repeats the input of an earlier one and stays", "0 = 1"],
        [0, 1, 2],
    ),
    "conflict": ("text,label\na,x\na,y\nc,y\n", GOOD, ["1 input with conflicting labels", "0 'x' / 1 'y'"], [0, 1, 2]),
    "overlap": (
        "text,label\nt1,x\nb,x\nt2,y\nd,y\n",
        "text,label\nt1,x\nt2,y\n",
        ["2 training rows also in the trusted set (trusted.csv) were removed from training: rows 0, 2"],
        [1, 3],
    ),
    "class not trusted": (
        "text,label\na,x\nb,y\nc,z\nd,z\n",
        "text,label\np,x\nq,y\n",
        ["1 class absent from the trusted set: 'z' (2 training rows)", "No trusted row shows what they look like"],
        [0, 1, 2, 3],
    ),
    "class only trusted": (
        "text,label\na,x\nb,y\n",
        "text,label\np,x\nq,y\nr,new\n",
        ["unknown in training", "'new' (1 trusted row)"],
        [0, 1],
    ),
    "look-alikes": (
        "text,label\na,Spam\nb,ham\n",
        "text,label\np,spam\nq,ham\nr,Spam\n",
        ["'Spam', 'spam' differ only in how they are written", "'spam' (1 trusted row)"],
        [0, 1],
    ),
    "blank lines": ("text,label\n\na,x\n\r\nb,y\n\n", GOOD, [], [0, 1]),
}


@pytest.mark.parametrize("problem", SAID)
def test_said(tmp_path: Path, problem: str) -> None:
    content, trusted, fragments, rows = SAID[problem]
    if trusted == GOOD:
        trusted = "text,label\ngood one,x\nbad one,y\n"
    train, _ = read_pair(_file(tmp_path, "train.csv", content), _file(tmp_path, "trusted.csv", trusted))
    said = "\n".join(train.messages)
    assert all(fragment in said for fragment in fragments), said
    assert fragments or not said
    assert train.rows.tolist() == rows


def test_overlap_can_be_kept() -> None:
    train, trusted = {"x": ["a", "b"], "y": [0, 1]}, {"x": ["a", "c"], "y": [0, 1]}
    found, _ = read_pair(train, trusted, options=ReadOptions(keep_overlap=True))
    assert len(found) == 2 and "kept as keep_overlap=True asks: rows 0" in found.messages[0]
    with pytest.raises(HyperkronError, match="every row of train is also in the trusted set"):
        read_pair(train, train)


def test_overlap_of_tables_and_images() -> None:
    """Numbers are compared as numbers, whatever their text; a gap equals a gap; −0 equals 0."""
    table = {"a": ["1.0", "2", "", "-0", "3"], "t": ["p", "q", "r", "s", "p"], "label": [0, 1, 0, 1, 0]}
    other = {"a": [1, None, 0.0, 2], "t": ["p", "r", "s", "other"], "label": [0, 1, 0, 1]}
    train, _ = read_pair(table, other, features=["a", "t"])
    assert train.rows.tolist() == [1, 4]
    pictures = np.arange(24, dtype=np.uint8).reshape(3, 1, 2, 4)
    train, _ = read_pair({"x": pictures, "y": [0, 1, 0]}, {"x": pictures[[2, 2]], "y": [0, 1]})
    assert train.rows.tolist() == [0, 1]


def test_missing_values_of_tables() -> None:
    train, _ = read_pair(
        {"a": [1, None, 3, None], "t": ["p", "", "q", ""], "label": [0, 1, 1, 0]}, {"a": [5], "t": ["p"], "label": [0]}
    )
    said = "\n".join(train.messages)
    assert "2 rows without a feature were left out: rows 1, 3" in said
    train, _ = read_pair(
        {"a": [1, None, 3, 4], "t": ["p", "z", "q", ""], "label": [0, 1, 0, 1]}, {"a": [5], "t": ["p"], "label": [0]}
    )
    assert any("missing values in 2 columns: 'a' (1), 't' (1)" in message for message in train.messages)


def test_unreadable_images_are_left_out(tmp_path: Path) -> None:
    for i in range(3):
        Image.effect_noise((40, 40), 50).save(tmp_path / f"{i}.png")
    _file(tmp_path, "torn.png", (tmp_path / "0.png").read_bytes()[:600])
    _file(tmp_path, "text.png", "no picture")
    lines = ["image,label", "0.png,x", "torn.png,x", "gone.png,y", "1.png,y", "text.png,x", ",x"]
    found = read(_file(tmp_path, "a.csv", "\n".join(lines)), image="image")
    assert found.rows.tolist() == [0, 3]
    (said,) = (message for message in found.messages if "cannot be read" in message)
    assert "4 images" in said and "'gone.png' (there is no such file)" in said and "'torn.png'" in said
    with pytest.raises(HyperkronError, match="none of the 2 images can be read"):
        read(_file(tmp_path, "b.csv", "image,label\ntext.png,x\ngone.png,y\n"))


# --- errors: problem -> fragments --------------------------------------------------------------------------

REFUSED: dict[str, tuple[str | bytes, dict[str, Any], list[str]]] = {
    "empty file": ("", {}, ["train.csv", "is empty"]),
    "only a header": ("text,label\n", {}, ["is empty", "no rows"]),
    "no header": ("1,2\n3,4\n", {}, ["has no header", "1, 2"]),
    "ragged": (
        'text,label\na,x\nb\nc,y,z\n"d\ne",x\n',
        {},
        ["2 columns", "2 rows", "line 3 has 1, line 4 has 3", "quotes"],
    ),
    "open quote": ('text,label\n"a,x\nb,y\n', {}, ["is not valid CSV", "quote"]),
    "wrong encoding": (
        "text,label\nok,x\ncafé,y\n".encode("latin-1"),
        {},
        ["charset='utf-8'", "line 3", "0xe9", "latin-1"],
    ),
    "utf-16 without a mark": ("text,label\na,x\n".encode("utf-16-le"), {}, ["zero byte in line 1", "charset='utf-8'"]),
    "binary": (b"text,label\n\0\1,x\n", {}, ["zero byte in line 2"]),
    "column not found": (GOOD, {"label": "lable"}, ["label='lable'", "Did you mean 'label'?", "'text', 'label'"]),
    "text not found": (GOOD, {"text": "Text"}, ["text='Text'", "Did you mean 'text'?"]),
    "feature not found": (GOOD, {"features": ["txt"]}, ["features[0]='txt'", "Did you mean 'text'?"]),
    "no label column": ("text,sort\na,x\nb,y\n", {}, ["label=...", "'text', 'sort'"]),
    "two text columns": (
        "first,second,label\none two three,four five six,x\nseven eight nine,ten eleven twelve,y\n",
        {},
        ["several columns of text ('first', 'second')", "text=...", "Columns: 'first', 'second', 'label'"],
    ),
    "label twice": ("text,label,Label\na,x,x\nb,y,y\n", {}, ["'label', 'Label'", "say which"]),
    "column twice": ("text,text,label\na,b,x\n", {}, ["more than one column 'text'"]),
    "single class": ("text,label\na,x\nb,x\n", {}, ["single class, 'x'"]),
    "no class list": (
        "text,label\n" + "".join(f"t{i},{i / 7}\n" for i in range(30)),
        {},
        ["32 classes in", "not a column of labels"],
    ),
    "all labels missing": ("text,label\na,\nb,\n", {}, ["no usable row left", "2 rows without a label"]),
    "nothing to learn from": ("label,id\nx,1\ny,2\n", {}, ["no column beside the label"]),
    "contradiction": (GOOD, {"text": "text", "image": "text"}, ["text='text' and image='text'", "contradict"]),
    "label is input": (GOOD, {"text": "label", "label": "label"}, ["label='label'", "cannot be an input"]),
    "features is a name": (GOOD, {"features": "text"}, ["must be a list", "['text']"]),
    "no features": (GOOD, {"features": []}, ["names no column"]),
    "unknown charset": (GOOD, {"options": ReadOptions(charset="klingon")}, ["charset='klingon'", "is not an encoding"]),
    "no such flag": (GOOD, {"trusted_column": "ok"}, ["trusted_column='ok'", "Columns"]),
    "strange flags": ("text,label,ok\na,x,maybe\nb,y,1\n", {"trusted_column": "ok"}, ["true/false", "'maybe'"]),
    "no flag set": ("text,label,ok\na,x,0\nb,y,0\n", {"trusted_column": "ok"}, ["flags none of the 2 rows"]),
    "all flags set": ("text,label,ok\na,x,1\nb,y,1\n", {"trusted_column": "ok"}, ["flags every one of the 2 rows"]),
    "no trusted rows": (GOOD, {"trusted": None}, ["trusted=...", "trusted_column=..."]),
    "two kinds of trust": (GOOD + "", {"trusted": "here", "trusted_column": "text"}, ["both given"]),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_refused(tmp_path: Path, problem: str) -> None:
    content, arguments, fragments = REFUSED[problem]
    train = _file(tmp_path, "train.csv", content)
    other = {"x": ["other", "another"], "y": ["x", "x" if problem == "single class" else "y"]}
    trusted = None if "trusted_column" in arguments else {"text": other["x"], "label": other["y"]}
    with pytest.raises(HyperkronError) as error:
        read_pair(train, **{"trusted": trusted, **arguments})
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        ("a.jsonl", '{"text": "a", "label": 1}\n[1]\n', ["line 2", "not a JSON object"]),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', ["line 2", "is not JSON"]),
        ("a.jsonl", "\n\n", ["is empty"]),
        ("a.jsonl", "[" * 100_000, ["line 1", "is not JSON"]),
        ("a.jsonl", '{"text": ["a"], "label": 1}\n{"text": "b", "label": 2}\n', ["text='text'", "holds lists"]),
        ("a.jsonl", '{"text": "a", "label": [1]}\n{"text": "b", "label": 2}\n', ["label='label'", "holds a list"]),
        ("a.csv", "text,label\na,1\nb\nc,2\n", ["but 1 row has another number of fields: line 3 has 1"]),
        ("a.csv", "text,label\na\nb\nc,2\n", ["but 2 rows have another number of fields: line 2 has 1, line 3"]),
        (
            "a.csv",
            "Export of 2021\ntext,label\na,1\nb,2\n",
            ["has 1 column but 3 rows", "remove lines before the header"],
        ),
        ("a.csv", "text,label\na,1,\nb,2,\n", ["line 2 has 3", "'text', 'label'", "or name all columns"]),
        ("a.json", '{"a": 1}', ["is not a list of JSON objects", "orient='records'", "WRENCH"]),
        ("a.parquet", "PAR1 no", ["is not a readable Parquet"]),
        ("a.npz", "PK no", ["is not a readable .npz"]),
        ("a.csv.gz", gzip.compress(GOOD.encode(), mtime=0)[:-12], ["cannot be read"]),
        ("a.pkl", "x", ["may be a pickle", "np.savez"]),
        ("a.npy", "x", ["one array without labels", "or x alone for new rows"]),
        ("a.docx", "x", ["suffix", "Known: .csv"]),
        ("a.csv.zip", "PK", ["suffix", "unpack it"]),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: str | bytes, fragments: list[str]) -> None:
    with pytest.raises(HyperkronError) as error:
        read(_file(tmp_path, name, content))
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)


@pytest.mark.parametrize(
    ("arrays", "fragment"),
    [
        ({"x": np.zeros((3, 2)), "y": [0, 1]}, "x has 3 rows but y has 2"),
        ({"x": np.zeros((0, 2)), "y": []}, "is empty"),
        ({"x": np.zeros((2, 2)), "y": np.zeros((2, 2, 2))}, "y has shape"),
        ({"x": np.zeros((3, 2)), "y": np.eye(3)}, r"one-hot labels have; pass y.argmax\(1\)"),
        ({"x": np.zeros((2, 3, 4, 5, 6)), "y": [0, 1]}, "images are"),
        ({"x": np.zeros((2, 7, 4, 5)), "y": [0, 1]}, "1 or 3 channels"),
        ({"x": np.full((2, 4, 4), -0.5), "y": [0, 1]}, "Undo the standardisation"),
        ({"x": np.full((2, 4, 4), np.nan), "y": [0, 1]}, "missing or infinite pixels"),
        ({"x": np.zeros((2, 3)), "y": [0, 5], "classes": ["a", "b"]}, "y holds 5, but there are 2 classes"),
        ({"x": np.zeros(2, complex), "y": [0, 1]}, "it must hold numbers"),
    ],
)
def test_broken_arrays(arrays: dict[str, Any], fragment: str) -> None:
    with pytest.raises(HyperkronError, match=fragment):
        read(arrays)


def test_paths_that_do_not_exist(tmp_path: Path) -> None:
    path = _file(tmp_path, "train.csv", GOOD)
    with pytest.raises(HyperkronError, match=r"train='.*trian\.csv' does not exist\. Did you mean 'train\.csv'\?"):
        read_pair(tmp_path / "trian.csv", path)
    with pytest.raises(HyperkronError, match=r"trusted='.*no.b\.csv' does not exist\. Its folder"):
        read_pair(path, tmp_path / "no" / "b.csv")
    with pytest.raises(HyperkronError, match=r"does not exist|cannot be opened"):
        read("a\0b.csv")
    with pytest.raises(HyperkronError, match=r"names the part 'test', but train\.csv has no parts"):
        read(f"{path}:test")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(HyperkronError, match="in no known form: it holds nothing"):
        read(empty)
    (empty / "class").mkdir()
    with pytest.raises(HyperkronError, match="is empty: no image in it"):
        read(empty)


def test_train_and_trusted_that_do_not_fit(tmp_path: Path) -> None:
    texts = {"x": ["a", "b"], "y": [0, 1]}
    with pytest.raises(HyperkronError, match="trusted holds table inputs but train holds text inputs"):
        read_pair(texts, {"x": np.eye(2), "y": [0, 1]})
    with pytest.raises(HyperkronError, match="share no label: '0', '1' against 'no', 'yes'"):
        read_pair(texts, {"x": ["c", "d"], "y": ["yes", "no"]})
    with pytest.raises(HyperkronError, match="train has 2 columns but trusted has 3"):
        read_pair({"x": np.eye(2), "y": [0, 1]}, {"x": np.eye(3), "y": [0, 1, 0]})
    with pytest.raises(HyperkronError, match=r"of shape .* but train of shape"):
        read_pair({"x": np.zeros((2, 4, 4)), "y": [0, 1]}, {"x": np.ones((2, 5, 5)), "y": [0, 1]})
    with pytest.raises(HyperkronError, match="'town' is not a column of trusted"):
        read_pair({"age": [1, 2], "town": ["a", "b"], "label": [0, 1]}, {"age": [3], "label": [1]})
    with pytest.raises(HyperkronError, match="has no columns; give a table that has them, or leave it out"):
        read(texts, text="x")


def test_options_are_checked() -> None:
    for wrong in ({"max_bytes": 0}, {"image_size": 2.5}, {"max_pixels": True}, {"abstain": "guess"}):
        with pytest.raises(HyperkronError, match=f"{next(iter(wrong))}="):
            ReadOptions(**wrong)  # type: ignore[arg-type]


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(HyperkronError, match=r"pip install 'hyperkron\[data\]'"):
        need("pyarrow_that_is_not_there")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.csv", GOOD)
    path.chmod(0)
    with pytest.raises(HyperkronError, match="cannot be read"):
        read(path)


def test_a_class_that_reads_like_no_label_is_named_where_it_was_one_of_two() -> None:
    with pytest.raises(HyperkronError, match=r"single class, 'dog'.*holds 'NA', taken as no label; rename it"):
        read({"text": ["a b", "c d", "e f"], "label": ["NA", "dog", "dog"]})
