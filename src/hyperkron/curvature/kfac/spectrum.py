"""EKFAC's spectrum: the squares of every example's gradient in the eigenbasis of the factors."""

from __future__ import annotations

import torch
from torch import Tensor

from hyperkron.curvature.kfac.coverage import Block

GRADIENTS = {"cpu": 2**21, "cuda": 2**25}
"""Gradients of single examples are made at most this many numbers at a time, by device type."""


def corrected(block: Block, x: Tensor, g: Tensor, q_a: Tensor, q_b: Tensor) -> Tensor:
    """Σ_n (Q_Bᵀ G_n Q_A)² with G_n = Σ_positions g [x, 1]ᵀ, the gradient of one example."""
    total = q_a.new_zeros(q_a.shape[0], q_b.shape[-1], q_a.shape[-1])
    d = block.layer.d_in if block.weight is not None else 0
    columns = block.layer.reordered(q_a[:, :d]) if d else None
    together = max(1, GRADIENTS.get(x.device.type, 2**24) // total.numel())
    for inputs, gradients in block.layer.positions(x, g):
        a = inputs.new_zeros(*inputs.shape[:-1], 1, dtype=q_a.dtype) if columns is None else _within(inputs, columns)
        if block.bias is not None:
            a = a + q_a[:, -1:]
        b = _within(gradients, q_b)
        if a.shape[2] == 1:
            total += (b[:, :, 0].square().permute(1, 2, 0)) @ (a[:, :, 0].square().transpose(0, 1))
        else:
            for some, of_them in zip(b.split(together), a.split(together), strict=True):
                total += _sum_of_squares(some.mT @ of_them)
    return total


def _sum_of_squares(x: Tensor) -> Tensor:
    """Over the first dimension, in the memory of ``x``; on a GPU in one pass over it, which on a CPU is far slower."""
    return torch.linalg.vector_norm(x, dim=0).square_() if x.is_cuda else x.square_().sum(0)


def _within(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows (n, groups, S, d) in a basis (groups, d, k); in one product where there is one group."""
    rows = rows.to(basis.dtype)
    if len(basis) > 1:
        return rows @ basis
    return (rows.reshape(-1, rows.shape[-1]) @ basis[0]).view(*rows.shape[:-1], -1)
