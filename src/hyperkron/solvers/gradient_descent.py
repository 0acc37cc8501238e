"""Gradient descent with a fixed step, which continues from a previous solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyperkron.solvers.fixed_step import FixedStep
from hyperkron.validation import check_whole


@dataclass(frozen=True)
class GradientDescent(FixedStep):
    """``iterations`` times v ← v − ηM⁻¹(Av − b), gradient descent on ½vᵀAv − bᵀv, from ``start`` or from zero.

    M is the preconditioner; without one it is I. From zero, v_k = (I − (I − ηM⁻¹A)^k) A⁻¹b. It is useful with a warm
    start: θ and λ move slowly, so A⁻¹b does too, and a few steps from the previous solution follow it (AmIGO: Arbel &
    Mairal, 2022).

    It needs one product per iteration, and one less from zero.

    Growth is detected and reported as in :class:`~hyperkron.solvers.neumann.Neumann`; with ``start``, the value may be
    the start itself. A single step cannot be checked for growth. The reported residual is that of the iterate before
    the last, with a preconditioner in the norm √(rᵀM⁻¹r). If rᵀM⁻¹r is not positive, M is not positive definite; the
    status is then ``NONPOSITIVE_CURVATURE``, and the value is the best iterate before, or else the start or ηb.

    Args:
        iterations: the number of steps.
        step: η, below 2/λmax of M⁻¹A; ``None`` finds 1/(1.1·λmax) by power iteration, or with a preconditioner takes
            1, because M should have the scale of A.
        power_iterations: products to spend on finding the step, in addition to the others.
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
