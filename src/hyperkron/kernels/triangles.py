"""Inverses of batches of small lower triangular matrices."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Triangles of this size are inverted by the library in one batch."""
MIN_BLOCKS, MAX_MATRICES = 9, 12
"""Inversion by blocks is used for at least this many blocks and at most this many matrices, where it is faster."""


def inverse(lower: Tensor, blocks: bool = False) -> Tensor:
    """L⁻¹ for lower triangles (L, n, n).

    On a GPU the library inverts many triangles of 64 rows faster than a few of 200. So with ``blocks=True``, at the
    price of more launches, a batch of 2 to 12 is cut into diagonal blocks of 64 rows. These are inverted together and
    then joined two by two:

        [K    ]⁻¹   [   K⁻¹           ]
        [C  R ]   = [−R⁻¹ C K⁻¹    R⁻¹] .
    """
    count, n = lower.shape[0], lower.shape[-1]
    pieces = -(-n // BLOCK)
    if not blocks or pieces == 1 or not (1 < count <= MAX_MATRICES and count * pieces >= MIN_BLOCKS):
        return torch.linalg.solve_triangular(lower, _ones(lower), upper=False)
    size = pieces * BLOCK
    given = lower
    if size > n:
        given = torch.nn.functional.pad(lower, (0, size - n, 0, size - n))
        given.diagonal(dim1=1, dim2=2)[:, n:] = 1.0
    found = torch.zeros_like(given)
    corners = _corners(given).permute(0, 3, 1, 2).reshape(count * pieces, BLOCK, BLOCK)
    small = torch.linalg.solve_triangular(corners, _ones(corners), upper=False)
    _corners(found).copy_(small.view(count, pieces, BLOCK, BLOCK).permute(0, 2, 3, 1))
    _join(given, found, 0, pieces)
    return found[:, :n, :n].contiguous()


def _ones(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


def _corners(m: Tensor) -> Tensor:
    """The diagonal blocks (L, BLOCK, BLOCK, number of blocks), as a view."""
    count, pieces = m.shape[0], m.shape[1] // BLOCK
    return m.view(count, pieces, BLOCK, pieces, BLOCK).diagonal(dim1=1, dim2=3)


def _join(lower: Tensor, found: Tensor, begin: int, end: int) -> None:
    """Fill the inverse below the diagonal blocks ``begin`` to ``end``."""
    if end - begin == 1:
        return
    middle = (begin + end) // 2
    _join(lower, found, begin, middle)
    _join(lower, found, middle, end)
    a, b, c = BLOCK * begin, BLOCK * middle, BLOCK * end
    between = torch.bmm(lower[:, b:c, a:b], found[:, a:b, a:b])
    found[:, b:c, a:b] = torch.bmm(found[:, b:c, b:c], between).neg_()
