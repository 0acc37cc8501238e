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
    if _REPLACEMENTS.keeping:
        yield
        return
    kernels = same_kernels()

    def with_same_kernels(*inputs: Any, **more: Any) -> Any:
        with kernels():
            return function(*inputs, **more)

    yield from _TORCH_RECOMPUTE(with_same_kernels, *options, **named)


class _Replacements:
    """Replaces attributes of a module while at least one user needs it; safe with several threads."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.lock = threading.Lock()
        self.users: dict[str, int] = {}
        self.originals: dict[str, Any] = {}
        self.keeping = 0

    def enter(self, name: str, replacement: Any) -> None:
        with self.lock:
            if not self.users.get(name):
                self.originals[name] = getattr(self.module, name)
                setattr(self.module, name, replacement)
            self.users[name] = self.users.get(name, 0) + 1

    def leave(self, name: str) -> None:
        with self.lock:
            self.users[name] -= 1
            if not self.users[name]:
                setattr(self.module, name, self.originals.pop(name))

    def count_keeping(self, change: int) -> None:
        """Add ``change`` to the number of contexts in which activations are kept."""
        with self.lock:
            self.keeping += change


_REPLACEMENTS = _Replacements(checkpoint)


@contextmanager
def differentiable_checkpoints(*, keep: bool = False) -> Iterator[None]:
    """Inside the block, reentrant checkpoints run without reentrance, at the same cost in time and memory.

    With ``keep=True`` activations are kept instead of recomputed. This is needed if parameters are replaced during the
    forward pass only. Other threads then keep their activations too, which only costs memory.
    """
    names = {"CheckpointFunction": _NotReentrant, "_checkpoint_without_reentrant_generator": _recompute}
    for name, replacement in names.items():
        _REPLACEMENTS.enter(name, replacement)
    _REPLACEMENTS.count_keeping(int(keep))
    try:
        yield
    finally:
        _REPLACEMENTS.count_keeping(-int(keep))
        for name in names:
            _REPLACEMENTS.leave(name)
