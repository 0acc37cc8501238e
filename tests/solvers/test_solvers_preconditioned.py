"""Gradient descent with a preconditioner, against closed forms and the plain iteration in other coordinates."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense_operator import (
    DenseInvertible,
    DenseOperator,
    FailingOperator,
    flatten,
    random_spd,
    random_vector,
    unflatten,
)
from hyperkron.solution import HyperkronError, Status
from hyperkron.solvers import GradientDescent
from hyperkron.trees import Tree
from recorded import START, System, alike
from solving import EYE, A, B, N, close

M = A + random_spd(N, condition=10.0, seed=5)
"""M⁻¹A has its eigenvalues between 0 and 1, whatever A's are."""


def diagonal(*values: float) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def closed_form(m: Tensor, a: Tensor, b: Tensor, steps: int, step: float, start: Tensor | None = None) -> Tensor:
    """A⁻¹b + (I − ηM⁻¹A)^k (v₀ − A⁻¹b)."""
    solution, eye = torch.linalg.solve(a, b), torch.eye(len(b), dtype=b.dtype)
    contraction = torch.linalg.matrix_power(eye - step * torch.linalg.solve(m, a), steps)
    return solution + contraction @ ((torch.zeros_like(b) if start is None else start) - solution)


def size(m: Tensor, r: Tensor) -> float:
    """√(rᵀM⁻¹r)."""
    return (r @ torch.linalg.solve(m, r)).sqrt().item()


class Counting(DenseInvertible):
    """Counts what is asked of its inverse, which becomes NaN after ``good`` times."""

    def __init__(self, matrix: Tensor, good: int = 1000) -> None:
        super().__init__(matrix)
        self.good, self.solves = good, 0

    def solve(self, b: Tree) -> Tree:
        self.solves += 1
        found = super().solve(b)
        return found if self.solves <= self.good else {k: x * math.nan for k, x in found.items()}


# --- the iteration -----------------------------------------------------------------------


@pytest.mark.parametrize("start", [None, START], ids=["zero", "start"])
@pytest.mark.parametrize("step", [0.5, 1.3])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_it_has_its_closed_form(steps: int, step: float, start: Tensor | None) -> None:
    operator, m = DenseOperator(A), Counting(M)
    given = None if start is None else unflatten(start)
    solution = GradientDescent(steps, step=step).solve(operator, unflatten(B), start=given, preconditioner=m)
    close(solution.value, closed_form(M, A, B, steps, step, start), 1e-12)
    assert solution.status is Status.BUDGET and solution.iterations == steps
    more = 0 if start is None else 1
    assert (solution.products, operator.products, m.products, m.solves) == (
        *(steps - 1 + more,) * 2,
        0,
        steps + more,
    )
    late = closed_form(M, A, B, steps - 1, step, start)
    assert solution.residual == pytest.approx(size(M, B - A @ late) / size(M, B), rel=1e-10)


def test_the_matrix_itself_with_a_whole_step_is_exact_at_once_without_a_product() -> None:
    operator = DenseOperator(A)
    solution = GradientDescent(1, step=1.0).solve(operator, unflatten(B), preconditioner=DenseInvertible(A))
    close(solution.value, torch.linalg.solve(A, B), 1e-13)
    assert (solution.status, solution.products, operator.products) == (Status.BUDGET, 0, 0)


def test_a_multiple_of_the_identity_converges_at_once() -> None:
    m = DenseInvertible(2.0 * EYE)
    solution = GradientDescent(10, step=0.5).solve(DenseOperator(4.0 * EYE), unflatten(B), preconditioner=m)
    assert (solution.status, solution.iterations, solution.products) == (Status.CONVERGED, 1, 1)
    close(solution.value, B / 4.0, 1e-15)


def test_it_stays_at_the_solution() -> None:
    start, m = unflatten(B / 4.0), DenseInvertible(2.0 * EYE)
    solution = GradientDescent(3).solve(DenseOperator(4.0 * EYE), unflatten(B), start=start, preconditioner=m)
    assert (solution.status, solution.products, solution.residual) == (Status.CONVERGED, 2, 0.0)
    assert torch.equal(flatten(solution.value), B / 4.0)


def test_without_a_step_it_takes_whole_ones_and_seeks_none() -> None:
    operator = DenseOperator(A)
    solution = GradientDescent(4).solve(operator, unflatten(B), preconditioner=DenseInvertible(M))
    close(solution.value, closed_form(M, A, B, 4, 1.0), 1e-12)
    assert solution.products == operator.products == 3


def test_it_continues_from_where_it_ended() -> None:
    b, operator, m = unflatten(B), DenseOperator(A), DenseInvertible(M)
    first = GradientDescent(4, step=0.8).solve(operator, b, preconditioner=m)
    second = GradientDescent(6, step=0.8).solve(operator, b, start=first.value, preconditioner=m)
    whole = GradientDescent(10, step=0.8).solve(operator, b, preconditioner=m)
    close(second.value, flatten(whole.value), 1e-13)


def test_the_identity_makes_no_difference() -> None:
    solver = GradientDescent(6, step=0.015)
    plain = solver.solve(DenseOperator(A), unflatten(B), start=unflatten(START))
    found = solver.solve(DenseOperator(A), unflatten(B), start=unflatten(START), preconditioner=DenseInvertible(EYE))
    close(found.value, flatten(plain.value), 1e-14)
    assert found.residual == pytest.approx(plain.residual, rel=1e-13)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_extreme_right_hand_sides_are_scaled(scale: float) -> None:
    solver, m = GradientDescent(4, step=0.5), DenseInvertible(M)
    unit = solver.solve(DenseOperator(A), unflatten(B), preconditioner=m)
    scaled = solver.solve(DenseOperator(A), unflatten(B * scale), preconditioner=m)
    assert torch.equal(flatten(scaled.value), flatten(unit.value) * scale)


# --- how it ends -------------------------------------------------------------------------


def test_a_step_too_large_for_the_preconditioned_matrix_diverges_and_its_best_iterate_is_returned() -> None:
    """The plain norm of the residual still falls long after the one of M⁻¹ has begun to rise."""
    a, m, b = diagonal(1.0, 1.5, 4e-4), diagonal(1.0, 1.0, 1e-4), vector(1.0, 1.0, 1e-5)
    assert GradientDescent(100, step=0.6).solve(DenseOperator(a), unflatten(b)).status.ok
    solution = GradientDescent(100, step=0.6).solve(DenseOperator(a), unflatten(b), preconditioner=DenseInvertible(m))
    assert solution.status is Status.DIVERGED
    left = [b - a @ closed_form(m, a, b, k, 0.6) for k in range(30)]
    best = min(range(30), key=lambda k: size(m, left[k]))
    assert 1 < best < min(range(30), key=lambda k: left[k].norm().item())
    close(solution.value, closed_form(m, a, b, best, 0.6), 1e-12)
    assert (solution.iterations, solution.products) == (best, best + 1)
    assert solution.residual == pytest.approx(size(m, left[best]) / size(m, b), rel=1e-8)


def test_one_that_diverges_from_a_start_returns_it() -> None:
    start, m = unflatten(START), DenseInvertible(0.4 * A)
    solution = GradientDescent(9).solve(DenseOperator(A), unflatten(B), start=start, preconditioner=m)
    assert (solution.status, solution.iterations, solution.products) == (Status.DIVERGED, 0, 2)
    assert torch.equal(flatten(solution.value), START)


@pytest.mark.parametrize("step", [3.0, 1e200])
def test_one_that_diverges_at_once_returns_its_first_term(step: float) -> None:
    """With the larger step the residual overflows, and M⁻¹ has infinities to deal with."""
    m = DenseInvertible(A)
    solution = GradientDescent(9, step=step).solve(DenseOperator(A), unflatten(B), preconditioner=m)
    assert (solution.status, solution.iterations, solution.products) == (Status.DIVERGED, 1, 1)
    close(solution.value, step * torch.linalg.solve(A, B), 1e-12)


def test_negative_curvature_is_named() -> None:
    a, m, b = diagonal(-0.5, 3.0, 4.0), diagonal(1.0, 4.0, 4.0), vector(1e-2, 1.0, 1.0)
    solution = GradientDescent(200).solve(DenseOperator(a), unflatten(b), preconditioner=DenseInvertible(m))
    assert solution.status is Status.NONPOSITIVE_CURVATURE
    best = min(range(1, 30), key=lambda k: size(m, b - a @ closed_form(m, a, b, k, 1.0)))
    assert solution.iterations == best > 1
    close(solution.value, closed_form(m, a, b, best, 1.0), 1e-12)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    ("m", "b"),
    [
        (diagonal(-1.0, -2.0), vector(1.0, 2.0)),
        (diagonal(1.0, -1.0), vector(1.0, 2.0)),
        (vector(0.0, 1.0, 1.0, 0.0).reshape(2, 2), vector(2.0, 0.0)),
    ],
    ids=["negative", "indefinite", "rᵀM⁻¹r = 0"],
)
def test_a_preconditioner_that_is_not_positive_definite_is_reported(m: Tensor, b: Tensor, steps: int) -> None:
    solver, operator, second = GradientDescent(steps, step=0.5), DenseOperator(diagonal(1.0, 1.0)), DenseInvertible(m)
    solution = solver.solve(operator, unflatten(b), preconditioner=second)
    assert solution.status is Status.NONPOSITIVE_CURVATURE and solution.residual is None
    assert (solution.iterations, solution.products) == (0, 0)
    assert torch.equal(flatten(solution.value), 0.5 * b)
    start = vector(0.1, 0.0)
    solution = solver.solve(operator, unflatten(b), start=unflatten(start), preconditioner=second)
    assert solution.status is Status.NONPOSITIVE_CURVATURE and solution.residual is None
    assert (solution.iterations, solution.products) == (0, 1)
    assert torch.equal(flatten(solution.value), start)


def test_a_right_hand_side_without_a_norm_is_reported_whatever_the_first_residual() -> None:
    """bᵀM⁻¹b < 0, though rᵀM⁻¹r is positive for r = (1, 0): there is nothing to measure r against."""
    m, b, start = diagonal(1.0, -1.0), vector(1.0, 2.0), vector(0.0, 2.0)
    for steps in (1, 3):
        solution = GradientDescent(steps, step=0.5).solve(
            DenseOperator(diagonal(1.0, 1.0)), unflatten(b), start=unflatten(start), preconditioner=DenseInvertible(m)
        )
        assert solution.status is Status.NONPOSITIVE_CURVATURE and solution.residual is None
        assert torch.equal(flatten(solution.value), start)


def test_a_first_residual_that_the_preconditioner_makes_nothing_of_is_no_solution() -> None:
    """rᵀM⁻¹r = 0 for r = (1, 0), though bᵀM⁻¹b is positive."""
    m, b, start = vector(0.0, 1.0, 1.0, 0.0).reshape(2, 2), vector(1.0, 1.0), vector(0.0, 1.0)
    for steps in (1, 3):
        solution = GradientDescent(steps).solve(
            DenseOperator(diagonal(1.0, 1.0)), unflatten(b), start=unflatten(start), preconditioner=DenseInvertible(m)
        )
        assert solution.status is Status.NONPOSITIVE_CURVATURE and solution.residual is None
        assert torch.equal(flatten(solution.value), start)


LATE = {
    "negative": (diagonal(1.0, 1.0), diagonal(1.0, -1.0), vector(1.0, 0.5), 0.9),
    "zero": (diagonal(1.0, 0.5), vector(0.0, 1.0, 1.0, 0.0).reshape(2, 2), vector(1.0, 1.0), 1.0),
}
"""A, M, b and η with bᵀM⁻¹b > 0, but r₁ᵀM⁻¹r₁ < 0 or, for r₁ that is not zero, = 0."""


@pytest.mark.parametrize("name", LATE)
def test_a_preconditioner_that_shows_its_fault_later_gives_the_iterate_before(name: str) -> None:
    a, m, b, step = LATE[name]
    solution = GradientDescent(5, step=step).solve(DenseOperator(a), unflatten(b), preconditioner=DenseInvertible(m))
    assert solution.status is Status.NONPOSITIVE_CURVATURE and solution.residual is None
    assert (solution.iterations, solution.products) == (1, 1)
    close(solution.value, step * torch.linalg.solve(m, b), 1e-15)
    zero = unflatten(0.0 * b)
    solution = GradientDescent(5, step=step).solve(
        DenseOperator(a), unflatten(b), start=zero, preconditioner=DenseInvertible(m)
    )
    assert (solution.status, solution.iterations) == (Status.NONPOSITIVE_CURVATURE, 0)
    assert solution.residual == 1.0 and flatten(solution.value).count_nonzero() == 0


@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_preconditioner_that_becomes_nan_is_reported(good: int) -> None:
    solution = GradientDescent(9, step=0.5).solve(DenseOperator(A), unflatten(B), preconditioner=Counting(M, good=good))
    assert (solution.status, solution.iterations, solution.residual) == (Status.NON_FINITE, good, None)
    expected = closed_form(M, A, B, good, 0.5) if good else 0.0 * B
    assert (flatten(solution.value) - expected).norm() <= 1e-12 * B.norm()


def test_an_operator_that_becomes_nan_is_reported() -> None:
    solution = GradientDescent(9, step=0.5).solve(
        FailingOperator(A, good=2), unflatten(B), preconditioner=DenseInvertible(M)
    )
    assert (solution.status, solution.iterations, solution.products) == (Status.NON_FINITE, 3, 3)
    close(solution.value, closed_form(M, A, B, 3, 0.5), 1e-12)


def test_what_has_no_inverse_is_refused() -> None:
    with pytest.raises(HyperkronError, match=r"preconditioner is a DenseOperator.* such as KFAC"):
        GradientDescent().solve(DenseOperator(A), unflatten(B), preconditioner=DenseOperator(M))  # type: ignore[arg-type]


# --- the plain iteration in other coordinates ----------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 15),
    conditions=st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)),
    negative=st.booleans(),
    reach=st.sampled_from([0.05, 0.3, 0.7, 1.4, 1.8, 2.2, 2.5]),
    seed=st.integers(0, 2**16),
    steps=st.integers(1, 12),
    started=st.booleans(),
)
def test_it_is_the_plain_iteration_of_the_preconditioned_system(
    size: int,
    conditions: tuple[float, float],
    negative: bool,
    reach: float,
    seed: int,
    steps: int,
    started: bool,
) -> None:
    """With M = LLᵀ: Lᵀv for L⁻¹AL⁻ᵀ and L⁻¹b, with the same residuals, by whichever way it ends.

    No ``reach`` makes a residual vanish or keep its size, where rounding would decide.
    """
    a, m = (random_spd(size, 10.0**exponent, seed + i) for i, exponent in enumerate(conditions))
    if negative:
        eigenvalues, basis = torch.linalg.eigh(a)
        eigenvalues[0] *= -1.0
        a = (basis * eigenvalues) @ basis.T
    b, start = random_vector(size, seed + 2), random_vector(size, seed + 3)
    lower = torch.linalg.cholesky(m)
    inverse = torch.linalg.inv(lower)
    inner = inverse @ a @ inverse.T
    solver = GradientDescent(steps, step=reach / float(torch.linalg.eigvalsh(inner).abs().max()))
    first, second = ((unflatten(x) if started else None) for x in (lower.T @ start, start))
    plain = solver.solve(DenseOperator(inner), unflatten(inverse @ b), start=first)
    found = solver.solve(DenseOperator(a), unflatten(b), start=second, preconditioner=DenseInvertible(m))
    assert (found.status, found.iterations, found.products) == (plain.status, plain.iterations, plain.products)
    close(found.value, inverse.T @ flatten(plain.value), 1e-8)
    assert found.residual == pytest.approx(plain.residual, rel=1e-6, abs=1e-10)


# --- recorded ----------------------------------------------------------------------------

TURNED = diagonal(*[1.0] * (N - 1), -1.0)
EARLY = {
    "diverges": (System(GradientDescent(9), preconditioner=0.1 * EYE), Status.DIVERGED),
    "diverges from a start": (System(GradientDescent(9), preconditioner=0.1 * EYE, start=START), Status.DIVERGED),
    "overflows": (System(GradientDescent(9, step=1e200), preconditioner=EYE), Status.DIVERGED),
    "meets negative curvature": (
        System(GradientDescent(9), matrix=-A, preconditioner=A + EYE),
        Status.NONPOSITIVE_CURVATURE,
    ),
    "converges": (System(GradientDescent(9), matrix=4.0 * EYE, preconditioner=4.0 * EYE), Status.CONVERGED),
    "M is negative": (System(GradientDescent(9, step=0.5), preconditioner=-A), Status.NONPOSITIVE_CURVATURE),
    "M is negative, from a start": (
        System(GradientDescent(9, step=0.5), preconditioner=-A, start=START),
        Status.NONPOSITIVE_CURVATURE,
    ),
    "M shows it later": (
        System(GradientDescent(9, step=0.9), matrix=EYE, preconditioner=TURNED, b=torch.ones(N, dtype=torch.float64)),
        Status.NONPOSITIVE_CURVATURE,
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in EARLY] + [(name, torch.float32) for name in EARLY if name != "overflows"],
)
def test_a_recorded_solve_that_ends_early_is_the_ordinary_one(name: str, dtype: torch.dtype) -> None:
    system, status = EARLY[name]
    system = dataclasses.replace(system, dtype=dtype)
    expected, found = system.solve(), system.replayed()
    assert found is not None and expected.status is status
    assert torch.equal(flatten(found.value), flatten(expected.value)) and flatten(found.value).isfinite().all()
    spent = 8 + (system.start is not None)
    assert alike(found, expected) and found.products == spent
