"""Waiting for the device, in one place: eager execution, which reads results, and recorded execution, which cannot.

A GPU works through a queue, so reading a number waits for all the work before it. An eager step therefore reads as many
values as possible together, at its end. While a CUDA graph is recorded nothing can be read. The recording assumes that
all checks succeed, and one read after each replay tells whether they did. If not, the step is repeated eagerly, where
errors are handled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A value that the device may still be computing; ``finish`` waits for it."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = finish

    @classmethod
    def ready(cls, value: T) -> Pending[T]:
        """A value that is already known."""
        return cls(lambda: value)

    def wait(self) -> T:
        """The value; for a recording, the value of the last replay."""
        return self._finish()

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """``function`` of the value, computed when it is waited for."""
        return Pending(lambda: function(self.wait()))


def read(*numbers: Tensor) -> list[float]:
    """The values of 0-dimensional tensors, in one copy to the host."""
    return torch.stack(numbers).detach().tolist()


class Execution:
    """How one step is executed on ``device``: eagerly, or ``recorded`` as a CUDA graph, which reads nothing."""

    def __init__(self, device: torch.device, *, recorded: bool = False) -> None:
        self.device, self.recorded = device, recorded
        self._finite: list[tuple[Tensor, Callable[[str], Exception]]] = []
        self._flags: list[Tensor] = []
        self._later: list[Tensor] = []
        self._sizes: list[list[int]] = []  # the sizes of the three lists above, in a recording
        self._replayed: list[list[float]] = []

    @property
    def queued(self) -> bool:
        """Whether the device works through a queue, so that waiting for a result costs time."""
        return self.device.type != "cpu"

    def check_finite(self, value: Tensor, error: Callable[[str], Exception]) -> None:
        """Check that ``value``, a few numbers, is finite: immediately on a CPU, otherwise in :meth:`settle`.

        ``error("nan")`` or ``error("infinite")`` creates the error.
        """
        here = value.device.type == "cpu" and not self.recorded
        if here and not self.queued and value.ndim == 0 and math.isfinite(value.item()):
            return
        self._finite.append((value.detach(), error))
        if here:
            self.settle()

    def settle(self) -> None:
        """Read all values that must be finite, together, and raise the error of the first that is not."""
        if not self._finite or self.recorded:
            return
        checks, self._finite = self._finite, []
        numbers = iter(_joined([value for value, _ in checks]).tolist())
        for value, error in checks:
            bad = [x for x in itertools.islice(numbers, value.numel()) if not math.isfinite(x)]
            if bad:
                raise error("nan" if any(map(math.isnan, bad)) else "infinite")

    def forget(self) -> None:
        """Drop the pending checks, because a later evaluation repeats them."""
        self._finite = []

    def take_checks(self) -> list[tuple[Tensor, Callable[[str], Exception]]]:
        """Remove and return the pending checks; the step that replays this recording repeats them with new values."""
        checks, self._finite = self._finite, []
        return checks

    def read_flags(self, flags: Tensor) -> list[Any]:
        """Read a vector whose entries are zero on success; a recording assumes zeros and reads them later."""
        if not self.recorded:
            return flags.tolist()
        self._flags.append(flags)
        return [0] * flags.numel()

    def later(self, numbers: Tensor) -> Pending[list[float]]:
        """Numbers that are needed only at the end of the step; in a recording they are read after each replay."""
        if not self.recorded:
            return Pending(lambda: numbers.reshape(-1).tolist())
        position = len(self._later)
        self._later.append(numbers)
        return Pending(lambda: self._replayed[position])

    def unread(self) -> Tensor:
        """Everything to read after a replay, as one vector; call this at the end of the recording."""
        parts = [value for value, _ in self._finite], self._flags, self._later
        self._finite, self._flags, self._later = [], [], []
        self._sizes = [[x.numel() for x in part] for part in parts]
        return _joined([x.detach().double() for part in parts for x in part])

    def replayed(self, unread: Tensor) -> bool:
        """Read the vector ``unread`` after a replay; returns whether all checks have succeeded."""
        numbers = iter(unread.tolist())
        finite, flags, self._replayed = ([list(itertools.islice(numbers, n)) for n in part] for part in self._sizes)
        return all(map(math.isfinite, itertools.chain(*finite))) and not any(itertools.chain(*flags))


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in parts])
