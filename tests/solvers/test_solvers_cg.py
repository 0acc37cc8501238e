"""Conjugate gradients, with and without a preconditioner, against minimisers over Krylov spaces."""

from __future__ import annotations

import pytest
import torch

from dense_operator import (
    DenseInvertible,
    DenseOperator,
    FailingOperator,
    flatten,
    random_spd,
    random_vector,
    unflatten,
)
from hyperkron.solution import Status
from hyperkron.solvers import CG
from solving import EYE, A, B, N, close, krylov_minimiser, singular_float32, true_residual


def test_cg_is_exact_after_as_many_steps_as_there_are_unknowns() -> None:
    a = random_spd(N, condition=10.0, seed=0)
    solution = CG(N).solve(DenseOperator(a), unflatten(B))
    close(solution.value, torch.linalg.solve(a, B))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_cg_minimises_over_the_krylov_space(steps: int) -> None:
    operator = DenseOperator(A)
    solution = CG(steps).solve(operator, unflatten(B))
    close(solution.value, krylov_minimiser(A, B, steps))
    assert solution.status is Status.BUDGET
    assert solution.iterations == solution.products == operator.products == steps
    assert solution.residual == pytest.approx(true_residual(solution, A, B), rel=1e-8)


def test_cg_adds_no_damping_of_its_own() -> None:
    solution = CG(100, tolerance=1e-12).solve(DenseOperator(A, damping=3.0), unflatten(B))
    close(solution.value, torch.linalg.solve(A + 3.0 * EYE, B))


@pytest.mark.parametrize("steps", [1, 4])
def test_cg_from_a_start_minimises_over_the_shifted_krylov_space(steps: int) -> None:
    start, operator = random_vector(N, seed=2), DenseOperator(A)
    solution = CG(steps).solve(operator, unflatten(B), start=unflatten(start))
    close(solution.value, krylov_minimiser(A, B, steps, start))
    assert solution.products == operator.products == steps + 1
    assert solution.residual == pytest.approx(true_residual(solution, A, B), rel=1e-8)


def test_cg_from_the_solution_stops_at_once() -> None:
    start = unflatten(torch.linalg.solve(A, B))
    solution = CG(5, tolerance=1e-10).solve(DenseOperator(A), unflatten(B), start=start)
    assert (solution.status, solution.iterations, solution.products) == (Status.CONVERGED, 0, 1)
    close(solution.value, torch.linalg.solve(A, B))


def test_cg_stops_at_the_tolerance() -> None:
    solution = CG(100, tolerance=0.05).solve(DenseOperator(A), unflatten(B))
    assert solution.status is Status.CONVERGED and 1 < solution.iterations < N
    assert solution.products == solution.iterations
    assert true_residual(solution, A, B) <= 0.05
    before = CG(solution.iterations - 1).solve(DenseOperator(A), unflatten(B))
    assert true_residual(before, A, B) > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cg_stops_at_the_precision_of_the_numbers(dtype: torch.dtype) -> None:
    """Long after convergence pᵀAp would underflow and read as non-positive curvature."""
    solution = CG(500).solve(DenseOperator(A.to(dtype)), unflatten(B.to(dtype)))
    assert solution.status is Status.CONVERGED and solution.iterations < 100
    close(flatten(solution.value).double(), torch.linalg.solve(A, B), 500 * torch.finfo(dtype).eps)


def test_cg_on_a_multiple_of_the_identity_needs_one_product() -> None:
    solution = CG(5).solve(DenseOperator(4.0 * EYE), unflatten(B))
    close(solution.value, B / 4.0, 1e-15)
    assert (solution.status, solution.products) == (Status.CONVERGED, 1)


def test_pcg_with_the_exact_inverse_needs_one_product() -> None:
    operator = DenseOperator(A)
    solution = CG(50, tolerance=1e-12).solve(operator, unflatten(B), preconditioner=DenseInvertible(A))
    close(solution.value, torch.linalg.solve(A, B))
    assert (solution.status, operator.products) == (Status.CONVERGED, 1)


def test_pcg_minimises_over_the_preconditioned_krylov_space() -> None:
    """PCG with M = LLᵀ is CG on L⁻¹AL⁻ᵀ, mapped back."""
    m = random_spd(N, condition=10.0, seed=5)
    lower = torch.linalg.cholesky(m)
    inner = torch.linalg.solve_triangular(lower, A, upper=False)
    inner = torch.linalg.solve_triangular(lower, inner.T, upper=False)
    rhs = torch.linalg.solve_triangular(lower, B[:, None], upper=False)[:, 0]
    y = krylov_minimiser(inner, rhs, 3)
    expected = torch.linalg.solve_triangular(lower.T, y[:, None], upper=True)[:, 0]
    solution = CG(3).solve(DenseOperator(A), unflatten(B), preconditioner=DenseInvertible(m))
    close(solution.value, expected)
    assert solution.residual == pytest.approx(true_residual(solution, A, B), rel=1e-8)


def test_pcg_with_a_good_preconditioner_needs_fewer_products() -> None:
    a, b = random_spd(40, condition=1e5, seed=3), random_vector(40, seed=4)
    close_to_a = DenseInvertible(a + random_spd(40, condition=3.0, seed=6) * 0.1)
    plain = CG(400, tolerance=1e-8).solve(DenseOperator(a), unflatten(b))
    preconditioned = CG(400, tolerance=1e-8).solve(DenseOperator(a), unflatten(b), preconditioner=close_to_a)
    assert plain.status is preconditioned.status is Status.CONVERGED
    assert preconditioned.products < plain.products / 3
    assert true_residual(preconditioned, a, b) < 1e-7
    assert close_to_a.products == 0


def test_cg_on_an_indefinite_operator_stops_at_its_last_good_iterate() -> None:
    eigenvalues = torch.linspace(1.0, 5.0, N, dtype=torch.float64)
    eigenvalues[0] = -0.5
    solution = CG(2 * N).solve(DenseOperator(torch.diag(eigenvalues)), unflatten(B))
    assert solution.status is Status.NONPOSITIVE_CURVATURE and not solution.status.ok
    assert 0 < solution.iterations < N and solution.products == solution.iterations + 1
    close(solution.value, krylov_minimiser(torch.diag(eigenvalues), B, solution.iterations))
    assert solution.residual == pytest.approx(true_residual(solution, torch.diag(eigenvalues), B), rel=1e-8)


def test_cg_whose_first_direction_is_bad_returns_the_right_hand_side() -> None:
    b = unflatten(B)
    solution = CG(5).solve(DenseOperator(-A), b)
    assert solution.status is Status.NONPOSITIVE_CURVATURE and solution.products == 1
    assert torch.equal(flatten(solution.value), B)
    assert solution.residual == pytest.approx(true_residual(solution, -A, B), rel=1e-12)
    b["bias"].zero_()
    assert flatten(solution.value).count_nonzero() == N  # no view of the caller's tensors


def test_pcg_whose_first_direction_is_bad_returns_the_preconditioned_right_hand_side() -> None:
    solution = CG(5).solve(DenseOperator(-A), unflatten(B), preconditioner=DenseInvertible(A))
    assert solution.status is Status.NONPOSITIVE_CURVATURE
    close(solution.value, torch.linalg.solve(A, B))


def test_cg_whose_first_direction_from_a_start_is_bad_returns_the_start() -> None:
    start = random_vector(N, seed=2)
    solution = CG(5).solve(DenseOperator(-A), unflatten(B), start=unflatten(start))
    assert solution.status is Status.NONPOSITIVE_CURVATURE
    assert torch.equal(flatten(solution.value), start)


def test_pcg_with_an_indefinite_preconditioner_says_so() -> None:
    solution = CG(5).solve(DenseOperator(A), unflatten(B), preconditioner=DenseInvertible(-A))
    assert solution.status is Status.NONPOSITIVE_CURVATURE
    assert torch.equal(flatten(solution.value), B)


def test_cg_on_a_zero_operator_says_so() -> None:
    assert CG(5).solve(DenseOperator(0.0 * A), unflatten(B)).status is Status.NONPOSITIVE_CURVATURE


def test_cg_judges_curvature_against_rounding() -> None:
    """pᵀAp = 1 + (1 + 1e-8)·(−1) in float32 is rounding, whichever sign it comes out with."""
    for tiny in (1e-8, -1e-8, 5e-8):
        matrix = torch.diag(torch.tensor([1.0, -1.0 + tiny]))
        solution = CG(2).solve(DenseOperator(matrix), unflatten(torch.ones(2)))
        assert solution.status is Status.NONPOSITIVE_CURVATURE


def test_cg_does_not_step_along_curvature_that_is_only_rounding() -> None:
    """It ends where float32 still follows the exact iterates; without a floor the error is 1 and more."""
    matrix = singular_float32()
    for seed in range(10):
        b = random_vector(40, seed, dtype=torch.float32)
        solution = CG(100).solve(DenseOperator(matrix), unflatten(b))
        assert solution.status is Status.NONPOSITIVE_CURVATURE
        exact = krylov_minimiser(matrix.double(), b.double(), solution.iterations)
        close(flatten(solution.value).double(), exact, 0.1)


@pytest.mark.parametrize("condition", [1e2, 1e5])
def test_cg_in_float32_never_mistakes_a_positive_definite_operator(condition: float) -> None:
    a = random_spd(60, condition, seed=7, dtype=torch.float32)
    solution = CG(400).solve(DenseOperator(a), unflatten(random_vector(60, seed=8, dtype=torch.float32)))
    assert solution.status.ok
    assert solution.residual is not None and solution.residual < 0.1


@pytest.mark.parametrize("good", [0, 2])
def test_cg_returns_its_last_finite_iterate(good: int) -> None:
    solution = CG(5).solve(FailingOperator(A, good), unflatten(B))
    assert (solution.status, solution.iterations, solution.products) == (Status.NON_FINITE, good, good + 1)
    expected = krylov_minimiser(A, B, good) if good else torch.zeros_like(B)
    close(solution.value, expected)
