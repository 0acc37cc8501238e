"""The fixed-step iteration v ← v + ηM⁻¹(b − Av), which Neumann series (M = I) and gradient descent share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.solution import HyperkronError, Solution, Status
from hyperkron.solvers.base import Solver, epsilon
from hyperkron.solvers.spectrum import power_iteration
from hyperkron.solvers.watch import Course, Flag, Number, Watch, among, either, first, root, strange
from hyperkron.trees import Tree


def fixed_step(
    operator: Operator,
    b: Tree,
    start: Tree | None,
    updates: int,
    step: float | None,
    power_iterations: int,
    seed: int,
    watch: Watch,
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
    return _iterate(operator, b, start, updates, step, spent, watch, preconditioner)


def _iterate(
    operator: Operator,
    b: Tree,
    start: Tree | None,
    updates: int,
    step: float,
    products: int,
    watch: Watch,
    preconditioner: Invertible | None,
) -> Solution:
    """The iteration of :func:`fixed_step` for a known step, after ``products`` were spent on finding it."""
    plain, invert = preconditioner is None, _itself if preconditioner is None else preconditioner.solve
    r, z = b, invert(b)
    sizes = [_size(r, z)]
    if start is not None:
        r, products = trees.add(b, operator.matvec(start), alpha=-1.0), products + 1
        z = invert(r)
        sizes.append(_size(r, z))
    course = _FixedStepCourse(watch.look(*sizes), epsilon(b, operator), plain)
    if start is None and not plain:
        z = watch.choose(course.unfit, b, z)  # the identity in place of an M that is at fault
    v = trees.scale(z, step) if start is None else trees.add(start, z, alpha=step)
    best = v if start is None else start
    if watch.ends(course):
        return watch.solution(trees.zeros_like(b) if start is None and not course.unfit else best, products)
    for done in range(1, updates):
        product = operator.matvec(z)
        products += 1
        r_next = trees.add(r, product, alpha=-step)
        z_next = invert(r_next)
        facts = watch.look(trees.dot(z, product), _square(r_next, z_next))
        course.step(facts, done, anyway=done == 1 and start is None)
        best = watch.choose(watch.alive & course.better, v, best)
        if watch.ends(course):
            break
        v, r, z = watch.choose(watch.alive, trees.add(v, z_next, alpha=step), v), r_next, z_next
    return watch.solution(watch.choose(watch.ended(*_GROWN), best, v), products)


_GROWN = Status.NONPOSITIVE_CURVATURE, Status.DIVERGED


def _itself(r: Tree) -> Tree:
    """M⁻¹r for M = I."""
    return r


def _square(r: Tree, z: Tree) -> Tensor:
    """rᵀz for z = M⁻¹r; negative where M is not positive definite, infinite where r is, NaN where only z is."""
    rz = trees.dot(r, z)
    if z is r:
        return rz
    rr = trees.dot(r, r)
    return torch.where(rr.isfinite(), torch.where(rz <= 0.0, -rr, rz), math.inf)


def _size(r: Tree, z: Tree) -> Tensor:
    """The root of :func:`_square`, with its sign."""
    if z is r:
        return trees.norm(r)
    square = _square(r, z)
    return square.sign() * square.abs().sqrt()


class _FixedStepCourse(Course):
    """Residuals so far.

    Attributes:
        unfit: whether M is not positive definite, as far as the first residuals tell;
        better: whether the last iterate of which the residual is known is the best so far; and
        best: how many updates led to the best, 0 for the start, whose residual is
        least: the smallest.
    """

    def __init__(self, sizes: list[Number], eps: float, plain: bool) -> None:
        super().__init__(sizes)
        self.eps, self.plain = eps, plain
        self.unfit: Flag = not plain and (sizes[0] < 0.0) | (sizes[-1] < 0.0)
        self.residual = either(self.unfit, math.nan, self.residual)
        self.best, self.least = 0, self.residual
        self.code = first((Status.NONPOSITIVE_CURVATURE, self.unfit), (Status.NON_FINITE, strange(self.residual)))
        self.iterations = either(self.code == 0, 1, 0)

    def step(self, facts: list[Number], done: int, *, anyway: bool) -> None:
        """From zᵀAz and the next ‖r‖², that of the iterate after ``done`` updates, which may be the best ``anyway``."""
        curvature, rr = facts
        lost: Flag = not self.plain and rr != rr  # NaN
        unfit: Flag = not self.plain and rr < 0.0
        rr = either(unfit, math.inf, rr)
        residual = either(strange(rr), math.inf, root(rr) / self.size)
        grows = residual > self.least * (1.0 + math.sqrt(self.eps))
        self.better = (residual <= self.least) | anyway
        self.best, self.least = either(self.better, done, self.best), either(self.better, residual, self.least)
        self.code = first(
            (Status.NON_FINITE, strange(curvature)),
            (Status.NON_FINITE, lost),
            (Status.NONPOSITIVE_CURVATURE, unfit),
            (Status.NONPOSITIVE_CURVATURE, grows & (curvature < 0.0)),
            (Status.DIVERGED, grows),
            (Status.CONVERGED, residual <= self.eps),
        )
        grown = among(self.code, *_GROWN)
        self.iterations = either(grown, self.best, either(self.code == 0, done + 1, done))
        known = either(grown, self.least, residual)
        self.residual = either(among(self.code, Status.NON_FINITE), math.nan, known)


def check_known(step: float | None, solver: Solver) -> None:
    """Refuse to record a search for the step: the numbers it finds are read on the way."""
    if step is None:
        raise HyperkronError(
            f"graph=True does not work with step=None of {type(solver).__name__}, which reads the step it finds from "
            "the device; pass step=, a number below 2/λmax, or graph=False."
        )
