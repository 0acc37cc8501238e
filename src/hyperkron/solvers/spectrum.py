"""Power iteration for the largest eigenvalue of an operator, and a safe step from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyperkron import trees
from hyperkron.curvature.base import Operator
from hyperkron.trees import Tree
from hyperkron.validation import check_whole

_SAFETY = 1.1


@dataclass(frozen=True)
class Spectrum:
    """The result of power iteration.

    Attributes:
        largest: an estimate, from below, of the largest |λ|: ‖Aq‖ for the last unit vector q.
        rayleigh: qᵀAq; negative if the eigenvalue of largest absolute value is negative.
        products: how many products were computed.
    """

    largest: float
    rayleigh: float
    products: int

    @property
    def safe_step(self) -> float:
        """η = 1 / (1.1·λ̂), which is below 2/λmax even if the estimate λ̂ is too small by a factor of 2.2."""
        return 1.0 / (_SAFETY * self.largest)


def power_iteration(operator: Operator, like: Tree, iterations: int = 8, seed: int = 0) -> Spectrum:
    """The eigenvalue of largest absolute value, by q ← Aq / ‖Aq‖ from a random start (von Mises, 1929).

    The start is drawn from a separate generator, so the result is reproducible. ``largest`` is 0 for a zero operator,
    and not finite if the products are not finite.

    Args:
        operator: A, symmetric.
        like: a tree with the names, shapes, dtypes and device of the operator's vectors.
        iterations: the number of products.
        seed: the seed of the random start.
    """
    check_whole("iterations", iterations, 1)
    device = next(iter(like.values())).device
    q = trees.normal_like(like, torch.Generator(device).manual_seed(seed))
    q = trees.scale(q, 1.0 / trees.norm(q))
    for done in range(iterations):
        product = operator.matvec(q)
        size = trees.norm(product)
        if done + 1 < iterations:
            q = trees.scale(product, 1.0 / size.clamp(min=torch.finfo(size.dtype).tiny))
    largest, rayleigh = torch.stack([size, trees.dot(q, product)]).tolist()
    return Spectrum(largest, rayleigh, iterations)
