"""Captures gradients in the backward pass, by an identity function on the output of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.solution import HyperkronError


class no_grad_no_autocast:
    """Inside the block there is neither autograd nor the model's autocast: factors are summed there.

    Every call of a layer enters two; a generator with ``torch.no_grad`` would take nearly twice as long.
    """

    def __init__(self, x: Tensor) -> None:
        self.kind = x.device.type

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled(), torch.is_autocast_enabled(self.kind)
        self._set(False, False)

    def __exit__(self, *_: object) -> None:
        self._set(*self.before)

    def _set(self, grad: bool, autocast: bool) -> None:
        torch.set_grad_enabled(grad)
        if self.before[1]:
            torch.set_autocast_enabled(self.kind, autocast)


def parameters_of(module: nn.Module) -> list[tuple[int, bool]]:
    """Which tensors are the parameters of ``module`` now, and which of them require a gradient.

    They are others inside ``functional_call``, and while a loss has frozen them.
    """
    return [(id(p), p.requires_grad) for p in module._parameters.values() if p is not None]


def check_unchanged(name: str, x: Tensor, version: int | None) -> None:
    """Refuse an input that the model has changed in place; autograd may have kept a copy of it, as under autocast."""
    if version is not None and x._version != version:
        raise HyperkronError(
            f"the input of {name} was changed in place after the layer was called, before KFAC could read it; use an "
            "operation that is not in place (x = x + y for x += y)."
        )


def same_memory(x: Tensor) -> Tensor:
    """A tensor with the memory and the strides of ``x`` that is not a view of it.

    The strides of dimensions of size one are copied too, because the backward pass of batch norm (torch 2.13) reads
    them for a single channels-last image.
    """
    made: Tensor = torch.ops.aten._unsafe_view.default(x, x.shape)
    return made if made.stride() == x.stride() else made.as_strided_(x.shape, x.stride())


def in_order(x: Tensor) -> Tensor:
    """``x`` contiguous, with default strides; ``contiguous`` alone may keep others for dimensions of size one."""
    return x.contiguous().view(-1).view(x.shape)


class Tap(torch.autograd.Function):
    """The identity on a layer's output; passes its gradient, and the ``saved`` tensors, to ``receive``.

    Tensors are saved with autograd's own mechanism, so that activation checkpoints recompute them.
    The result shares the output's memory without being a view of it, so that the model may change it in place
    (``ReLU(inplace=True)``). None of the layers concerned needs its output in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor | None, receive: Callable[..., None], *saved: Tensor) -> Tensor:
        ctx.receive = receive
        ctx.save_for_backward(*saved)
        return same_memory(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        ctx.receive(gradient, *saved)
        return gradient, None, None, *(None for _ in saved)


def with_last(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Each pair, and whether it is the last."""
    previous: tuple[Tensor, Tensor] | None = None
    for pair in pairs:
        if previous is not None:
            yield (*previous, False)
        previous = pair
    if previous is not None:
        yield (*previous, True)
