"""Recorded solves: nothing is read on the way, and their numbers are judged afterwards as they would have been."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyperkron as hk
from dense_operator import DenseInvertible, FailingOperator, flatten, random_spd, random_vector, unflatten
from hyperkron.curvature.base import Curvature, Invertible
from hyperkron.losses import classification
from hyperkron.point import Point
from hyperkron.solution import HyperkronError, NonFiniteError, Solution, Status
from hyperkron.solvers import CG, Direct, GradientDescent, Neumann, Solver, Watch

N = 12
A = random_spd(N, condition=10.0, seed=0)
B = random_vector(N, seed=1)
START = random_vector(N, seed=2)
EYE = torch.eye(N, dtype=torch.float64)


class _NoReads(TorchDispatchMode):
    """Refuses what waits for the device below Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select")
        assert func.overloadpacket.__name__ not in waits, func
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def nothing_read() -> Iterator[None]:
    """Every way to a number of a tensor fails."""

    def fail(*args: Any) -> None:
        raise AssertionError("read from the device")

    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__"):
            stack.enter_context(patch.object(Tensor, name, fail))
        stack.enter_context(_NoReads())
        yield


@dataclass
class System:
    """One solve, done at once or recorded."""

    solver: Solver
    matrix: Tensor = A
    b: Tensor = B
    start: Tensor | None = None
    good: int = 1000
    preconditioner: Tensor | None = None

    def solve(self, watch: Watch | None = None) -> Solution:
        start = None if self.start is None else unflatten(self.start)
        second: Invertible | None = None if self.preconditioner is None else DenseInvertible(self.preconditioner)
        operator = FailingOperator(self.matrix, self.good)
        return self.solver.solve(operator, unflatten(self.b), start=start, preconditioner=second, watch=watch)

    def recorded(self) -> tuple[Solution, Watch, list[float]]:
        """The solution of a recording, its watch and the numbers that were not read."""
        watch = Watch(recording=True)
        with nothing_read():
            solution = self.solve(watch)
        return solution, watch, [x for part in watch.unread for x in part.tolist()]


UNEVENTFUL = {
    "cg": System(CG(4)),
    "cg, one": System(CG(1)),
    "cg, start": System(CG(3), start=START),
    "cg, float32": System(CG(3), matrix=A.float(), b=B.float()),
    "cg, preconditioner": System(CG(3), preconditioner=random_spd(N, condition=3.0, seed=5)),
    "neumann": System(Neumann(6, step=0.05)),
    "neumann, no term": System(Neumann(0, step=0.05)),
    "neumann, float32": System(Neumann(6, step=0.05), matrix=A.float(), b=B.float()),
    "gradient descent": System(GradientDescent(6, step=0.05)),
    "gradient descent, start": System(GradientDescent(6, step=0.05), start=START),
    "gradient descent, one": System(GradientDescent(1, step=0.05), start=START),
}


@pytest.mark.parametrize("name", UNEVENTFUL)
def test_a_recorded_solve_is_the_ordinary_one(name: str) -> None:
    system = UNEVENTFUL[name]
    expected = system.solve()
    found, watch, numbers = system.recorded()
    assert expected.status is found.status is Status.BUDGET
    assert torch.equal(flatten(found.value), flatten(expected.value))
    assert (found.iterations, found.products) == (expected.iterations, expected.products)
    assert found.residual is watch.residual is None
    for _ in range(2):  # each replay is judged on its own
        assert watch.uneventful(numbers)
        assert watch.residual == expected.residual is not None


@pytest.mark.parametrize("name", UNEVENTFUL)
def test_a_replay_is_judged_by_its_own_numbers(name: str) -> None:
    """Every number matters, and one that was bad does not tell against the next replay."""
    _, watch, numbers = UNEVENTFUL[name].recorded()
    for i in range(len(numbers)):
        assert not watch.uneventful([*numbers[:i], math.nan, *numbers[i + 1 :]]), i
        assert watch.uneventful(numbers)


def test_a_replay_on_other_numbers_has_its_own_residual() -> None:
    first, second = System(CG(3)), System(CG(3), b=START)
    _, watch, _ = first.recorded()
    _, _, numbers = second.recorded()
    assert watch.uneventful(numbers)
    assert watch.residual == second.solve().residual != first.solve().residual


def test_a_judgement_forgets_the_replay_before() -> None:
    """‖A‖ as it was seen, by which CG knows rounding, and the least residual, by which a series knows growth."""
    _, watch, numbers = System(CG(3)).recorded()
    _, _, large = System(CG(3), matrix=1e18 * A).recorded()
    assert watch.uneventful(large) and watch.uneventful(numbers)
    _, watch, _ = System(Neumann(2, step=0.05)).recorded()
    little = math.sqrt(torch.finfo(torch.float64).eps)
    grown = [1.0, 1.0, 1.0, (1.0 + 0.9 * little) ** 2, 1.0, (1.0 + 1.8 * little) ** 2]  # the first term counts
    assert watch.uneventful(grown) and watch.uneventful(grown)


INDEFINITE = torch.diag(torch.tensor([-0.5, *range(1, N)], dtype=torch.float64))

EVENTS = {
    "cg converges": (System(CG(30, tolerance=0.05)), Status.CONVERGED),
    "cg converges in its last iteration": (System(CG(1), matrix=4.0 * EYE), Status.CONVERGED),
    "cg starts at the solution": (System(CG(3), start=torch.linalg.solve(A, B)), Status.CONVERGED),
    "cg's first direction is bad": (System(CG(3), matrix=-A), Status.NONPOSITIVE_CURVATURE),
    "cg's start is bad": (System(CG(3), matrix=-A, start=START), Status.NONPOSITIVE_CURVATURE),
    "cg's later direction is bad": (System(CG(N), matrix=INDEFINITE), Status.NONPOSITIVE_CURVATURE),
    "cg's preconditioner is bad": (System(CG(3), preconditioner=-A), Status.NONPOSITIVE_CURVATURE),
    "cg's operator is zero": (System(CG(3), matrix=0.0 * A), Status.NONPOSITIVE_CURVATURE),
    "cg's first product is nan": (System(CG(3), good=0), Status.NON_FINITE),
    "cg's last product is nan": (System(CG(3), good=2), Status.NON_FINITE),
    "cg's residual at the start is nan": (System(CG(3), start=START, good=0), Status.NON_FINITE),
    "neumann converges": (System(Neumann(9, step=0.25), matrix=4.0 * EYE), Status.CONVERGED),
    "neumann diverges": (System(Neumann(9, step=0.5)), Status.DIVERGED),
    "neumann overflows": (System(Neumann(9, step=1e200)), Status.DIVERGED),
    "neumann meets negative curvature": (System(Neumann(9, step=0.1), matrix=-A), Status.NONPOSITIVE_CURVATURE),
    "neumann's product is nan": (System(Neumann(9, step=0.05), good=4), Status.NON_FINITE),
    "gradient descent diverges": (System(GradientDescent(9, step=0.5), start=START), Status.DIVERGED),
    "gradient descent's start is nan": (System(GradientDescent(9, step=0.05), start=START, good=0), Status.NON_FINITE),
}


@pytest.mark.parametrize("name", EVENTS)
def test_what_the_ordinary_way_would_have_met_is_found_afterwards(name: str) -> None:
    system, status = EVENTS[name]
    assert system.solve().status is status
    _, watch, numbers = system.recorded()
    assert not watch.uneventful(numbers)


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
    _, watch, numbers = system.recorded()
    assert not watch.uneventful(numbers)


@pytest.mark.parametrize("solver", [CG(3), GradientDescent(5, step=0.05)])
def test_a_start_that_is_not_finite_is_found_afterwards(solver: Solver) -> None:
    system = System(solver, start=START * math.inf)
    with pytest.raises(NonFiniteError, match="start holds NaN or infinity"):
        system.solve()
    _, watch, numbers = system.recorded()
    assert not watch.uneventful(numbers)


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
@pytest.mark.parametrize("curvature", [hk.Hessian(0.5), hk.GGN(0.5), hk.Identity(0.3)])
@pytest.mark.parametrize("solver", [CG(2), Neumann(4, step=0.1), GradientDescent(4, step=0.1)])
def test_a_recorded_hypergradient_reads_nothing(
    curvature: Curvature, solver: Solver, cross: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "answers_at_once", lambda x: False)  # as on a GPU
    if isinstance(curvature, hk.Identity) and isinstance(solver, CG):
        solver = Neumann(2, step=0.1)  # CG would be done at once
    method = hk.Implicit(curvature, solver, cross=cross, graph=True)
    at = problem()
    expected = method.compute(*at)
    assert expected.status is Status.BUDGET and expected.solution is not None
    with Point(*at, recording=True) as point, nothing_read():
        answer = method._answer(point, None)
    torch.testing.assert_close(answer.grads, expected.grads, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(answer.solution.value, expected.solution.value, rtol=0.0, atol=0.0)
    assert answer.watch.uneventful([x for part in answer.watch.unread for x in part.tolist()])
    assert answer.watch.residual == expected.solution.residual


# --- what is refused -------------------------------------------------------------------------


class Reading(CG):
    """A solver of somebody else, of which nothing is known."""

    check_graph = Solver.check_graph


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"solver": Neumann(3)}, r"step=None of Neumann.*pass step=.*or graph=False"),
        ({"solver": GradientDescent(3)}, r"step=None of GradientDescent.*pass step="),
        ({"solver": CG(3), "preconditioner": hk.KFAC(0.1)}, r"preconditioner=KFAC; leave the preconditioner out, or"),
        ({"solver": CG(3), "preconditioner": hk.Identity()}, r"preconditioner=Identity"),
        (
            {"solver": CG(3), "curvature": hk.KFAC(0.1)},
            r"KFAC and CG; use KFAC, EKFAC.*with Direct.*Hessian, GGN",
        ),
        ({"solver": CG(3), "curvature": hk.EKFAC(0.1)}, r"EKFAC and CG; use"),
        ({"solver": Direct(), "curvature": hk.GGN(0.1)}, r"GGN and Direct; use"),
        ({"solver": Reading(3)}, r"solver=Reading\(iterations=3.*may read from the device.*or graph=False"),
    ],
)
def test_what_cannot_be_recorded_is_refused(options: dict[str, Any], named: str) -> None:
    options = {"curvature": hk.Hessian(0.1), **options}
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
    method = hk.cg(2, curvature=hk.GGN(0.5), graph=True)
    method.compute(*at)
    with Point(*at, recording=True) as point, pytest.raises(HyperkronError, match=r"counts the rows .* whole batches"):
        method._answer(point, None)
