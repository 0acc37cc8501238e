"""Recorded solves that end early tell and return what the ordinary way does, having spent all their products."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dense_operator import flatten, random_vector
from hyperkron import trees
from hyperkron.curvature.base import Operator
from hyperkron.kernels.execution import Execution
from hyperkron.solution import Solution, Status
from hyperkron.solvers import CG, GradientDescent, LinearSystem, Neumann, Solver
from hyperkron.trees import Tree
from recorded import EYE, START, A, N, System, alike

DTYPES = [torch.float32, torch.float64]
MOSTLY = pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.float64])
"""In float32 too by ``make long``; by ``make test`` where it overflows, and in drawn examples."""
INDEFINITE = torch.diag(torch.tensor([-0.5, *range(1, N)], dtype=torch.float64))


def same(system: System, products: int) -> Solution:
    """The replay of a solve is the ordinary one, but for ``products``."""
    expected, found = system.solve(), system.replayed()
    assert found is not None and found.products == products
    assert torch.equal(flatten(found.value), flatten(expected.value))
    assert [x.dtype for x in found.value.values()] == [x.dtype for x in expected.value.values()]
    assert alike(found, expected)
    return found


@MOSTLY
@pytest.mark.parametrize("start", [None, START])
@pytest.mark.parametrize("then", [-1.0, 0.0])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_cg_meets_negative_curvature_along_any_direction(
    bad: int, then: float, start: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """Where it is zero, the step and all that follows is not finite."""
    spent = 0 if start is None else 1
    found = same(System(CG(4), start=start, good=bad + spent, then=then, dtype=dtype), 4 + spent)
    assert (found.status, found.iterations) == (Status.NONPOSITIVE_CURVATURE, bad)
    assert all(x.isfinite().all() and x.any() for x in found.value.values())


@MOSTLY
@pytest.mark.parametrize("start", [None, 0.1 * START])
@pytest.mark.parametrize("iterations", [1, 2, 3, 6])
def test_cg_converges_before_or_in_its_last_iteration(
    iterations: int, start: torch.Tensor | None, dtype: torch.dtype
) -> None:
    reached = System(CG(iterations), start=start, dtype=dtype).solve().residual
    assert reached is not None
    found = same(System(CG(6, tolerance=reached), start=start, dtype=dtype), 6 if start is None else 7)
    assert (found.status, found.iterations) == (Status.CONVERGED, iterations)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [None, START])
@pytest.mark.parametrize("then", [1e3, -1e3, 1e200, math.inf])
@pytest.mark.parametrize("bad", [1, *(pytest.param(x, marks=pytest.mark.long) for x in (2, 5)), 8])
def test_a_fixed_step_grows_at_any_update(
    bad: int, then: float, start: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """By overflow too, which in float32 1e200 is."""
    spent = 0 if start is None else 1
    system = System(GradientDescent(9, step=0.05), start=start, good=bad - 1 + spent, then=then, dtype=dtype)
    if math.isinf(then) or (then == 1e200 and dtype is torch.float32):
        assert system.solve().status is Status.NON_FINITE and system.replayed() is None
        return
    found = same(system, 8 + spent)
    assert found.status is (Status.NONPOSITIVE_CURVATURE if then < 0.0 else Status.DIVERGED)
    assert found.iterations == (1 if start is None and bad == 1 else bad - 1)


@MOSTLY
@pytest.mark.parametrize("updates", [1, 2, 5, 9])
def test_a_series_converges_at_any_term(updates: int, dtype: torch.dtype) -> None:
    found = same(System(Neumann(9, step=0.125), matrix=4.0 * EYE, good=updates - 1, then=2.0, dtype=dtype), 9)
    assert (found.status, found.iterations) == (Status.CONVERGED, updates)


@pytest.mark.parametrize("start", [None, START])
@pytest.mark.parametrize("then", [-1.0, 7.0])
def test_a_residual_that_shrinks_again_makes_no_difference(then: float, start: torch.Tensor | None) -> None:
    solver = GradientDescent(12, step=0.125)
    found = same(System(solver, matrix=4.0 * EYE, start=start, good=4, then=then, bad=1), 11 + (start is not None))
    assert not found.status.ok and found.iterations == (4 if start is None else 3)


EARLY = {
    "cg starts at the solution": (System(CG(3), matrix=4.0 * EYE, start=START, b=4.0 * START), Status.CONVERGED),
    "cg's later direction is bad": (System(CG(N), matrix=INDEFINITE), Status.NONPOSITIVE_CURVATURE),
    "cg's preconditioner is bad": (System(CG(3), preconditioner=-A), Status.NONPOSITIVE_CURVATURE),
    "cg's first direction is, preconditioned, bad": (
        System(CG(3), matrix=-A, preconditioner=A + EYE),
        Status.NONPOSITIVE_CURVATURE,
    ),
    "cg's operator is zero": (System(CG(3), matrix=0.0 * A), Status.NONPOSITIVE_CURVATURE),
    "neumann diverges": (System(Neumann(9, step=0.5)), Status.DIVERGED),
    "neumann overflows": (System(Neumann(9, step=1e200)), Status.DIVERGED),
    "neumann meets negative curvature": (System(Neumann(9, step=0.1), matrix=-A), Status.NONPOSITIVE_CURVATURE),
    "gradient descent diverges": (System(GradientDescent(9, step=0.5), start=START), Status.DIVERGED),
}


UNKNOWN = {"cg's preconditioner is bad", "neumann overflows"}
"""Of which the residual of the value is not known, or not finite."""


@pytest.mark.parametrize("name", EARLY)
def test_an_early_end_is_that_of_the_ordinary_way(name: str) -> None:
    system, status = EARLY[name]
    count = (
        system.solver.iterations if isinstance(system.solver, CG) else 9 - isinstance(system.solver, GradientDescent)
    )
    found = same(system, count + (system.start is not None))
    assert found.status is status
    assert (found.residual is None) == (name in UNKNOWN)


@pytest.mark.parametrize("solver", [CG(4, tolerance=0.5), Neumann(4, step=0.05), GradientDescent(5, step=0.05)])
def test_a_nan_before_the_end_is_refused_and_one_after_it_is_not_seen(solver: Solver) -> None:
    system = System(solver, matrix=INDEFINITE if isinstance(solver, CG) else A)
    assert dataclasses.replace(system, good=0).replayed() is None
    early = System(solver, matrix=4.0 * EYE) if isinstance(solver, CG) else System(solver, matrix=20.0 * EYE)
    assert early.solve().status is Status.CONVERGED and early.solve().products == 1
    same(dataclasses.replace(early, good=1), 4)


class _OneDevice(TorchDispatchMode):
    """Refuses whatever touches a tensor elsewhere, which in a CUDA graph would be a copy from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves((args, kwargs, found)) if isinstance(x, torch.Tensor)]
        assert {x.device.type for x in tensors} == {"meta"}, func
        return found


class _Doubling(Operator):
    def matvec(self, v: Tree) -> Tree:
        return trees.scale(v, 2.0)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("solver", [CG(3), Neumann(4, step=0.1), GradientDescent(4, step=0.1)])
def test_a_recording_takes_no_number_from_the_host(solver: Solver, started: bool) -> None:
    """Tensors without memory cannot be read either."""
    b = {"weight": torch.empty(3, 2, device="meta"), "scale": torch.empty((), device="meta")}
    execution = Execution(torch.device("meta"), recorded=True)
    with _OneDevice():
        solver.record(LinearSystem(_Doubling(), b, b if started and solver.uses_start else None), execution)
        assert len(execution.unread()) == 4 + (started and solver.uses_start)  # flags, and the outcome's three


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    powers=st.lists(st.floats(-3.0, 3.0), min_size=N, max_size=N),
    negative=st.integers(0, 2),
    solver=st.sampled_from([CG(1), CG(5), CG(9, tolerance=1e-2), Neumann(6, step=0.3), GradientDescent(6, step=0.3)]),
    started=st.booleans(),
    turn=st.tuples(st.integers(0, 6), st.sampled_from([1.0, -1.0, 0.0, 30.0, math.nan])),
    dtype=st.sampled_from(DTYPES),
)
def test_a_replay_is_the_ordinary_way_or_refused(
    seed: int,
    powers: list[float],
    negative: int,
    solver: Solver,
    started: bool,
    turn: tuple[int, float],
    dtype: torch.dtype,
) -> None:
    values = torch.tensor([-(10.0**x) if i < negative else 10.0**x for i, x in enumerate(powers)], dtype=torch.float64)
    basis, _ = torch.linalg.qr(random_vector(N * N, seed).reshape(N, N))
    start = random_vector(N, seed + 1) if started and solver.uses_start else None
    system = System(solver, (basis * values) @ basis.T, random_vector(N, seed + 2), start, *turn, dtype=dtype)
    if system.solve().status is Status.NON_FINITE:
        assert system.replayed() is None
    else:
        same(system, system.recorded().products)
