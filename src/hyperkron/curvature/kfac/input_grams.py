"""Σ a aᵀ over the inputs of a layer's call, once for all layers that read the same tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyperkron.curvature.kfac.coverage import Block
from hyperkron.curvature.kfac.factors import Factor, few_rows
from hyperkron.curvature.kfac.grams import added_images, bordered, narrowed, summed
from hyperkron.curvature.kfac.layers import WeightSharing


class InputGrams:
    """The sums of one measurement, kept while layers may share them.

    Args:
        dtype: the dtype of the sums.
        low_rank: keep few rows instead of their matrix.
        one_at_a_time: forget the sums of one input when another is summed, to save memory.
    """

    def __init__(self, dtype: torch.dtype, low_rank: bool, one_at_a_time: bool) -> None:
        self.dtype, self.low_rank, self.one_at_a_time = dtype, low_rank, one_at_a_time
        self._grams: dict[tuple[Any, ...], tuple[Factor, int]] = {}
        self._alive: list[Tensor] = []  # the inputs, whose ids are keys

    def forget(self) -> None:
        """Forget the shared sums and their inputs."""
        self._grams.clear()
        self._alive.clear()

    def gram(self, block: Block, x: Tensor, rows: int, sharing: WeightSharing) -> tuple[Factor, int]:
        """Σ a aᵀ over the rows of one call, with a = [x, 1] where the block has a bias; layers that read the same
        tensor (query, key, value) share one."""
        layer = block.layer
        key = (layer.same_rows, id(x), x._version, block.bias is not None, sharing)
        shareable = layer.same_rows is not None and block.weight is not None
        if shareable and key in self._grams:
            return self._grams[key]
        made = self._without_rows(block, x.detach(), rows, sharing)
        if made is None:
            y, scale = x.detach(), None
            if layer.homogeneous:
                y, scale = self.narrowed(y, rows, layer.d_in, sharing)
            made = summed(layer.inputs(y, sharing), self.dtype, block, self.low_rank, scale)
        if shareable:
            if self.one_at_a_time and not any(x is y for y in self._alive):
                self.forget()
            self._grams[key] = made
            self._alive.append(x)
        return made

    def _without_rows(self, block: Block, x: Tensor, rows: int, sharing: WeightSharing) -> tuple[Factor, int] | None:
        """The same for layers that can sum their ``rows`` rows without forming them; ``None`` for others."""
        layer = block.layer
        if self.few(rows, layer.d_in) or sharing == "reduce" or block.weight is None:
            return None
        total = layer.input_gram(x.to(self.dtype))
        if total is None or block.bias is None:
            return None if total is None else (total, rows)
        whole = layer.inputs(added_images(x.to(self.dtype)), "expand")  # a row is linear in the image
        sums = torch.stack([part.sum(1) for part in whole]).sum(0)
        return bordered(total, layer.ordered(sums), rows), rows

    def narrowed(self, x: Tensor, rows: int, d: int, sharing: WeightSharing) -> tuple[Tensor, Tensor | None]:
        """``x`` in half precision with its scale, if its ``rows`` rows of size ``d`` are summed to a matrix."""
        return (x, None) if sharing == "reduce" or self.few(rows, d) else narrowed(x, rows, d)

    def few(self, rows: int, d: int) -> bool:
        """Whether the rows are kept instead of their matrix."""
        return self.low_rank and few_rows(rows, d)
