"""Conjugate gradients, plain and preconditioned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.solution import Solution
from hyperkron.solvers.base import LinearSystem
from hyperkron.solvers.iteration import Ending, Event, IterativeSolver, Read, first, non_finite, possible, sqrt, where
from hyperkron.solvers.stacked import stacked_cg
from hyperkron.trees import Tree
from hyperkron.validation import check_interval, check_whole


@dataclass(frozen=True)
class CG(IterativeSolver):
    """Conjugate gradients on (A + δI) v = b, one product for each iteration, returning the last iterate.

    With r₀ = b − Av₀, z = M⁻¹r (z = r without a preconditioner) and p₀ = z₀::

        α = rᵀz / pᵀAp,    v ← v + αp,    r ← r − αAp,    p ← z + (r₊ᵀz₊ / rᵀz) p

    After k iterations v minimises ½vᵀAv − bᵀv over v₀ + span{p₀, …, p_{k−1}}, the Krylov space (Hestenes & Stiefel,
    1952). From v₀ = 0 no product is needed for r₀; from ``start`` one is. Preconditioned by KFAC it needs few products:
    the better M ≈ A, the fewer. If A is singular and b is not in its range, the minimisers grow without bound with k;
    use damping then.

    It stops early

    - when ‖r‖ ≤ tolerance·‖b‖, or at the precision of the dtype: ``CONVERGED``;
    - when rᵀM⁻¹r is not positive, or pᵀAp is not above ε‖A‖‖p‖², the rounding error of products with A:
      ``NONPOSITIVE_CURVATURE``, with the last iterate. If this happens in the first iteration and there is no
      ``start``, that would be zero and the hypergradient would silently lose its implicit term. The value is then p₀,
      which is b or M⁻¹b (b if rᵀM⁻¹r is not positive; Nocedal & Wright, 2006, algorithm 7.1);
    - when a NaN or an infinity appears: ``NON_FINITE``, with the last finite iterate (v₀ at the first).

    A solve recorded as a CUDA graph computes, and reports, the products of all iterations, but keeps the value with
    which it stops. The reported residual is the recursive one. Use in hypergradients: Grazzi et al., 2020 (AID-CG).

    Args:
        iterations: the maximum number of iterations.
        tolerance: the relative residual at which to stop; 0 runs all iterations.
    """

    iterations: int = 3
    tolerance: float = 0.0

    uses_start: ClassVar[bool] = True
    uses_preconditioner: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("iterations", self.iterations, 1)
        remedy = "it is a relative residual, such as 1e-6"
        check_interval("tolerance", self.tolerance, 0, 1, brackets="[)", remedy=remedy)

    def _iterate(self, system: LinearSystem, read: Read) -> tuple[Tree, int, Ending]:
        operator, b, start, eps = system.operator, system.b, system.start, system.epsilon
        r, products = system.residual()
        v, norm = trees.zeros_like(b) if start is None else start, trees.norm(b)
        size, left = read(norm, norm if start is None else trees.norm(r))
        residual, goal = left / size, max(self.tolerance, eps)
        end = Ending(first((Event.NON_FINITE, non_finite(residual)), (Event.CONVERGED, residual <= goal)), 0, residual)
        if end.stopped:
            return v, products, end

        p = z = system.preconditioned(r)
        rz, largest = trees.dot(r, z), 0.0
        for done in range(1, self.iterations + 1):
            product = operator.matvec(p)
            products += 1
            curvature = trees.dot(p, product)
            step = rz / curvature
            v_next, r = trees.add(v, p, alpha=step), trees.add(r, product, alpha=-step)
            rr = trees.dot(r, r)

            square, bend, pp, qq, left = read(rz, curvature, trees.dot(p, p), trees.dot(product, product), rr)
            left = sqrt(left) / size
            norm = sqrt(qq / where(pp > 0.0, pp, math.inf))  # a lower bound of ‖A‖
            largest = where(norm > largest, norm, largest)
            status = first(
                (Event.NON_FINITE, non_finite(square, bend, pp, qq)),
                (Event.NONPOSITIVE_CURVATURE, (square <= 0.0) | (bend <= eps * largest * pp)),
                (Event.NON_FINITE, non_finite(left)),
                (Event.CONVERGED, left <= goal),
            )
            stuck, usable = status == Event.NONPOSITIVE_CURVATURE, status <= Event.CONVERGED
            v = where(end.running & usable, v_next, v)
            residual = where(usable, left, residual)
            if done == 1 and start is None and possible(stuck):  # p₀ is the value, or b if the preconditioner is bad
                (left,) = read(trees.norm(trees.subtract(b, product)))
                v = where(stuck, trees.scale(where(square <= 0.0, b, p), 1.0), v)
                residual = where(stuck, where(square <= 0.0, math.nan, left / size), residual)
            end.update(status, where(usable, done, done - 1), residual)
            if end.stopped or done == self.iterations:
                break
            z = system.preconditioned(r)
            rz_next = rr if z is r else trees.dot(r, z)
            p, rz = trees.add(z, p, alpha=rz_next / rz), rz_next
        return v, products, end

    def solve_stacked(self, operator: Operator, b: Tree, *, preconditioner: Invertible | None = None) -> Solution:
        """Solve all systems together, with one batched product per iteration; each system stops on its own."""
        self._check(LinearSystem(operator, b, None, preconditioner))
        return stacked_cg(operator, b, preconditioner, self.iterations, self.tolerance)
