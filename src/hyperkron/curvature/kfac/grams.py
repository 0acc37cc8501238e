"""Sums Σ r rᵀ over the rows of a layer, chunk by chunk, as a matrix or, where they are few, as the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperkron.curvature.kfac.coverage import Block
from hyperkron.curvature.kfac.factors import Factor, LowRank, few_rows
from hyperkron.linalg import gram, in_blocks


def summed(chunks: Iterator[Tensor], dtype: torch.dtype, block: Block | None, low_rank: bool) -> tuple[Factor, int]:
    """Σ r rᵀ over chunks of rows (groups, rows, d), and the number of rows; ``block`` says which columns to use."""
    biased, weighted = block is not None and block.bias is not None, block is None or block.weight is not None
    total: Tensor | None = None
    sums: Tensor | None = None
    waiting: list[Tensor] = []
    count = 0
    for chunk in chunks:
        waiting.append(chunk.to(dtype))
        count, d = count + chunk.shape[1], chunk.shape[2]
        del chunk  # nothing holds a chunk while the next one is made
        if low_rank and weighted and total is None and few_rows(count, d):
            continue
        while waiting:
            part = waiting.pop(0)
            total = _plus_gram(total, part) if weighted else None
            if biased:
                sums = part.sum(1) if sums is None else sums + part.sum(1)
            del part
    layer = None if block is None else block.layer
    if waiting:
        waiting = waiting if layer is None else [layer.ordered(rows) for rows in waiting]
        ones = [torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1) if biased else r for r in waiting]
        return LowRank(torch.cat(ones, dim=1)), count
    if layer is not None and total is not None:
        total = layer.ordered_gram(total)
    if sums is None:
        assert total is not None
        return total, count
    return bordered(total, sums if layer is None else layer.ordered(sums), count), count


def _plus_gram(total: Tensor | None, rows: Tensor) -> Tensor:
    """total + rowsᵀ rows, group by group, in the memory of ``total``."""
    if total is None:
        return gram(rows)
    if in_blocks(rows):
        return total.add_(gram(rows))
    if rows.shape[0] > 1:
        return total.baddbmm_(rows.mT, rows)
    total[0].addmm_(rows[0].mT, rows[0])
    return total


def bordered(total: Tensor | None, sums: Tensor, count: int) -> Tensor:
    """Σ [r, 1][r, 1]ᵀ from Σ r rᵀ and Σ r: the column of ones of a bias is never materialised."""
    if total is None:
        return sums.new_full((sums.shape[0], 1, 1), float(count))
    joint = F.pad(total, (0, 1, 0, 1), value=float(count))
    joint[:, :-1, -1] = sums
    joint[:, -1, :-1] = sums
    return joint
