"""Solvers against dense float64 closed forms: the direct one, what all share, and properties.

Conjugate gradients are in ``test_solvers_cg.py``, Neumann series and gradient descent in ``test_solvers_series.py``,
the latter with a preconditioner in ``test_solvers_preconditioned.py``.
"""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_operator import DenseInvertible, DenseOperator, flatten, random_spd, random_vector, unflatten
from hyperkron.curvature.base import Operator
from hyperkron.solution import HyperkronError, NonFiniteError, Status
from hyperkron.solvers import CG, Direct, GradientDescent, Neumann, Solver
from solving import EYE, ITERATIVE, A, B, N, close, true_residual

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


@pytest.mark.parametrize("solver", [Direct(), *ITERATIVE], ids=repr)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 2.0**-140), (torch.float64, 2.0**-1060)])
def test_right_hand_sides_below_the_normal_numbers(solver: Solver, dtype: torch.dtype, size: float) -> None:
    """One over such a size is infinite; the gradient of a network that is sure of all its answers is that small."""
    b = torch.ones(N, dtype=dtype) * size
    assert 0 < float(b[0]) < torch.finfo(dtype).tiny
    solution = solver.solve(DenseInvertible(A.to(dtype)), unflatten(b))
    assert solution.status is not Status.NON_FINITE
    assert bool(flatten(solution.value).isfinite().all())


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


@pytest.mark.parametrize("solver", [Direct(), Neumann()], ids=repr)
def test_a_preconditioner_that_would_be_ignored_is_refused(solver: Solver) -> None:
    assert not solver.uses_preconditioner
    with pytest.raises(HyperkronError, match=r"preconditioner was given to .* use CG or GradientDescent"):
        solver.solve(DenseInvertible(A), unflatten(B), preconditioner=DenseInvertible(A))


def test_wrong_types_are_refused_with_the_remedy() -> None:
    with pytest.raises(HyperkronError, match=r"preconditioner is a DenseOperator.* such as KFAC"):
        CG().solve(DenseOperator(A), unflatten(B), preconditioner=DenseOperator(A))  # type: ignore[arg-type]
    with pytest.raises(HyperkronError, match="operator is a Tensor"):
        CG().solve(A, unflatten(B))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CG(iterations=0), "iterations=0 must be a whole number ≥ 1"),
        (lambda: CG(iterations=2.5), "iterations=2.5 must be a whole number"),
        (lambda: CG(iterations=True), "iterations=True must be a whole number"),
        (lambda: CG(tolerance=-1e-3), "tolerance=-0.001 must be a number in [0, 1); it is a relative residual"),
        (lambda: CG(tolerance=math.nan), "tolerance=nan must be a number in [0, 1); it is a relative residual"),
        (lambda: CG(tolerance=1.0), "tolerance=1.0 must be a number in [0, 1); it is a relative residual"),
        (lambda: Neumann(terms=-1), "terms=-1 must be a whole number ≥ 0"),
        (lambda: Neumann(step=0.0), "step=0.0 must be a positive number; pass one below 2/λmax"),
        (lambda: Neumann(power_iterations=0), "power_iterations=0 must be a whole number ≥ 1"),
        (lambda: Neumann(seed=-1), "seed=-1 must be a whole number ≥ 0"),
        (lambda: GradientDescent(iterations=0), "iterations=0 must be a whole number ≥ 1"),
        (lambda: GradientDescent(step=math.inf), "step=inf must be a positive number; pass one below 2/λmax"),
        (lambda: GradientDescent(step="big"), "step='big' must be a positive number; pass one below 2/λmax"),
    ],
)
def test_bad_configuration_is_refused_with_the_remedy(make: object, message: str) -> None:
    with pytest.raises(HyperkronError, match=re.escape(message)):
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
        "GradientDescent": (True, True, True),
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
