"""Conjugate gradients, plain and preconditioned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.solution import HyperkronError, Solution, Status
from hyperkron.solvers.base import Solver, check_count, epsilon
from hyperkron.solvers.watch import Progress, Verdict, Watch
from hyperkron.trees import Tree


@dataclass(frozen=True)
class CG(Solver):
    """Conjugate gradients on (A + δI) v = b, one product for each iteration, returning the last iterate.

    With r₀ = b − Av₀, z = M⁻¹r (z = r without a preconditioner) and p₀ = z₀::

        α = rᵀz / pᵀAp,    v ← v + αp,    r ← r − αAp,    p ← z + (r₊ᵀz₊ / rᵀz) p

    After k iterations v minimises ½vᵀAv − bᵀv over v₀ + span{p₀, …, p_{k−1}}, the Krylov space (Hestenes &
    Stiefel, 1952). It is CG on the system itself, not on its normal equations, so the condition number is not
    squared. From v₀ = 0 no product is spent on r₀; from ``start`` one is.

    Preconditioned by KFAC it gives the exact answer in few products: the better M ≈ A, the fewer. Where A is
    singular and b is not in its range, the minimisers grow without bound with k; damping is the cure.

    It stops early

    - when ‖r‖ ≤ tolerance·‖b‖, or at the precision of the dtype: ``CONVERGED``;
    - when rᵀM⁻¹r is not positive, or pᵀAp is not above ε‖A‖‖p‖², the rounding error of products with A (ε is
      the unit roundoff, ‖A‖ as seen so far): ``NONPOSITIVE_CURVATURE``. The value is the last iterate, which
      still minimises the quadratic over a space where it is convex. If the first direction is already bad and
      there is no ``start``, that iterate would be zero and the hypergradient would silently lose its implicit
      term; the value is then p₀: b (the identity in place of A, as Nocedal & Wright, 2006, algorithm 7.1, do
      for Newton–CG) or M⁻¹b (the preconditioner in place of A; b if M itself is at fault);
    - when a NaN or an infinity appears: ``NON_FINITE``, with the last finite iterate (v₀ at the first).

    Numbers are copied to the host once in each iteration (after a recorded solve, once for all). The residual
    reported is the recursive one.

    Reference for the use in hypergradients: Grazzi et al., 2020 (AID-CG).

    Args:
        iterations: the most iterations to do.
        tolerance: the relative residual at which to stop; 0 does all iterations.

    Example:
        >>> CG(iterations=10, tolerance=1e-6)
        CG(iterations=10, tolerance=1e-06)
    """

    iterations: int = 3
    tolerance: float = 0.0

    uses_start: ClassVar[bool] = True
    uses_preconditioner: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a configuration that makes no sense."""
        check_count("iterations", self.iterations, 1)
        if not (isinstance(self.tolerance, int | float) and 0.0 <= self.tolerance < 1.0):
            raise HyperkronError(
                f"tolerance is {self.tolerance!r}; pass a relative residual from 0 to below 1, such as 1e-6"
            )

    def check_graph(self) -> None:
        """All it decides by is asked of the watch."""

    def _solve(
        self, operator: Operator, b: Tree, start: Tree | None, preconditioner: Invertible | None, watch: Watch
    ) -> Solution:
        eps = epsilon(b)
        progress = _Progress(eps, max(self.tolerance, eps))
        size = trees.norm(b)
        v, r, products = trees.zeros_like(b), b, 0
        if start is not None:
            v, r, products = start, trees.add(b, operator.matvec(start), alpha=-1.0), 1
            size = torch.stack([size, trees.norm(r)])
        event = watch(progress.begin, size)
        if event is not None:
            return Solution(v, event, 0, products, watch.residual)
        p = z = r if preconditioner is None else preconditioner.solve(r)
        rz = trees.dot(r, z)
        for done in range(self.iterations):
            product = operator.matvec(p)
            products += 1
            curvature = trees.dot(p, product)
            step = rz / curvature
            v_next, r_next = trees.add(v, p, alpha=step), trees.add(r, product, alpha=-step)
            rr = trees.dot(r_next, r_next)
            facts = torch.stack([rz, curvature, trees.dot(p, p), trees.dot(product, product), rr])
            event = watch(progress.step, facts)
            if event is Status.NONPOSITIVE_CURVATURE and done == 0 and start is None:
                if progress.rz <= 0.0:
                    return Solution(trees.map(torch.clone, b), event, 0, products)
                left = float(trees.norm(trees.add(b, product, alpha=-1.0)))
                return Solution(trees.map(torch.clone, p), event, 0, products, left / progress.size)
            if event is Status.CONVERGED:
                return Solution(v_next, event, done + 1, products, watch.residual)
            if event is not None:
                return Solution(v, event, done, products, watch.residual)
            v, r = v_next, r_next
            if done + 1 < self.iterations:
                z = r if preconditioner is None else preconditioner.solve(r)
                rz_next = rr if preconditioner is None else trees.dot(r, z)
                p, rz = trees.add(z, p, alpha=rz_next / rz), rz_next
        return Solution(v, Status.BUDGET, self.iterations, products, watch.residual)


class _Progress(Progress):
    """The residual so far, and ‖A‖ as far as it was seen."""

    def __init__(self, eps: float, goal: float) -> None:
        self.eps, self.goal = eps, goal

    def begin(self, numbers: list[float]) -> Verdict:
        self.largest = 0.0
        event, residual = super().begin(numbers)
        return Verdict(event or self._reached(), residual)

    def step(self, numbers: list[float]) -> Verdict:
        """From rᵀz, pᵀAp, ‖p‖², ‖Ap‖² and the new ‖r‖²."""
        self.rz, _, pp, qq, rr = numbers
        if pp > 0.0:
            self.largest = max(self.largest, math.sqrt(qq / pp))
        trouble = _trouble(numbers, self.eps * self.largest)
        if trouble is not None:
            return Verdict(trouble, self.residual)
        self.residual = math.sqrt(rr) / self.size
        return Verdict(self._reached(), self.residual)

    def _reached(self) -> Status | None:
        return Status.CONVERGED if self.residual <= self.goal else None


def _trouble(facts: list[float], floor: float) -> Status | None:
    """Why an iteration cannot be used, from rᵀz, pᵀAp, ‖p‖², ‖Ap‖² and the new ‖r‖²; ``None`` if it can."""
    rz, curvature, pp, qq, rr = facts
    if not all(math.isfinite(fact) for fact in (rz, curvature, pp, qq)):
        return Status.NON_FINITE
    if rz <= 0.0 or curvature <= floor * pp:
        return Status.NONPOSITIVE_CURVATURE
    return None if math.isfinite(rr) else Status.NON_FINITE
