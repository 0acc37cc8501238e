"""Gradient descent with a fixed step, which continues from a previous solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyperkron.solvers.fixed_step import FixedStep
from hyperkron.validation import check_whole


@dataclass(frozen=True)
class GradientDescent(FixedStep):
    """``iterations`` times v ← v − ηM⁻¹(Av − b), gradient descent on ½vᵀAv − bᵀv, from ``start`` or from zero.

    M is the preconditioner; without one it is I. From zero, v_k = (I − (I − ηM⁻¹A)^k) A⁻¹b. Its worth is the
    warm start: as θ and λ move slowly, so does A⁻¹b, and a few steps from the previous solution follow it
    (AmIGO: Arbel & Mairal, 2022). Started where it ended, it continues as if it had not stopped.

    It costs a product for each iteration, one less from zero, and with a preconditioner as many applications of
    M⁻¹ as iterations, one more from a start. Without a ``step`` a safe one is found by power iteration, for
    ``power_iterations`` further products. With a preconditioner none is sought: M is taken to have the scale of A,
    and η is 1.

    Growth is detected and reported as in :class:`~hyperkron.solvers.neumann.Neumann` (with ``start``, the value may
    be the start itself), and the residual reported is that of the last iterate but one. With a preconditioner
    residuals are compared and reported in the norm √(rᵀM⁻¹r), relative to that of b; for a positive semi-definite A
    and a step below 2/λmax of M⁻¹A they never grow in it. Where rᵀM⁻¹r is not positive, M is not positive definite:
    that is reported as ``NONPOSITIVE_CURVATURE``, with the best iterate before it; if it shows at once, with the start
    or, from zero, ηb. A single step is not seen to grow: that takes a second residual.

    Args:
        iterations: the steps to do.
        step: η, below 2/λmax of M⁻¹A; ``None`` finds 1/(1.1·λmax), or is 1 with a preconditioner.
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
    uses_preconditioner: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a configuration that makes no sense."""
        check_whole("iterations", self.iterations, 1)
        super().__post_init__()

    @property
    def updates(self) -> int:
        """One in each iteration."""
        return self.iterations
