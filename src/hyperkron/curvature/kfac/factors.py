"""A Kronecker factor, stored as a dense matrix or as a few rows, and the inverses of both forms.

A factor M = Σ r rᵀ of R rows in d dimensions has rank at most R. If R is well below d (deep convolutions at small
batch, ``reduce`` factors of any wide layer), the rows are kept instead of the matrix. The damped inverse then follows
from a system of size R by Woodbury's identity,

    (XᵀX + δI)⁻¹ = [I − Xᵀ (XXᵀ + δI)⁻¹ X] / δ .
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperkron.curvature.kfac.half_inverses import (
    MIN_ROWS,
    HalfDual,
    HalfInverse,
    HalfPrimal,
    HalfRows,
    load_half_inverse,
    solve_both_sides,
)
from hyperkron.kernels.linalg import Factorization, Halves, MatrixStack, gram, load_factorization
from hyperkron.kernels.split_products import MIN_SIZE, full_precision, half_product, product, subtract_product
from hyperkron.trees import HALF_TYPES

DUAL_RATIO = 0.5
"""Rows are kept where there are at most this many for each dimension."""


@dataclass(frozen=True)
class LowRank:
    """M = c XᵀX, stored as its rows X (groups, R, d) and c; rows in half precision stay in half precision."""

    rows: Tensor
    share: float | Tensor = 1.0

    @property
    def in_half(self) -> bool:
        return self.rows.dtype in HALF_TYPES

    @property
    def wide(self) -> Tensor:
        """√c X in full precision."""
        return self.rows.float() * self.share**0.5 if self.in_half else self.rows

    def kernel(self) -> Tensor:
        """c XXᵀ."""
        return half_product(self.rows, self.rows.mT).mul_(self.share) if self.in_half else gram(self.rows.mT)


Factor = Tensor | LowRank

Factors = dict[str, tuple[Factor, Factor]]
"""(A, B) of each block."""

Matrices = dict[str, Tensor]
"""One matrix (groups, d_out, d_in [+1]) for each block."""


def few_rows(rows: int, d: int) -> bool:
    """Whether the dual form is cheaper than a matrix."""
    return rows <= DUAL_RATIO * d


def dense(factor: Factor) -> Tensor:
    """The factor as a matrix (groups, d, d)."""
    return factor.wide.mT @ factor.wide if isinstance(factor, LowRank) else factor


def stored(factor: Factor) -> Tensor:
    """The tensor of a factor: the matrix, or its rows."""
    return factor.rows if isinstance(factor, LowRank) else factor


def dimension(factor: Factor) -> int:
    """d, of a d × d factor."""
    return factor.rows.shape[2] if isinstance(factor, LowRank) else factor.shape[-1]


def scaled(factor: Factor, c: float | Tensor) -> Factor:
    """c·M for c ≥ 0."""
    if not isinstance(factor, LowRank):
        return factor * c
    return LowRank(factor.rows, factor.share * c) if factor.in_half else LowRank(factor.rows * c**0.5)


def added(a: Factor, b: Factor) -> Factor:
    """M + N, as rows if both are given as rows and the rows together are still few."""
    if not (isinstance(a, LowRank) and isinstance(b, LowRank)):
        return dense(a) + dense(b)
    if few_rows(a.rows.shape[1] + b.rows.shape[1], a.rows.shape[2]):
        return LowRank(torch.cat([a.wide, b.wide], dim=1))
    return dense(a) + dense(b)


def add_to(sums: dict[str, Any], name: str, value: Factor) -> None:
    """Add ``value`` to the sum of that name, or start the sum with it."""
    sums[name] = added(sums[name], value) if name in sums else value


@dataclass(frozen=True)
class Primal(MatrixStack):
    """(M + δI)⁻¹ of dense factors, (L, d, d).

    The system may be padded with an identity; V may be padded with zeros.
    """

    system: Factorization
    kind: ClassVar[str] = "primal"

    @property
    def size(self) -> int:
        return self.system.size

    def solve(self, v: Tensor, overwrite: bool = False) -> Tensor:
        """(M + δI)⁻¹ V for V of shape (L, d, k); with ``overwrite`` the memory of V may be used."""
        longer = _longer(v, self.size)
        return self.system.solve(longer, overwrite or longer is not v)[:, : v.shape[1]]

    def times(self, v: Tensor) -> Tensor:
        """(M + δI) V."""
        return self.system.times(_longer(v, self.size))[:, : v.shape[1]]


def _longer(v: Tensor, rows: int) -> Tensor:
    """V of shape (L, d, k), padded with zeros to this many rows."""
    return F.pad(v, (0, 0, 0, rows - v.shape[1])) if rows > v.shape[1] else v


@dataclass(frozen=True)
class Dual(MatrixStack):
    """(XᵀX + δI)⁻¹, stored as the rows X (L, R, d), the inverse of XXᵀ + δI, and δ (L,).

    Products run in full precision, because the result along the rows is a small difference of large numbers.
    """

    rows: Tensor
    kernel: Primal
    shift: Tensor
    kind: ClassVar[str] = "dual"

    @property
    def size(self) -> int:
        return self.rows.shape[2]

    def solve(self, v: Tensor, overwrite: bool = False) -> Tensor:
        """(XᵀX + δI)⁻¹ V for V of shape (L, d, k); in the memory of V with ``overwrite``."""
        found = v if overwrite else v.clone()
        with full_precision():
            along = self.kernel.solve(product(self.rows, found), overwrite=True)
            return subtract_product(found, self.rows.mT, along).div_(self.shift[:, None, None])

    def times(self, v: Tensor) -> Tensor:
        """(XᵀX + δI) V."""
        return self.rows.mT @ (self.rows @ v) + self.shift[:, None, None] * v

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "shift": self.shift, **self.kernel.state_dict()}


FactorInverse = Primal | Dual | HalfInverse


@dataclass
class System:
    """The factorisation of a stack: of M + δI, or of XXᵀ + δI if the factors are given as ``rows``."""

    factorization: Factorization
    shift: Tensor
    rows: list[LowRank]

    def inverse(self) -> FactorInverse:
        """The inverse for solves in float32."""
        primal = Primal(self.factorization)
        return Dual(torch.cat([x.wide for x in self.rows]), primal, self.shift) if self.rows else primal

    def half_inverse(self) -> FactorInverse:
        """The inverse for solves in float16."""
        assert isinstance(self.factorization, Halves)
        if not self.rows:
            return HalfPrimal.of(self.factorization, self.shift)
        rows, share = torch.cat([x.rows for x in self.rows]), self.rows[0].share
        if not self.rows[0].in_half:
            return HalfDual.of(rows, self.factorization, self.shift)
        if isinstance(share, float) and all(isinstance(x.share, float) and x.share == share for x in self.rows):
            shares = torch.full_like(self.shift, share)  # one launch
        else:
            shares = torch.cat([self.shift.new_ones(len(x.rows)) * x.share for x in self.rows])
        return HalfRows.of(rows, shares, self.factorization, self.shift)

    @property
    def suits_half(self) -> bool:
        """Whether solves in float16 are possible and pay off: a large system, factorised by halves."""
        if not isinstance(self.factorization, Halves):
            return False
        if self.rows:
            return self.rows[0].rows.shape[1] >= MIN_ROWS and self.rows[0].rows.shape[2] >= MIN_SIZE
        return self.factorization.size >= MIN_SIZE


def inverses_of(a: System, b: System, half: bool) -> tuple[FactorInverse, FactorInverse]:
    """The inverses of A and B; for solves in float16 if ``half`` allows it and both are suited."""
    if half and a.suits_half and b.suits_half:
        return a.half_inverse(), b.half_inverse()
    return a.inverse(), b.inverse()


def load_factor_inverse(state: dict[str, Any]) -> FactorInverse:
    """The inverse whose :meth:`state_dict` this is."""
    if "system" not in state:
        return load_half_inverse(state)
    primal = Primal(load_factorization(state["system"]))
    return Dual(state["rows"], primal, state["shift"]) if "rows" in state else primal


@dataclass(frozen=True)
class ShapeClass:
    """Blocks of one shape, their groups stacked one after the other, and the inverses of both stacks of factors."""

    names: tuple[str, ...]
    groups: tuple[int, ...]
    a: FactorInverse
    b: FactorInverse

    def solve(self, v: Matrices, overwrite: bool = False) -> Sequence[Tensor]:
        """(B + δ_B I)⁻¹ V (A + δ_A I)⁻¹ for every block; with ``overwrite`` the memory of V may be used.

        V is padded like the systems, so that its rows are aligned.
        """
        parts = [v[name] for name in self.names]
        if isinstance(self.a, HalfInverse) and isinstance(self.b, HalfInverse):
            return solve_both_sides(self.b, self.a, parts, overwrite)
        rows, columns = parts[0].shape[1:]
        if (rows, columns) == (self.b.size, self.a.size):
            stacked = torch.cat(parts)
        else:
            stacked = parts[0].new_zeros(sum(self.groups), self.b.size, self.a.size)
            torch._foreach_copy_(stacked[:, :rows, :columns].split(self.groups), parts)
        half = self.b.solve(stacked, overwrite=True)
        return self.a.solve(half.mT, overwrite=True).mT[:, :rows, :columns].split(self.groups)

    def matvec(self, v: Matrices) -> Sequence[Tensor]:
        """(B + δ_B I) V (A + δ_A I)."""
        stacked = torch.cat([v[name] for name in self.names])
        return self.a.times(self.b.times(stacked).mT).mT.split(self.groups)

    def parts(self) -> dict[str, ShapeClass]:
        """Each block by itself."""
        found, end = {}, 0
        for name, count in zip(self.names, self.groups, strict=True):
            begin, end = end, end + count
            found[name] = ShapeClass((name,), (count,), self.a.part(begin, end), self.b.part(begin, end))
        return found

    def state_dict(self) -> dict[str, Any]:
        sides = {"a": self.a.state_dict(), "b": self.b.state_dict()}
        return {"names": list(self.names), "groups": list(self.groups), **sides}


@dataclass(frozen=True)
class FactoredInverses:
    """(B + δ_B I)⁻¹ ⊗ (A + δ_A I)⁻¹ of all blocks; those of one shape are solved together."""

    classes: tuple[ShapeClass, ...]

    vectorizes: ClassVar[bool] = False
    """Whether ``torch.func.vmap`` takes :meth:`solve`."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for c in self.classes for name in c.names)

    def solve(self, v: Matrices, overwrite: bool = False) -> Matrices:
        """(B + δ_B I)⁻¹ V (A + δ_A I)⁻¹ for every block; with ``overwrite`` the memory of V may be used."""
        return self._apart(c.solve(v, overwrite) for c in self.classes)

    def matvec(self, v: Matrices) -> Matrices:
        """(B + δ_B I) V (A + δ_A I) for every block."""
        return self._apart(c.matvec(v) for c in self.classes)

    def _apart(self, found: Iterable[Sequence[Tensor]]) -> Matrices:
        """The matrix of every block by its name, from those of each shape."""
        pairs = zip(self.classes, found, strict=True)
        return {name: x for c, matrices in pairs for name, x in zip(c.names, matrices, strict=True)}

    def only(self, names: Collection[str]) -> FactoredInverses:
        """Those of some of the blocks; the others of a class stay stacked."""
        parts = ({"": c} if set(c.names) <= set(names) else c.parts() for c in self.classes)
        return FactoredInverses(tuple(c for one in parts for c in one.values() if set(c.names) <= set(names)))

    def strategies(self) -> str:
        """How many factors are inverted as matrices and how many through their rows, such as ``"3 primal, 1 dual"``."""
        counts: dict[str, int] = {}
        for c in self.classes:
            for side in (c.a, c.b):
                counts[side.kind] = counts.get(side.kind, 0) + len(c.names)
        return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items(), reverse=True))

    def state_dict(self) -> dict[str, Any]:
        classes = {str(i): c.state_dict() for i, c in enumerate(self.classes)}
        return {"kind": "factored", "classes": classes}


def load_factored(state: dict[str, Any]) -> FactoredInverses:
    """The inverses whose :meth:`FactoredInverses.state_dict` this is."""
    return FactoredInverses(
        tuple(
            ShapeClass(tuple(c["names"]), tuple(c["groups"]), load_factor_inverse(c["a"]), load_factor_inverse(c["b"]))
            for c in state["classes"].values()
        )
    )
