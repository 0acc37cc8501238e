"""Gradient descent with a fixed step, which continues from a previous solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyperkron.curvature.base import Invertible, Operator
from hyperkron.solution import Solution
from hyperkron.solvers.base import Solver, check_count, check_step
from hyperkron.solvers.fixed_step import check_known, fixed_step
from hyperkron.solvers.watch import Watch
from hyperkron.trees import Tree


@dataclass(frozen=True)
class GradientDescent(Solver):
    """``iterations`` times v ← v − η(Av − b), gradient descent on ½vᵀAv − bᵀv, from ``start`` or from zero.

    From zero, v_k = (I − (I − ηA)^k) A⁻¹b. Its worth is the warm start: as θ and λ move slowly, so does A⁻¹b,
    and a few steps from the previous solution follow it (AmIGO: Arbel & Mairal, 2022). Started where it
    ended, it continues as if it had not stopped.

    It costs a product for each iteration, one less from zero. Without a ``step`` a safe one is found by power
    iteration, for ``power_iterations`` further products. Growth is detected and reported as in
    :class:`~hyperkron.solvers.neumann.Neumann` (with ``start``, the value may be the start itself), and the
    residual reported is that of the last iterate but one.

    Args:
        iterations: the steps to do.
        step: η, below 2/λmax; ``None`` finds 1/(1.1·λmax).
        power_iterations: products to spend on finding the step.
        seed: of the power iteration's start.

    Example:
        >>> GradientDescent(iterations=10, step=0.1)
        GradientDescent(iterations=10, step=0.1, power_iterations=8, seed=0)
    """

    iterations: int = 10
    step: float | None = None
    power_iterations: int = 8
    seed: int = 0

    uses_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a configuration that makes no sense."""
        check_count("iterations", self.iterations, 1)
        check_count("power_iterations", self.power_iterations, 1)
        check_count("seed", self.seed, 0)
        check_step(self.step)

    def check_graph(self) -> None:
        """Refuse a step that is yet to be found."""
        check_known(self.step, self)

    def _solve(
        self, operator: Operator, b: Tree, start: Tree | None, preconditioner: Invertible | None, watch: Watch
    ) -> Solution:
        return fixed_step(operator, b, start, self.iterations, self.step, self.power_iterations, self.seed, watch)
