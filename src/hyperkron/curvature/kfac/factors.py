"""A Kronecker factor: a dense matrix, or the few rows it is made of; and the inverse of either.

A factor M = Σ r rᵀ of R rows in d dimensions has rank R. Where R is well below d (deep convolutions at small batch,
``reduce`` factors of any wide layer), the rows are kept instead of the matrix, and the damped inverse is had from a
system of size R by Woodbury's identity,

    (XᵀX + δI)⁻¹ = [I − Xᵀ (XXᵀ + δI)⁻¹ X] / δ .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperkron.kernels.linalg import Factorization, full_precision, load_factorization

DUAL_RATIO = 0.5
"""Rows are kept where there are at most this many for each dimension."""


@dataclass(frozen=True)
class LowRank:
    """M = XᵀX by its rows X, (groups, R, d)."""

    rows: Tensor


Factor = Tensor | LowRank


def few_rows(rows: int, d: int) -> bool:
    """Whether the dual form is the cheaper one."""
    return rows <= DUAL_RATIO * d


def dense(factor: Factor) -> Tensor:
    """The factor as a matrix (groups, d, d)."""
    return factor.rows.mT @ factor.rows if isinstance(factor, LowRank) else factor


def stored(factor: Factor) -> Tensor:
    """The tensor a factor is kept as: the matrix, or its rows."""
    return factor.rows if isinstance(factor, LowRank) else factor


def dimension(factor: Factor) -> int:
    """d, of a d × d factor."""
    return factor.rows.shape[2] if isinstance(factor, LowRank) else factor.shape[-1]


def scaled(factor: Factor, c: float | Tensor) -> Factor:
    """c·M for c ≥ 0."""
    return LowRank(factor.rows * c**0.5) if isinstance(factor, LowRank) else factor * c


def added(a: Factor, b: Factor) -> Factor:
    """M + N, as rows where the rows stay few."""
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        rows = torch.cat([a.rows, b.rows], dim=1)
        if few_rows(rows.shape[1], rows.shape[2]):
            return LowRank(rows)
    return dense(a) + dense(b)


def add_to(sums: dict[str, Any], name: str, value: Factor) -> None:
    """Add to the sum of that name, or begin one."""
    sums[name] = added(sums[name], value) if name in sums else value


@dataclass(frozen=True)
class Primal:
    """(M + δI)⁻¹ of dense factors, (L, d, d).

    The system may have more rows than M, those of an identity; V may have them too, as zeros.
    """

    system: Factorization

    @property
    def size(self) -> int:
        """The rows of the system."""
        return self.system.size

    def solve(self, v: Tensor, own: bool = False) -> Tensor:
        """(M + δI)⁻¹ V for V of shape (L, d, k); in the memory of V, perhaps, where that is the caller's ``own``."""
        longer = _longer(v, self.size)
        return self.system.solve(longer, own or longer is not v)[:, : v.shape[1]]

    def times(self, v: Tensor) -> Tensor:
        """(M + δI) V."""
        return self.system.times(_longer(v, self.size))[:, : v.shape[1]]

    def state_dict(self) -> dict[str, Any]:
        """Its tensors, by name."""
        return {"system": self.system.state_dict()}


def _longer(v: Tensor, rows: int) -> Tensor:
    """V of shape (L, d, k) with zeros below it, up to this many rows."""
    return F.pad(v, (0, 0, 0, rows - v.shape[1])) if rows > v.shape[1] else v


@dataclass(frozen=True)
class Dual:
    """(XᵀX + δI)⁻¹ by the rows X (L, R, d), the inverse of XXᵀ + δI, and δ (L,).

    Products run in full precision: the answer along the rows is a small difference of large numbers.
    """

    rows: Tensor
    kernel: Primal
    shift: Tensor

    @property
    def size(self) -> int:
        """d."""
        return self.rows.shape[2]

    def solve(self, v: Tensor, own: bool = False) -> Tensor:
        """(XᵀX + δI)⁻¹ V for V of shape (L, d, k)."""
        with full_precision():
            along = self.kernel.solve(torch.bmm(self.rows, v), own=True)
            return (v - torch.bmm(self.rows.mT, along)) / self.shift[:, None, None]

    def times(self, v: Tensor) -> Tensor:
        """(XᵀX + δI) V."""
        return self.rows.mT @ (self.rows @ v) + self.shift[:, None, None] * v

    def state_dict(self) -> dict[str, Any]:
        """Its tensors, by name."""
        return {"rows": self.rows, "shift": self.shift, **self.kernel.state_dict()}


FactorInverse = Primal | Dual


def load_factor_inverse(state: dict[str, Any]) -> FactorInverse:
    """The inverse whose :meth:`state_dict` this is."""
    primal = Primal(load_factorization(state["system"]))
    return Dual(state["rows"], primal, state["shift"]) if "rows" in state else primal
