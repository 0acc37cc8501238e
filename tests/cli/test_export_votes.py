"""`hyperkron export` of rows that have several labels each."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import run_folder
from hyperkron.cleaning.data import row_hashes
from hyperkron.cleaning.folder import HASHES
from hyperkron.cli import main
from hyperkron.cli.summary import summary

Captured = pytest.CaptureFixture[str]
RUN = Path("runs/mine")
GIVEN = ["cat", "dog", "cat"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_run(source: str, positions: list[int], **reading: Any) -> None:
    """A run with three rows, of which the last is a suspect."""
    RUN.mkdir(parents=True)
    hashes = row_hashes(source)
    run_folder.write_json(
        RUN / "config.json",
        {
            "source": {"train": source, "reading": reading},
            "rows": {"count": len(hashes), "sha256": hashes.sha256, "version": hashes.VERSION},
        },
    )
    (RUN / HASHES).write_bytes(hashes.each)
    result = {"format": 1, "data": {"classes": ["cat", "dog"]}, "sources": [{"name": "ann"}]}
    run_folder.write_json(RUN / "result.json", result)
    lines = [f"{row},{name},dog,{p},{1 - p},{str(p > 0.5).lower()}\n" for row, name, p in
             zip(positions, GIVEN, (0.1, 0.1, 0.9), strict=True)]  # fmt: skip
    (RUN / "rows.csv").write_text("row,given,suggested,error_probability,weight,suspect\n" + "".join(lines))


def test_the_share_of_suspects_is_that_of_the_rows_with_a_vote() -> None:
    run_folder.write_run_folder(RUN, rows=20)
    lines = (RUN / "rows.csv").read_text().splitlines()
    (RUN / "rows.csv").write_text("\n".join([lines[0], *lines[1:11], *(f"{i},,cat,,,false" for i in range(10, 20))]))
    assert " of 10 (" in summary(RUN) and "labelled rows look mislabelled" in summary(RUN)


def labels(file: str, column: str = "label") -> list[str]:
    with open(file, newline="") as lines:
        return [line[column] for line in csv.DictReader(lines)]


@pytest.mark.parametrize(("how", "expected"), [("--drop", ["cat", "dog"]), ("--relabel", ["cat", "dog", "dog"])])
def test_of_one_line_per_annotator_the_majority_is_written(how: str, expected: list[str], capsys: Captured) -> None:
    votes = {"a": ("dog", "cat", "cat"), "b": ("cat", "dog", "dog"), "c": ("cat", "cat", "cat")}  # the first is wrong
    lines = [f"{doc},{who},{name}\n" for doc, said in votes.items() for who, name in zip("xyz", said, strict=True)]
    Path("long.csv").write_text("doc,who,label\n" + "".join(lines))
    write_run("long.csv", [0, 3, 6], label="label", annotator="who", id=["doc"])
    gone = "".join(f"{i},further vote\n" for i in (1, 2, 4, 5, 7, 8))
    (RUN / "left_out.csv").write_text(f"row,why\n{gone}")
    assert main(["export", "runs/mine", how, "suspects", "-o", "clean.csv"]) == 0
    assert labels("clean.csv") == expected
    err = capsys.readouterr().err
    assert "majority of the votes" in err and "left out" not in err  # all rows are there, with one line each


def test_a_suspect_whose_label_is_still_the_most_likely_is_not_counted_as_relabelled(capsys: Captured) -> None:
    Path("plain.csv").write_text("f,label\n1,cat\n2,dog\n3,cat\n")
    write_run("plain.csv", [0, 1, 2], label="label")
    rows = (RUN / "rows.csv").read_text()
    (RUN / "rows.csv").write_text(rows.replace("1,dog,dog,0.1,0.9,false", "1,dog,dog,0.6,0.4,true"))
    assert main(["export", "runs/mine", "--relabel", "suspects", "-o", "new.csv"]) == 0
    err = capsys.readouterr().err
    assert "1 suspect keeps its label: in doubt, but no other label" in err and "3 rows written; 1 relabelled." in err
    assert labels("new.csv") == ["cat", "dog", "dog"]


def test_columns_of_annotators_alone_cannot_be_relabelled(capsys: Captured) -> None:
    Path("wide.csv").write_text("f,ann,bob\n1,cat,cat\n2,dog,dog\n3,cat,cat\n")
    write_run("wide.csv", [0, 1, 2], annotators=["ann", "bob"])
    assert main(["export", "runs/mine", "--relabel", "suspects", "-o", "new.csv"]) == 1
    err = capsys.readouterr().err
    assert "--label" not in err and "Use --drop suspects alone" in err and "runs/mine/rows.csv" in err
    assert not Path("new.csv").exists()
    assert "--drop" in summary(RUN) and "--relabel" not in summary(RUN)
    assert main(["export", "runs/mine", "--drop", "suspects", "-o", "new.csv"]) == 0
    assert Path("new.csv").read_text() == "f,ann,bob\n1,cat,cat\n2,dog,dog\n"


def test_a_column_of_labels_beside_those_of_annotators_is_filled_in(capsys: Captured) -> None:
    Path("wide.csv").write_text("f,ann,bob,label\n1,cat,cat,\n2,dog,dog,cat\n3,cat,cat,\n")
    write_run("wide.csv", [0, 1, 2], annotators=["ann", "bob"])
    assert main(["export", "runs/mine", "--relabel", "suspects", "-o", "new.csv"]) == 0
    assert labels("new.csv") == ["cat", "dog", "dog"] and labels("new.csv", "ann") == ["cat", "dog", "cat"]


def test_an_array_of_votes_cannot_be_relabelled(capsys: Captured) -> None:
    np.savez("votes.npz", x=np.eye(3), y=np.zeros((3, 2), dtype=int))
    write_run("votes.npz", [0, 1, 2])
    assert main(["export", "runs/mine", "--relabel", "suspects", "-o", "new.npz"]) == 1
    assert "Use --drop suspects alone" in capsys.readouterr().err
