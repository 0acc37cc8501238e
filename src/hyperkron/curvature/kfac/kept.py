"""Gradients of single examples at every layer, kept from one pass over the data to save a second pass.

EKFAC measures its spectrum in the eigenbasis of the factors, which are known only after a pass over all data. If the
point allows it and they are few enough, the gradients of that pass are kept, and the spectrum is computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperkron.curvature.kfac.coverage import Block
from hyperkron.curvature.kfac.factors import Matrices, add_to
from hyperkron.curvature.kfac.grams import GRADIENTS, by_gradients, corrected, corrected_by_gradients
from hyperkron.curvature.kfac.layers import cast_floating
from hyperkron.losses import Loss

MOST = 2**27
"""At most this many numbers are kept, for the spectrum and for others together."""


@dataclass(frozen=True)
class LayerGradients:
    """The gradients of the examples of a batch at one call of a layer, in the form that needs fewer numbers.

    The two forms are gradients in weight and bias (:meth:`Layer.gradients_of_examples`), and the layer's input with the
    gradient at its output.
    """

    block: Block
    whole: bool
    """Whether these are gradients in weight and bias."""
    pair: tuple[Tensor, Tensor]

    @staticmethod
    def of(block: Block, x: Tensor, gs: Sequence[Tensor], dtype: torch.dtype) -> list[LayerGradients]:
        """The gradients for each of ``gs``, which are gradients at the output of one call."""
        layer, count = block.layer, block.layer.examples(x)
        size = layer.groups * layer.d_out * (layer.d_in + 1)
        if not by_gradients(block, x, gs[0]) or count * size > x.numel() + gs[0].numel():
            return [LayerGradients(block, False, (x, g)) for g in gs]
        most = max(1, GRADIENTS.get(x.device.type, 2**24) // (size * len(gs)))
        chunks = layer.gradients_of_several(cast_floating(x, dtype), [g.to(dtype) for g in gs], most)
        pairs = (tuple(map(torch.cat, zip(*chunk, strict=True))) for chunk in zip(*chunks, strict=True))
        return [LayerGradients(block, True, (weight, bias)) for weight, bias in pairs]

    @property
    def numbers(self) -> dict[tuple[Any, ...], int]:
        """How many numbers each tensor has, by its place in memory: layers may have the same input."""
        return {(x.data_ptr(), x.shape, x.stride()): x.numel() for x in self.pair}

    def corrected(self, q_a: Tensor, q_b: Tensor) -> Tensor:
        """The contribution to EKFAC's spectrum."""
        if not self.whole:
            return corrected(self.block, *self.pair, q_a, q_b)
        together = max(1, GRADIENTS.get(q_a.device.type, 2**24) // (q_b.shape[-1] * q_a.shape[-1]))
        chunks = zip(*(x.split(together) for x in self.pair), strict=True)
        return corrected_by_gradients(self.block, chunks, q_a, q_b)


class KeptGradients:
    """The gradients of all parts of a batch; empty if they would be too many."""

    def __init__(self, parts: int) -> None:
        self.left, self._count = parts, parts
        self.parts: list[tuple[float, list[LayerGradients]]] = []
        self.fits = True

    def vectors(self, loss: Loss) -> list[tuple[Tensor, Tensor]]:
        """Vectors to backpropagate in addition to those of the curvature."""
        return []

    def add(self, gradients: Iterable[LayerGradients], rows: float, numbers: dict[tuple[Any, ...], int]) -> None:
        """Add a part; ``rows`` is its weight in the mean over all parts.

        ``numbers`` has what others keep of this part; what is kept here is added to it, if it fits.
        """
        found = list(gradients)
        self.parts.append((rows, found))
        self.left -= 1
        own = {place: count for one in found for place, count in one.numbers.items()}
        self.fits = sum((numbers | own).values()) * self._count <= MOST
        if self.fits:
            numbers.update(own)
        else:
            self.parts.clear()

    @property
    def complete(self) -> bool:
        return self.fits and not self.left

    def spectra(self, basis: dict[str, tuple[Tensor, Tensor]], scales: Matrices) -> Matrices:
        """EKFAC's S of the blocks in ``basis``, in the form of :attr:`Measured.corrected`."""
        sums: dict[str, Any] = {}
        bases = {n: (q_a if n not in scales else q_a / scales[n].mT, q_b) for n, (q_a, q_b) in basis.items()}
        for rows, part in self.parts:
            for one in part:
                if one.block.name in bases:
                    add_to(sums, one.block.name, one.corrected(*bases[one.block.name]) * rows)
        total = sum(rows for rows, _ in self.parts)
        return {name: x / total for name, x in sums.items()}
