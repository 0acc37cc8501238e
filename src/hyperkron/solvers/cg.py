"""Conjugate gradients, plain and preconditioned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.kernels.execution import Execution, Pending, read
from hyperkron.solution import Solution, Status
from hyperkron.solvers.base import LinearSystem, Solver, finite_or_none
from hyperkron.solvers.recorded import recorded_cg
from hyperkron.solvers.stacked import stacked_cg
from hyperkron.trees import Tree
from hyperkron.validation import check_interval, check_whole


@dataclass(frozen=True)
class CG(Solver):
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

    def _solve(self, system: LinearSystem) -> Solution:
        operator, b, start, eps = system.operator, system.b, system.start, system.epsilon
        r, products = system.residual()
        v, norm = trees.zeros_like(b) if start is None else start, trees.norm(b)
        size, left = read(norm, norm if start is None else trees.norm(r))
        residual, goal = left / size, max(self.tolerance, eps)
        if not math.isfinite(residual):
            return Solution(v, Status.NON_FINITE, products=products)
        if residual <= goal:
            return Solution(v, Status.CONVERGED, products=products, residual=residual)

        p = z = system.preconditioned(r)
        rz = trees.dot(r, z)
        largest, iterations = 0.0, 0
        for _ in range(self.iterations):
            product = operator.matvec(p)
            products += 1
            curvature = trees.dot(p, product)
            step = rz / curvature
            v_next, r = trees.add(v, p, alpha=step), trees.add(r, product, alpha=-step)
            rr = trees.dot(r, r)
            facts = _Facts(*read(rz, curvature, trees.dot(p, p), trees.dot(product, product), rr))
            largest = max(largest, facts.norm)
            status = facts.breakdown(eps * largest)
            if status is not Status.BUDGET:
                break
            v, residual, iterations = v_next, math.sqrt(facts.rr) / size, iterations + 1
            if residual <= goal:
                status = Status.CONVERGED
                break
            if iterations == self.iterations:
                break
            z = system.preconditioned(r)
            rz_next = rr if z is r else trees.dot(r, z)
            p, rz = trees.add(z, p, alpha=rz_next / rz), rz_next

        if status is not Status.NONPOSITIVE_CURVATURE or iterations > 0 or start is not None:
            return Solution(v, status, iterations, products, residual)
        if facts.rz <= 0.0:  # the preconditioner is at fault
            return Solution(trees.map(torch.clone, b), status, 0, products)
        (left,) = read(trees.norm(trees.subtract(b, product)))
        return Solution(trees.map(torch.clone, p), status, 0, products, finite_or_none(left / size))

    def solve_stacked(self, operator: Operator, b: Tree, *, preconditioner: Invertible | None = None) -> Solution:
        """Solve all systems together, with one batched product per iteration; each system stops on its own."""
        self._check(LinearSystem(operator, b, None, preconditioner))
        return stacked_cg(operator, b, preconditioner, self.iterations, self.tolerance)

    def _record(self, system: LinearSystem, execution: Execution) -> tuple[Tree, Pending[Solution]]:
        return recorded_cg(system, execution, self.iterations, self.tolerance)


class _Facts(NamedTuple):
    """The numbers that decide whether an iteration succeeded: rᵀz, pᵀAp, ‖p‖², ‖Ap‖² and the new ‖r‖²."""

    rz: float
    curvature: float
    pp: float
    qq: float
    rr: float

    @property
    def norm(self) -> float:
        """‖Ap‖/‖p‖, a lower bound of ‖A‖."""
        return math.sqrt(self.qq / self.pp) if self.pp > 0.0 else 0.0

    def breakdown(self, rounding: float) -> Status:
        """Why the iteration failed; ``BUDGET`` if it succeeded."""
        if not all(map(math.isfinite, self[:4])):
            return Status.NON_FINITE
        if self.rz <= 0.0 or self.curvature <= rounding * self.pp:
            return Status.NONPOSITIVE_CURVATURE
        return Status.BUDGET if math.isfinite(self.rr) else Status.NON_FINITE
