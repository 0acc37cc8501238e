"""Sends the factors or spectra of blocks to the processes that own them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hyperkron.curvature.kfac.owners import Owners


class Deliveries:
    """Sends each block to its owner in one collective, during the backward pass of the next; one block at a time.

    Attributes:
        sent: the blocks that were sent; their owners have them after :meth:`finish`.
        shares_sums: whether an A that its owner already has is not sent again; the same on all ranks.
    """

    def __init__(self, owners: Owners) -> None:
        self.owners, self.sent, self.shares_sums = owners, set[str](), True
        self._sums: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}  # A and its sum, by id and owner
        self._coming: tuple[Callable[[], list[Tensor] | None], Callable[[list[Tensor]], None]] | None = None

    def send_factors(self, name: str, sides: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Remove A and B of a block from pairs of dictionaries and send them; the owner's dictionaries get the sums."""
        self._receive()
        self.sent.add(name)
        inputs, gradients = zip(*((a.pop(name), b.pop(name)) for a, b in sides), strict=True)
        keys = [(id(a), self.owners.of[name]) for a in inputs]
        known = self.shares_sums and all(key in self._sums for key in keys)
        if not known:
            self._sums = {key: (a, None) for key, a in zip(keys, inputs, strict=True)}
        sums = self.owners.sums(name, gradients if known else (*gradients, *inputs))

        def put(found: list[Tensor]) -> None:
            for key, total in zip(keys, found[len(keys) :], strict=False):  # none if the owner already had A
                self._sums[key] = (self._sums[key][0], total)
            for (a, b), key, total in zip(sides, keys, found, strict=False):
                a[name], b[name] = self._sums[key][1], total

        self._coming = sums, put

    def send_spectrum(self, name: str, spectra: dict[str, Tensor]) -> None:
        """The same for EKFAC's S."""
        self._receive()
        self.sent.add(name)
        sums = self.owners.sums(name, [spectra.pop(name)], symmetric=False)
        self._coming = sums, lambda found: spectra.update({name: found[0]})

    def _receive(self) -> None:
        """Wait for the block that is being sent; its owner stores the sums."""
        coming, self._coming = self._coming, None
        if coming is not None and (found := coming[0]()) is not None:
            coming[1](found)

    def finish(self) -> None:
        """Wait for the last block, and forget the sums that layers share."""
        self._receive()
        self._sums.clear()
