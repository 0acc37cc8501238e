"""Casts the weights under autocast again in the backward pass instead of keeping the casts in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def recast_in_backward(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside the block, autograd recomputes casts of these parameters in the backward pass instead of keeping them.

    This saves half the memory of the model and costs one more cast per parameter. It is for recorded passes, where it
    costs no time in Python.
    """
    known = {id(p) for p in parameters}

    def pack(x: Tensor) -> Tensor | Callable[[], Tensor]:
        cast = _cast_again(x, known)
        if cast is None:
            return x.detach()
        torch.clear_autocast_cache()  # the cache would keep the cast, too
        return cast

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _cast_again(x: Tensor, known: set[int]) -> Callable[[], Tensor] | None:
    """A function that makes ``x``, if its autograd graph says that it is a parameter in another dtype, perhaps
    transposed, whose id is ``known``."""
    node, transposed, dtype = x.grad_fn, False, x.dtype
    if node is not None and type(node).__name__ in ("TBackward0", "TransposeBackward0"):
        node, transposed = node.next_functions[0][0], True
    if type(node).__name__ != "ToCopyBackward0":
        return None
    leaf = node.next_functions[0][0]  # type: ignore[union-attr]
    parameter = getattr(leaf, "variable", None)
    if not isinstance(parameter, Tensor) or id(parameter) not in known or (transposed and parameter.dim() != 2):
        return None
    shape, stride = (tuple(y) for y in (parameter.shape, parameter.stride()))
    wanted = (shape[::-1], stride[::-1]) if transposed else (shape, stride)
    if (tuple(x.shape), tuple(x.stride())) != wanted:
        return None

    def cast() -> Tensor:
        found = parameter.detach().to(dtype)
        return found.t() if transposed else found

    return cast
