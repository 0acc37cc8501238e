"""Algorithms that take a hypergradient: with curvature measured on batches of its own, and in stocBiO."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hyperkron as hk
from hyperkron.algorithms import Algorithm
from hyperkron.evaluation.point import Point
from hyperkron.training.undo import RecordedBatches
from quadratic import Quadratic
from tests.algorithms.test_algorithms import ALGORITHMS

SUM = Quadratic(examples=6, noise=0.2)
WITH: dict[str, Any] = {
    name: getattr(hk.algorithms, name)
    for name in hk.algorithms.__all__
    if isinstance(getattr(hk.algorithms, name, None), type)
    and issubclass(getattr(hk.algorithms, name), Algorithm)
    and getattr(hk.algorithms, name) is not hk.algorithms.SUSTAIN  # its series is its own
    and "hypergradient" in {f.name for f in dataclasses.fields(getattr(hk.algorithms, name))}
}


def curvature_data() -> hk.algorithms.Examples:
    """Three batches of two, unlike those of the inner data."""
    return hk.algorithms.Examples(*(3 * x for x in SUM.data()[0]), batch_size=2, seed=5)


def rows(batches: list[Any]) -> set[tuple[float, ...]]:
    return {tuple(row) for batch in batches for row in batch[0].tolist()}


def test_all_of_them_are_here() -> None:
    assert set(WITH) == {"AID", "AmIGO", "MRBO", "StocBiO", "TGDA", "VRBO"}


@pytest.mark.parametrize("name", WITH)
@pytest.mark.parametrize("own", [True, False])
def test_the_curvature_is_measured_on_its_own_batch(name: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    crossed: list[Any] = []
    usual = hk.curvature.Hessian.operator

    def operator(self: hk.curvature.Hessian, point: Point, state: Any) -> Any:
        measured.append(point.curvature_batch)
        crossed.append(point.inner_batch)
        return usual(self, point, state)

    monkeypatch.setattr(hk.curvature.Hessian, "operator", operator)
    algorithm = WITH[name](hypergradient=hk.cg(3, 0.1, warm_start=True))
    state, data = algorithm.init(SUM.problem(), *SUM.modules()), SUM.batches(2)
    batches = hk.algorithms.BatchSources(
        data.sources["inner"], data.sources["outer"], curvature_data() if own else None
    )
    for _ in range(2):
        algorithm.step(state, batches)
    inner, other = rows([SUM.data()[0]]), rows([curvature_data().full()])
    assert not inner & other
    assert rows(crossed) <= inner
    assert rows(measured) <= (other if own else inner)
    assert len(rows(measured)) >= 4 or not own  # fresh ones, not one for all


def test_the_direction_is_that_of_the_hypergradient_with_this_batch() -> None:
    """θ stands still; KFAC on the inner batch points elsewhere."""
    method = hk.kfac(0.1, fisher="type-2")
    inner, outer = SUM.data()
    other = tuple(3 * x for x in inner)
    model, hyper = SUM.modules()
    with torch.no_grad():
        model.weight.fill_(0.3)
    wanted, usual = (
        method.fresh().compute(SUM.problem(), model, hyper, inner, outer, curvature_batch=batch).grads["value"]
        for batch in (other, None)
    )
    start = hyper().detach().clone()
    algorithm = hk.AID(method, 1, inner_rate=0.0, outer_rate=0.5)
    hk.fit(SUM.problem(), model, hyper, algorithm, inner, outer, steps=1, curvature_data=other)
    found = (start - hyper().detach()) / 0.5
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)
    assert float((found - usual).norm() / usual.norm()) > 0.1


@pytest.mark.parametrize("name", [n for n, a in ALGORITHMS.items() if type(a).__name__ not in WITH])
def test_algorithms_without_such_a_curvature_refuse_it(name: str) -> None:
    data = SUM.batches(2)
    with pytest.raises(hk.HyperkronError, match=r"curvature_data=Examples.*leave it out"):
        hk.fit(
            SUM.problem(),
            *SUM.modules(),
            ALGORITHMS[name],
            data.sources["inner"],
            data.sources["outer"],
            steps=1,
            curvature_data=curvature_data(),
        )


@pytest.mark.parametrize(
    "method",
    [hk.unrolled(2), hk.identity(), hk.sama(), hk.algorithms.hia(3)],
    ids=["unrolled", "identity", "sama", "hia"],
)
def test_hypergradients_that_measure_none_refuse_it(method: Any) -> None:
    algorithm = hk.AID(method, 1)
    state = algorithm.init(SUM.problem(), *SUM.modules())
    with pytest.raises(hk.HyperkronError, match=f"{type(method).__name__} measures no curvature"):
        algorithm.step(state, hk.algorithms.BatchSources(*SUM.data(), curvature_data()))


def test_its_place_in_the_data_is_resumed(tmp_path: Path) -> None:
    def run(steps: int) -> hk.Run:
        data = SUM.batches(2)
        algorithm = hk.AID(hk.kfac(0.1), 1)
        arguments = (SUM.problem(), *SUM.modules(), algorithm, data.sources["inner"], data.sources["outer"])
        return hk.fit(*arguments, steps=steps, curvature_data=curvature_data())

    def reached(run: hk.Run) -> Tensor:
        return run.state.hyper().detach()

    whole, half = reached(run(4)), run(2)
    half.save(tmp_path)
    assert torch.equal(reached(run(0).resume(tmp_path).advance(2)), whole)
    data = SUM.batches(2)
    arguments = (SUM.problem(), *SUM.modules(), hk.AID(hk.kfac(0.1), 1), data.sources["inner"], data.sources["outer"])
    with pytest.raises(hk.HyperkronError, match="curvature_data"):
        hk.fit(*arguments, steps=0).resume(tmp_path)


def test_a_repeated_step_gets_the_same_batch() -> None:
    numbers = iter(range(9))
    batches = RecordedBatches(hk.algorithms.BatchSources(None, None, lambda: next(numbers)))
    batches.begin()
    first = batches.curvature(), batches.curvature()
    batches.rewind()
    assert (batches.curvature(), batches.curvature()) == first == (0, 1)
    assert batches.curvature() == 2
    assert {note.level for note in batches.notes} == {"curvature"}


# --- stocBiO -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [lambda: hk.kfac(0.1), lambda: hk.cg(3)], ids=["kfac", "cg"])
def test_stocbio_takes_a_hypergradient(method: Any) -> None:
    """Without the series it is AID's order of things, draw by draw."""
    reached = []
    for make in (hk.algorithms.StocBiO, hk.AID):
        algorithm = make(hypergradient=method(), inner_steps=3)
        state, batches = algorithm.init(SUM.problem(), *SUM.modules()), SUM.batches(2)
        for _ in range(3):
            algorithm.step(state, batches)
        reached.append(state.hyper().detach())
    assert torch.equal(*reached)
    assert float(reached[0].norm()) > 0


def test_stocbio_is_the_series_by_default() -> None:
    state = hk.algorithms.StocBiO(terms=4, step_size=0.2, misscaled=True).init(SUM.problem(), *SUM.modules())
    method = state.hypergradient
    assert isinstance(method, hk.algorithms.StochasticNeumann)
    assert (method.terms, method.step, method.misscaled) == (4, 0.2, True)


@pytest.mark.parametrize("option", [{"terms": 4}, {"step_size": 0.2}, {"misscaled": True}], ids=str)
def test_stocbio_refuses_settings_of_a_series_that_is_replaced(option: Any) -> None:
    with pytest.raises(hk.HyperkronError, match="belong to the Neumann series"):
        hk.algorithms.StocBiO(hypergradient=hk.kfac(), **option)


# --- Monte-Carlo samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "curvature"), [(hk.kfac, hk.curvature.KFAC), (hk.ekfac, hk.curvature.EKFAC)], ids=["kfac", "ekfac"]
)
def test_named_methods_take_the_number_of_samples(named: Any, curvature: Any) -> None:
    inner, outer = SUM.data()
    model, hyper = SUM.modules()
    with torch.no_grad():
        model.weight.fill_(0.3)
    found, wanted, one, exact = (
        method.compute(SUM.problem(), model, hyper, inner, outer).grads["value"]
        for method in (
            named(0.1, samples=500),
            hk.Implicit(curvature(0.1, samples=500), hk.solvers.Direct()),
            named(0.1),
            named(0.1, fisher="type-2"),
        )
    )
    assert torch.equal(found, wanted)
    assert float((found - exact).norm()) < 0.2 * float((one - exact).norm())
    with pytest.raises(hk.HyperkronError, match="samples=0"):
        named(samples=0)
