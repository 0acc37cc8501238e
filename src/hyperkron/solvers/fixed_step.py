"""The fixed-step iteration v ← v + η(b − Av), which Neumann series and gradient descent share."""

from __future__ import annotations

import math

import torch

from hyperkron import trees
from hyperkron.curvature.base import Operator
from hyperkron.solution import Solution, Status
from hyperkron.solvers.base import epsilon
from hyperkron.solvers.spectrum import power_iteration
from hyperkron.trees import Tree


def fixed_step(
    operator: Operator,
    b: Tree,
    start: Tree | None,
    updates: int,
    step: float | None,
    power_iterations: int,
    seed: int,
) -> Solution:
    """``updates`` times v ← v + ηr, r ← r − ηAr, from r = b − A·start.

    The residual is carried along, since b − A(v + ηr) = r − ηAr: the last update needs no product, and from
    v₀ = 0 neither does the first residual. With r_k = (I − ηA)^k r₀ this is the Neumann series
    v = v₀ + η Σ_{k<updates} (I − ηA)^k r₀ and, written out, gradient descent on ½vᵀAv − bᵀv.

    For symmetric A the norms ‖r_k‖ are log-convex in k, so once they grow they grow for ever: the first
    growth beyond rounding ends the iteration as ``DIVERGED``, or as ``NONPOSITIVE_CURVATURE`` if rᵀAr < 0.
    The value is the iterate of least residual, but from v₀ = 0 never zero itself: it is then the first term
    ηb (b where A is zero and gives no step).
    """
    spent = 0
    if step is None:
        spectrum = power_iteration(operator, b, power_iterations, seed)
        spent = spectrum.products
        if not math.isfinite(spectrum.largest):
            return Solution(trees.zeros_like(b) if start is None else start, Status.NON_FINITE, 0, spent)
        step = spectrum.safe_step if spectrum.largest > 0.0 else 1.0
        if spectrum.largest == 0.0 or spectrum.rayleigh < -epsilon(b) * spectrum.largest:
            value = trees.scale(b, step) if start is None else start
            return Solution(value, Status.NONPOSITIVE_CURVATURE, 0, spent)
    return _iterate(operator, b, start, updates, step, spent)


def _iterate(operator: Operator, b: Tree, start: Tree | None, updates: int, step: float, products: int) -> Solution:
    """The iteration of :func:`fixed_step` for a known step, after ``products`` were spent on finding it."""
    eps, size = epsilon(b), float(trees.norm(b))
    if start is None:
        v, r, residual = trees.scale(b, step), b, 1.0
    else:
        r, products = trees.add(b, operator.matvec(start), alpha=-1.0), products + 1
        residual = float(trees.norm(r)) / size
        if not math.isfinite(residual):
            return Solution(start, Status.NON_FINITE, 0, products)
        v = trees.add(start, r, alpha=step)
    # v has had r added; `best`, reached after `at` updates, is the iterate of the smallest residual, `least`.
    best, least, at = start, residual, 0
    for done in range(1, updates):
        product = operator.matvec(r)
        products += 1
        r_next = trees.add(r, product, alpha=-step)
        curvature, rr_next = torch.stack([trees.dot(r, product), trees.dot(r_next, r_next)]).tolist()
        if not math.isfinite(curvature):
            return Solution(v, Status.NON_FINITE, done, products)
        residual = math.sqrt(rr_next) / size if math.isfinite(rr_next) else math.inf
        if residual > least * (1.0 + math.sqrt(eps)):
            status = Status.NONPOSITIVE_CURVATURE if curvature < 0.0 else Status.DIVERGED
            if best is None:
                best, least, at = v, residual, done
            return Solution(best, status, at, products, least if math.isfinite(least) else None)
        if residual <= eps:
            return Solution(v, Status.CONVERGED, done, products, residual)
        if best is None or residual <= least:
            best, least, at = v, residual, done
        v, r = trees.add(v, r_next, alpha=step), r_next
    return Solution(v, Status.BUDGET, updates, products, residual)
