"""Each recipe's rule can give each verdict, and gives it for the right reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from experiments import paper, records
from experiments.paper import diagnostic, unrolling
from experiments.paper.printed import printed
from experiments.paper.recipe import Result, Verdict


def _result(figures: dict[str, Any], name: str = "x") -> Result:
    return Result(name, "small", (1, 2), figures)


# --- the diagnostic table ----------------------------------------------------------------------------------


def _diagnostic() -> dict[str, Any]:
    rows = {name: list(row) for name, row in printed("table_diagnostic_relative_error")["rows"].items()}
    rows["KFAC"] = [1e-6, 2e-6, 3e-6]
    return {"dimensions": [10, 100, 500], "mean": {"100": copy.deepcopy(rows), "800": rows}}


def test_the_diagnostic_table_has_dimensions_that_were_not_printed() -> None:
    figures: dict[str, Any] = {
        "dimensions": [10, 100, 500, 5000],
        "mean": {"800": {name: [1e-3] * 4 for name in ("KFAC", "PCG-3")}},
    }
    figures["mean"]["800"] |= {
        name: [0.1, 0.2, 0.3, 0.4] for name in printed("table_diagnostic_relative_error")["rows"]
    }
    (table,) = diagnostic.tables(_result(figures))
    assert list(table.columns)[-2:] == ["d=500", "d=5000"]
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert rows["CG-3"] == ["1.05e-03", "1.00e-01", "7.49e-02", "2.00e-01", "3.02e-01", "3.00e-01", "4.00e-01"]
    assert rows["PCG-3"] == ["–", "1.00e-03"] * 3 + ["1.00e-03"]


def test_diagnostic_verdicts() -> None:
    assert diagnostic.verdict(_result(_diagnostic())).verdict is Verdict.REPRODUCED
    for examples in ("100", "800"):
        high = _diagnostic()
        high["mean"][examples]["KFAC"][1] = 8e-3
        assert diagnostic.verdict(_result(high)).verdict is Verdict.FAILED
    falling = _diagnostic()
    falling["mean"]["100"]["Neumann-20"][2] = 0.01
    judged = diagnostic.verdict(_result(falling))  # rising at the implied number of examples only
    assert judged.verdict is Verdict.TREND and "At N = 100 all but Neumann-20 rise" in judged.because
    falling["mean"]["800"]["CG-3"][1] = 1e-4
    assert diagnostic.verdict(_result(falling)).verdict is Verdict.FAILED
    far = _diagnostic()
    far["mean"]["100"]["CG-5"] = [1e-5, 2e-5, 0.196]
    judged = diagnostic.verdict(_result(far))
    assert judged.verdict is Verdict.TREND and "19 of 21" in judged.because


# --- unrolling ---------------------------------------------------------------------------------------------


def _unrolled(one: float, far: list[float], kfac: float) -> Result:
    methods = {"identity": 0.4, "KFAC": kfac}
    return _result({"steps": [1, 10, 100], "one step": one, "unrolled": far, "methods": methods})


def test_unrolling_verdicts() -> None:
    good = [0.9, 0.1, 1e-4]
    assert unrolling.verdict(_unrolled(1e-10, good, 0.2)).verdict is Verdict.REPRODUCED
    assert unrolling.verdict(_unrolled(1e-10, good, 0.5)).verdict is Verdict.TREND
    assert unrolling.verdict(_unrolled(1e-3, good, 0.2)).verdict is Verdict.FAILED
    assert unrolling.verdict(_unrolled(1e-10, [0.9, 0.1, 0.01], 0.2)).verdict is Verdict.FAILED
    assert unrolling.verdict(_unrolled(1e-10, [0.1, 0.9, 1e-4], 0.2)).verdict is Verdict.FAILED


# --- tables and figures ------------------------------------------------------------------------------------

RESULTS = {"diagnostic": _result(_diagnostic()), "unrolling": _unrolled(1e-10, [0.9, 0.1, 1e-4], 0.2)}


@pytest.mark.parametrize("name", RESULTS)
def test_tables_are_rectangular_and_figures_are_small(name: str, tmp_path: Path) -> None:
    recipe = paper.recipes()[name]
    for result in (None, RESULTS[name]):
        for table in recipe.tables(result):
            assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
            assert all(isinstance(cell, str) for row in table.rows for cell in row)
    assert recipe.plot is not None
    for path in recipe.plot(RESULTS[name], tmp_path):
        text = path.read_text("utf-8")
        assert path.suffix == ".svg" and "<svg" in text and len(text) < 200_000


@pytest.mark.long
def test_figures_are_the_same_every_time(tmp_path: Path) -> None:
    recipe = paper.recipes()["unrolling"]
    assert recipe.plot is not None
    first, second = (
        recipe.plot(RESULTS["unrolling"], tmp_path / folder)[0].read_text("utf-8") for folder in ("a", "b")
    )
    assert first == second


@pytest.mark.parametrize("name", paper.recipes())
def test_every_recipe_explains_its_rule_and_has_all_scales_it_says(name: str) -> None:
    recipe = paper.recipes()[name]
    rule = recipe.verdict.__doc__ or ""
    assert rule.lower().count("reproduced") >= 2, "say when it is reproduced and when it is not"
    assert "smoke" in recipe.scales and "small" in recipe.scales and set(recipe.judged) <= {"smoke", "small", "paper"}


@pytest.mark.parametrize("name", paper.programs())
def test_every_program_explains_its_rule_and_has_a_page(name: str) -> None:
    program = paper.programs()[name]
    assert program.rule.lower().count("reproduced") >= 2
    assert program.rule in " ".join((records.PAGES / program.page).read_text("utf-8").split())
    assert program.command.startswith(f"python -m {program.main.__module__} --")
