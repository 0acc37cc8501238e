"""The truncated Neumann series."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron.solvers.fixed_step import FixedStep
from hyperkron.validation import check_whole


@dataclass(frozen=True)
class Neumann(FixedStep):
    """The truncated series A⁻¹b ≈ v = η Σ_{k=0}^{K} (I − ηA)^k b, with K = ``terms`` products.

    The limit K → ∞ is A⁻¹b itself, for 0 < η < 2/λmax; the leading η makes the size of v right and not only its
    direction.

    Without a ``step`` a safe one is found by power iteration, for ``power_iterations`` further products. A series whose
    terms grow is stopped and reported (``DIVERGED``, or ``NONPOSITIVE_CURVATURE`` if a negative rᵀAr shows why), with
    the partial sum of least residual, at the least ηb. A NaN or an infinity from the operator ends it as
    ``NON_FINITE``, with the last finite sum (zero if there is no step yet). A series recorded as a CUDA graph spends
    all K products and reports these, but holds its sum from where it ends.

    The residual reported is that of the sum without its last term, which is known at no cost and is the larger one for
    a safe step. A solution's ``iterations`` are the terms summed, the first included.

    Reference: Lorraine, Vicol & Duvenaud, 2020; as the hypergradient of stocBiO: Ji, Yang & Liang, 2021.

    Args:
        terms: K, the terms after the first (0 gives ηb).
        step: η, below 2/λmax; ``None`` finds 1/(1.1·λmax).
        power_iterations: products to spend on finding the step.
        seed: of the power iteration's start.
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
