"""Whether a model under autocast has gradients that a hypergradient can be made of.

Of hundreds of examples whose gradients cancel, bfloat16 may leave little: the gradient of a ResNet-18 can turn by 15°
where that of a BERT stays as it is. What is built on it, by any curvature, is no better.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyperkron import trees
from hyperkron.kernels import compiled
from hyperkron.losses import Loss
from hyperkron.point import Point
from hyperkron.solution import warn_once
from hyperkron.trees import Tree

ENOUGH = 0.99
"""A cosine that autocast must leave: an angle of 8°."""


def too_coarse(place: Callable[..., Point]) -> bool:
    """Whether autocast turns ∂θ J_in or ∂θ J_out by more than :data:`ENOUGH` allows; it is then said, once.

    It costs an evaluation of each objective where there is no autocast, and four gradients where there is. Where the
    problem says whether to use it nothing is looked at, nor are compiled models, for they would be compiled again.

    Args:
        place: makes the point, with or without ``plain=True``.
    """
    for name, evaluate in (("J_out", Point.outer), ("J_in", Point.inner)):
        cosine = _cosine(place, evaluate)
        if cosine < ENOUGH:
            warn_once(
                "autocast",
                f"autocast turns ∂θ {name} away from what it is without (cosine {cosine:.3f}), so hypergradients are "
                "evaluated without autocast; BilevelProblem(..., autocast=True) keeps it, autocast=False never has it.",
            )
            return True
    return False


def _cosine(place: Callable[..., Point], evaluate: Callable[[Point], Loss]) -> float:
    """Between the gradients under autocast and without it; 1 where there is no autocast."""
    with place(plain=True) as point:
        if point.problem.autocast is not None or compiled(point.model):
            return 1.0
        loss = evaluate(point)
        if not point.met:
            return 1.0
        exact = _gradient(point, loss)
        del loss
    with place() as point:
        rounded = _gradient(point, evaluate(point))
    return float(trees.dot(exact, rounded) / (trees.norm(exact) * trees.norm(rounded)))


def _gradient(point: Point, loss: Loss) -> Tree:
    """∂θ of a loss; zero where it does not depend on θ."""
    found: tuple[torch.Tensor | None, ...] = (None,) * len(point.params)
    if loss.value.requires_grad:
        found = torch.autograd.grad(loss.value, list(point.params.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for (name, p), g in zip(point.params.items(), found, strict=True)
    }
