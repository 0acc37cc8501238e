"""Cells that a spreadsheet would run are told of, and escaped or refused where that is asked for."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import pytest
from PIL import Image

from hyperkron.cleaning.data import export_rows
from hyperkron.cleaning.data.kept import is_formula
from hyperkron.solution import HyperkronError, HyperkronWarning


@pytest.mark.parametrize(
    "cell", ["=1+1", "=cmd|' /C calc'!A0", "+1+1", "-1+1", "-2+3|x", "@SUM(A1)", "\tx", "\r=1", "- item", "+", "-", "="]
)
def test_formulas(cell: str) -> None:
    assert is_formula(cell)


@pytest.mark.parametrize(
    "cell",
    [
        "-5",
        "+3.2",
        "-1e-3",
        "-.5",
        "+1,5",
        "-1,000.5",
        "-7 %",
        "-1.250,75 €",
        "-$3",
        "-inf",
        "a=b",
        "",
        "'=1",
        "5",
        " x",
        "a@b.c",
    ],
)
def test_numbers_and_texts(cell: str) -> None:
    assert not is_formula(cell)


TABLE = 'id,text,label\n1,"=1+1, or so",x\n2,-5,x\n3,plain,y\n4,@me,y\n'


def test_they_are_kept_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE)
    with pytest.warns(HyperkronWarning, match=r"a\.csv has 2 cells .* such as '=1\+1, or so' in row 0, column 'text'"):
        export_rows(tmp_path / "a.csv", [0, 1, 2, 3], tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text() == TABLE


def test_only_rows_that_are_written_count(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_rows(tmp_path / "a.csv", [1, 2], tmp_path / "b.csv", formulas="refuse")


def test_they_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE.replace("id,", "=id,"))
    with pytest.warns(
        HyperkronWarning, match="3 cells .* in the header, column '=id'; an apostrophe was put before each"
    ):
        export_rows(tmp_path / "a.csv", [0, 1, 2, 3], tmp_path / "b.csv", formulas="escape")
    with (tmp_path / "b.csv").open(newline="") as file:
        found = list(csv.reader(file))
    assert found[0] == ["'=id", "text", "label"]
    assert [line[1] for line in found[1:]] == ["'=1+1, or so", "-5", "plain", "'@me"]


def test_a_suggested_label_counts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,x\nb,=y\n")
    with pytest.raises(HyperkronError, match="'=y' in row 0, column 'label'; pass formulas='escape'"):
        export_rows(tmp_path / "a.csv", [0], tmp_path / "b.csv", ["=y"], formulas="refuse")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_the_list_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "photos" / "=cat").mkdir(parents=True)
    Image.new("L", (2, 2)).save(tmp_path / "photos" / "=cat" / "a.png")
    with pytest.warns(HyperkronWarning, match="2 cells"):
        export_rows(tmp_path / "photos", [0], tmp_path / "b.csv", formulas="escape")
    assert (tmp_path / "b.csv").read_text() == "image,label\n'=cat/a.png,'=cat\n"


def test_other_formats_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "=1+1", "label": "x"}\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_rows(tmp_path / "a.jsonl", [0], tmp_path / "b.jsonl", formulas="refuse")
    assert (tmp_path / "b.jsonl").read_text() == (tmp_path / "a.jsonl").read_text()


def test_an_unknown_choice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE)
    with pytest.raises(HyperkronError, match="formulas='drop' is unknown; choose keep, escape or refuse"):
        export_rows(tmp_path / "a.csv", [0], tmp_path / "b.csv", formulas="drop")  # type: ignore[arg-type]
