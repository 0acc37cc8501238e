"""The map of problems and methods: every problem can be solved by every method, and the search chooses as it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import records
from experiments.pieces import Lines
from experiments.seeds import Difference
from experiments.which_method import compare as which
from experiments.which_method import diagnosed, page
from experiments.which_method.methods import METHODS
from experiments.which_method.problems import PROBLEMS, digits


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(which, "START", 5)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.long
def test_a_problem(problem: str) -> None:
    """λ moves, and the hypergradient is finite; its cosine with itself would be one."""
    task = PROBLEMS[problem](digits(0))
    found = which.run(task, which.Piece(problem, "KFAC", 0.1, 0), 2)
    assert not found["failed"] and found["held"] != found["before"] and 0 <= found["wanted"] <= 100
    near = which.cosines(task, which.Piece(problem, "", 0.0, 0), (0,))["cosines"]
    assert set(near) == set(METHODS) and all(math.isfinite(x) and abs(x) <= 1 + 1e-9 for v in near.values() for x in v)
    assert sum(near["PCG-3"]) >= sum(near["identity"]) - 0.05


@pytest.mark.parametrize("method", METHODS)
def test_a_method(method: str) -> None:
    torch.manual_seed(0)
    found = which.run(PROBLEMS["domain weights"](digits(0)), which.Piece("domain weights", method, 0.1, 0), 2)
    assert json.loads(json.dumps(found))["failed"] is False and found["bytes"] > 1000


def row(piece: which.Piece, held: float | None) -> dict[str, Any]:
    """A finished run."""
    return {**piece._asdict(), "held": held, "wanted": 50.0, "milliseconds": 1.0, "bytes": 10}


def test_the_step_size_with_the_lowest_held_out_objective_is_run_again() -> None:
    rows: list[dict[str, Any]] = []
    while todo := list(which.Map(rows, ["poisoning"], seeds=2).missing()):
        piece = todo[0][1]
        held = None if piece.rate < 0.005 else abs(math.log10(piece.rate / 0.09))
        extra = {"cosines": {name: [0.5, 0.7] for name in METHODS}} if not piece.rate else {}
        rows.append({**row(piece, held), **extra} if piece.rate else {**piece._asdict(), **extra})
    made = which.Map(rows, ["poisoning"], seeds=2)
    assert len(rows) == 2 + len(METHODS) * (2 * len(which.RATES) + 2)
    assert made.best("poisoning", "KFAC") == 0.1
    assert made.best("poisoning", "unheard of") is None
    text = which.table(made)
    assert text.count("| KFAC | 0.60 |") == 1 and "| 1.0× | 1.0× | 0.1 |" in text


def test_the_page_has_the_recorded_tables(capsys: pytest.CaptureFixture[str]) -> None:
    page.main([])
    assert capsys.readouterr().out.strip() in (records.PAGES / "which-method.md").read_text("utf-8")
    page.main(["--summary"])
    docs = Path(__file__).parents[2] / "docs"
    assert capsys.readouterr().out.strip() in (docs / "which-method.md").read_text("utf-8")


def test_the_page_of_the_diagnosis_has_the_recorded_table(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosed.main(["--table"])
    text = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text("utf-8")
    assert capsys.readouterr().out.strip() in text
    rows = Lines(diagnosed.RESULT).rows
    assert len(rows) == len(PROBLEMS) * len(diagnosed.SEEDS) * len(diagnosed.LOOKS)
    for look, curved, plain in zip(diagnosed.LOOKS, ("none of 27", "4 of 31"), ("8 of 23", "8 of 19"), strict=True):
        here = [(row["method"] != "hk.identity()", row["problem"]) for row in rows if row["look"] == look]
        wrong = [says for says, problem in here if says == page.TAKE[problem].startswith("`hk.identity")]
        says = sum(says for says, _ in here)
        assert f"{sum(wrong) or 'none'} of {says}" == curved and curved in text
        assert f"{len(wrong) - sum(wrong)} of {len(here) - says}" == plain and plain in text


def test_a_problem_is_diagnosed_at_every_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosed, "START", 5)
    monkeypatch.setattr(diagnosed, "LOOKS", (0, 1))
    monkeypatch.setattr(diagnosed, "SEEDS", (1,))
    monkeypatch.setattr("hyperkron.hypergradient.diagnosis.TIMED_SECONDS", 0.0)
    monkeypatch.setattr(diagnosed, "PROBLEMS", {"domain weights": PROBLEMS["domain weights"]})
    for _ in range(2):  # what is recorded is not repeated
        diagnosed.main(["--out", str(tmp_path / "rows.jsonl")])
        rows = Lines(tmp_path / "rows.jsonl").rows
        assert [row["look"] for row in rows] == [0, 1] and all(len(row["cosines"]) == 11 for row in rows)


def test_what_to_take_is_what_the_record_speaks_for() -> None:
    """A method that is recommended is clearly better than identity; where identity is, no other is by half a point."""
    made = which.Map(Lines(which.RESULT).rows, list(PROBLEMS))
    names = {"hk.kfac()": "KFAC", "hk.pcg(3)": "PCG-3", "hk.cg(20)": "CG-20", "hk.identity()": "identity"}
    for problem, text in page.TAKE.items():
        taken = names[text.split("`")[1]]
        gains = {name: page._gain(made, problem, name) for name in METHODS if name != "identity"}
        clear = {name: float(told.strip("*").split(" ")[0]) for name, (told, sign) in gains.items() if sign}
        if taken == "identity":
            assert all(gain < 0.5 for gain in clear.values()), problem
        elif "accuracy is not" in text:
            base, x = made.figures(problem, "identity"), made.figures(problem, taken)
            assert base and x and not clear and Difference.of(base["held"], x["held"]).sign < 0  # type: ignore[union-attr]
        else:
            assert clear[taken] == max(clear.values()), problem


def test_the_figure_shows_every_finished_problem(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = which.Map(Lines(which.RESULT).rows, list(PROBLEMS))
    assert "label correction" in page.figure(made, tmp_path / "map.svg").read_text("utf-8")
