"""A sample of the grid of models × λ × hypergradients × cross modes, and a check that the grid sees what is wrong.

The whole grid: ``make grid``. What is right, and to which tolerance: ``support/grid/cells.py``.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import hyperkron as hk
import oracles
from grid import cells, special
from grid.cells import CRASHED, NO_EFFECT, REFUSED, RIGHT, SILENT, WARNED, Pair
from grid.hypers import HYPERS
from grid.methods import METHODS, Method
from grid.models import MODELS
from grid.truth import flat, relative


def sample() -> dict[str, list[tuple[str, list[str]]]]:
    """For each model one or two λ, for each of them three methods; every λ and every method comes up."""
    draw = random.Random(1)
    hypers, methods = draw.sample(list(HYPERS), len(HYPERS)), itertools.cycle(draw.sample(list(METHODS), len(METHODS)))
    chosen: dict[str, list[tuple[str, list[str]]]] = {}
    for model, spec in MODELS.items():
        chosen[model] = []
        for _ in range(1 if spec.lengthwise or spec.compiled else 2):  # those are slow to make
            hyper = next(h for h in hypers if HYPERS[h].fits(spec))
            hypers.remove(hyper)
            hypers.append(hyper)  # to the end of the queue
            chosen[model].append((hyper, [next(methods) for _ in range(3)]))
    return chosen


SAMPLE = sample()
ONCE_WRONG: dict[tuple[str, str], list[str]] = {
    ("mlp", "mwn"): ["identity, auto", "kfac, auto", "ekfac", "pcg", "cg ggn, auto", "sama", "sama wide"],
    ("mlp dropout", "mwn normalised"): ["sama wide"],
    ("mlp dropout", "mwn no_grad"): ["kfac exact"],
    ("old spectral norm", "weights clip"): ["kfac, auto", "identity, forward"],
    ("weight norm", "weights clip"): ["cg hessian, auto", "unrolled adam"],
    ("straight-through", "domains"): ["kfac empirical", "sama"],
    ("mlp", "weights, l2"): ["kfac exact"],
    ("lstm", "weights clip"): ["kfac, auto"],
    ("checkpointed", "weights clip"): ["unrolled", "unrolled adam"],
    ("checkpointed", "mwn"): ["sama"],
    ("checkpointed", "inputs"): ["identity, forward"],
    ("checkpointed reentrant", "weights clip"): ["identity, auto", "kfac, auto", "unrolled"],
    ("compiled", "weights clip"): ["kfac, auto"],
    ("mlp bfloat16", "weights clip"): ["kfac exact", "ekfac"],
}
"""Cells that were silently wrong or crashed before they were mended."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old forms of weight and spectral norm are deprecated
        yield


def test_the_sample_has_every_hyper_and_every_method() -> None:
    drawn = [(h, m) for pairs in SAMPLE.values() for h, methods in pairs for m in methods]
    assert {h for h, _ in drawn} == set(HYPERS)
    assert {m for _, m in drawn} == set(METHODS)


@pytest.mark.parametrize("model", MODELS)
def test_no_cell_is_silently_wrong(model: str) -> None:
    records = [r for hyper, methods in SAMPLE[model] for r in cells.run_pair(model, hyper, methods)]
    bad = [f"{r.outcome}: {r.name}: {r.errors} {r.words}" for r in records if r.bad]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(("model", "hyper"), ONCE_WRONG)
def test_no_cell_is_wrong_again(model: str, hyper: str) -> None:
    records = cells.run_pair(model, hyper, ONCE_WRONG[model, hyper])
    bad = [f"{r.outcome}: {r.name}: {r.errors} {r.words}" for r in records if r.bad]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("case", special.CASES)
def test_no_special_case_is_silently_wrong(case: str) -> None:
    record = special.run(case)
    assert not record.bad, f"{record.outcome}: {record.errors} {record.words}"


# --- the oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hyper", ["weights sigmoid", "decay tensor", "soft labels", "inputs"])
def test_the_oracle_agrees_with_dense_matrices(hyper: str) -> None:
    truth = Pair("mlp", hyper).truth
    v = torch.randn(len(truth.b), dtype=torch.float64)

    def value() -> torch.Tensor:
        return truth.evaluate("inner").value

    assert relative(truth.hessian(v), oracles.hessian(value, truth.params) @ v) < 1e-12
    assert relative(truth.cross(v), oracles.hessian(value, truth.params, truth.hypers).T @ v) < 1e-12
    ((output, criterion),) = truth.evaluate("inner").terms
    dense = oracles.ggn(output, criterion, truth.params)
    assert relative(truth.ggn(v), dense @ v + truth.l2() * v) < 1e-12


# --- the grid sees what is wrong -----------------------------------------------------------------------------


class Broken(hk.hypergradient.Hypergradient):
    """A right method whose result is spoilt, with or without a word."""

    def __init__(self, method: hk.hypergradient.Hypergradient, spoil: Any) -> None:
        self.method, self.spoil = method, spoil

    def compute(self, *arguments: Any) -> hk.HypergradientResult:
        return self.spoil(self.method.compute(*arguments))

    @property
    def curvature(self) -> Any:
        return self.method.curvature  # type: ignore[attr-defined]

    def fresh(self) -> hk.hypergradient.Hypergradient:
        return Broken(self.method.fresh(), self.spoil)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def judged(spoil: Any, name: str = "identity, reverse", hyper: str = "weights sigmoid") -> cells.Record:
    method = METHODS[name]
    return Pair("mlp", hyper).run(name, replace(method, make=lambda s: Broken(method.make(s), spoil)))


def scaled(result: hk.HypergradientResult, factor: float = 1.1) -> hk.HypergradientResult:
    return replace(result, grads={n: factor * g for n, g in result.grads.items()})


def with_other_v(result: hk.HypergradientResult) -> hk.HypergradientResult:
    """A v that is too long, and the cross term that belongs to it."""
    assert result.solution is not None
    value = {n: 1.001 * x for n, x in result.solution.value.items()}
    return replace(scaled(result, 1.001), solution=replace(result.solution, value=value))


def test_a_right_result_is_right() -> None:
    assert judged(lambda result: result).outcome == RIGHT


@pytest.mark.parametrize("name", ["identity, reverse", "kfac, auto", "cg ggn, auto", "pcg", "sama", "unrolled"])
def test_a_scaled_cross_term_is_seen(name: str) -> None:
    assert judged(scaled, name).outcome == SILENT


SOLVED = ["identity, reverse", "kfac, reverse", "kfac exact", "ekfac", "cg hessian, auto", "cg 3", "pcg", "neumann"]


@pytest.mark.parametrize("name", [*SOLVED, "descent", "sama adam"])
def test_a_wrong_solution_is_seen(name: str) -> None:
    record = judged(with_other_v, name)
    assert record.outcome == SILENT and record.failed == ["v"]


def test_moving_theta_through_detached_losses_is_seen() -> None:
    def difference(result: hk.HypergradientResult) -> hk.HypergradientResult:
        pair = Pair("mlp", "mwn")
        assert result.solution is not None
        v, sides = result.solution.value, []
        for sign in (1, -1):
            moved = {n: p + sign * 1e-4 * v[n] for n, p in pair.truth.named.items()}
            value = pair.truth.evaluate("inner", moved).value
            sides.append(flat(torch.autograd.grad(value, pair.truth.hypers), pair.truth.hypers))
        wrong = pair.truth.direct - (sides[0] - sides[1]) / 2e-4
        parts = wrong.split([p.numel() for p in pair.truth.hypers])
        grads = {n: x.reshape(g.shape) for (n, g), x in zip(result.grads.items(), parts, strict=True)}
        return replace(result, grads=grads)

    assert judged(difference, hyper="mwn").outcome == SILENT


def test_a_status_excuses_v_but_not_the_cross_term() -> None:
    status = hk.Status.DIVERGED
    assert judged(lambda r: replace(with_other_v(r), status=status)).outcome == WARNED
    assert judged(lambda r: replace(scaled(r), status=status)).outcome == SILENT


def test_only_a_warning_that_names_what_is_wrong_excuses_it() -> None:
    def warning(words: str) -> Any:
        def spoil(result: hk.HypergradientResult) -> hk.HypergradientResult:
            warnings.warn(words, hk.HyperkronWarning, stacklevel=1)
            return scaled(result)

        return spoil

    assert judged(warning("the finite-difference cross term has an error of about 10 %")).outcome == WARNED
    assert judged(warning("autocast was too coarse")).outcome == SILENT


def test_low_coverage_must_be_told() -> None:
    class Uncovered(Broken):
        def coverage(self, model: Any) -> hk.curvature.Coverage:
            return hk.curvature.Coverage(())

        @property
        def curvature(self) -> Any:
            return self

    def without_share(result: hk.HypergradientResult) -> hk.HypergradientResult:
        return replace(result, stats={name: x for name, x in result.stats.items() if name != "coverage"})

    method = METHODS["kfac, reverse"]
    how = replace(method, make=lambda s: Uncovered(method.make(s), without_share))
    record = Pair("mlp", "weights sigmoid").run("kfac, reverse", how)
    assert record.outcome == SILENT and record.failed == ["coverage"]


def test_exceptions_are_refusals_or_crashes() -> None:
    def refuse(result: hk.HypergradientResult) -> hk.HypergradientResult:
        raise hk.HyperkronError("damping=-1 must not be negative; use 0.")

    def crash(result: hk.HypergradientResult) -> hk.HypergradientResult:
        raise RuntimeError("expected scalar type Float but found BFloat16")

    assert judged(refuse).outcome == REFUSED
    assert judged(crash).outcome == CRASHED


def test_a_cell_that_shows_nothing_is_counted_apart() -> None:
    pair = Pair("mlp", "weights sigmoid")
    with torch.no_grad():
        for hyper in (pair.hyper, pair.truth.hyper):
            hyper.weight.fill_(100.0)  # type: ignore[union-attr, operator]
    pair.truth = type(pair.truth)(
        pair.kind, pair.twin, pair.truth.hyper, pair.truth.batches["inner"], pair.truth.batches["outer"], cells.SEED
    )
    made = Method(lambda s: hk.identity(cross="reverse"), "reverse", equals=lambda t: t.b)
    assert pair.run("identity, reverse", made).outcome == NO_EFFECT
