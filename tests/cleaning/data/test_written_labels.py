"""Exports with new labels are read again with the same classes, whatever form the labels and the rows have."""

from __future__ import annotations

import csv
import io
import json
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hyperkron.cleaning.data import ReadOptions, export_rows, read
from hyperkron.cleaning.data.kept import csv_line
from hyperkron.solution import HyperkronError

MIXED = [True, "maybe", False, 1.5, 2, None]
"""Labels of several types, as one list of JSON objects may have them."""


def again(file: Path) -> list[str]:
    """The class of every row of a file."""
    found = read(file)
    return [found.classes[k] for k in found.labels.tolist()]


@pytest.mark.parametrize("new", ["1", "7"])
def test_labels_of_a_csv_with_a_point_stay_those_of_whole_numbers(tmp_path: Path, new: str) -> None:
    """As pandas writes whole numbers with gaps; "1" beside "3.0" would be other classes than 1 and 3."""
    (tmp_path / "a.csv").write_text("x,label\n1,3.0\n2,1.0\n3,3.00\n4,\n")
    export_rows(tmp_path / "a.csv", [0, 1, 2], tmp_path / "b.csv", [new, None, None])
    assert (tmp_path / "b.csv").read_text() == f"x,label\n1,{new}.0\n2,1.0\n3,3.00\n"
    assert again(tmp_path / "b.csv") == [new, "1", "3"]


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_labels_of_json_have_the_type_of_their_class(tmp_path: Path, form: str) -> None:
    rows = [{"text": f"some words {i}", "label": label} for i, label in enumerate(MIXED)]
    text = "".join(json.dumps(row) + "\n" for row in rows) if form == "jsonl" else json.dumps(rows)
    (tmp_path / f"a.{form}").write_text(text)
    out = tmp_path / f"b.{form}"
    new = ["maybe", "true", "1.5", "2", "false", "3"]
    export_rows(tmp_path / f"a.{form}", range(6), out, new)
    content = out.read_text()
    found = [json.loads(line) for line in content.splitlines()] if form == "jsonl" else json.loads(content)
    assert [row["label"] for row in found] == ["maybe", True, 1.5, 2, False, 3]
    assert [type(row["label"]) for row in found] == [str, bool, float, int, bool, int]
    assert again(out) == new


def test_gaps_of_a_parquet_column_get_labels_of_its_type(tmp_path: Path) -> None:
    """A column of labels beside votes is filled in with their majority."""
    pq.write_table(pa.table({"x": [1, 2, 3], "label": pa.array([4, None, 5])}), tmp_path / "a.parquet")
    export_rows(tmp_path / "a.parquet", [0, 1, 2], tmp_path / "b.parquet", ["5", "4", None])
    assert pq.read_table(tmp_path / "b.parquet").column("label").to_pylist() == [5, 4, 5]


def test_labels_of_an_npz_keep_their_type(tmp_path: Path) -> None:
    for y, new in (([True, False, True], ["false", None, None]), ([1.0, 2.0, 1.0], ["2", None, None])):
        np.savez(tmp_path / "a.npz", x=np.eye(3, dtype=np.float32), y=np.array(y))
        out = export_rows(tmp_path / "a.npz", [0, 1, 2], tmp_path / "b.npz", new, overwrite=True)
        with np.load(out) as found:
            assert found["y"].tolist() == [y[1], y[1], y[2]]


def test_lines_of_json_keep_their_ends(tmp_path: Path) -> None:
    lines = [b'{"text": "a b", "label": "x"}\r\n', b'{"text": "c d", "label": "y"}\r\n', b'{"text": "e", "label": "x"}']
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    export_rows(tmp_path / "a.jsonl", [0, 1, 2], tmp_path / "b.jsonl", [None, "x", None])
    assert (tmp_path / "b.jsonl").read_bytes() == lines[0] + lines[1].replace(b'"y"', b'"x"') + lines[2] + b"\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_csv_keep_their_ends(tmp_path: Path, end: str) -> None:
    (tmp_path / "a.csv").write_bytes(end.join(["text,label", "one,x", "two,y"]).encode())
    export_rows(tmp_path / "a.csv", [0, 1], tmp_path / "b.csv", ["y", None])
    assert (tmp_path / "b.csv").read_bytes() == end.join(["text,label", "one,y", "two,y", ""]).encode()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_cell_of_a_line_is_read_as_it_was_written(end: str) -> None:
    """Also with a lone return, which the csv module puts in quotes only beside one in the end of the line."""
    cells = ["a\rb", "c\nd", "e\r\nf", 'say "hi"', "x, y", "", " 007 ", "\u2028"]
    line = csv_line(cells, end=end)
    assert line.endswith(end) and list(csv.reader(io.StringIO(line, newline=""), strict=True)) == [cells]


def test_a_relabelled_row_with_a_lone_return_stays_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text,label\n"one\rtwo",x\nthree,y\nfour,x\n')
    export_rows(tmp_path / "a.csv", [0, 1, 2], tmp_path / "b.csv", ["y", None, None])
    assert (tmp_path / "b.csv").read_bytes() == b'text,label\n"one\rtwo",y\nthree,y\nfour,x\n'


@pytest.mark.parametrize(("name", "row"), [("a.csv", "text,label\ncafé,x\n"), ("a.jsonl", '{"text": "é", "label": 1}')])
def test_a_label_that_the_encoding_lacks_is_refused(tmp_path: Path, name: str, row: str) -> None:
    (tmp_path / name).write_bytes(row.encode("cp1252"))
    with pytest.raises(
        HyperkronError, match=f"'日本' of a new label cannot be written in cp1252, the .* of {name}; save"
    ):
        export_rows(tmp_path / name, [0], tmp_path / f"b{name}", ["日本"], options=ReadOptions(charset="cp1252"))


def test_only_empty_cells_of_a_sheet_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts such as None and NA are classes and values in every format, and are exported as they are."""
    import pandas

    def sheet(path: Path, **asked: Any) -> Any:
        text = 'x,y,label\n1,NA,None\n2,,"b"\n3,n/a,None\n'
        more = {name: asked[name] for name in asked.keys() & {"dtype", "keep_default_na", "na_values"}}
        return pandas.read_csv(io.StringIO(text), **more)

    with zipfile.ZipFile(tmp_path / "book.xlsx", "w") as archive:
        archive.writestr("xl/workbook.xml", "")
    monkeypatch.setitem(sys.modules, "openpyxl", types.ModuleType("openpyxl"))  # which the tests do not need
    monkeypatch.setattr(pandas, "read_excel", sheet)
    assert read(tmp_path / "book.xlsx", features=["x"]).classes == ("None", "b")
    out = export_rows(tmp_path / "book.xlsx", [0, 1, 2], tmp_path / "b.csv")
    assert out.read_text() == "x,y,label\n1,NA,None\n2,,b\n3,n/a,None\n"
