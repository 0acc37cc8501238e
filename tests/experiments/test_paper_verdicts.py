"""Each recipe's rule can give each verdict, and gives it for the right reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from experiments import paper
from experiments.paper import amortization, batch_size, diagnostic, moving_average, simple_models, unrolling
from experiments.paper.printed import printed
from experiments.paper.recipe import Result, Verdict

CURVE = {"step": [0, 1], "seconds": [0.0, 1.0], "test_loss": [2.0, 1.0]}


def _result(figures: dict[str, Any], name: str = "x") -> Result:
    return Result(name, "small", (1, 2), figures)


def _run(loss: float | None, seconds: float = 1.0, spread: float = 0.0) -> dict[str, Any]:
    return {
        "test_loss": [None, None] if loss is None else [loss - spread, loss + spread],
        "test_error": [0.1, 0.1],
        "lowest_test_loss": [loss, loss],
        "seconds_to_best": [1.0, 1.0],
        "steps": [10, 10],
        "step_seconds": [seconds, seconds],
        "f1": [0.5, 0.5],
        "setting": {"inner": 0.1, "outer": 1.0, "momentum": 0.0},
        "edge": ["inner"],
        "curve": CURVE,
    }


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


# --- batch sizes -------------------------------------------------------------------------------------------


def _batches(*pairs: tuple[float, float]) -> Result:
    sizes = [10 * (i + 1) for i in range(len(pairs))]
    found = {str(b): {"AID-KFAC": _run(k), "AID-CG-3": _run(c)} for b, (k, c) in zip(sizes, pairs, strict=True)}
    return _result({"batches": sizes, "found": found})


@pytest.mark.parametrize(
    ("pairs", "linear", "resnet"),
    [
        (((0.4, 0.6), (0.3, 0.4), (0.3, 0.35)), Verdict.REPRODUCED, Verdict.REPRODUCED),
        (((0.4, 0.5), (0.3, 0.4), (0.3, 0.6)), Verdict.TREND, Verdict.REPRODUCED),  # the gap grows
        (((0.4, 0.6), (0.3, 0.4), (0.3, 0.2)), Verdict.TREND, Verdict.TREND),
        (((0.4, 0.3), (0.3, 0.4), (0.3, 0.5)), Verdict.FAILED, Verdict.TREND),
        (((0.4, 0.6), (0.3, 0.2), (0.3, 0.2)), Verdict.FAILED, Verdict.FAILED),
    ],
)
def test_batch_size_verdicts(pairs: tuple[tuple[float, float], ...], linear: Verdict, resnet: Verdict) -> None:
    assert batch_size.verdict_linear(_batches(*pairs)).verdict is linear
    assert batch_size.verdict_resnet(_batches(*pairs)).verdict is resnet


# --- KFAC against EKFAC ------------------------------------------------------------------------------------


def _intervals(kfac: list[float], ekfac: list[float], fast: list[float], slow: list[float]) -> Result:
    taus = [1, 5, 50]
    found = {
        str(tau): {"AID-KFAC": _run(kfac[i], fast[i]), "AID-EKFAC": _run(ekfac[i], slow[i])}
        for i, tau in enumerate(taus)
    }
    chosen = {kind: {"setting": {"inner": 0.1}} for kind in amortization.KINDS}
    return _result({"intervals": taus, "found": found, "chosen": chosen})


def test_amortization_verdicts() -> None:
    times = [0.7, 0.3, 0.2], [1.8, 0.6, 0.3]
    good = [1.24, 1.33, 1.36], [1.21, 1.24, 1.33]
    assert amortization.verdict(_intervals(*good, *times)).verdict is Verdict.REPRODUCED
    assert "EKFAC clearly below at 3 of 3." in amortization.verdict(_intervals(*good, *times)).because
    alone = _intervals(*good, *times)
    for of in alone.figures["found"].values():
        for run in of.values():
            run["test_loss"] = run["test_loss"][:1]
    assert "EKFAC clearly below at 0 of 3." in amortization.verdict(alone).because  # one seed decides nothing
    stale = [1.37, 1.33, 1.36], [1.21, 1.24, 1.33]  # KFAC gains nothing from fresh factors
    assert amortization.verdict(_intervals(*stale, *times)).verdict is Verdict.TREND
    mostly = [1.24, 1.33, 1.32], [1.21, 1.24, 1.33]
    assert amortization.verdict(_intervals(*mostly, *times)).verdict is Verdict.TREND
    worse = [1.2, 1.2, 1.36], [1.21, 1.24, 1.33]
    assert amortization.verdict(_intervals(*worse, *times)).verdict is Verdict.FAILED
    assert amortization.verdict(_intervals(*good, times[1], times[0])).verdict is Verdict.FAILED  # EKFAC is not slower
    assert amortization.verdict(_intervals(*good, [0.2] * 3, times[1])).verdict is Verdict.FAILED  # nothing is saved


# --- the simple models -------------------------------------------------------------------------------------


def _models(**changes: float | None) -> Result:
    loss: dict[str, float | None] = {"AID-CG-3": 0.4, "AID-KFAC": 0.3, "AmIGO": 0.4, "AmIGO-KFAC": 0.31, "MRBO": 0.5}
    loss |= {"MRBO-KFAC": 0.4, "stocBiO": 0.6, "BOME": 0.7, "BSG-1": 0.8}
    loss |= {name.replace("_", "-"): value for name, value in changes.items()}
    references = {
        kind: {"test_loss": [0.5, 0.6], "test_error": [0.1, 0.2]} for kind in ("trusted only", "trusted + noisy")
    }
    return _result({"found": {name: _run(value) for name, value in loss.items()}, "references": references})


def test_simple_model_verdicts() -> None:
    assert simple_models.verdict(_models()).verdict is Verdict.REPRODUCED
    assert simple_models.verdict(_models(stocBiO=0.1)).verdict is Verdict.TREND  # the lowest is without KFAC
    assert simple_models.verdict(_models(MRBO_KFAC=0.6)).verdict is Verdict.TREND
    assert simple_models.verdict(_models(MRBO_KFAC=None)).verdict is Verdict.TREND  # a failed run is worst
    assert simple_models.verdict(_models(MRBO_KFAC=0.6, AmIGO_KFAC=0.6)).verdict is Verdict.FAILED


def test_a_pair_of_simple_models_that_is_not_whole_does_not_count() -> None:
    result = _models()
    del result.figures["found"]["MRBO"]
    judgement = simple_models.verdict(result)
    assert judgement.verdict is Verdict.TREND and "MRBO" not in judgement.because.partition(";")[0]
    result.figures["found"]["AmIGO"]["test_loss"].pop()  # a seed is missing
    assert simple_models.verdict(result).verdict is Verdict.FAILED


def test_a_difference_within_the_noise_is_none() -> None:
    noisy = _models()
    noisy.figures["found"]["MRBO-KFAC"] = _run(0.4, spread=0.1)
    assert simple_models.verdict(noisy).verdict is Verdict.TREND
    sizes = _batches((0.4, 0.6), (0.3, 0.4), (0.3, 0.35))
    sizes.figures["found"]["10"]["AID-KFAC"] = _run(0.4, spread=0.1)
    assert batch_size.verdict_linear(sizes).verdict is Verdict.FAILED
    assert batch_size.verdict_resnet(sizes).verdict is Verdict.TREND
    averages = _averages(0.3, 0.1)
    averages.figures["found"]["10"]["1e-10"]["0.9"] = _run(0.7, spread=0.2)
    assert moving_average.verdict(averages).verdict is Verdict.TREND
    taus = _intervals([1.24, 1.33, 1.36], [1.21, 1.24, 1.33], [0.7, 0.3, 0.2], [1.8, 0.6, 0.3])
    taus.figures["found"]["1"]["AID-EKFAC"] = _run(1.21, 1.8, spread=0.1)
    assert amortization.verdict(taus).verdict is Verdict.TREND


# --- moving averages ---------------------------------------------------------------------------------------


def _averages(noisy: float, calm: float, other: float = 0.0) -> Result:
    """Gains with small batch and small damping, with large batch and large damping, and elsewhere."""
    gain = {("10", "0.001"): other, ("10", "1e-10"): noisy, ("100", "0.001"): calm, ("100", "1e-10"): other}
    found: dict[str, Any] = {}
    for (batch, damping), x in gain.items():
        found.setdefault(batch, {})[damping] = {"0": _run(1.0), "0.3": _run(2.0), "0.9": _run(1.0 - x)}
    return _result({"found": found})


def test_moving_average_verdicts() -> None:
    assert moving_average.verdict(_averages(0.3, 0.1)).verdict is Verdict.REPRODUCED
    assert moving_average.verdict(_averages(0.3, 0.2)).verdict is Verdict.TREND  # it helps where it should not
    assert moving_average.verdict(_averages(0.3, 0.0, 0.4)).verdict is Verdict.TREND
    assert moving_average.verdict(_averages(-0.1, -0.2)).verdict is Verdict.FAILED
    assert moving_average.verdict(_averages(0.1, 0.2)).verdict is Verdict.FAILED


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

RESULTS = {
    "diagnostic": _result(_diagnostic()),
    "batch-linear": _batches((0.4, 0.6), (0.3, 0.4)),
    "batch-resnet": _batches((0.4, 0.6), (0.3, 0.4)),
    "ekfac-linear": _intervals([1.0] * 3, [1.0] * 3, [1.0] * 3, [1.0] * 3),
    "ekfac-resnet": _intervals([1.0] * 3, [1.0] * 3, [1.0] * 3, [1.0] * 3),
    "linear-mnist": _models(BOME=None),
    "cnn-cifar": _models(),
    "ema": _averages(0.3, 0.1),
    "unrolling": _unrolled(1e-10, [0.9, 0.1, 1e-4], 0.2),
}


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
