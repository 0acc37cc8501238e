"""The fixed-step iteration v ← v + ηM⁻¹(b − Av), shared by the Neumann series (M = I) and gradient descent."""

from __future__ import annotations

import math
from abc import abstractmethod

from hyperkron import trees
from hyperkron.kernels.execution import read
from hyperkron.solution import HyperkronError, Solution, Status
from hyperkron.solvers.base import LinearSystem, signed_norm, signed_square
from hyperkron.solvers.iteration import Ending, Event, IterativeSolver, Read, first, non_finite, possible, sqrt, where
from hyperkron.solvers.spectrum import power_iteration
from hyperkron.trees import Tree
from hyperkron.validation import check_positive, check_whole


class FixedStep(IterativeSolver):
    """``updates`` times v ← v + ηz, r ← r − ηAz, z = M⁻¹r, from r = b − A·start; without a preconditioner M = I.

    The residual is updated by b − A(v + ηz) = r − ηAz. So the last update needs no product, and from v₀ = 0 neither
    does the first residual. This is the Neumann series v = v₀ + ηM⁻¹ Σ_{k<updates} (I − ηAM⁻¹)^k r₀.

    Residuals are measured by ‖r‖ = √(rᵀM⁻¹r). For symmetric A and M the norms ‖r_k‖ are log-convex in k: once they grow
    they always grow. So the first growth beyond rounding ends the iteration with ``DIVERGED``, or with
    ``NONPOSITIVE_CURVATURE`` if zᵀAz < 0. The value is the iterate with the smallest residual; from v₀ = 0 it is never
    zero but at least the first term ηM⁻¹b (b if A is zero and gives no step). If rᵀM⁻¹r is not positive, the status is
    ``NONPOSITIVE_CURVATURE`` too; the value is then ηb if this happens for r = b from v₀ = 0.
    """

    step: float | None
    power_iterations: int
    seed: int

    @property
    @abstractmethod
    def updates(self) -> int:
        """How many times v is updated."""

    def __post_init__(self) -> None:
        check_whole("power_iterations", self.power_iterations, 1)
        check_whole("seed", self.seed, 0)
        if self.step is not None:
            check_positive("step", self.step, "pass one below 2/λmax, or None to have a safe one found")

    def check_graph(self) -> None:
        """Raise an error if the step must be found, because the search reads numbers from the device."""
        if self.step is None:
            raise HyperkronError(
                f"graph=True does not work with step=None of {type(self).__name__}, which reads the step it finds from "
                "the device; pass step=, a number below 2/λmax, or graph=False."
            )

    def _solve(self, system: LinearSystem) -> Solution:
        if self.step is not None or system.preconditioner is not None:
            return super()._solve(system)
        b, start = system.b, system.start
        spectrum = power_iteration(system.operator, b, self.power_iterations, self.seed)
        products = spectrum.products
        if not math.isfinite(spectrum.largest):
            return Solution(trees.zeros_like(b) if start is None else start, Status.NON_FINITE, products=products)
        step = spectrum.safe_step if spectrum.largest > 0.0 else 1.0
        if spectrum.largest == 0.0 or spectrum.rayleigh < -system.epsilon * spectrum.largest:
            value = trees.scale(b, step) if start is None else start
            return Solution(value, Status.NONPOSITIVE_CURVATURE, products=products)
        value, more, end = self._iterate(system, read, step)
        return end.solution(value, products + more)

    def _iterate(self, system: LinearSystem, read: Read, step: float | None = None) -> tuple[Tree, int, Ending]:
        operator, b, start, eps = system.operator, system.b, system.start, system.epsilon
        step = step or self.step or 1.0
        z = system.preconditioned(b)
        norm = left = signed_norm(b, z)
        r, products = system.residual()
        if start is not None:
            z = system.preconditioned(r)
            left = signed_norm(r, z)
        size, left = read(norm, left)
        indefinite = (size < 0.0) | (left < 0.0)  # never without a preconditioner
        residual = where(indefinite, math.nan, left / size)
        status = first((Event.NONPOSITIVE_CURVATURE, indefinite), (Event.NON_FINITE, non_finite(residual)))
        end = Ending(status, status == Event.BUDGET, residual)
        if end.stopped and status == Event.NON_FINITE:
            return trees.zeros_like(b) if start is None else start, products, end
        if start is None:
            z = z if system.preconditioner is None else where(indefinite, b, z)  # the identity instead of a bad M
            v = best = trees.scale(z, step)
        else:
            v, best = trees.add(start, z, alpha=step), start

        least, updates_to_best = residual, 0
        for done in range(1, self.updates):
            if end.stopped:
                break
            product = operator.matvec(z)
            products += 1
            curvature = trees.dot(z, product)
            r = trees.add(r, product, alpha=-step)
            z = system.preconditioned(r)
            curvature, square = read(curvature, signed_square(r, z))
            lost = (square != square) & (system.preconditioner is not None)  # NaN
            residual = where((square >= 0.0) & (square < math.inf), sqrt(square) / size, math.inf)
            grows = residual > least * (1.0 + math.sqrt(eps))
            better = (residual <= least) | (done == 1 and start is None)
            best = where(end.running & better, v, best)
            least, updates_to_best = where(better, residual, least), where(better, done, updates_to_best)
            status = first(
                (Event.NON_FINITE, non_finite(curvature) | lost),
                (Event.NONPOSITIVE_CURVATURE, (square < 0.0) | (grows & (curvature < 0.0))),
                (Event.DIVERGED, grows),
                (Event.CONVERGED, residual <= eps),
            )
            grown = (status == Event.NONPOSITIVE_CURVATURE) | (status == Event.DIVERGED)
            end.update(
                status,
                where(grown, updates_to_best, where(status == Event.BUDGET, done + 1, done)),
                where(grown, least, where(status == Event.NON_FINITE, math.nan, residual)),
            )
            if possible(end.running):
                v = where(end.running, trees.add(v, z, alpha=step), v)
        v = where((end.status == Event.NONPOSITIVE_CURVATURE) | (end.status == Event.DIVERGED), best, v)
        return v, products, end
