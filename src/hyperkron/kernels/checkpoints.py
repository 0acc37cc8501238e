"""Activation checkpointing that gradients of chosen tensors can pass through.

``torch.utils.checkpoint`` knows two ways. The reentrant one stores gradients in ``.grad`` from inside the backward
pass: ``torch.autograd.grad`` does not see the parameters inside it, and would leave them out in silence. The other one
computes the activations again during the backward pass, with the parameters that the model has at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint


class _NotReentrant:
    """In place of torch's reentrant function: the same call, the other way."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *inputs: Any) -> Any:
        return checkpoint.checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=preserve)


def _kept(*_: Any, **__: Any) -> Iterator[None]:
    """In place of what sets up the second computation: nothing, so that activations are kept."""
    yield


@contextmanager
def differentiable_checkpoints(*, keep: bool = False) -> Iterator[None]:
    """Reentrant checkpoints inside are taken the other way, which costs the same time and memory.

    Args:
        keep: activations are kept instead of computed again. For parameters that are in place during the forward pass
            only: what is computed again later would use others.
    """
    names = {"CheckpointFunction": _NotReentrant}
    if keep:
        names["_checkpoint_without_reentrant_generator"] = _kept  # type: ignore[assignment]
    before = {name: getattr(checkpoint, name) for name in names}
    for name, stand_in in names.items():
        setattr(checkpoint, name, stand_in)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(checkpoint, name, own)
