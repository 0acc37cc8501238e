"""The command line with the real task: from reading to export."""

from __future__ import annotations

import json
import signal
from dataclasses import fields
from pathlib import Path

import pytest

from blobs import quicken
from hyperkron import cleaning
from hyperkron.cli import main
from hyperkron.cli.output import Lines
from tables import write_table

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_settings_are_those_of_the_task() -> None:
    from hyperkron.cli.cleaning import SETTINGS

    assert {*SETTINGS} == {field.name for field in fields(cleaning.CleanConfig)}


def test_a_real_run_from_a_mistake_and_an_interruption_to_export(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    quicken(monkeypatch)
    lines = write_table()
    given = ["clean", "train.csv", "--label", "kind", "--epochs", "1", "--compare", "none", "--out", "runs/mine"]
    assert main([*given, "--trusted-column", "chekced"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "Reading train.csv\nhyperkron clean: error: --trusted-column='chekced' is not a column of train"
    )
    assert "Traceback" not in err
    assert not Path("runs/mine").exists()
    advance, steps = Lines.advance, [0]

    def stop(self: Lines, count: int, stage: str) -> None:
        steps[0] += 1
        if steps[0] == 12:
            signal.raise_signal(signal.SIGTERM)
        advance(self, count, stage)

    monkeypatch.setattr(Lines, "advance", stop)
    assert main([*given, "--trusted-column", "checked"]) == 143
    assert "continue with: hyperkron resume runs/mine" in capsys.readouterr().err
    assert main(["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv"]) == 1  # not finished
    capsys.readouterr()
    assert main(["resume", "runs/mine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data"]["train_rows"] == 90 and found["data"]["trusted_rows"] == 30
    assert set(found["files"]) >= {"report.html", "rows.csv", "model.safetensors", "suspects.jsonl"}
    assert main(given) == 1  # never overwritten
    capsys.readouterr()
    assert main(["resume", "runs/mine"]) == 0
    assert capsys.readouterr().err.startswith("The run in runs/mine is finished")
    assert main(["report", "runs/mine"]) == 0
    assert main(["export", "runs/mine", "--relabel", "suspects", "-o", "all.csv"]) == 0
    assert main(["export", "runs/mine", "--drop", "suspects", "--threshold", "0", "-o", "checked.csv"]) == 0
    assert len(Path("all.csv").read_text().splitlines()) == 121
    assert Path("checked.csv").read_text().splitlines()[1:] == [line for line in lines if line.endswith("yes")]
