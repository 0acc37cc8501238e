"""Recorded solves that do all their iterations: nothing is read on the way, and nothing else is different."""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from dense_operator import flatten, random_spd
from hyperkron.curvature.base import Curvature
from hyperkron.evaluation.point import Point
from hyperkron.losses import classification
from hyperkron.solution import HyperkronError, NonFiniteError, Status
from hyperkron.solvers import CG, Direct, GradientDescent, Neumann, Solver
from recorded import START, B, N, System, alike, nothing_read, to_a_bit

UNEVENTFUL = {
    "cg": System(CG(4)),
    "cg, one": System(CG(1)),
    "cg, start": System(CG(3), start=START),
    "cg, float32": System(CG(3), dtype=torch.float32),
    "cg, preconditioner": System(CG(3), preconditioner=random_spd(N, condition=3.0, seed=5)),
    "neumann": System(Neumann(6, step=0.05)),
    "neumann, no term": System(Neumann(0, step=0.05)),
    "neumann, float32": System(Neumann(6, step=0.05), dtype=torch.float32),
    "gradient descent": System(GradientDescent(6, step=0.05)),
    "gradient descent, start": System(GradientDescent(6, step=0.05), start=START),
    "gradient descent, one": System(GradientDescent(1, step=0.05), start=START),
    "gradient descent, preconditioner": System(
        GradientDescent(6, step=0.05), preconditioner=random_spd(N, condition=3.0, seed=5)
    ),
    "gradient descent, preconditioner, start": System(
        GradientDescent(6, step=0.05), start=START, preconditioner=random_spd(N, condition=3.0, seed=5)
    ),
    "gradient descent, preconditioner, float32": System(
        GradientDescent(6, step=0.05), preconditioner=random_spd(N, condition=3.0, seed=5), dtype=torch.float32
    ),
}


@pytest.mark.parametrize("name", UNEVENTFUL)
def test_a_recorded_solve_is_the_ordinary_one(name: str) -> None:
    system = UNEVENTFUL[name]
    expected = system.solve()
    found = system.replayed()
    assert found is not None and expected.residual is not None
    assert torch.equal(flatten(found.value), flatten(expected.value))
    assert expected.status is Status.BUDGET
    assert alike(found, expected) and found.products == expected.products


@pytest.mark.parametrize("name", UNEVENTFUL)
def test_every_product_matters(name: str) -> None:
    system = UNEVENTFUL[name]
    for good in range(system.solve().products):
        spoilt = dataclasses.replace(system, good=good)
        assert spoilt.solve().status is Status.NON_FINITE
        assert spoilt.replayed() is None


def test_a_replay_on_other_numbers_has_its_own_residual() -> None:
    first, second = System(CG(3)), System(CG(3), b=START)
    found = first.recorded().replayed(second.recorded().unread)
    assert found is not None and found.residual == to_a_bit(second.solve().residual) != first.solve().residual


@pytest.mark.parametrize("solver", [CG(3), Neumann(5, step=0.05), GradientDescent(5, step=0.05)])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-8, 1e8, 1e30, math.nan, math.inf])
def test_right_hand_sides_that_need_care_are_found_afterwards(solver: Solver, scale: float) -> None:
    """The solves themselves go well, but zero, NaN and what float32 cannot square are another way."""
    system = System(solver, b=scale * B)
    if math.isfinite(scale):
        assert system.solve().status in (Status.BUDGET, Status.CONVERGED)
    else:
        with pytest.raises(NonFiniteError, match="b holds NaN or infinity"):
            system.solve()
    assert system.replayed() is None


@pytest.mark.parametrize("solver", [CG(3), GradientDescent(5, step=0.05)])
def test_a_start_that_is_not_finite_is_found_afterwards(solver: Solver) -> None:
    system = System(solver, start=START * math.inf)
    with pytest.raises(NonFiniteError, match="start holds NaN or infinity"):
        system.solve()
    assert system.replayed() is None


def test_the_ordinary_way_reads_once_for_each_iteration() -> None:
    reads: list[int] = []
    read = Tensor.tolist
    for system, count in ((System(CG(4)), 6), (System(CG(4), start=START), 7), (System(Neumann(5, step=0.05)), 7)):
        reads.clear()
        with patch.object(Tensor, "tolist", lambda x: reads.append(1) or read(x)):  # type: ignore[func-returns-value]
            system.solve()
        assert len(reads) == count  # the door (and that of the start), the first residual, iterations


# --- the whole hypergradient -----------------------------------------------------------------


def problem() -> tuple[hk.BilevelProblem, nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(0)
    model, weights = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double(), hk.SampleWeights(8).double()
    x, y, index = torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,)), torch.arange(8)

    def inner(m: nn.Module, w: nn.Module, b: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])) + hk.losses.l2(m, 0.01)

    def outer(m: nn.Module, w: nn.Module, b: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(m(b[0]), b[1])

    return hk.BilevelProblem(inner, outer), model, weights, (x, y, index), (x.flip(0), y, index)


@pytest.mark.parametrize("cross", ["auto", "reverse", "forward", "difference"])
@pytest.mark.parametrize("curvature", [hk.curvature.Hessian(0.5), hk.curvature.GGN(0.5), hk.curvature.Identity(0.3)])
@pytest.mark.parametrize("solver", [CG(2), Neumann(4, step=0.1), GradientDescent(4, step=0.1)])
def test_a_recorded_hypergradient_reads_nothing(
    curvature: Curvature, solver: Solver, cross: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "answers_at_once", lambda x: False)  # as on a GPU
    if isinstance(curvature, hk.curvature.Identity) and isinstance(solver, CG):
        solver = Neumann(2, step=0.1)  # CG would be done at once
    method = hk.Implicit(curvature, solver, cross=cross, graph=True)
    at = problem()
    expected = method.compute(*at)
    assert expected.status is Status.BUDGET and expected.solution is not None
    with Point(*at, recording=True) as point, nothing_read():
        answer = method._answer(point, None)
        unread = point.execution.unread()
    torch.testing.assert_close(answer.grads, expected.grads, rtol=1e-9, atol=1e-12)
    assert point.execution.replayed(unread)
    found = answer.solution.wait()
    torch.testing.assert_close(found.value, expected.solution.value, rtol=0.0, atol=0.0)
    assert found.residual == to_a_bit(expected.solution.residual)


# --- what is refused -------------------------------------------------------------------------


class Reading(CG):
    """A solver of somebody else, of which nothing is known."""

    _record = Solver._record


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"solver": Neumann(3)}, r"step=None of Neumann.*pass step=.*or graph=False"),
        ({"solver": GradientDescent(3)}, r"step=None of GradientDescent.*pass step="),
        (
            {"solver": CG(3), "preconditioner": hk.curvature.KFAC(0.1)},
            r"preconditioner=KFAC; leave the preconditioner out, or",
        ),
        ({"solver": CG(3), "preconditioner": hk.curvature.Identity()}, r"preconditioner=Identity"),
        (
            {"solver": GradientDescent(3, step=0.1), "preconditioner": hk.curvature.KFAC(0.1)},
            r"preconditioner=KFAC; leave",
        ),
        (
            {"solver": CG(3), "curvature": hk.curvature.KFAC(0.1)},
            r"KFAC and CG; use KFAC, EKFAC.*with Direct.*Hessian, GGN",
        ),
        ({"solver": CG(3), "curvature": hk.curvature.EKFAC(0.1)}, r"EKFAC and CG; use"),
        ({"solver": Direct(), "curvature": hk.curvature.GGN(0.1)}, r"GGN and Direct; use"),
        ({"solver": Reading(3)}, r"solver=Reading\(iterations=3.*may read from the device.*or graph=False"),
    ],
)
def test_what_cannot_be_recorded_is_refused(options: dict[str, Any], named: str) -> None:
    options = {"curvature": hk.curvature.Hessian(0.1), **options}
    hk.Implicit(**options)
    with pytest.raises(HyperkronError, match=f"graph=True does not work with {named}"):
        hk.Implicit(**options, graph=True)


def test_named_methods_pass_graph_on() -> None:
    made = hk.cg(2, graph=True), hk.neumann(2, step=0.1, graph=True), hk.gradient_descent(2, step=0.1, graph=True)
    assert all(method.graph for method in made)
    assert not any(method.graph for method in (hk.cg(), hk.neumann(), hk.gradient_descent()))
    with pytest.raises(HyperkronError, match="pass step="):
        hk.neumann(graph=True)


def test_a_gauss_newton_matrix_in_parts_is_not_recorded() -> None:
    class Halves(hk.BilevelProblem):
        def parts(self, batch: Any) -> list[Any]:
            return [tuple(x[:4] for x in batch), tuple(x[4:] for x in batch)]

    whole, *rest = problem()
    at = Halves(whole.inner, whole.outer), *rest
    method = hk.cg(2, curvature=hk.curvature.GGN(0.5), graph=True)
    method.compute(*at)
    with Point(*at, recording=True) as point, pytest.raises(HyperkronError, match=r"counts the rows .* whole batches"):
        method._answer(point, None)
