"""The truncated Neumann series."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron.solvers.fixed_step import FixedStep
from hyperkron.validation import check_whole


@dataclass(frozen=True)
class Neumann(FixedStep):
    """The truncated series A⁻¹b ≈ v = η Σ_{k=0}^{K} (I − ηA)^k b, with K = ``terms`` products.

    For K → ∞ and 0 < η < 2/λmax this converges to A⁻¹b. The factor η in front gives v the right length.

    A series whose terms grow is stopped with ``DIVERGED``, or with ``NONPOSITIVE_CURVATURE`` if rᵀAr is negative; the
    value is the partial sum with the smallest residual, or ηb. NaN or infinity from the operator ends it with
    ``NON_FINITE`` and the last finite sum (zero if no step is known yet). A series recorded as a CUDA graph always
    computes, and reports, all K products, but keeps the sum with which it ends.

    The reported residual is that of the sum without its last term. It is known at no cost and, for a safe step, larger
    than the residual of the whole sum. ``iterations`` of the solution counts the terms, including the first.

    Reference: Lorraine, Vicol & Duvenaud, 2020; as the hypergradient of stocBiO: Ji, Yang & Liang, 2021.

    Args:
        terms: K, the terms after the first (0 gives ηb).
        step: η, below 2/λmax; ``None`` finds 1/(1.1·λmax) by power iteration.
        power_iterations: the number of products to find the step, in addition to the K.
        seed: the seed of the power iteration's random start.
    """

    terms: int = 10
    step: float | None = None
    power_iterations: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("terms", self.terms, 0)
        super().__post_init__()

    @property
    def updates(self) -> int:
        return self.terms + 1
