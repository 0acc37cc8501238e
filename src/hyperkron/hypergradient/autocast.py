"""Checks whether gradients under autocast are accurate enough for a hypergradient.

If the gradients of many examples nearly cancel, their sum in bfloat16 is mostly rounding (docs/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hyperkron import trees
from hyperkron.evaluation.differentiation import gradient_tree
from hyperkron.evaluation.point import Point
from hyperkron.losses import Loss
from hyperkron.solution import NonFiniteError, warn_once

MIN_COSINE = 0.99
"""The least cosine between gradients with and without autocast: an angle of 8°."""


def too_coarse(make_point: Callable[..., Point]) -> bool:
    """Whether the cosine of ∂θ J_in or ∂θ J_out with and without autocast is below :data:`MIN_COSINE`; warns once.

    The check costs one evaluation of each objective without autocast, and four gradients with it. It costs nothing if
    the problem has ``autocast=True`` or ``False``.
    """
    for name, evaluate in (("J_out", Point.outer), ("J_in", Point.inner)):
        cosine = _cosine(make_point, evaluate)
        if cosine < MIN_COSINE:
            warn_once(
                "autocast",
                f"autocast changes the direction of ∂θ {name} (cosine {cosine:.3f}), so hypergradients are evaluated "
                "without autocast; BilevelProblem(..., autocast=True) keeps it, autocast=False never uses it.",
            )
            return True
    return False


def _cosine(make_point: Callable[..., Point], evaluate: Callable[[Point], Loss]) -> float:
    """The cosine between the gradients with and without autocast; 1 without autocast, or if the gradient is zero."""
    with make_point(plain=True) as point:
        if point.problem.autocast is not None:
            return 1.0
        loss = evaluate(point)
        if not point.met_autocast or not loss.value.requires_grad:
            point.execution.forget()  # the hypergradient repeats this evaluation and its checks
            return 1.0
        exact = gradient_tree(loss.value, point.params)
        del loss
    size = trees.norm(exact)
    if not size > 0.0:
        return 1.0
    try:
        with make_point() as point:
            rounded = gradient_tree(evaluate(point).value, point.params)
    except NonFiniteError:  # float16 overflows
        return 0.0
    units = trees.scale(exact, 1.0 / size), trees.scale(rounded, 1.0 / trees.norm(rounded))
    cosine = float(trees.dot(*units))
    return cosine if math.isfinite(cosine) else 0.0
