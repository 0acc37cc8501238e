"""A Kronecker factor: a dense matrix, or the few rows it is made of; and the inverse of either.

A factor M = Σ r rᵀ of R rows in d dimensions has rank R. Where R is well below d (deep convolutions at small batch,
``reduce`` factors of any wide layer), the rows are kept instead of the matrix, and the damped inverse is had from a
system of size R by Woodbury's identity,

    (XᵀX + δI)⁻¹ = [I − Xᵀ (XXᵀ + δI)⁻¹ X] / δ .
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hyperkron.linalg import full_precision

DUAL_RATIO = 0.5
"""Rows are kept where there are at most this many for each dimension."""


@dataclass(frozen=True)
class LowRank:
    """M = XᵀX by its rows X, (groups, R, d)."""

    rows: Tensor

    def dense(self) -> Tensor:
        """The matrix itself."""
        return self.rows.mT @ self.rows


Factor = Tensor | LowRank


def few_rows(rows: int, d: int) -> bool:
    """Whether the dual form is the cheaper one."""
    return rows <= DUAL_RATIO * d


def dense(factor: Factor) -> Tensor:
    """The factor as a matrix (groups, d, d)."""
    return factor.dense() if isinstance(factor, LowRank) else factor


def mean_diagonal(factor: Factor) -> Tensor:
    """tr M / d of every group."""
    if isinstance(factor, LowRank):
        return factor.rows.square().sum((1, 2)) / factor.rows.shape[2]
    return factor.diagonal(dim1=-2, dim2=-1).mean(-1)


def scaled(factor: Factor, c: float) -> Factor:
    """c·M for c ≥ 0."""
    return LowRank(factor.rows * c**0.5) if isinstance(factor, LowRank) else factor * c


def added(a: Factor, b: Factor) -> Factor:
    """M + N, as rows where the rows stay few."""
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        rows = torch.cat([a.rows, b.rows], dim=1)
        if few_rows(rows.shape[1], rows.shape[2]):
            return LowRank(rows)
    return dense(a) + dense(b)


@dataclass(frozen=True)
class DualInverse:
    """(XᵀX + δI)⁻¹ by its rows X, the inverse of XXᵀ + δI, and δ of every group.

    Both products run in full precision: the answer along the rows is a small difference of large numbers.
    """

    rows: Tensor
    kernel: Tensor
    shift: Tensor

    def left(self, v: Tensor) -> Tensor:
        """(XᵀX + δI)⁻¹ V."""
        with full_precision():
            return (v - self.rows.mT @ (self.kernel @ (self.rows @ v))) / self.shift[:, None, None]

    def times(self, v: Tensor) -> Tensor:
        """(XᵀX + δI) V."""
        return self.rows.mT @ (self.rows @ v) + self.shift[:, None, None] * v


@dataclass(frozen=True)
class DenseInverse:
    """An explicit inverse."""

    matrix: Tensor

    def left(self, v: Tensor) -> Tensor:
        """M⁻¹ V."""
        return self.matrix @ v

    def times(self, v: Tensor) -> Tensor:
        """M V, recovered from the inverse."""
        return torch.linalg.solve(self.matrix, v)


FactorInverse = DenseInverse | DualInverse
