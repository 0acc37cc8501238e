"""Waiting for the device, in one place: eager execution, which reads results, and recorded execution, which cannot.

A GPU works through a queue: to read a number is to wait for all the work before it. So an eager step reads what can
wait in one piece at its end. While a CUDA graph is recorded nothing can be read at all: the recording takes for granted
that all goes well, and each replay is followed by one read that tells whether it did. If it did not, the replay is
refused and the step is done again eagerly, which knows what to do about it.
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
        """A value that is there already."""
        return cls(lambda: value)

    def wait(self) -> T:
        """The value; if it comes from a recording, that of the last replay."""
        return self._finish()

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """What ``function`` makes of the value, when that is waited for."""
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
        self._sizes: list[list[int]] = []  # of these three in a recording
        self._replayed: list[list[float]] = []

    @property
    def queued(self) -> bool:
        """Whether the device works through a queue, so that waiting for a result before going on costs time."""
        return self.device.type != "cpu"

    def check_finite(self, value: Tensor, error: Callable[[str], Exception]) -> None:
        """Require that ``value``, a few numbers, is finite: known at once on a CPU, else by :meth:`settle`.

        ``error`` makes the error from "nan" or "infinite".
        """
        here = value.device.type == "cpu" and not self.recorded
        if here and not self.queued and value.ndim == 0 and math.isfinite(value.item()):
            return
        self._finite.append((value.detach(), error))
        if here:
            self.settle()

    def settle(self) -> None:
        """Read all values that must be finite, in one piece, and raise the error of the first that is not."""
        if not self._finite or self.recorded:
            return
        checks, self._finite = self._finite, []
        numbers = iter(_joined([value for value, _ in checks]).tolist())
        for value, error in checks:
            bad = [x for x in itertools.islice(numbers, value.numel()) if not math.isfinite(x)]
            if bad:
                raise error("nan" if any(map(math.isnan, bad)) else "infinite")

    def forget(self) -> None:
        """Let go of the checks that are not read yet, where a later evaluation makes the same ones."""
        self._finite = []

    def handed_over(self) -> list[tuple[Tensor, Callable[[str], Exception]]]:
        """The checks not read yet, for the step that a recorded part belongs to; every replay has new values."""
        checks, self._finite = self._finite, []
        return checks

    def read_flags(self, flags: Tensor) -> list[Any]:
        """The entries of a vector that are zero if all is well; a recording assumes that they are."""
        if not self.recorded:
            return flags.tolist()
        self._flags.append(flags)
        return [0] * flags.numel()

    def later(self, numbers: Tensor) -> Pending[list[float]]:
        """Numbers that are needed at the end of the step only; those of a recording are read after each replay."""
        if not self.recorded:
            return Pending(lambda: numbers.reshape(-1).tolist())
        position = len(self._later)
        self._later.append(numbers)
        return Pending(lambda: self._replayed[position])

    def unread(self) -> Tensor:
        """Everything a replay has to read, as one vector: the last thing that is recorded."""
        parts = [value for value, _ in self._finite], self._flags, self._later
        self._finite, self._flags, self._later = [], [], []
        self._sizes = [[x.numel() for x in part] for part in parts]
        return _joined([x.detach().double() for part in parts for x in part])

    def replayed(self, unread: Tensor) -> bool:
        """Read what a replay has left in ``unread``; whether it went as the recording took for granted."""
        numbers = iter(unread.tolist())
        finite, flags, self._replayed = ([list(itertools.islice(numbers, n)) for n in part] for part in self._sizes)
        return all(map(math.isfinite, itertools.chain(*finite))) and not any(itertools.chain(*flags))


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in parts])
