"""Replays of the identity, EKFAC, SAMA and the iterative solvers: their answers are those of the ordinary way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hyperkron as hk
import replaying
from hyperkron.curvature.kfac import eigen
from hyperkron.evaluation.point import Point
from hyperkron.hypergradient import replay
from replaying import METHOD, PROBLEM, Batch, Rerun, batch, close, inner, network, outer, trained

device = replaying.device


def test_the_identity_can_be_recorded(device: str) -> None:
    expected = trained(hk.identity(cross="difference"), device)
    method = hk.identity(cross="difference", graph=True)
    METHOD[:] = [method]
    close(trained(method, device), expected)
    assert Rerun.made == 1


@pytest.mark.parametrize(
    ("options", "recordings"),
    [
        ({}, 0),  # every step makes a basis
        pytest.param({"basis_every": 4}, 1, marks=pytest.mark.long),
        pytest.param({"refresh_every": 3}, 1, marks=pytest.mark.long),
        ({"refresh_every": 3, "basis_every": 2}, 2),
        ({"basis_every": 4, "ema": 0.3}, 1),
        ({"basis_every": 4, "keep_previous": False}, 1),
    ],
)
def test_steps_of_ekfac_without_a_new_basis_are_recorded(device: str, options: dict[str, Any], recordings: int) -> None:
    expected = trained(hk.ekfac(1e-2, **options), device, 14)
    method = hk.ekfac(1e-2, **options, graph=True)
    METHOD[:] = [method]
    found = trained(method, device, 14)
    close(found, expected)
    assert Rerun.made == recordings
    for stat in ("curvature_age", "curvature_refreshes", "curvature_strategy"):
        assert [r.stats[stat] for r in found] == [r.stats[stat] for r in expected]


def test_a_spectrum_that_is_not_finite_is_found_after_a_replay(device: str) -> None:
    model, weights, method = network(device), hk.SampleWeights(80).to(device), hk.ekfac(basis_every=9, graph=True)
    METHOD[:] = [method]

    def step(i: int, scale: float = 1.0) -> hk.HypergradientResult:
        x, y, index = batch(i, device)
        other = (x * scale, y, index)
        return method.compute(PROBLEM, model, weights, (x, y, index), batch(50, device), curvature_batch=other)

    for i in range(4):
        step(i)
    assert Rerun.made == 1
    with pytest.raises(hk.NonFiniteError):  # no previous one: it was written over
        step(4, float("inf"))
    assert torch.isfinite(step(5).grads["weight"]).all()


def test_while_recording_a_spectrum_is_checked_without_being_read() -> None:
    eye, good = torch.eye(2)[None], torch.ones(1, 2, 2)
    spectra = {"good": good, "infinite": good * torch.inf, "zero": good - torch.eye(2), "nan": good * torch.nan}
    blocks = {name: eigen.EigenBlock(eye, eye, spectrum) for name, spectrum in spectra.items()}
    with Point(PROBLEM, network("cpu"), hk.SampleWeights(8), None, None, recording=True) as point:
        eigen.checked(point, eigen.EigenInverses(blocks))
    assert point.execution.unread().tolist() == [False, True, True, True]


@pytest.mark.parametrize("adam", [False, True])
def test_sama_is_recorded_where_no_moments_are_read(device: str, adam: bool) -> None:
    def run(graph: bool) -> list[Any]:
        model, weights = network(device), hk.SampleWeights(40).to(device)
        optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.1)
        method, found = hk.sama(optimizer, graph=graph), []
        METHOD[:] = [method]
        for i in range(6):
            optimizer.zero_grad()
            inner(model, weights, batch(i, device)).backward()
            optimizer.step()
            found.append(method.compute(PROBLEM, model, weights, batch(i, device), batch(50 + i, device)))
            if i == 3:
                optimizer.param_groups[0]["lr"] = 0.03  # recorded as a constant, so this needs another recording
        return found

    expected = run(False)
    close(run(True), expected)
    assert Rerun.made == (0 if adam else 2)


SOLVED: dict[str, Callable[..., hk.Implicit]] = {
    "cg": functools.partial(hk.cg, 2, 1.0),
    "cg, warm": functools.partial(hk.cg, 2, 1.0, warm_start=True),
    "cg, GGN": functools.partial(hk.cg, 3, curvature=hk.curvature.GGN(0.1), cross="difference"),
    "neumann": functools.partial(hk.neumann, 5, 1.0, step=0.05),
    "neumann, GGN": functools.partial(hk.neumann, 5, step=0.05, curvature=hk.curvature.GGN(0.1), cross="reverse"),
    "gradient descent": functools.partial(hk.gradient_descent, 5, 1.0, step=0.05),
}
"""Solvers that do all their iterations in :func:`trained`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ("cg", "neumann") else ()) for name in SOLVED]
)
def test_iterative_solvers_are_replayed(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    expected = trained(SOLVED[name](), device)
    method = SOLVED[name](graph=True)
    METHOD[:] = [method]
    found = trained(method, device)
    close(found, expected)
    residuals = [[r.solution.residual for r in results] for results in (found, expected)]
    assert residuals[0] == pytest.approx(residuals[1], rel=0.0 if device == "cpu" else 1e-3)
    assert len(set(residuals[0])) == len(found)
    assert (Rerun.made, method._replays._served) == (1, len(found) - 1)
    assert method.state.cross.calls == len(found)


def test_a_solve_that_ends_early_is_replayed(device: str) -> None:
    """One batch has a curvature so large that the series grows."""

    def steps(method: hk.Implicit) -> list[Any]:
        METHOD[:] = [method]
        model, weights = network(device)[3:], hk.SampleWeights(40).to(device)
        model[2] = nn.Linear(36, 3, device=device)
        batches = [batch(i, device) for i in range(5)]
        batches[3][0].mul_(30.0)
        return [method.compute(PROBLEM, model, weights, b, batch(50, device)) for b in batches]

    expected = steps(hk.neumann(5, step=0.05))
    method = hk.neumann(5, step=0.05, graph=True)
    found = steps(method)
    close(found, expected)
    assert [r.status for r in found] == [hk.Status.BUDGET] * 3 + [hk.Status.DIVERGED, hk.Status.BUDGET]
    assert [r.stats["iterations"] for r in found] == [r.stats["iterations"] for r in expected]
    assert found[3].solution.products == 5 > expected[3].solution.products
    assert (Rerun.made, method._replays._served) == (1, 4)


@pytest.mark.parametrize("name", ["cg", "cg, warm", "neumann"])
def test_solves_may_all_end_early(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    early = {"neumann": functools.partial(hk.neumann, 5, step=1e3), "cg": functools.partial(hk.cg, 8, 0.0)}
    early["cg, warm"] = functools.partial(early["cg"], warm_start=True)
    expected, method = trained(early[name](), device), early[name](graph=True)
    METHOD[:] = [method]
    found = trained(method, device)
    close(found, expected)
    assert all(not r.status.ok for r in found)
    for stat in ("iterations", "residual"):
        mine, its = [[r.stats.get(stat, -1.0) for r in results] for results in (found, expected)]
        assert mine == pytest.approx(its, rel=0.0 if device == "cpu" else 1e-3)
    assert (Rerun.made, method._replays._served) == (1, len(found) - 1)


def test_replays_that_all_have_to_be_done_again_are_given_up(device: str) -> None:
    """A right-hand side so small that float32 cannot square it is scaled, which only the ordinary way does."""

    def faint(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
        return outer(model, weights, b) * 1e-9

    method, problem = hk.cg(2, 1.0, graph=True), hk.BilevelProblem(inner, faint)
    METHOD[:] = [method]
    model, weights = network(device), hk.SampleWeights(40).to(device)
    with pytest.warns(hk.HyperkronWarning, match="graph=True has no effect, .* most replays had to be repeated"):
        found = [method.compute(problem, model, weights, batch(i, device), batch(50, device)) for i in range(5)]
    assert all(r.status.ok for r in found)
    assert method._replays._failed_replays == replay.MAX_FAILED_REPLAYS
