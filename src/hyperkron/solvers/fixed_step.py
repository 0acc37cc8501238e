"""The fixed-step iteration v ← v + η(b − Av), which Neumann series and gradient descent share."""

from __future__ import annotations

import math

from hyperkron import trees
from hyperkron.curvature.base import Operator
from hyperkron.solution import HyperkronError, Solution, Status
from hyperkron.solvers.base import Solver, epsilon
from hyperkron.solvers.spectrum import power_iteration
from hyperkron.solvers.watch import Course, Number, Watch, among, either, first, root, strange
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
    return _iterate(operator, b, start, updates, step, spent, watch)


def _iterate(
    operator: Operator, b: Tree, start: Tree | None, updates: int, step: float, products: int, watch: Watch
) -> Solution:
    """The iteration of :func:`fixed_step` for a known step, after ``products`` were spent on finding it."""
    r, sizes = b, [trees.norm(b)]
    if start is not None:
        r, products = trees.add(b, operator.matvec(start), alpha=-1.0), products + 1
        sizes.append(trees.norm(r))
    course = _Course(watch.look(*sizes), epsilon(b))
    if watch.ends(course):
        return watch.solution(trees.zeros_like(b) if start is None else start, products)
    v = trees.scale(b, step) if start is None else trees.add(start, r, alpha=step)
    best = v if start is None else start
    for done in range(1, updates):
        product = operator.matvec(r)
        products += 1
        r_next = trees.add(r, product, alpha=-step)
        facts = watch.look(trees.dot(r, product), trees.dot(r_next, r_next))
        course.step(facts, done, anyway=done == 1 and start is None)
        best = watch.choose(watch.alive & course.better, v, best)
        if watch.ends(course):
            break
        v, r = watch.choose(watch.alive, trees.add(v, r_next, alpha=step), v), r_next
    return watch.solution(watch.choose(watch.ended(*_GROWN), best, v), products)


_GROWN = Status.NONPOSITIVE_CURVATURE, Status.DIVERGED


class _Course(Course):
    """Residuals so far.

    Attributes:
        better: whether the last iterate of which the residual is known is the best so far; and
        best: how many updates led to the best, 0 for the start, whose residual is
        least: the smallest.
    """

    def __init__(self, sizes: list[Number], eps: float) -> None:
        super().__init__(sizes)
        self.eps = eps
        self.best, self.least = 0, self.residual
        self.code = first((Status.NON_FINITE, strange(self.residual)))
        self.iterations = either(self.code == 0, 1, 0)

    def step(self, facts: list[Number], done: int, *, anyway: bool) -> None:
        """From rᵀAr and the next ‖r‖², that of the iterate after ``done`` updates, which may be the best ``anyway``."""
        curvature, rr = facts
        residual = either(strange(rr), math.inf, root(rr) / self.size)
        grows = residual > self.least * (1.0 + math.sqrt(self.eps))
        self.better = (residual <= self.least) | anyway
        self.best, self.least = either(self.better, done, self.best), either(self.better, residual, self.least)
        self.code = first(
            (Status.NON_FINITE, strange(curvature)),
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
