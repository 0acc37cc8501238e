"""Casts the weights under autocast again in the backward pass instead of keeping the casts in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class _Cast(NamedTuple):
    """A parameter in another dtype, perhaps transposed."""

    parameter: Tensor
    dtype: torch.dtype
    transposed: bool

    def compute(self) -> Tensor:
        found = self.parameter.detach().to(self.dtype)
        return found.t() if self.transposed else found


@contextmanager
def recast_in_backward(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside the block, autograd recomputes casts of these parameters in the backward pass instead of keeping them.

    This saves half the memory of the model and costs one more cast per parameter. It is for recorded passes, where it
    costs no time in Python.
    """
    known = {id(p) for p in parameters}

    def pack(x: Tensor) -> Tensor | _Cast:
        cast = _cast(x)
        if cast is None or id(cast.parameter) not in known:
            return x.detach()
        torch.clear_autocast_cache()  # the cache would keep the cast, too
        return cast

    def unpack(kept: Tensor | _Cast) -> Tensor:
        return kept.compute() if isinstance(kept, _Cast) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _cast(x: Tensor) -> _Cast | None:
    """The parameter that ``x`` is a cast of, read from its autograd graph; ``None`` if it is not a cast."""
    node, transposed = x.grad_fn, False
    if node is not None and type(node).__name__ in ("TBackward0", "TransposeBackward0"):
        node, transposed = node.next_functions[0][0], True
    if type(node).__name__ != "ToCopyBackward0":
        return None
    leaf = node.next_functions[0][0]  # type: ignore[union-attr]
    parameter = getattr(leaf, "variable", None)
    if not isinstance(parameter, Tensor) or (transposed and parameter.dim() != 2):
        return None
    shape, stride = (tuple(y) for y in (parameter.shape, parameter.stride()))
    wanted = (shape[::-1], stride[::-1]) if transposed else (shape, stride)
    return _Cast(parameter, x.dtype, transposed) if (tuple(x.shape), tuple(x.stride())) == wanted else None
