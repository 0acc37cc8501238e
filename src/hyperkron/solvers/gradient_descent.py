"""Gradient descent with a fixed step, which continues from a previous solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyperkron.solvers.fixed_step import FixedStep
from hyperkron.validation import check_whole


@dataclass(frozen=True)
class GradientDescent(FixedStep):
    """``iterations`` times v ← v − ηM⁻¹(Av − b), gradient descent on ½vᵀAv − bᵀv, from ``start`` or from zero.

    M is the preconditioner; without one it is I. From zero, v_k = (I − (I − ηM⁻¹A)^k) A⁻¹b. Its worth is the warm
    start: as θ and λ move slowly, so does A⁻¹b, and a few steps from the previous solution follow it (AmIGO: Arbel &
    Mairal, 2022).

    It costs a product for each iteration, one less from zero. Without a ``step`` a safe one is found by power
    iteration, for ``power_iterations`` further products; with a preconditioner η is 1, for M is taken to have the scale
    of A.

    Growth is detected and reported as in :class:`~hyperkron.solvers.neumann.Neumann` (with ``start``, the value may be
    the start itself), and the residual reported is that of the last iterate but one; with a preconditioner in the norm
    √(rᵀM⁻¹r). Where rᵀM⁻¹r is not positive, M is not positive definite: that is reported as ``NONPOSITIVE_CURVATURE``,
    with the best iterate before it; if it shows at once, with the start or, from zero, ηb. A single step is not seen to
    grow.

    Args:
        iterations: the steps to do.
        step: η, below 2/λmax of M⁻¹A; ``None`` finds 1/(1.1·λmax), or is 1 with a preconditioner.
        power_iterations: products to spend on finding the step.
        seed: of the power iteration's start.
    """

    iterations: int = 10
    step: float | None = None
    power_iterations: int = 8
    seed: int = 0

    uses_start: ClassVar[bool] = True
    uses_preconditioner: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("iterations", self.iterations, 1)
        super().__post_init__()

    @property
    def updates(self) -> int:
        return self.iterations
