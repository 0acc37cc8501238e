"""Projections of λ onto simple sets: applied to each of its parameters before the first and after every step.

They see the parameters themselves, not what a module makes of them: ``SampleWeights(squash="sigmoid")`` holds numbers
of any size, and needs no box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperkron.validation import check_interval, check_positive


@dataclass(frozen=True)
class Box:
    """Every entry of λ in [low, high].

    Args:
        low: the lower bound; ``-inf`` for none.
        high: the upper bound; ``inf`` for none.

    Example:
        >>> Box(0.0, 1.0)(torch.tensor([-1.0, 0.5, 2.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        check_interval("low", self.low, -math.inf, math.inf, brackets="[)", remedy="-inf is no bound")
        check_interval("high", self.high, self.low, math.inf, remedy="low ≤ high is needed; inf is no bound")

    def __call__(self, x: Tensor) -> Tensor:
        """The nearest point of the box."""
        return x.clamp(self.low, self.high)


@dataclass(frozen=True)
class Ball:
    """Every parameter of λ with ‖x‖ ≤ radius (about zero).

    Args:
        radius: of the ball.

    Example:
        >>> Ball(1.0)(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)

    def __call__(self, x: Tensor) -> Tensor:
        """The nearest point of the ball."""
        return x * (self.radius / torch.linalg.vector_norm(x).clamp(min=self.radius))


@dataclass(frozen=True)
class Simplex:
    r"""Every parameter of λ, as one vector, in {x ≥ 0, Σx = total}: the nearest point, by sorting.

        x ↦ max(x − τ, 0) with τ such that the entries add up to ``total``

    Args:
        total: what the entries sum to.

    Reference: Duchi et al., "Efficient projections onto the l1-ball for learning in high dimensions" (ICML 2008).

    Example:
        >>> Simplex()(torch.tensor([1.0, 1.0, -3.0]))
        tensor([0.5000, 0.5000, 0.0000])
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        check_positive("total", self.total)

    def __call__(self, x: Tensor) -> Tensor:
        """The nearest point of the simplex."""
        if x.numel() == 0:
            return x
        flat = x.reshape(-1)
        ordered = flat.sort(descending=True).values
        excess = ordered.cumsum(0) - self.total
        count = torch.arange(1, len(flat) + 1, device=x.device, dtype=x.dtype)
        support = (ordered * count > excess).sum().clamp(min=1)
        shift = excess.gather(0, support.view(1) - 1) / support
        return (flat - shift).clamp(min=0.0).reshape(x.shape)
