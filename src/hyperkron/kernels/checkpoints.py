"""Activation checkpointing that gradients of chosen tensors can pass through.

``torch.utils.checkpoint`` knows two ways. The reentrant one stores gradients in ``.grad`` from inside the backward
pass: ``torch.autograd.grad`` does not see the parameters inside it, and would leave them out in silence. The other one
computes the activations again during the backward pass, with the parameters and by the kernels of that time: another
attention than that of the forward pass would not have its second derivative.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

from hyperkron.kernels.selection import same_kernels


class _NotReentrant:
    """In place of torch's reentrant function: the same call, the other way."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *inputs: Any) -> Any:
        return checkpoint.checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=preserve)


_SECOND_TIME = checkpoint._checkpoint_without_reentrant_generator


def _second_time(function: Callable[..., Any], *options: Any, **named: Any) -> Iterator[None]:
    """In place of what sets up the second computation: by the same kernels, or none where activations are kept."""
    if _REPLACEMENTS.keeping:
        yield
        return
    kernels = same_kernels()

    def again(*inputs: Any, **more: Any) -> Any:
        with kernels():
            return function(*inputs, **more)

    yield from _SECOND_TIME(again, *options, **named)


class _Replacements:
    """Stand-ins for names of a module while somebody needs them; threads may come and go in any order."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.lock = threading.Lock()
        self.users: dict[str, int] = {}
        self.own: dict[str, Any] = {}
        self.keeping = 0

    def enter(self, name: str, stand_in: Any) -> None:
        with self.lock:
            if not self.users.get(name):
                self.own[name] = getattr(self.module, name)
                setattr(self.module, name, stand_in)
            self.users[name] = self.users.get(name, 0) + 1

    def leave(self, name: str) -> None:
        with self.lock:
            self.users[name] -= 1
            if not self.users[name]:
                setattr(self.module, name, self.own.pop(name))

    def count_keeping(self, change: int) -> None:
        """Add ``change`` to the number of contexts in which activations are kept."""
        with self.lock:
            self.keeping += change


_REPLACEMENTS = _Replacements(checkpoint)


@contextmanager
def differentiable_checkpoints(*, keep: bool = False) -> Iterator[None]:
    """Reentrant checkpoints inside are taken the other way, which costs the same time and memory.

    With ``keep`` activations are kept instead of computed again: for parameters that are in place during the forward
    pass only. Other threads keep theirs meanwhile, which only costs memory.
    """
    names = {"CheckpointFunction": _NotReentrant, "_checkpoint_without_reentrant_generator": _second_time}
    for name, stand_in in names.items():
        _REPLACEMENTS.enter(name, stand_in)
    _REPLACEMENTS.count_keeping(int(keep))
    try:
        yield
    finally:
        _REPLACEMENTS.count_keeping(-int(keep))
        for name in names:
            _REPLACEMENTS.leave(name)
