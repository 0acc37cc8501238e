"""Batches epoch after epoch, from where a saved run continues with those that would have followed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hyperkron.batches import Source


class Epochs(Source):
    """A source whose epochs are made by :meth:`epoch` with ``generator``.

    It is saved as the state of the generator before the epoch and the number of batches that were given since.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._batches: Iterator[Any] = iter(())
        self._start, self._given = generator.get_state(), 0

    @abstractmethod
    def epoch(self) -> Iterable[Any]:
        """The batches of a new epoch, at least one; all random numbers come from :attr:`generator`."""

    def next(self) -> Any:
        """The next batch."""
        found = next(self._batches, None)
        if found is None:
            self._start, self._given = self.generator.get_state(), 0
            self._batches = iter(self.epoch())
            found = next(self._batches)
        self._given += 1
        return found

    __call__ = next

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"start": self._start, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batches that would have followed."""
        self.generator.set_state(state["start"].cpu())
        self._batches, self._start, self._given = iter(()), state["start"], 0
        for _ in range(state["given"]):
            self.next()
