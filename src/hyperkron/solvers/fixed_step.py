"""The fixed-step iteration v ← v + ηM⁻¹(b − Av), which Neumann series (M = I) and gradient descent share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.kernels.execution import read
from hyperkron.solution import HyperkronError, Solution, Status
from hyperkron.solvers.base import Solver, epsilon, finite_or_none
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
    preconditioner: Invertible | None = None,
) -> Solution:
    """``updates`` times v ← v + ηz, r ← r − ηAz, z = M⁻¹r, from r = b − A·start; without a preconditioner M = I.

    The residual is carried along, since b − A(v + ηz) = r − ηAz: the last update needs no product, and from
    v₀ = 0 neither does the first residual. With r_k = (I − ηAM⁻¹)^k r₀ this is the Neumann series
    v = v₀ + ηM⁻¹ Σ_{k<updates} (I − ηAM⁻¹)^k r₀ and, written out, gradient descent on ½vᵀAv − bᵀv.

    Residuals are measured by ‖r‖ = √(rᵀM⁻¹r), in which this is the plain iteration for M^{-1/2} A M^{-1/2}. For
    symmetric A and M the norms ‖r_k‖ are log-convex in k, so once they grow they grow for ever: the first
    growth beyond rounding ends the iteration as ``DIVERGED``, or as ``NONPOSITIVE_CURVATURE`` if zᵀAz < 0.
    The value is the iterate of least residual, but from v₀ = 0 never zero itself: it is then the first term
    ηM⁻¹b (b where A is zero and gives no step).

    Where rᵀM⁻¹r is not positive, M is not positive definite and there is no such norm. That ends the iteration as
    ``NONPOSITIVE_CURVATURE`` too; from v₀ = 0 and for r = b the value is then ηb.

    Without a ``step`` η comes from a power iteration on A; with a preconditioner, whose scale is A's, it is 1.
    """
    spent = 0
    if step is None and preconditioner is not None:
        step = 1.0
    if step is None:
        spectrum = power_iteration(operator, b, power_iterations, seed)
        spent = spectrum.products
        if not math.isfinite(spectrum.largest):
            return Solution(trees.zeros_like(b) if start is None else start, Status.NON_FINITE, 0, spent)
        step = spectrum.safe_step if spectrum.largest > 0.0 else 1.0
        if spectrum.largest == 0.0 or spectrum.rayleigh < -epsilon(b, operator) * spectrum.largest:
            value = trees.scale(b, step) if start is None else start
            return Solution(value, Status.NONPOSITIVE_CURVATURE, 0, spent)
    return _iterate(operator, b, start, updates, step, spent, preconditioner)


def _iterate(
    operator: Operator,
    b: Tree,
    start: Tree | None,
    updates: int,
    step: float,
    products: int,
    preconditioner: Invertible | None,
) -> Solution:
    """The iteration of :func:`fixed_step` for a known step, after ``products`` were spent on finding it."""
    eps = epsilon(b, operator)
    r, z = b, preconditioned(b, preconditioner)
    norm = left = signed_norm(r, z)
    if start is not None:
        r, products = trees.add(b, operator.matvec(start), alpha=-1.0), products + 1
        z = preconditioned(r, preconditioner)
        left = signed_norm(r, z)
    size, first = read(norm, left)
    if preconditioner is not None and (size < 0.0 or first < 0.0):
        value = trees.scale(b, step) if start is None else start  # the identity in place of an M that is at fault
        return Solution(value, Status.NONPOSITIVE_CURVATURE, 0, products)
    residual = first / size
    if not math.isfinite(residual):
        return Solution(trees.zeros_like(b) if start is None else start, Status.NON_FINITE, 0, products)

    v = trees.scale(z, step) if start is None else trees.add(start, z, alpha=step)
    best, least, updates_to_best, done = v if start is None else start, residual, 0, 1
    while done < updates:
        product = operator.matvec(z)
        products += 1
        curvature = trees.dot(z, product)
        r = trees.add(r, product, alpha=-step)
        z = preconditioned(r, preconditioner)
        slope, square = read(curvature, signed_square(r, z))
        if not math.isfinite(slope) or (preconditioner is not None and math.isnan(square)):
            return Solution(v, Status.NON_FINITE, done, products)
        residual = math.sqrt(square) / size if 0.0 <= square < math.inf else math.inf
        grows = residual > least * (1.0 + math.sqrt(eps))
        if residual <= least or (done == 1 and start is None):
            best, least, updates_to_best = v, residual, done
        if grows or square < 0.0:
            status = Status.NONPOSITIVE_CURVATURE if slope < 0.0 or square < 0.0 else Status.DIVERGED
            return Solution(best, status, updates_to_best, products, finite_or_none(least))
        if residual <= eps:
            return Solution(v, Status.CONVERGED, done, products, residual)
        v, done = trees.add(v, z, alpha=step), done + 1
    return Solution(v, Status.BUDGET, done, products, residual)


def preconditioned(r: Tree, preconditioner: Invertible | None) -> Tree:
    """z = M⁻¹r; r itself without a preconditioner."""
    return r if preconditioner is None else preconditioner.solve(r)


def signed_square(r: Tree, z: Tree) -> Tensor:
    """rᵀz for z = M⁻¹r; negative where M is not positive definite, infinite where r is, NaN where only z is."""
    rz = trees.dot(r, z)
    if z is r:
        return rz
    rr = trees.dot(r, r)
    return torch.where(rr.isfinite(), torch.where(rz <= 0.0, -rr, rz), math.inf)


def signed_norm(r: Tree, z: Tree) -> Tensor:
    """The root of :func:`signed_square`, with its sign."""
    if z is r:
        return trees.norm(r)
    square = signed_square(r, z)
    return square.sign() * square.abs().sqrt()


def check_known(step: float | None, solver: Solver) -> None:
    """Refuse to record a search for the step: the numbers it finds are read on the way."""
    if step is None:
        raise HyperkronError(
            f"graph=True does not work with step=None of {type(solver).__name__}, which reads the step it finds from "
            "the device; pass step=, a number below 2/λmax, or graph=False."
        )
