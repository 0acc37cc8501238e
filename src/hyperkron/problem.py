"""J_in and J_out: the two plain functions of a bilevel problem.

    min_λ  J_out(λ, θ*(λ))    subject to    θ*(λ) ∈ argmin_θ J_in(λ, θ)

A function of either level takes the model (θ), the hyperparameter module (λ) and a batch of any kind,
and returns a :class:`hyperkron.losses.Loss` or, where curvature is not asked of it, a scalar tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hyperkron.losses import Loss
from hyperkron.solution import HyperkronError

Objective = Callable[[nn.Module, nn.Module, Any], Loss | Tensor]


@dataclass(frozen=True)
class BilevelProblem:
    """The two objectives of a bilevel problem, as plain functions ``f(model, hyper, batch)``.

    Args:
        inner: J_in(λ, θ), minimised over the model's trainable parameters.
        outer: J_out(λ, θ), minimised over the parameters of ``hyper`` through θ*(λ).

    Example:
        >>> import torch, hyperkron as hk
        >>> def inner(model, weights, batch):
        ...     x, y, index = batch
        ...     return hk.losses.cross_entropy(model(x), y, weight=weights(index))
        >>> def outer(model, weights, batch):
        ...     x, y, _ = batch
        ...     return hk.losses.cross_entropy(model(x), y)
        >>> problem = hk.BilevelProblem(inner, outer)
    """

    inner: Objective
    outer: Objective

    def __post_init__(self) -> None:
        for name in ("inner", "outer"):
            function = getattr(self, name)
            if not callable(function):
                raise HyperkronError(
                    f"{name}={function!r} is not callable; pass a function (model, hyper, batch) -> loss."
                )
