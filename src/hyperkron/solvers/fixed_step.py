"""The fixed-step iteration v ← v + η(b − Av), which Neumann series and gradient descent share."""

from __future__ import annotations

import math

import torch

from hyperkron import trees
from hyperkron.curvature.base import Operator
from hyperkron.solution import HyperkronError, Solution, Status
from hyperkron.solvers.base import Solver, epsilon
from hyperkron.solvers.spectrum import power_iteration
from hyperkron.solvers.watch import Progress, Verdict, Watch
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
    progress, size = _Progress(epsilon(b), started=start is not None), trees.norm(b)
    if start is None:
        v, r = trees.scale(b, step), b
        watch(progress.begin, size)
    else:
        r, products = trees.add(b, operator.matvec(start), alpha=-1.0), products + 1
        if watch(progress.begin, torch.stack([size, trees.norm(r)])) is not None:
            return Solution(start, Status.NON_FINITE, 0, products)
        v = trees.add(start, r, alpha=step)
    best = v if start is None else start
    for done in range(1, updates):
        product = operator.matvec(r)
        products += 1
        r_next = trees.add(r, product, alpha=-step)
        event = watch(progress.step, torch.stack([trees.dot(r, product), trees.dot(r_next, r_next)]))
        if progress.best == done:
            best = v
        if event in (Status.NONPOSITIVE_CURVATURE, Status.DIVERGED):
            return Solution(best, event, progress.best, products, watch.residual)
        if event is not None:
            return Solution(v, event, done, products, watch.residual)
        v, r = trees.add(v, r_next, alpha=step), r_next
    return Solution(v, Status.BUDGET, updates, products, watch.residual)


class _Progress(Progress):
    """Residuals so far; ``best`` is how many updates led to the iterate of the smallest, ``least``.

    It is 0 for the start; without one, the first iterate is better than none.
    """

    def __init__(self, eps: float, *, started: bool) -> None:
        self.eps, self.started = eps, started
        self.best = self.done = 0

    def begin(self, numbers: list[float]) -> Verdict:
        verdict = super().begin(numbers)
        self.best, self.done, self.least = 0, 0, self.residual
        return verdict

    def step(self, numbers: list[float]) -> Verdict:
        """From rᵀAr and the next ‖r‖²."""
        curvature, rr = numbers
        self.done += 1
        if not math.isfinite(curvature):
            return Verdict(Status.NON_FINITE)
        residual = math.sqrt(rr) / self.size if math.isfinite(rr) else math.inf
        grows = residual > self.least * (1.0 + math.sqrt(self.eps))
        if not (self.started or self.best) or residual <= self.least:
            self.best, self.least = self.done, residual
        if grows:
            status = Status.NONPOSITIVE_CURVATURE if curvature < 0.0 else Status.DIVERGED
            return Verdict(status, self.least if math.isfinite(self.least) else None)
        return Verdict(Status.CONVERGED if residual <= self.eps else None, residual)


def check_known(step: float | None, solver: Solver) -> None:
    """Refuse to record a search for the step: the numbers it finds are read on the way."""
    if step is None:
        raise HyperkronError(
            f"graph=True does not work with step=None of {type(solver).__name__}, which reads the step it finds from "
            "the device; pass step=, a number below 2/λmax, or graph=False."
        )
