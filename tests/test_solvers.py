"""Solvers against dense float64 closed forms."""

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
from hyperkron.curvature.base import Operator
from hyperkron.solution import HyperkronError, NonFiniteError, Solution, Status
from hyperkron.solvers import CG, Direct, GradientDescent, Neumann, Solver, power_iteration
from hyperkron.trees import Tree

N = 12
A = random_spd(N, condition=100.0, seed=0)
B = random_vector(N, seed=1)
EYE = torch.eye(N, dtype=torch.float64)
ITERATIVE: list[Solver] = [
    CG(4),
    Neumann(4),
    GradientDescent(4),
    Neumann(4, step=0.01),
    GradientDescent(4, step=0.01),
]


def close(actual: Tree | Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Equal to a relative error in norm."""
    vector = flatten(actual) if isinstance(actual, dict) else actual
    assert (vector - expected).norm() <= tolerance * expected.norm()


def true_residual(solution: Solution, matrix: Tensor, b: Tensor) -> float:
    return ((b - matrix @ flatten(solution.value)).norm() / b.norm()).item()


def krylov_minimiser(matrix: Tensor, b: Tensor, steps: int, start: Tensor | None = None) -> Tensor:
    """argmin of ½vᵀAv − bᵀv over v₀ + span{r₀, Ar₀, …}, by an orthonormal basis of that space."""
    v0 = torch.zeros_like(b) if start is None else start
    basis = torch.empty(len(b), 0, dtype=b.dtype)
    new = b - matrix @ v0
    for _ in range(steps):
        for _ in range(2):
            new = new - basis @ (basis.T @ new)
        basis = torch.cat([basis, (new / new.norm())[:, None]], dim=1)
        new = matrix @ basis[:, -1]
    return v0 + basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ (b - matrix @ v0))


def singular_float32() -> Tensor:
    """A positive semi-definite matrix of rank 10 and size 40, whose products carry float32 rounding."""
    basis, _ = torch.linalg.qr(random_spd(40, 10.0, seed=9))
    return ((basis[:, :10] * torch.linspace(1.0, 3.0, 10)) @ basis[:, :10].T).float()


def neumann_sum(matrix: Tensor, b: Tensor, terms: int, step: float) -> Tensor:
    """η Σ_{k=0}^{terms} (I − ηA)^k b, each power on its own."""
    m = torch.eye(len(b), dtype=b.dtype) - step * matrix
    return step * sum((torch.linalg.matrix_power(m, k) @ b for k in range(terms + 1)), torch.zeros_like(b))


# --- direct ------------------------------------------------------------------------------


def test_direct_applies_the_inverse_and_spends_no_product() -> None:
    operator = DenseInvertible(A, damping=0.5)
    solution = Direct().solve(operator, unflatten(B))
    close(solution.value, torch.linalg.solve(A + 0.5 * EYE, B))
    assert (solution.status, solution.iterations, solution.products) == (Status.DIRECT, 0, 0)
    assert operator.products == 0 and not Direct.needs_products


@pytest.mark.parametrize("status", [Status.MORE_DAMPING, Status.KEPT_PREVIOUS])
def test_direct_takes_its_status_from_the_operator(status: Status) -> None:
    assert Direct().solve(DenseInvertible(A, status=status), unflatten(B)).status is status


def test_direct_refuses_an_operator_without_inverse() -> None:
    with pytest.raises(HyperkronError, match=r"DenseOperator has no inverse.*use CG"):
        Direct().solve(DenseOperator(A), unflatten(B))


def test_direct_refuses_a_non_finite_answer() -> None:
    with pytest.raises(NonFiniteError, match="raise the damping"):
        Direct().solve(DenseInvertible(A * math.nan), unflatten(B))


# --- conjugate gradients -----------------------------------------------------------------


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
    with pytest.raises(HyperkronError, match="iterations is 0"):
        power_iteration(DenseOperator(A), unflatten(B), 0)


# --- what all share ----------------------------------------------------------------------


@pytest.mark.parametrize("solver", [Direct(), *ITERATIVE], ids=repr)
def test_a_right_hand_side_of_zeros_costs_nothing(solver: Solver) -> None:
    operator = DenseInvertible(A)
    solution = solver.solve(operator, unflatten(0.0 * B))
    assert (solution.status, solution.products, operator.products) == (Status.CONVERGED, 0, 0)
    assert flatten(solution.value).count_nonzero() == 0 and solution.residual == 0.0


@pytest.mark.parametrize("solver", [Direct(), *ITERATIVE], ids=repr)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_very_small_and_very_large_right_hand_sides_in_float32(solver: Solver, size: float) -> None:
    """Squares of these numbers under- and overflow in float32; the solution is linear in b all the same."""
    operator = DenseInvertible(A.float())
    unit = flatten(solver.solve(operator, unflatten(B.float())).value).double()
    scaled = solver.solve(operator, unflatten(B.float() * size))
    assert scaled.status.ok
    close(flatten(scaled.value).double(), unit * size, 1e-5)


@pytest.mark.parametrize("solver", [CG(4), GradientDescent(4, step=0.01)], ids=repr)
def test_a_start_is_scaled_with_its_right_hand_side(solver: Solver) -> None:
    start = random_vector(N, seed=2)
    unit = solver.solve(DenseOperator(A), unflatten(B), start=unflatten(start))
    scaled = solver.solve(DenseOperator(A), unflatten(B * 2.0**40), start=unflatten(start * 2.0**40))
    assert torch.equal(flatten(scaled.value), flatten(unit.value) * 2.0**40)
    assert scaled.residual == pytest.approx(unit.residual)


@pytest.mark.parametrize("solver", ITERATIVE, ids=repr)
def test_a_nan_operator_is_reported(solver: Solver) -> None:
    solution = solver.solve(DenseOperator(A * math.nan), unflatten(B))
    assert solution.status is Status.NON_FINITE
    assert torch.isfinite(flatten(solution.value)).all()


@pytest.mark.parametrize("solver", [CG(4), GradientDescent(4, step=0.01)], ids=repr)
def test_a_nan_operator_gives_the_start_back(solver: Solver) -> None:
    solution = solver.solve(DenseOperator(A * math.nan), unflatten(B), start=unflatten(B))
    assert solution.status is Status.NON_FINITE
    assert torch.equal(flatten(solution.value), B)


@pytest.mark.parametrize("solver", [Direct(), *ITERATIVE], ids=repr)
def test_a_non_finite_right_hand_side_is_refused_by_name(solver: Solver) -> None:
    b, operator = unflatten(B.clone()), DenseInvertible(A)
    b["scale"].fill_(math.inf)
    with pytest.raises(NonFiniteError, match=r"b holds NaN or infinity in \['scale'\]"):
        solver.solve(operator, b)
    assert operator.products == 0


def test_a_non_finite_start_is_refused_by_name() -> None:
    with pytest.raises(NonFiniteError, match=r"start holds .* pass start=None"):
        CG().solve(DenseOperator(A), unflatten(B), start=unflatten(B * math.nan))


@pytest.mark.parametrize("solver", [Direct(), *ITERATIVE], ids=repr)
def test_global_random_state_and_arguments_are_left_alone(solver: Solver) -> None:
    b, before = unflatten(B.clone()), torch.random.get_rng_state()
    start = unflatten(B.clone()) if solver.uses_start else None
    solver.solve(DenseInvertible(A), b, start=start)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(flatten(b), B) and (start is None or torch.equal(flatten(start), B))


@pytest.mark.parametrize("solver", ITERATIVE, ids=repr)
def test_values_are_detached_and_keep_their_dtype(solver: Solver) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        b = unflatten(B.to(dtype).requires_grad_())
        value = solver.solve(DenseOperator(A.to(dtype)), b).value
        assert list(value) == list(b)
        assert all(x.dtype is dtype and not x.requires_grad for x in value.values())


@pytest.mark.parametrize("solver", [Direct(), Neumann()], ids=repr)
def test_a_start_that_would_be_ignored_is_refused(solver: Solver) -> None:
    assert not solver.uses_start
    with pytest.raises(HyperkronError, match=rf"start was given to {type(solver).__name__}, which uses none"):
        solver.solve(DenseInvertible(A), unflatten(B), start=unflatten(B))


@pytest.mark.parametrize("solver", [Direct(), Neumann(), GradientDescent()], ids=repr)
def test_a_preconditioner_that_would_be_ignored_is_refused(solver: Solver) -> None:
    assert not solver.uses_preconditioner
    with pytest.raises(HyperkronError, match=r"preconditioner was given to .* use CG"):
        solver.solve(DenseInvertible(A), unflatten(B), preconditioner=DenseInvertible(A))


def test_wrong_types_are_refused_with_the_remedy() -> None:
    with pytest.raises(HyperkronError, match=r"preconditioner is a DenseOperator.* such as KFAC"):
        CG().solve(DenseOperator(A), unflatten(B), preconditioner=DenseOperator(A))  # type: ignore[arg-type]
    with pytest.raises(HyperkronError, match="operator is a Tensor"):
        CG().solve(A, unflatten(B))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CG(iterations=0), "iterations is 0; pass an integer of at least 1"),
        (lambda: CG(iterations=2.5), "iterations is 2.5; pass an integer"),
        (lambda: CG(iterations=True), "iterations is True; pass an integer"),
        (lambda: CG(tolerance=-1e-3), "tolerance is -0.001; pass a relative residual"),
        (lambda: CG(tolerance=math.nan), "tolerance is nan; pass a relative residual"),
        (lambda: CG(tolerance=1.0), "tolerance is 1.0; pass a relative residual"),
        (lambda: Neumann(terms=-1), "terms is -1; pass an integer of at least 0"),
        (lambda: Neumann(step=0.0), "step is 0.0; pass a positive number"),
        (lambda: Neumann(power_iterations=0), "power_iterations is 0; pass an integer of at least 1"),
        (lambda: Neumann(seed=-1), "seed is -1; pass an integer of at least 0"),
        (lambda: GradientDescent(iterations=0), "iterations is 0; pass an integer of at least 1"),
        (lambda: GradientDescent(step=math.inf), "step is inf; pass a positive number"),
        (lambda: GradientDescent(step="big"), "step is 'big'; pass a positive number"),
    ],
)
def test_bad_configuration_is_refused_with_the_remedy(make: object, message: str) -> None:
    with pytest.raises(HyperkronError, match=message.replace(".", r"\.")):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("solver", [Direct(), *ITERATIVE], ids=repr)
def test_solvers_are_values(solver: Solver) -> None:
    assert dataclasses.is_dataclass(solver) and hash(solver) == hash(dataclasses.replace(solver))
    for field in dataclasses.fields(solver):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(solver, field.name, 1)
    assert isinstance(DenseOperator(A), Operator)


def test_flags_tell_what_a_solver_uses() -> None:
    flags = {type(s).__name__: (s.needs_products, s.uses_start, s.uses_preconditioner) for s in [Direct(), *ITERATIVE]}
    assert flags == {
        "Direct": (False, False, False),
        "CG": (True, True, True),
        "Neumann": (True, False, False),
        "GradientDescent": (True, True, False),
    }


# --- properties --------------------------------------------------------------------------

sizes, seeds = st.integers(1, 20), st.integers(0, 2**16)
conditions = st.floats(0.0, 6.0).map(lambda exponent: 10.0**exponent)
quick = settings(max_examples=40, deadline=None)


@quick
@given(sizes, conditions, seeds)
def test_cg_reaches_its_tolerance_on_any_positive_definite_system(size: int, condition: float, seed: int) -> None:
    a, b = random_spd(size, condition, seed), random_vector(size, seed + 1)
    solution = CG(1000, tolerance=1e-8).solve(DenseOperator(a), unflatten(b))
    assert solution.status is Status.CONVERGED
    assert true_residual(solution, a, b) <= 1e-7


@quick
@given(sizes, conditions, seeds, st.integers(1, 6))
def test_the_energy_falls_with_every_cg_iteration(size: int, condition: float, seed: int, steps: int) -> None:
    a, b = random_spd(size, condition, seed), random_vector(size, seed + 1)

    def energy(iterations: int) -> float:
        v = flatten(CG(iterations).solve(DenseOperator(a), unflatten(b)).value)
        return (0.5 * v @ a @ v - b @ v).item()

    least = (-0.5 * b @ torch.linalg.solve(a, b)).item()
    assert energy(steps + 1) <= energy(steps) + 1e-10 * abs(least)
    assert energy(steps) >= least * (1 + 1e-10)


@quick
@given(sizes, st.floats(0.0, 3.0).map(lambda e: 10.0**e), seeds, st.integers(0, 30))
def test_a_found_step_never_diverges(size: int, condition: float, seed: int, terms: int) -> None:
    a, b = random_spd(size, condition, seed), random_vector(size, seed + 1)
    solution = Neumann(terms, seed=seed).solve(DenseOperator(a), unflatten(b))
    assert solution.status.ok
    assert solution.residual is not None and true_residual(solution, a, b) <= solution.residual + 1e-12


@quick
@given(sizes, conditions, seeds, st.integers(1, 5), st.integers(1, 5))
def test_gradient_descent_can_be_split_anywhere(size: int, condition: float, seed: int, k1: int, k2: int) -> None:
    a, b = random_spd(size, condition, seed), unflatten(random_vector(size, seed + 1))
    step = 0.9 / condition
    first = GradientDescent(k1, step=step).solve(DenseOperator(a), b)
    second = GradientDescent(k2, step=step).solve(DenseOperator(a), b, start=first.value)
    close(second.value, flatten(GradientDescent(k1 + k2, step=step).solve(DenseOperator(a), b).value), 1e-9)


@quick
@given(st.integers(2, 20), conditions, seeds)
def test_an_exact_preconditioner_needs_one_product_whatever_the_condition(
    size: int, condition: float, seed: int
) -> None:
    a, b = random_spd(size, condition, seed), random_vector(size, seed + 1)
    solution = CG(50, tolerance=1e-7).solve(DenseOperator(a), unflatten(b), preconditioner=DenseInvertible(a))
    assert (solution.status, solution.products) == (Status.CONVERGED, 1)
    close(solution.value, torch.linalg.solve(a, b), 1e-8)


@quick
@given(st.integers(2, 15), seeds)
def test_a_negative_eigenvalue_is_never_called_converged(size: int, seed: int) -> None:
    a, b = random_spd(size, 10.0, seed), random_vector(size, seed + 1)
    eigenvalues, basis = torch.linalg.eigh(a)
    eigenvalues[0] = -1.0
    solution = CG(5 * size, tolerance=1e-12).solve(DenseOperator((basis * eigenvalues) @ basis.T), unflatten(b))
    assert solution.status is Status.NONPOSITIVE_CURVATURE
