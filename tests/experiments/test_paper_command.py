"""``python -m experiments.paper``: list, run and report."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import paper, records
from experiments.paper.__main__ import main
from experiments.paper.recipe import Judgement, Result, Verdict
from experiments.pieces import OutOfTime
from hyperkron.solution import HyperkronError

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class _Recipe:
    name, place, scales, title = "counted", "Table 9", ("smoke",), "A title"

    def judge(self, result: Result) -> Judgement:
        return Judgement(Verdict.REPRODUCED, f"{len(result.seeds)} seeds agree.")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The paper's functions replaced by ones that remember their arguments."""
    found: list[dict[str, Any]] = []

    def run(name: str, scale: str, *, seeds: int | None, **more: Any) -> Result:
        found.append({"name": name, "scale": scale, "seeds": seeds, **more})
        if name == "nothing":
            raise HyperkronError("name='nothing' is no recipe; choose one of counted.")
        if more["limit_minutes"] == -1:
            raise OutOfTime("The time limit of -1 minutes is over.")
        more["say"]("a cell is done")
        return Result("counted", "smoke", (1, 2), {}, complete=more["device"] == "cpu")

    monkeypatch.setattr(paper, "recipes", lambda: {"counted": _Recipe()})
    monkeypatch.setattr(paper, "run", run)
    monkeypatch.setattr(paper, "run_all", lambda scale, **more: {"counted": run("counted", scale, **more)})
    monkeypatch.setattr(paper, "meant_for", lambda scale, device: [_Recipe()])
    return found


def test_paper_list(capsys: Captured) -> None:
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name} " in text for name in (*paper.recipes(), *paper.programs()))
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [recipe["name"] for recipe in found["recipes"]] == list(paper.recipes())
    assert {program["name"]: program["command"] for program in found["programs"]} == {
        name: program.command for name, program in paper.programs().items()
    }


@pytest.mark.parametrize("name", ["counted", "all"])
def test_paper_run(name: str, calls: list[dict[str, Any]], capsys: Captured) -> None:
    given = ["run", name, "--scale", "smoke", "--seeds", "2", "--limit-minutes", "3.5", "--folder", "f"]
    assert main(given) == 0
    out, err = capsys.readouterr()
    assert out == "counted: reproduced. 2 seeds agree.\n" and "a cell is done" in err
    [call] = calls
    assert (call["name"], call["scale"], call["seeds"], call["device"]) == ("counted", "smoke", 2, "cpu")
    assert call["limit_minutes"] == 3.5 and call["folder"] == "f" and call["data"] is None
    assert call["command"] == " ".join(["python -m experiments.paper", *given])
    assert main([*given, "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["verdicts"]["counted"]["verdict"] == "reproduced" and err == ""


def test_paper_run_out_of_time_and_mistaken(calls: list[dict[str, Any]], capsys: Captured) -> None:
    assert main(["run", "counted", "--limit-minutes", "-1"]) == 3
    assert "time limit" in capsys.readouterr().err
    assert main(["run", "counted", "--device", "cuda"]) == 3  # not complete
    assert main(["run", "nothing"]) == 1
    assert "is no recipe" in capsys.readouterr().err


def test_paper_report_writes_the_page(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert main(["report", "--folder", "results", "--out", "page"]) == 0
    written = capsys.readouterr().out.splitlines()
    assert "page/paper.md" in written and Path("page/paper.md").exists()
    assert main(["report", "--folder", "results"]) == 0  # the recorded pages are left alone
    assert all(Path(line).is_relative_to("results/pages") for line in capsys.readouterr().out.split())
    assert Path("results/pages/paper.md").exists()
    assert main(["report", "--folder", "results", "--out", "page", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == written


def test_a_mistake_in_the_command_ends_with_2(capsys: Captured) -> None:
    for given in ([], ["run"], ["run", "diagnostic", "--scale", "smal"], ["run", "diagnostic", "--seed", "1"]):
        with pytest.raises(SystemExit) as stop:
            main(given)
        assert stop.value.code == 2 and "usage: python -m experiments.paper" in capsys.readouterr().err


@pytest.mark.long
def test_it_runs_as_a_module_from_the_checkout() -> None:
    command = [sys.executable, "-m", "experiments.paper", "list"]
    done = subprocess.run(command, cwd=records.ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    recipes, _ = done.stdout.split("\n\n", 1)  # the programs come after a blank line
    assert [line.split()[0] for line in recipes.splitlines()] == list(paper.recipes())


def test_the_recorded_page_is_that_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the figures, which take long to draw."""
    undrawn = {name: replace(recipe, plot=None) for name, recipe in paper.recipes().items()}
    monkeypatch.setattr(paper, "recipes", lambda: undrawn)
    for made in paper.report(out=tmp_path):
        recorded = (records.PAGES / made.relative_to(tmp_path)).read_text("utf-8").split("\n\n")
        text = [block for block in recorded if not block.startswith("![")]
        assert made.read_text("utf-8").split("\n\n") == text, "run python -m experiments.paper report"


def test_the_short_page_has_the_verdicts_of_the_record() -> None:
    record = (records.PAGES / "paper.md").read_text("utf-8")
    short = (records.ROOT / "docs" / "paper.md").read_text("utf-8")
    overview = record[record.index("| where |") :].partition("\n\n")[0]
    assert overview in short
    verdicts = [line.split(" | ")[2] for line in overview.splitlines()[2:]]
    kinds = (Verdict.REPRODUCED, Verdict.TREND, Verdict.FAILED, Verdict.REFUSED, Verdict.NOT_RUN)
    yes, trend, no, refused, waiting = (verdicts.count(kind.value) for kind in kinds)
    assert yes + trend + no + refused + waiting == len(verdicts)
    counts = f"{yes} of {len(verdicts)} entries are reproduced, {trend} in trend, and {no} are not"
    assert counts in short and f"{refused} get no verdict" in short
    assert waiting == 0 or f"{waiting} not run yet" in short
