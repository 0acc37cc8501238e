"""Activation checkpointing that works with ``torch.autograd.grad`` and second derivatives.

``torch.utils.checkpoint`` has two implementations. The reentrant one stores gradients in ``.grad`` inside the backward
pass, so ``torch.autograd.grad`` would ignore the parameters inside it without an error. The other one recomputes the
activations in the backward pass, with the parameters and kernels that are in use then. If these are other attention
kernels than in the forward pass, the second derivative may be missing. So here all checkpoints use the second
implementation, and recompute with the kernels of the forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

from hyperkron.kernels.selection import same_kernels


class _NotReentrant:
    """Replaces torch's reentrant function: the same call without ``use_reentrant``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *inputs: Any) -> Any:
        return checkpoint.checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=preserve)


_TORCH_RECOMPUTE = checkpoint._checkpoint_without_reentrant_generator


def _recompute(function: Callable[..., Any], *options: Any, **named: Any) -> Iterator[None]:
    """Replaces torch's recomputation: uses the kernels of the forward pass, or does nothing if activations are kept."""
    if _keeping:
        yield
        return
    kernels = same_kernels()

    def with_same_kernels(*inputs: Any, **more: Any) -> Any:
        with kernels():
            return function(*inputs, **more)

    yield from _TORCH_RECOMPUTE(with_same_kernels, *options, **named)


_REPLACEMENTS = {"CheckpointFunction": _NotReentrant, "_checkpoint_without_reentrant_generator": _recompute}
_lock = threading.Lock()
_active: list[object] = []
"""The contexts that are open, in any thread; the first replaces torch's functions, and the last puts them back."""
_keeping: list[object] = []
"""Those of them that keep activations."""
_originals: dict[str, Any] = {}


@contextmanager
def differentiable_checkpoints(*, keep: bool = False) -> Iterator[None]:
    """Inside the block, reentrant checkpoints run without reentrance, at the same cost in time and memory.

    With ``keep=True`` activations are kept instead of recomputed. This is needed if parameters are replaced during the
    forward pass only. Other threads then keep their activations too, which only costs memory.
    """
    this, counted = object(), (_active, _keeping) if keep else (_active,)
    with _lock:
        if not _active:
            _originals.update({name: getattr(checkpoint, name) for name in _REPLACEMENTS})
            vars(checkpoint).update(_REPLACEMENTS)
        for contexts in counted:
            contexts.append(this)
    try:
        yield
    finally:
        with _lock:
            for contexts in counted:
                contexts.remove(this)
            if not _active:
                vars(checkpoint).update(_originals)
