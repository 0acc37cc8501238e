"""Conjugate gradients, plain and preconditioned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.solution import Solution, Status
from hyperkron.solvers.base import Solver, epsilon
from hyperkron.solvers.watch import Course, Number, Watch, among, either, first, ratio, root, strange
from hyperkron.trees import Tree
from hyperkron.validation import check_interval, check_whole


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

    Numbers are copied to the host once in each iteration. A solve recorded as a CUDA graph spends the products of all
    iterations, and reports these, but holds its value from where it stops; its numbers are read once for all. The
    residual reported is the recursive one.

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
        check_whole("iterations", self.iterations, 1)
        remedy = "it is a relative residual, such as 1e-6"
        check_interval("tolerance", self.tolerance, 0, 1, brackets="[)", remedy=remedy)

    def check_graph(self) -> None:
        """All it decides by is looked at by the watch."""

    def _solve(
        self, operator: Operator, b: Tree, start: Tree | None, preconditioner: Invertible | None, watch: Watch
    ) -> Solution:
        v, r, products, sizes = trees.zeros_like(b), b, 0, [trees.norm(b)]
        if start is not None:
            v, r, products = start, trees.add(b, operator.matvec(start), alpha=-1.0), 1
            sizes.append(trees.norm(r))
        course = _CGCourse(watch.look(*sizes), epsilon(b, operator), self.tolerance)
        if watch.ends(course):
            return watch.solution(v, products)
        p = z = r if preconditioner is None else preconditioner.solve(r)
        rz = trees.dot(r, z)
        for done in range(self.iterations):
            product = operator.matvec(p)
            products += 1
            curvature = trees.dot(p, product)
            step = rz / curvature
            v_next, r_next = trees.add(v, p, alpha=step), trees.add(r, product, alpha=-step)
            rr = trees.dot(r_next, r_next)
            course.step(watch.look(rz, curvature, trees.dot(p, p), trees.dot(product, product), rr), done)
            v = watch.choose(watch.alive & course.usable, v_next, v)
            if done == 0 and start is None and watch.may(course.stuck):
                (left,) = watch.look(trees.norm(trees.add(b, product, alpha=-1.0)))
                v = watch.choose(course.stuck, trees.map(torch.clone, watch.choose(course.unfit, b, p)), v)
                course.begin_stuck(left)
            if watch.ends(course):
                break
            r = r_next
            if done + 1 < self.iterations:
                z = r if preconditioner is None else preconditioner.solve(r)
                rz_next = rr if preconditioner is None else trees.dot(r, z)
                p, rz = trees.add(z, p, alpha=rz_next / rz), rz_next
        return watch.solution(v, products)


class _CGCourse(Course):
    """The residual so far, and ‖A‖ as far as it was seen.

    Attributes:
        usable: whether the last iteration leads to an iterate,
        stuck: whether its direction is bad, and
        unfit: whether that is for rᵀM⁻¹r.
    """

    def __init__(self, sizes: list[Number], eps: float, tolerance: float) -> None:
        super().__init__(sizes)
        self.eps, self.goal = eps, max(tolerance, eps)
        self.iterations, self.largest = 0, 0.0
        reached = self.residual <= self.goal
        self.code = first((Status.NON_FINITE, strange(self.residual)), (Status.CONVERGED, reached))

    def step(self, facts: list[Number], done: int) -> None:
        """Another iteration after ``done``, from rᵀz, pᵀAp, ‖p‖², ‖Ap‖² and the new ‖r‖²."""
        rz, curvature, pp, qq, rr = facts
        norm, residual = root(ratio(qq, pp)), root(rr) / self.size
        self.largest = either(norm > self.largest, norm, self.largest)
        self.unfit = rz <= 0.0
        self.code = first(
            (Status.NON_FINITE, strange(rz, curvature, pp, qq)),
            (Status.NONPOSITIVE_CURVATURE, self.unfit | (curvature <= self.eps * self.largest * pp)),
            (Status.NON_FINITE, strange(rr)),
            (Status.CONVERGED, residual <= self.goal),
        )
        self.stuck = among(self.code, Status.NONPOSITIVE_CURVATURE)
        self.usable = among(self.code, Status.BUDGET, Status.CONVERGED)
        self.iterations = done + self.usable
        self.residual = either(self.usable, residual, self.residual)

    def begin_stuck(self, left: Number) -> None:
        """Where the first direction is bad, the value is it, and ``left`` = ‖b − Ap₀‖; or b, if M is at fault."""
        self.residual = either(self.stuck, either(self.unfit, math.nan, left / self.size), self.residual)
