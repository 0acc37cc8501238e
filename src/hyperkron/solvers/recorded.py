"""Conjugate gradients and the fixed-step iteration without branches, to be recorded in a CUDA graph.

No number can be read while a graph is recorded. So these solvers run all iterations; from where the eager solver would
stop, ``torch.where`` keeps the value. The outcome is read after each replay. Tests check that they agree with the eager
solvers bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.kernels.execution import Execution, Pending
from hyperkron.solution import Solution, Status
from hyperkron.solvers.base import LinearSystem, finite_or_none, signed_norm, signed_square
from hyperkron.trees import Tree

_STATUSES = Status.BUDGET, Status.CONVERGED, Status.NONPOSITIVE_CURVATURE, Status.DIVERGED, Status.NON_FINITE
BUDGET, CONVERGED, NONPOSITIVE, DIVERGED, NON_FINITE = range(len(_STATUSES))
"""How a solve ends, as a number; ``BUDGET`` while it is still running."""


def recorded_cg(
    system: LinearSystem, execution: Execution, iterations: int, tolerance: float
) -> tuple[Tree, Pending[Solution]]:
    """:class:`~hyperkron.solvers.cg.CG`: its value, and its solution after a replay."""
    operator, b, start, eps = system.operator, system.b, system.start, system.epsilon
    r, products = system.residual()
    v, goal = trees.zeros_like(b) if start is None else start, max(tolerance, eps)
    norm = trees.norm(b)
    size, left = _numbers(norm, norm if start is None else trees.norm(r))
    residual = left / size
    outcome = _Outcome(_first((NON_FINITE, _any_non_finite(residual)), (CONVERGED, residual <= goal)), 0, residual)
    p = z = system.preconditioned(r)
    rz, largest = trees.dot(r, z), torch.zeros_like(residual)
    for done in range(iterations):
        product = operator.matvec(p)
        products += 1
        curvature = trees.dot(p, product)
        step = rz / curvature
        v_next, r = trees.add(v, p, alpha=step), trees.add(r, product, alpha=-step)
        rr = trees.dot(r, r)
        facts = _numbers(rz, curvature, trees.dot(p, p), trees.dot(product, product), rr)
        rz_, curvature_, pp, qq, rr_ = facts
        largest = torch.fmax(largest, torch.where(pp > 0.0, qq / pp, 0.0).sqrt())
        left, nonpositive = rr_.sqrt() / size, rz_ <= 0.0
        status = _first(
            (NON_FINITE, _any_non_finite(*facts[:4])),
            (NONPOSITIVE, nonpositive | (curvature_ <= eps * largest * pp)),
            (NON_FINITE, _any_non_finite(rr_)),
            (CONVERGED, left <= goal),
        )
        usable = status <= CONVERGED
        v = trees.where(outcome.running & usable, v_next, v)
        residual = torch.where(usable, left, residual)
        if done == 0 and start is None:  # a bad first direction is the value, or b if the preconditioner is bad
            (left,) = _numbers(trees.norm(trees.subtract(b, product)))
            stuck = status == NONPOSITIVE
            v = trees.where(stuck, trees.where(nonpositive, b, p), v)
            residual = torch.where(stuck, torch.where(nonpositive, math.nan, left / size), residual)
        outcome.update(status, done + usable, residual)
        if done + 1 < iterations:
            z = system.preconditioned(r)
            rz_next = rr if z is r else trees.dot(r, z)
            p, rz = trees.add(z, p, alpha=rz_next / rz), rz_next
    return v, outcome.pending(execution, v, products)


def recorded_fixed_step(
    system: LinearSystem, execution: Execution, updates: int, step: float
) -> tuple[Tree, Pending[Solution]]:
    """:class:`~hyperkron.solvers.fixed_step.FixedStep`: its value, and its solution after a replay."""
    operator, b, start, preconditioner = system.operator, system.b, system.start, system.preconditioner
    eps, z = system.epsilon, system.preconditioned(b)
    norm = left = signed_norm(b, z)
    r, products = system.residual()
    if start is not None:
        z = system.preconditioned(r)
        left = signed_norm(r, z)
    size, left = _numbers(norm, left)
    nonpositive = (size < 0.0) | (left < 0.0)  # never without a preconditioner
    residual = torch.where(nonpositive, math.nan, left / size)
    status = _first((NONPOSITIVE, nonpositive), (NON_FINITE, _any_non_finite(residual)))
    outcome = _Outcome(status, status == BUDGET, residual)
    if start is None:
        z = z if preconditioner is None else trees.where(nonpositive, b, z)
        v = best = trees.scale(z, step)
    else:
        v, best = trees.add(start, z, alpha=step), start
    least, updates_to_best = residual, torch.zeros_like(residual)
    for done in range(1, updates):
        product = operator.matvec(z)
        products += 1
        curvature = trees.dot(z, product)
        r = trees.add(r, product, alpha=-step)
        z = system.preconditioned(r)
        curvature, square = _numbers(curvature, signed_square(r, z))
        nonpositive, lost = square < 0.0, square.isnan() & (preconditioner is not None)
        residual = torch.where((square >= 0.0) & square.isfinite(), square.sqrt() / size, math.inf)
        grows = residual > least * (1.0 + math.sqrt(eps))
        better = (residual <= least) | (done == 1 and start is None)
        least, updates_to_best = torch.where(better, residual, least), torch.where(better, done, updates_to_best)
        status = _first(
            (NON_FINITE, _any_non_finite(curvature) | lost),
            (NONPOSITIVE, nonpositive | (grows & (curvature < 0.0))),
            (DIVERGED, grows),
            (CONVERGED, residual <= eps),
        )
        grown = (status == NONPOSITIVE) | (status == DIVERGED)
        best = trees.where(outcome.running & better, v, best)
        outcome.update(
            status,
            torch.where(grown, updates_to_best, torch.where(status == BUDGET, done + 1, done)),
            torch.where(grown, least, torch.where(status == NON_FINITE, math.nan, residual)),
        )
        v = trees.where(outcome.running, trees.add(v, z, alpha=step), v)
    v = trees.where(outcome.ended(NONPOSITIVE, DIVERGED), best, v)
    return v, outcome.pending(execution, v, products)


class _Outcome:
    """Status, iterations and residual of a solve as one vector, which no longer changes when the solve has ended."""

    def __init__(self, status: Tensor, iterations: Tensor | int, residual: Tensor) -> None:
        self.vector = self._stacked(status, iterations, residual)

    @staticmethod
    def _stacked(status: Tensor, iterations: Tensor | int, residual: Tensor) -> Tensor:
        count = iterations.to(residual) if isinstance(iterations, Tensor) else torch.full_like(residual, iterations)
        return torch.stack([status.to(residual), count, residual])

    @property
    def running(self) -> Tensor:
        """Whether the solve has not ended."""
        return self.vector[0] == BUDGET

    def ended(self, *statuses: int) -> Tensor:
        """Whether it has ended with one of ``statuses``."""
        return torch.stack([self.vector[0] == status for status in statuses]).any()

    def update(self, status: Tensor, iterations: Tensor | int, residual: Tensor) -> None:
        """Store the result of an iteration, unless the solve had ended before it."""
        self.vector = torch.where(self.running, self._stacked(status, iterations, residual), self.vector)

    def pending(self, execution: Execution, value: Tree, products: int) -> Pending[Solution]:
        """The solution of a replay."""

        def solution(numbers: list[float]) -> Solution:
            status, iterations, residual = numbers
            return Solution(value, _STATUSES[int(status)], int(iterations), products, finite_or_none(residual))

        return execution.later(self.vector).then(solution)


def _numbers(*found: Tensor) -> tuple[Tensor, ...]:
    """The numbers that an eager solver would read, in float64 like Python's floats."""
    return torch.stack(found).double().unbind()


def _any_non_finite(*numbers: Tensor) -> Tensor:
    """Whether any of ``numbers`` is NaN or infinite."""
    return ~torch.stack(numbers).isfinite().all()


def _first(*events: tuple[int, Tensor]) -> Tensor:
    """The first status whose condition holds; ``BUDGET`` if none does."""
    status = torch.zeros_like(events[0][1], dtype=torch.int64)
    for code, condition in reversed(events):
        status = torch.where(condition, code, status)
    return status
