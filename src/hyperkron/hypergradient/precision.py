"""Whether a model under autocast has gradients that a hypergradient can be made of.

Of hundreds of examples whose gradients cancel, bfloat16 may leave little (docs/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hyperkron import trees
from hyperkron.evaluation.differentiation import gradient_tree
from hyperkron.evaluation.point import Point
from hyperkron.losses import Loss
from hyperkron.solution import NonFiniteError, warn_once

ENOUGH = 0.99
"""A cosine that autocast must leave: an angle of 8°."""


def too_coarse(place: Callable[..., Point]) -> bool:
    """Whether autocast turns ∂θ J_in or ∂θ J_out by more than :data:`ENOUGH` allows; it is then said, once.

    ``place`` makes the point. It costs an evaluation of each objective where there is no autocast, and four gradients
    where there is; nothing where the problem says whether to use it.
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
    """Between the gradients under autocast and without it; 1 where there is no autocast, or nothing to turn."""
    with place(plain=True) as point:
        if point.problem.autocast is not None:
            return 1.0
        loss = evaluate(point)
        if not point.met_autocast or not loss.value.requires_grad:
            point.execution.forget()  # the hypergradient evaluates the same, and checks it
            return 1.0
        exact = gradient_tree(loss.value, point.params)
        del loss
    if not trees.norm(exact) > 0.0:
        return 1.0
    try:
        with place() as point:
            rounded = gradient_tree(evaluate(point).value, point.params)
    except NonFiniteError:  # float16 overflows
        return 0.0
    cosine = float(trees.dot(exact, rounded) / (trees.norm(exact) * trees.norm(rounded)))
    return cosine if math.isfinite(cosine) else 0.0
