"""What the command line tells a user to type, and what a spreadsheet would make of what it writes."""

from __future__ import annotations

import csv
import html
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import run_folder
from hyperkron.cleaning.report import write_report
from hyperkron.cli import main, runs
from hyperkron.cli.options import as_options
from hyperkron.cli.summary import summary
from hyperkron.solution import HyperkronWarning

Captured = pytest.CaptureFixture[str]
RUN = Path("the run's")
QUOTED = "'the run'\"'\"'s'"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("If so, pass id=[\"order's no\", 'day'], so", "If so, pass --id 'order'\"'\"'s no' day, so"),
        ("pass formulas='escape'.", "pass --formulas escape."),
        ('label="it\'s" is not a column', '--label="it\'s" is not a column'),
        ("features[0]='a' is not a column", "--features[0]='a' is not a column"),
        (r"pass label='\x'", r"pass --label='\x'"),  # not a text as Python writes it
    ],
)
def test_names_of_columns_can_be_copied(said: str, told: str) -> None:
    assert as_options(said) == told


def test_a_run_with_an_apostrophe_can_be_resumed_by_copying(capsys: Captured) -> None:
    run_folder.write_run_folder(RUN, rows=20)
    (RUN / "result.json").unlink()
    for command in ("report", "attribute"):
        assert main([command, str(RUN), *(["--query", "x.csv"] if command == "attribute" else [])]) == 1
        assert f"`hyperkron resume {QUOTED}`" in capsys.readouterr().err
    (RUN / "rows.csv").unlink()
    assert main(["export", str(RUN), "--drop", "suspects", "-o", "x.csv"]) == 1
    assert f"`hyperkron resume {QUOTED}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("train", "suffix"), [("a.xlsx", ".csv"), ("a.xlsx:Sheet 2", ".csv"), ("a.jsonl.gz", ".jsonl")]
)
def test_the_export_that_is_proposed_has_a_name_that_is_accepted(train: str, suffix: str) -> None:
    run_folder.write_run_folder(RUN, rows=20)
    config = json.loads((RUN / "config.json").read_text())
    run_folder.write_json(RUN / "config.json", config | {"source": {"train": train}})
    assert f"hyperkron export {QUOTED} --drop suspects -o clean{suffix}\n" in summary(RUN)
    page = html.unescape(write_report(RUN).read_text("utf-8"))
    assert f"hyperkron export {QUOTED} --decisions decisions.json -o clean{suffix}<" in page


def test_a_warning_has_no_place_in_the_code(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def warning(options: Any) -> int:
        warnings.warn_explicit("encoder='x' is missing", HyperkronWarning, "hyperkron", 1)
        return 0

    monkeypatch.setattr(runs, "report", warning)
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = warnings.showwarning
        assert main(["report", "x"]) == 0
        assert warnings.showwarning is before
    assert capsys.readouterr().err == "warning: --encoder='x' is missing\n"


@pytest.mark.parametrize("what", ["keep", "escape", "refuse"])
def test_formulas_among_predictions(what: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    rows = SimpleNamespace(ids={"customer": ["=cmd()", "b"]}, messages=[], count=2)
    answers = torch.tensor([[0.9, 0.1], [0.25, 0.75]])
    result = SimpleNamespace(classes=("=good", "bad"), predicted=lambda *_, **__: (rows, answers))
    monkeypatch.setattr(runs, "load", lambda *_, **__: result)
    code = main(["predict", "run", "new.csv", "-o", "out.csv", "--formulas", what])
    err = capsys.readouterr().err
    assert "has 2 cells that a spreadsheet takes for a formula, such as '=cmd()' in row 0, column 'customer'" in err
    assert code == (1 if what == "refuse" else 0) and Path("out.csv").exists() == (what != "refuse")
    if what != "refuse":
        mark = "'" if what == "escape" else ""
        with open("out.csv", newline="") as lines:
            assert list(csv.reader(lines)) == [
                ["row", "customer", "label", "probability", "p(=good)", "p(bad)"],
                ["0", f"{mark}=cmd()", f"{mark}=good", "0.9", "0.9", "0.1"],
                ["1", "b", "bad", "0.75", "0.25", "0.75"],
            ]
