"""Inverses of many symmetric positive definite matrices at once.

On a GPU, library routines treat a batch of large matrices one after the other. :func:`spd_inverse` instead halves the
matrices until the pieces are small and puts the inverse together from batched products,

    [P  Qᵀ]⁻¹   [P⁻¹ + WᵀS⁻¹W   −WᵀS⁻¹]
    [Q  D ]   = [−S⁻¹W            S⁻¹ ] ,     W = Q P⁻¹ ,   S = D − W Qᵀ ,

4/3·n³ operations, nearly all of them in matrix products. Products run in full float32 whatever the global setting, for
an inverse amplifies the rounding of TF32 by the condition number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LEAF = 128
"""Pieces of this size go to the library's batched Cholesky."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products in true float32, restoring the global setting afterwards."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def spd_inverse(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """(inverses, info) of a batch (L, n, n); ``info`` is non-zero where a matrix is not positive definite."""
    if matrices.device.type == "cpu" or matrices.shape[-1] <= LEAF:
        return _library_inverse(matrices)
    with full_precision():
        return _halved_inverse(matrices)


def _library_inverse(matrices: Tensor) -> tuple[Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(matrices)
    if matrices.device.type == "cpu":
        return torch.cholesky_inverse(factor), info
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device).expand_as(matrices)
    root = torch.linalg.solve_triangular(factor, eye, upper=False)
    return root.mT @ root, info


def _halved_inverse(m: Tensor) -> tuple[Tensor, Tensor]:
    n = m.shape[-1]
    if n <= LEAF:
        return _library_inverse(m)
    k = _split(n)
    p_inverse, info_p = _halved_inverse(m[:, :k, :k])
    q = m[:, k:, :k]
    w = q @ p_inverse
    s_inverse, info_s = _halved_inverse(torch.baddbmm(m[:, k:, k:], w, q.mT, alpha=-1))
    out = torch.empty_like(m)
    corner = torch.bmm(s_inverse, w)
    out[:, :k, :k] = torch.baddbmm(p_inverse, w.mT, corner)
    out[:, k:, :k] = corner.neg_()
    out[:, :k, k:] = corner.mT
    out[:, k:, k:] = s_inverse
    return out, info_p + info_s


def _split(n: int) -> int:
    """Where to halve: at a multiple of the leaf size, so that products are aligned; a lone remainder goes last."""
    k = (n // 2 + LEAF - 1) // LEAF * LEAF
    return k if k < n else n // 2
