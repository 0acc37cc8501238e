"""The memory that a computation holds, counted on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages that operations make inside the block, and remembers the peak.

    For devices that have no count of their own. A storage counts from the operation that returns it until nothing
    refers to it, whether it belongs to a result, to autograd's graph or to a parameter; what an operation
    uses inside is not seen.

    Args:
        known: tensors that were there before; they do not count when an operation returns a view of them.

    Example:
        >>> with Storages() as count:
        ...     x = torch.zeros(1000)
        ...     y = x + 1
        ...     del y
        >>> count.peak, count.now
        (8000, 4000)
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()
        for x in known:
            self._count(x.untyped_storage(), counts=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it returns."""
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage, counts: bool = True) -> None:
        place = storage._cdata
        if place in self._seen or not storage.nbytes():
            return
        self._seen.add(place)
        size = storage.nbytes() if counts else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, place, size).atexit = False

    def _gone(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self.now -= size
