"""Where gradients pass: an identity on the output of a layer, and the precision in which they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


def plainly(x: Tensor) -> AbstractContextManager[object]:
    """Without graph, and without the autocast a model may run under: factors are summed in their own precision."""
    kind = x.device.type
    return _without_autocast(kind) if torch.is_autocast_enabled(kind) else torch.no_grad()  # asking is cheaper


@contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        yield


def same_memory(x: Tensor) -> Tensor:
    """A tensor with the memory and the strides of ``x`` that is not a view of it.

    The strides of dimensions of one are set too: for a single image whose channels are last the backward pass of batch
    norm (torch 2.13) goes by them.
    """
    made: Tensor = torch.ops.aten._unsafe_view.default(x, x.shape)
    return made if made.stride() == x.stride() else made.as_strided_(x.shape, x.stride())


def in_order(x: Tensor) -> Tensor:
    """``x`` contiguous, with the strides of its shape; ``contiguous`` alone leaves those of dimensions of one."""
    return x.contiguous().view(-1).view(x.shape)


class Tap(torch.autograd.Function):
    """The identity on a layer's output; hands the gradient that passes through to ``receive``.

    What it returns shares the output's memory without being a view of it, so that a model may go on in place, as
    ``ReLU(inplace=True)`` does; none of the layers concerned needs its output in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return same_memory(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.receive(gradient)
        return gradient, None, None


def with_last(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Each pair, and whether it is the last."""
    previous: tuple[Tensor, Tensor] | None = None
    for pair in pairs:
        if previous is not None:
            yield (*previous, False)
        previous = pair
    if previous is not None:
        yield (*previous, True)
