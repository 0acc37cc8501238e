"""Batches that are remembered for the length of a step: to name those of a bad one, or to try it again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperkron.algorithms import BatchSources, Examples
from hyperkron.evaluation.inputs import tensors_of
from hyperkron.training.randomness import random_state, same_random_state, set_random_state

MAX_IDS = 10_000
"""Numbers of one tensor that a description lists."""


@dataclass(frozen=True)
class Note:
    """One draw of a step.

    Attributes:
        level: ``inner``, ``outer`` or ``curvature``.
        kind: ``batch``, or ``index`` where a finite-sum method asked for the number of a batch.
        value: the batch or its number.
        random: the random state after it, if the draw changed it.
    """

    level: str
    kind: str
    value: Any
    random: dict[str, Any] | None


class RecordedBatches(BatchSources):
    """Batches that are remembered since :meth:`begin`, and given once more after :meth:`rewind`.

    Example:
        >>> numbers = iter(range(9))
        >>> batches = RecordedBatches(lambda: next(numbers), None)
        >>> batches.begin()
        >>> batches.inner(), batches.inner()
        (0, 1)
        >>> batches.rewind()
        >>> batches.inner(), batches.inner(), batches.inner()
        (0, 1, 2)
    """

    def __init__(self, inner: Any, outer: Any, curvature: Any = None) -> None:
        super().__init__(inner, outer, curvature)
        self.notes: list[Note] = []
        self._active, self._next = False, 0

    def begin(self) -> None:
        """A step begins: remember from now on, and nothing of before."""
        self.notes, self._active, self._next = [], True, 0

    def rewind(self) -> None:
        """Give everything remembered once more, in the same order and with the same effect on random states."""
        self._next = 0

    def end(self) -> None:
        """Forget, and remember nothing more."""
        self.notes, self._active, self._next = [], False, 0

    def note(self, level: str, kind: str, take: Callable[[], Any]) -> Any:
        """What ``take()`` gives, or gave the last time."""
        if not self._active:
            return take()
        if self._next < len(self.notes) and (self.notes[self._next].level, self.notes[self._next].kind) == (
            level,
            kind,
        ):
            found = self.notes[self._next]
            self._next += 1
            if found.random is not None:
                set_random_state(found.random)
            return found.value
        del self.notes[self._next :]
        before = random_state()
        value = take()
        after = random_state()
        self.notes.append(Note(level, kind, value, None if same_random_state(before, after) else after))
        self._next += 1
        return value

    def inner(self) -> Any:
        """A fresh batch of J_in."""
        return self.note("inner", "batch", super().inner)

    def outer(self) -> Any:
        """A fresh batch of J_out."""
        return self.note("outer", "batch", super().outer)

    def curvature(self) -> Any:
        """A fresh batch of J_in to measure A on."""
        return self.note("curvature", "batch", super().curvature)

    def finite(self, algorithm: str) -> tuple[Examples, Examples]:
        """Both sources as finite sums, whose draws are remembered too."""
        inner, outer = super().finite(algorithm)
        return (_Watched(inner, "inner", self), _Watched(outer, "outer", self)) if self._active else (inner, outer)


class _Watched(Examples):
    """The same examples, in the same place of their order, whose draws a :class:`RecordedBatches` remembers."""

    def __init__(self, examples: Examples, level: str, batches: RecordedBatches) -> None:
        self.examples, self.level, self.batches = examples, level, batches
        self.tensors, self.batch_size = examples.tensors, examples.batch_size

    def index(self) -> int:
        """The number of the next batch."""
        number: int = self.batches.note(self.level, "index", self.examples.index)
        return number

    def next(self) -> tuple[Tensor, ...]:
        """The next batch."""
        return self.batch(self.index())


# --- descriptions ------------------------------------------------------------------------------------------


def describe(batches: RecordedBatches) -> list[dict[str, Any]]:
    """The draws of the step as plain values: numbers that identify examples, and rows that are not finite."""
    return [_described(note, getattr(batches, f"{note.level}_source")) for note in batches.notes]


def _described(note: Note, source: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"level": note.level}
    batch = note.value
    if note.kind == "index":
        found["batch"] = note.value
        batch = source.batch(note.value)
        found["examples"] = [note.value * source.batch_size, note.value * source.batch_size + len(batch[0]) - 1]
    found["tensors"] = [_tensor(place, x) for place, x in tensors_of("batch", batch)]
    return found


def _tensor(place: str, x: Tensor) -> dict[str, Any]:
    """Whole numbers as they are (indices and labels name examples); of others the rows that are not finite."""
    found: dict[str, Any] = {"where": place, "dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
    if x.is_floating_point():
        bad = ~torch.isfinite(x.detach()).reshape(len(x), -1).all(1) if x.dim() else ~torch.isfinite(x.detach()).view(1)
        found["non_finite_rows"] = bad.nonzero().flatten().tolist()[:MAX_IDS]
    elif x.dim() <= 1 and x.numel() <= MAX_IDS and x.dtype != torch.bool:
        found["values"] = x.tolist()
    return found


def plain(value: Any) -> Any:
    """A figure as strict JSON has it: ``None`` for what is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
