"""The fixed-step iteration v ← v + ηM⁻¹(b − Av), shared by the Neumann series (M = I) and gradient descent."""

from __future__ import annotations

import math
from abc import abstractmethod

from hyperkron import trees
from hyperkron.kernels.execution import Execution, Pending, read
from hyperkron.solution import HyperkronError, Solution, Status
from hyperkron.solvers.base import LinearSystem, Solver, finite_or_none, signed_norm, signed_square
from hyperkron.solvers.recorded import recorded_fixed_step
from hyperkron.solvers.spectrum import power_iteration
from hyperkron.trees import Tree
from hyperkron.validation import check_positive, check_whole


class FixedStep(Solver):
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
        check_step(self.step)

    def check_graph(self) -> None:
        """Raise an error if the step must be found, because the search reads numbers from the device."""
        if self.step is None:
            raise HyperkronError(
                f"graph=True does not work with step=None of {type(self).__name__}, which reads the step it finds from "
                "the device; pass step=, a number below 2/λmax, or graph=False."
            )

    def _record(self, system: LinearSystem, execution: Execution) -> tuple[Tree, Pending[Solution]]:
        step = 1.0 if self.step is None else self.step  # None: with a preconditioner only
        return recorded_fixed_step(system, execution, self.updates, step)

    def _solve(self, system: LinearSystem) -> Solution:
        if self.step is not None or system.preconditioner is not None:
            return self._iterate(system, 1.0 if self.step is None else self.step, 0)
        b, start = system.b, system.start
        spectrum = power_iteration(system.operator, b, self.power_iterations, self.seed)
        if not math.isfinite(spectrum.largest):
            value = trees.zeros_like(b) if start is None else start
            return Solution(value, Status.NON_FINITE, products=spectrum.products)
        step = spectrum.safe_step if spectrum.largest > 0.0 else 1.0
        if spectrum.largest == 0.0 or spectrum.rayleigh < -system.epsilon * spectrum.largest:
            value = trees.scale(b, step) if start is None else start
            return Solution(value, Status.NONPOSITIVE_CURVATURE, products=spectrum.products)
        return self._iterate(system, step, spectrum.products)

    def _iterate(self, system: LinearSystem, step: float, products: int) -> Solution:
        """The iteration for a known step; ``products`` is the number of products used to find it."""
        operator, b, start, preconditioner = system.operator, system.b, system.start, system.preconditioner
        eps, z = system.epsilon, system.preconditioned(b)
        norm = left = signed_norm(b, z)
        r, spent = system.residual()
        products += spent
        if start is not None:
            z = system.preconditioned(r)
            left = signed_norm(r, z)
        size, first = read(norm, left)
        if preconditioner is not None and (size < 0.0 or first < 0.0):
            value = trees.scale(b, step) if start is None else start  # the identity instead of a bad M
            return Solution(value, Status.NONPOSITIVE_CURVATURE, 0, products)
        residual = first / size
        if not math.isfinite(residual):
            return Solution(trees.zeros_like(b) if start is None else start, Status.NON_FINITE, 0, products)

        v = trees.scale(z, step) if start is None else trees.add(start, z, alpha=step)
        best, least, updates_to_best, done = v if start is None else start, residual, 0, 1
        while done < self.updates:
            product = operator.matvec(z)
            products += 1
            curvature = trees.dot(z, product)
            r = trees.add(r, product, alpha=-step)
            z = system.preconditioned(r)
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


def check_step(step: float | None) -> None:
    """Refuse a step that is neither ``None`` nor positive and finite."""
    if step is not None:
        check_positive("step", step, "pass one below 2/λmax, or None to have a safe one found")
