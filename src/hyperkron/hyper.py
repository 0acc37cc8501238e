"""λ as a module: the hyperparameters users reach for first."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hyperkron.solution import HyperkronError

Squash = Literal["clip", "sigmoid", "softmax"]


class SampleWeights(nn.Module):
    """One learnable weight for every training example: σ_n = squash(λ_n).

    Args:
        count: the number of examples.
        squash: ``clip`` to [0, 1] (the paper's choice), ``sigmoid``, or ``softmax`` over all examples times ``count``.
        init: the initial weight of every example; ``None`` means 0.5, for ``softmax`` 1 (the only uniform weight).

    Example:
        >>> weights = SampleWeights(4)
        >>> weights(torch.tensor([0, 2]))
        tensor([0.5000, 0.5000], grad_fn=<ClampBackward1>)
    """

    def __init__(self, count: int, squash: Squash = "clip", init: float | None = None) -> None:
        super().__init__()
        if count < 1:
            raise HyperkronError(f"count={count!r} must be at least 1: the number of training examples.")
        if squash not in ("clip", "sigmoid", "softmax"):
            raise HyperkronError(f"squash={squash!r} is unknown; choose clip, sigmoid or softmax.")
        start = 0.5 if init is None else init
        raw = {"clip": start, "softmax": 0.0}.get(squash)
        if raw is None:
            if not 0 < start < 1:
                raise HyperkronError(f"init={init!r} must lie strictly between 0 and 1 for squash='sigmoid'.")
            raw = float(torch.logit(torch.tensor(start, dtype=torch.float64)))
        self.squash = squash
        self.weight = nn.Parameter(torch.full((count,), raw))

    def forward(self, index: Tensor) -> Tensor:
        """The weights of the examples in ``index``."""
        if self.squash == "clip":
            return self.weight[index].clamp(0.0, 1.0)
        if self.squash == "sigmoid":
            return self.weight[index].sigmoid()
        return self.weight.softmax(0)[index] * self.weight.numel()


class _Tensor(nn.Module):
    """A tensor as a module."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value.detach().clone())

    def forward(self) -> Tensor:
        """The tensor."""
        return self.value


def as_hyper(tensor: Tensor) -> _Tensor:
    """A tensor as λ: a module whose call returns it and whose parameter ``value`` is learned.

    Example:
        >>> log_decay = as_hyper(torch.tensor(-3.0))
        >>> log_decay()
        Parameter containing:
        tensor(-3., requires_grad=True)
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise HyperkronError(f"as_hyper needs a floating point tensor, not {tensor!r}.")
    return _Tensor(tensor)
