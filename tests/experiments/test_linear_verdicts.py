"""The rules that judge the linear model can give each verdict, and give it for the right reason."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.paper import linear_verdicts
from experiments.paper.recipe import Verdict

Figures = dict[str, Any]


def _run(loss: float | None, seconds: float = 1.0, spread: float = 0.0) -> dict[str, Any]:
    losses = [None, None] if loss is None else [loss - spread, loss + spread]
    return {"test_loss": losses, "step_seconds": [seconds, seconds]}


# --- batch sizes -------------------------------------------------------------------------------------------


def _batches(*pairs: tuple[float, float]) -> Figures:
    sizes = [10 * (i + 1) for i in range(len(pairs))]
    found = {str(b): {"AID-KFAC": _run(k), "AID-CG-3": _run(c)} for b, (k, c) in zip(sizes, pairs, strict=True)}
    return {"batches": sizes, "found": found}


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (((0.4, 0.6), (0.3, 0.4), (0.3, 0.35)), Verdict.REPRODUCED),
        (((0.4, 0.5), (0.3, 0.4), (0.3, 0.6)), Verdict.TREND),  # the gap grows
        (((0.4, 0.6), (0.3, 0.4), (0.3, 0.2)), Verdict.TREND),
        (((0.4, 0.3), (0.3, 0.4), (0.3, 0.5)), Verdict.FAILED),
        (((0.4, 0.6), (0.3, 0.2), (0.3, 0.2)), Verdict.FAILED),
    ],
)
def test_batch_size_verdicts(pairs: tuple[tuple[float, float], ...], expected: Verdict) -> None:
    assert linear_verdicts.batches(_batches(*pairs)).verdict is expected


# --- KFAC against EKFAC ------------------------------------------------------------------------------------


def _intervals(kfac: list[float], ekfac: list[float], fast: list[float], slow: list[float]) -> Figures:
    taus = [1, 5, 50]
    found = {
        str(tau): {"AID-KFAC": _run(kfac[i], fast[i]), "AID-EKFAC": _run(ekfac[i], slow[i])}
        for i, tau in enumerate(taus)
    }
    return {"intervals": taus, "found": found}


def test_amortization_verdicts() -> None:
    times = [0.7, 0.3, 0.2], [1.8, 0.6, 0.3]
    good = [1.24, 1.33, 1.36], [1.21, 1.24, 1.33]
    assert linear_verdicts.intervals(_intervals(*good, *times)).verdict is Verdict.REPRODUCED
    assert "EKFAC clearly below at 3 of 3." in linear_verdicts.intervals(_intervals(*good, *times)).because
    alone = _intervals(*good, *times)
    for of in alone["found"].values():
        for run in of.values():
            run["test_loss"] = run["test_loss"][:1]
    assert "EKFAC clearly below at 0 of 3." in linear_verdicts.intervals(alone).because  # one seed decides nothing
    stale = [1.37, 1.33, 1.36], [1.21, 1.24, 1.33]  # KFAC gains nothing from fresh factors
    assert linear_verdicts.intervals(_intervals(*stale, *times)).verdict is Verdict.TREND
    mostly = [1.24, 1.33, 1.32], [1.21, 1.24, 1.33]
    assert linear_verdicts.intervals(_intervals(*mostly, *times)).verdict is Verdict.TREND
    worse = [1.2, 1.2, 1.36], [1.21, 1.24, 1.33]
    assert linear_verdicts.intervals(_intervals(*worse, *times)).verdict is Verdict.FAILED
    assert (
        linear_verdicts.intervals(_intervals(*good, times[1], times[0])).verdict is Verdict.FAILED
    )  # EKFAC is not slower
    assert (
        linear_verdicts.intervals(_intervals(*good, [0.2] * 3, times[1])).verdict is Verdict.FAILED
    )  # nothing is saved


# --- the simple models -------------------------------------------------------------------------------------


def _models(**changes: float | None) -> Figures:
    loss: dict[str, float | None] = {"AID-CG-3": 0.4, "AID-KFAC": 0.3, "AmIGO": 0.4, "AmIGO-KFAC": 0.31, "MRBO": 0.5}
    loss |= {"MRBO-KFAC": 0.4, "stocBiO": 0.6, "BOME": 0.7, "BSG-1": 0.8}
    loss |= {name.replace("_", "-"): value for name, value in changes.items()}
    return {"found": {name: _run(value) for name, value in loss.items()}}


def test_simple_model_verdicts() -> None:
    assert linear_verdicts.methods(_models()).verdict is Verdict.REPRODUCED
    assert linear_verdicts.methods(_models(stocBiO=0.1)).verdict is Verdict.TREND  # the lowest is without KFAC
    assert linear_verdicts.methods(_models(MRBO_KFAC=0.6)).verdict is Verdict.TREND
    assert linear_verdicts.methods(_models(MRBO_KFAC=None)).verdict is Verdict.TREND  # a failed run is worst
    assert linear_verdicts.methods(_models(MRBO_KFAC=0.6, AmIGO_KFAC=0.6)).verdict is Verdict.FAILED


def test_a_pair_of_simple_models_that_is_not_whole_does_not_count() -> None:
    result = _models()
    del result["found"]["MRBO"]
    judgement = linear_verdicts.methods(result)
    assert judgement.verdict is Verdict.TREND and "MRBO" not in judgement.because.partition(";")[0]
    result["found"]["AmIGO"]["test_loss"].pop()  # a seed is missing
    assert linear_verdicts.methods(result).verdict is Verdict.FAILED


def test_a_difference_within_the_noise_is_none() -> None:
    noisy = _models()
    noisy["found"]["MRBO-KFAC"] = _run(0.4, spread=0.1)
    assert linear_verdicts.methods(noisy).verdict is Verdict.TREND
    sizes = _batches((0.4, 0.6), (0.3, 0.4), (0.3, 0.35))
    sizes["found"]["10"]["AID-KFAC"] = _run(0.4, spread=0.1)
    assert linear_verdicts.batches(sizes).verdict is Verdict.FAILED
    averages = _averages(0.3, 0.1)
    averages["found"]["10"]["1e-10"]["0.9"] = _run(0.7, spread=0.2)
    assert linear_verdicts.averages(averages).verdict is Verdict.FAILED
    taus = _intervals([1.24, 1.33, 1.36], [1.21, 1.24, 1.33], [0.7, 0.3, 0.2], [1.8, 0.6, 0.3])
    taus["found"]["1"]["AID-EKFAC"] = _run(1.21, 1.8, spread=0.1)
    assert linear_verdicts.intervals(taus).verdict is Verdict.TREND


# --- moving averages ---------------------------------------------------------------------------------------


def _averages(noisy: float, calm: float, other: float = 0.0) -> Figures:
    """Gains with small batch and small damping, with large batch and large damping, and elsewhere."""
    gain = {("10", "0.001"): other, ("10", "1e-10"): noisy, ("100", "0.001"): calm, ("100", "1e-10"): other}
    found: dict[str, Any] = {}
    for (batch, damping), x in gain.items():
        found.setdefault(batch, {})[damping] = {"0": _run(1.0), "0.3": _run(2.0), "0.9": _run(1.0 - x)}
    return {"found": found}


def test_moving_average_verdicts() -> None:
    assert linear_verdicts.averages(_averages(0.3, 0.1)).verdict is Verdict.REPRODUCED
    assert linear_verdicts.averages(_averages(0.3, 0.2)).verdict is Verdict.TREND  # it helps where it should not
    assert linear_verdicts.averages(_averages(0.3, 0.0, 0.4)).verdict is Verdict.TREND
    assert linear_verdicts.averages(_averages(-0.1, -0.2)).verdict is Verdict.FAILED
    assert linear_verdicts.averages(_averages(0.1, 0.2)).verdict is Verdict.FAILED
