"""The source again, with only the rows to keep."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hyperkron.cleaning.data import ReadOptions, export_rows, read
from hyperkron.solution import HyperkronError

HEAD = b"id, text ,label,amount\r\n"
LINES = [
    b'007,"a ""quoted"", text",x,1.50\r\n',
    b'1e5,"two\r\nlines",y,\r\n',
    b"  3 ,'plain',\"x\",NaN\r\n",
    b"4,last,y,0",
]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_csv_rows_are_the_very_bytes(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(mark + HEAD + b"\r\n" + b"".join(LINES))
    export_rows(tmp_path / "a.csv", [2, 0], tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_bytes() == mark + HEAD + LINES[0] + LINES[2]
    export_rows(tmp_path / "a.csv", [3, 1], tmp_path / "c.csv")
    assert (tmp_path / "c.csv").read_bytes() == mark + HEAD + LINES[1] + LINES[3] + b"\r\n"


def test_csv_new_labels_touch_their_rows_only(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(HEAD + b"".join(LINES))
    export_rows(tmp_path / "a.csv", [2, 1, 0], tmp_path / "b.csv", ["x", 'z,"', None])
    changed = b'1e5,"two\r\nlines","z,""",\r\n'
    assert (tmp_path / "b.csv").read_bytes() == HEAD + LINES[0] + changed + LINES[2]


@pytest.mark.parametrize("first", [b"sep=;\r\n", b'"sep=;"\n', b"\xef\xbb\xbfSEP=;\r\n"])
def test_csv_with_the_separator_in_its_first_line(tmp_path: Path, first: bytes) -> None:
    """Excel writes and reads such files; the header alone would be split at its commas."""
    (tmp_path / "a.csv").write_bytes(first + b"a,b,c;label\n1,5;x\n2,5;y\n")
    found = read(tmp_path / "a.csv", label="label")
    assert found.encoding is not None and [column.name for column in found.encoding.columns] == ["a,b,c"]
    export_rows(tmp_path / "a.csv", [1], tmp_path / "b.csv", ["x"])
    assert (tmp_path / "b.csv").read_bytes() == first + b"a,b,c;label\n2,5;x\n"
    (tmp_path / "a.csv").write_bytes(first + b"a;label\n1;x;2\n")
    with pytest.raises(HyperkronError, match="line 3 has 3"):
        read(tmp_path / "a.csv", label="label")


def test_csv_other_delimiter_charset_and_compression(tmp_path: Path) -> None:
    options = ReadOptions(charset="latin-1")
    (tmp_path / "a.csv").write_bytes("text;label\ncafé;1\nthé;2\n".encode("latin-1"))
    export_rows(tmp_path / "a.csv", [0, 1], tmp_path / "b.csv.gz", [None, "1"], options=options)
    assert gzip.decompress((tmp_path / "b.csv.gz").read_bytes()) == "text;label\ncafé;1\nthé;1\n".encode("latin-1")
    export_rows(tmp_path / "b.csv.gz", [0], tmp_path / "c.csv", options=options)
    assert read(tmp_path / "b.csv.gz", options=options, label="text", text="label").inputs == ["1", "1"]
    assert (tmp_path / "c.csv").read_bytes() == "text;label\ncafé;1\n".encode("latin-1")


def test_rows_of_a_reader_find_their_way_back(tmp_path: Path) -> None:
    """What the reader left out does not shift the rows."""
    (tmp_path / "a.csv").write_text("text,label\na,x\n,x\n\nc,\nd,y\n")
    found = read(tmp_path / "a.csv")
    export_rows(tmp_path / "a.csv", found.rows, tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text() == "text,label\na,x\nd,y\n"


def test_jsonl(tmp_path: Path) -> None:
    lines = [
        '{"text":"é","label" : 1, "n": 1.50}',
        '{"text": "b", "label": 2, "deep": {"x": [1]}}',
        '{"label": 1, "text": ""}',
    ]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines), "utf-8")
    export_rows(tmp_path / "a.jsonl", [2, 1, 0], tmp_path / "b.jsonl", ["1", "3", None])
    changed = '{"text": "b", "label": 3, "deep": {"x": [1]}}'
    assert (tmp_path / "b.jsonl").read_text("utf-8") == f"{lines[0]}\n{changed}\n{lines[2]}\n"
    (tmp_path / "a.json").write_text(json.dumps([json.loads(line) for line in lines]))
    export_rows(tmp_path / "a.json", [1], tmp_path / "b.json", ["name"])
    assert json.loads((tmp_path / "b.json").read_text()) == [{"text": "b", "label": "name", "deep": {"x": [1]}}]


@pytest.mark.parametrize(
    ("column", "new", "expected"),
    [
        (pa.array(["x", None, "y"]), "z", ["x", "z"]),
        (pa.array(["x", "x", "y"]).dictionary_encode(), "z", ["x", "z"]),
        (pa.array([1, 2, 3], pa.int8()), "7", [1, 7]),
    ],
)
def test_parquet(tmp_path: Path, column: Any, new: str, expected: list[Any]) -> None:
    text = pa.field("text", pa.large_string(), metadata={"note": "kept"})
    schema = pa.schema(
        [text, pa.field("label", column.type), pa.field("when", pa.timestamp("ms"))], metadata={"k": "v"}
    )
    table = pa.table(
        [pa.array(["a", "b", "c"], pa.large_string()), column, pa.array([1, None, 3], pa.timestamp("ms"))], schema
    )
    pq.write_table(table, tmp_path / "a.parquet")
    export_rows(tmp_path / "a.parquet", [0, 2], tmp_path / "b.parquet")
    again = pq.read_table(tmp_path / "b.parquet")
    assert again.equals(table.take([0, 2])) and again.schema.equals(schema, check_metadata=True)
    export_rows(tmp_path / "a.parquet", [0, 1], tmp_path / "c.parquet", [None, new])
    again = pq.read_table(tmp_path / "c.parquet")
    assert again.column("label").to_pylist() == expected and again.schema.equals(schema, check_metadata=True)


def test_parquet_label_of_another_type(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2], "label": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(HyperkronError, match="cannot be written into the column 'label'"):
        export_rows(tmp_path / "a.parquet", [0], tmp_path / "b.parquet", ["cat"])
    assert not (tmp_path / "b.parquet").exists()


def test_npz(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float16).reshape(3, 2)
    np.savez(
        tmp_path / "a.npz",
        x_train=x,
        y_train=np.array([0, 1, 0], np.uint8),
        ids_train=[7, 8, 9],
        x_test=x,
        y_test=[1, 1, 1],
    )
    export_rows(tmp_path / "a.npz", [0, 2], tmp_path / "b.npz", ["1", None])
    found = np.load(tmp_path / "b.npz")
    assert found["x_train"].dtype == np.float16 and found["x_train"].tolist() == x[[0, 2]].tolist()
    assert found["y_train"].dtype == np.uint8 and found["y_train"].tolist() == [1, 0]
    assert found["ids_train"].tolist() == [7, 9] and len(found["x_test"]) == 3
    np.savez(tmp_path / "c.npz", x=x, y=[0, 1, 0], classes=["no", "yes"])
    export_rows(tmp_path / "c.npz", [0, 1], tmp_path / "d.npz", ["yes", None])
    assert np.load(tmp_path / "d.npz")["y"].tolist() == [1, 1]
    with pytest.raises(HyperkronError, match="labels holds 'maybe'; the classes are no, yes"):
        export_rows(tmp_path / "c.npz", [0], tmp_path / "e.npz", ["maybe"])
    with pytest.raises(HyperkronError, match="cannot be written into 'y_train'"):
        export_rows(tmp_path / "a.npz", [0], tmp_path / "e.npz", ["maybe"])


def test_image_folder(tmp_path: Path) -> None:
    for i, name in enumerate(["cat", "dog", "cat"]):
        (tmp_path / "a" / name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), i).save(tmp_path / "a" / name / f"{i}.png")
    (tmp_path / "a" / "cat" / "1.png").write_text("broken")
    rows = read(tmp_path / "a").rows
    assert rows.tolist() == [0, 2, 3]  # cat/0, cat/2, dog/1; cat/1 is broken
    export_rows(tmp_path / "a", rows[1:], tmp_path / "a" / "list.csv", ["dog", None])
    assert (tmp_path / "a" / "list.csv").read_text() == "image,label\ncat/2.png,dog\ndog/1.png,dog\n"
    export_rows(tmp_path / "a", rows[1:], tmp_path / "b.npz", ["dog", "cat"])
    again = read(tmp_path / "b.npz")
    assert again.inputs[:, 0, 0, 0].tolist() == [2, 1] and [again.classes[k] for k in again.labels] == ["dog", "cat"]
    with pytest.raises(HyperkronError, match="rows 1 that a does not have, or whose image is broken"):
        export_rows(tmp_path / "a", [1], tmp_path / "c.npz")


def test_idx_becomes_npz(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 2, 1, 2) + bytes([1, 2, 3, 4]))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 2) + bytes([5, 6]))
    export_rows(tmp_path, [1], tmp_path / "b.npz")
    found = np.load(tmp_path / "b.npz")
    assert found["x"].tolist() == [[[[3, 4]]]] and found["y"].tolist() == ["6"]


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_wrench(tmp_path: Path, form: str) -> None:
    rows = [{"label": i % 2, "weak_labels": [1 - i % 2], "data": {"text": f"t{i}"}} for i in range(3)]
    (tmp_path / "label.json").write_text('{"0": "A", "1": "B"}')
    if form == "json":
        (tmp_path / "train.json").write_text(json.dumps(dict(enumerate(rows))))
    else:
        lines = [json.dumps({"text": row["data"]["text"], **row}) + "\n" for row in rows]  # type: ignore[index]
        (tmp_path / "train.jsonl").write_text("".join(lines))
    out = tmp_path / f"out.{form}"
    export_rows(tmp_path, [0, 2], out, ["B", None])
    found = list(json.loads(out.read_text()).values()) if form == "json" else [json.loads(x) for x in out.open()]
    assert [(row["label"], row["data"]) for row in found] == [(1, {"text": "t0"}), (0, {"text": "t2"})]
    with pytest.raises(HyperkronError, match="the classes are A, B"):
        export_rows(tmp_path, [0], tmp_path / f"more.{form}", ["C"])


# --- refusals ----------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    source, out = tmp_path / "a.csv", tmp_path / "b.csv"
    source.write_text("text,label\na,x\nb,y\n")
    out.write_text("mine")
    with pytest.raises(HyperkronError, match="exists already; choose another name, or pass overwrite=True"):
        export_rows(source, [0], out)
    assert out.read_text() == "mine"
    export_rows(source, [0], out, overwrite=True)
    assert out.read_text() == "text,label\na,x\n"
    with pytest.raises(HyperkronError, match="is the source itself"):
        export_rows(source, [0], source, overwrite=True)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(HyperkronError, match="is a folder"):
        export_rows(source, [0], tmp_path / "folder.csv", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv", "folder.csv"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,x\n")
    (tmp_path / "b.csv").write_text("mine")
    with pytest.raises(HyperkronError, match="rows 5"):
        export_rows(tmp_path / "a.csv", [5], tmp_path / "b.csv", overwrite=True)
    assert (tmp_path / "b.csv").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": [0, 2]}, "keep names rows 2, but a.csv has the rows 0 to 1"),
        ({"keep": [-1]}, "keep names rows -1"),
        ({"keep": [0, 0]}, "more than once"),
        ({"keep": [True, False]}, "flatnonzero"),
        ({"keep": [0.5]}, "list of row numbers"),
        ({"keep": [0], "labels": []}, "labels has 0 entries but keep has 1"),
        ({"keep": [0], "labels": ["z"], "label": "lable"}, "Did you mean 'label'"),
        ({"keep": [0], "out": "b.parquet"}, "are written as .csv"),
        ({"keep": [0], "source": "none.csv"}, "source=.* does not exist"),
    ],
)
def test_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,x\nb,y\n")
    source, out = (tmp_path / arguments.pop(name, other) for name, other in (("source", "a.csv"), ("out", "b.csv")))
    with pytest.raises(HyperkronError, match=message):
        export_rows(source, out=out, **arguments)
    assert not out.exists()


def test_rows_and_labels_as_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,x\nb,y\n")
    out = export_rows(tmp_path / "a.csv", np.array([0, 1]), tmp_path / "b.csv", np.array(["y", None]))
    assert out.read_text() == "text,label\na,y\nb,y\n"


def test_no_rows_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,x\n")
    assert export_rows(tmp_path / "a.csv", [], tmp_path / "b.csv").read_text() == "text,label\n"
