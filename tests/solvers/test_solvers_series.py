"""Neumann series, gradient descent, and the power iteration that finds their steps, against closed forms."""

from __future__ import annotations

import pytest
import torch

from dense_operator import DenseOperator, FailingOperator, flatten, random_vector, unflatten
from hyperkron.solution import HyperkronError, Status
from hyperkron.solvers import GradientDescent, Neumann, Solver, power_iteration
from solving import EYE, A, B, N, close, neumann_sum, singular_float32, true_residual

# --- Neumann series ----------------------------------------------------------------------


@pytest.mark.parametrize("terms", [0, 1, 2, 10])
def test_neumann_is_the_truncated_series(terms: int) -> None:
    operator = DenseOperator(A)
    solution = Neumann(terms, step=0.01).solve(operator, unflatten(B))
    close(solution.value, neumann_sum(A, B, terms, 0.01), 1e-13)
    assert solution.status is Status.BUDGET and solution.iterations == terms + 1
    assert solution.products == operator.products == terms
    late = neumann_sum(A, B, terms - 1, 0.01)
    assert solution.residual == pytest.approx(((B - A @ late).norm() / B.norm()).item(), rel=1e-10)


def test_neumann_has_the_inverse_as_its_limit_scale_included() -> None:
    solution = Neumann(5000).solve(DenseOperator(A, damping=0.1), unflatten(B))
    close(solution.value, torch.linalg.solve(A + 0.1 * EYE, B), 1e-9)


def test_neumann_finds_a_safe_step_and_counts_its_products() -> None:
    operator = DenseOperator(A)
    solution = Neumann(3, power_iterations=20, seed=5).solve(operator, unflatten(B))
    assert solution.products == operator.products == 23
    spectrum = power_iteration(DenseOperator(A), unflatten(B), 20, seed=5)
    assert 1.0 / 110.0 <= spectrum.safe_step <= 1.2 / 110.0
    close(solution.value, neumann_sum(A, B, 3, spectrum.safe_step), 1e-13)


def test_the_right_step_on_a_multiple_of_the_identity_converges_at_once() -> None:
    solution = Neumann(10, step=0.25).solve(DenseOperator(4.0 * EYE), unflatten(B))
    assert (solution.status, solution.products) == (Status.CONVERGED, 1)
    close(solution.value, B / 4.0, 1e-15)


def test_neumann_with_too_large_a_step_diverges_and_returns_its_best_sum() -> None:
    """b has little of the eigenvector that grows, so the residual falls before it rises."""
    matrix = torch.diag(torch.tensor([1.0, 1.5, 4.0], dtype=torch.float64))
    b = torch.tensor([1.0, 1.0, 1e-3], dtype=torch.float64)
    operator = DenseOperator(matrix)
    solution = Neumann(100, step=0.6).solve(operator, unflatten(b))
    assert solution.status is Status.DIVERGED and not solution.status.ok
    sums = [neumann_sum(matrix, b, k, 0.6) for k in range(30)]
    best = min(range(30), key=lambda k: (b - matrix @ sums[k]).norm().item())
    assert 1 < best < 20
    close(solution.value, sums[best], 1e-12)
    assert solution.iterations == best + 1 and operator.products == solution.products == best + 2
    assert solution.residual == pytest.approx(true_residual(solution, matrix, b), rel=1e-8)


@pytest.mark.parametrize("step", [0.1, 1e30, 1e200])
def test_neumann_that_diverges_at_once_returns_its_first_term(step: float) -> None:
    solution = Neumann(10, step=step).solve(DenseOperator(A), unflatten(B))
    assert (solution.status, solution.iterations, solution.products) == (Status.DIVERGED, 1, 1)
    close(solution.value, step * B, 1e-15)


def test_neumann_names_negative_curvature_rather_than_the_step() -> None:
    eigenvalues = torch.tensor([-0.5, 3.0, 4.0], dtype=torch.float64)
    b = torch.tensor([1e-2, 1.0, 1.0], dtype=torch.float64)
    for step in (None, 0.2):
        solution = Neumann(200, step=step).solve(DenseOperator(torch.diag(eigenvalues)), unflatten(b))
        assert solution.status is Status.NONPOSITIVE_CURVATURE
        assert solution.products < 30


@pytest.mark.parametrize("solver", [Neumann(10), GradientDescent(10)])
def test_a_negative_dominant_eigenvalue_is_found_by_the_power_iteration(solver: Solver) -> None:
    solution = solver.solve(DenseOperator(-A), unflatten(B))
    assert (solution.status, solution.products) == (Status.NONPOSITIVE_CURVATURE, 8)
    size = power_iteration(DenseOperator(-A), unflatten(B)).largest
    close(solution.value, B / (1.1 * size), 1e-14)


def test_a_singular_operator_leaves_a_truncated_series_usable() -> None:
    """Zero eigenvalues do not make the series grow: it adds ηb along them, term after term."""
    matrix = torch.diag(torch.tensor([0.0, 0.0, 1.0, 2.0], dtype=torch.float64))
    b = torch.ones(4, dtype=torch.float64)
    solution = Neumann(300, step=0.5).solve(DenseOperator(matrix), unflatten(b))
    assert solution.status is Status.BUDGET
    close(solution.value, torch.tensor([150.5, 150.5, 1.0, 0.5], dtype=torch.float64), 1e-12)


def test_rounding_on_a_singular_operator_is_not_divergence() -> None:
    """What is left of b in the null space keeps its norm, up to rounding, for ever."""
    for seed in range(5):
        b = unflatten(random_vector(40, seed, dtype=torch.float32))
        assert Neumann(300).solve(DenseOperator(singular_float32()), b).status is Status.BUDGET


def test_an_operator_of_zeros_gives_no_step() -> None:
    solution = Neumann(5).solve(DenseOperator(0.0 * A), unflatten(B))
    assert solution.status is Status.NONPOSITIVE_CURVATURE
    assert torch.equal(flatten(solution.value), B)


def test_neumann_returns_its_last_finite_sum() -> None:
    solution = Neumann(10, step=0.01).solve(FailingOperator(A, good=2), unflatten(B))
    assert (solution.status, solution.iterations, solution.products) == (Status.NON_FINITE, 3, 3)
    close(solution.value, neumann_sum(A, B, 2, 0.01), 1e-13)


# --- gradient descent --------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_gradient_descent_from_zero_has_its_closed_form(steps: int) -> None:
    operator = DenseOperator(A)
    solution = GradientDescent(steps, step=0.01).solve(operator, unflatten(B))
    contraction = torch.linalg.matrix_power(EYE - 0.01 * A, steps)
    close(solution.value, (EYE - contraction) @ torch.linalg.solve(A, B), 1e-12)
    assert solution.status is Status.BUDGET and solution.iterations == steps
    assert solution.products == operator.products == steps - 1


def test_gradient_descent_from_a_start_is_its_update_rule() -> None:
    start, operator = random_vector(N, seed=2), DenseOperator(A)
    solution = GradientDescent(5, step=0.015).solve(operator, unflatten(B), start=unflatten(start))
    v = start
    for _ in range(5):
        before, v = v, v - 0.015 * (A @ v - B)
    close(solution.value, v, 1e-13)
    assert solution.products == operator.products == 5
    assert solution.residual == pytest.approx(((B - A @ before).norm() / B.norm()).item(), rel=1e-10)


def test_gradient_descent_continues_from_where_it_ended() -> None:
    b, operator = unflatten(B), DenseOperator(A)
    first = GradientDescent(4, step=0.01).solve(operator, b)
    second = GradientDescent(6, step=0.01).solve(operator, b, start=first.value)
    whole = GradientDescent(10, step=0.01).solve(operator, b)
    close(second.value, flatten(whole.value), 1e-13)


def test_gradient_descent_that_diverges_returns_its_start() -> None:
    start = random_vector(N, seed=2)
    solution = GradientDescent(10, step=0.1).solve(DenseOperator(A), unflatten(B), start=unflatten(start))
    assert (solution.status, solution.iterations, solution.products) == (Status.DIVERGED, 0, 2)
    assert torch.equal(flatten(solution.value), start)
    assert solution.residual == pytest.approx(true_residual(solution, A, B), rel=1e-12)


def test_gradient_descent_with_its_own_step_converges() -> None:
    solution = GradientDescent(5000).solve(DenseOperator(A), unflatten(B))
    close(solution.value, torch.linalg.solve(A, B), 1e-9)


# --- power iteration ---------------------------------------------------------------------


def test_power_iteration_finds_the_largest_eigenvalue() -> None:
    operator = DenseOperator(A)
    spectrum = power_iteration(operator, unflatten(B), iterations=100)
    assert spectrum.largest == pytest.approx(100.0, rel=1e-8)
    assert spectrum.rayleigh == pytest.approx(100.0, rel=1e-8)
    assert spectrum.products == operator.products == 100
    assert power_iteration(DenseOperator(-A), unflatten(B), 100).rayleigh == pytest.approx(-100.0, rel=1e-8)


def test_power_iteration_estimates_from_below_and_repeats_itself() -> None:
    estimates = [power_iteration(DenseOperator(A), unflatten(B), k).largest for k in (1, 2, 4, 8, 16)]
    assert estimates == sorted(estimates) and estimates[-1] <= 100.0 * (1 + 1e-12)
    assert power_iteration(DenseOperator(A), unflatten(B), 8).largest == estimates[3]
    assert power_iteration(DenseOperator(A), unflatten(B), 8, seed=1).largest != estimates[3]


def test_power_iteration_refuses_no_iterations() -> None:
    with pytest.raises(HyperkronError, match="iterations=0 must be a whole number ≥ 1"):
        power_iteration(DenseOperator(A), unflatten(B), 0)
