"""Damped inverses in float16, for solves on the tensor cores of a GPU.

Where TF32 is allowed, a solve can run in float16: it has as many bits as TF32, is twice as fast and needs half the
memory. But its range is small. So inverses are stored as contractions (matrices of norm at most one): numbers that are
scaled into the range once stay in it.

    δ (M + δI)⁻¹   = Tᵀ T ,        T = √δ L⁻¹ ,   L Lᵀ = M + δI        (:class:`HalfPrimal`)
    δ (XᵀX + δI)⁻¹ = I − Wᵀ W ,    W = L⁻¹ X ,    L Lᵀ = XXᵀ + δI      (:class:`HalfDual`)
                   = I − Xᵀ Tᵀ T X / δ ,    T = √δ L⁻¹                (:class:`HalfRows`)

The right-hand side V is rounded once, with the same effect as rounding b. How many bits the stored matrices need:

- Tᵀ T contains no difference, so one float16 number for each entry of T is enough.
- I − WᵀW is a difference that is small along the rows, so W and W V are stored as sums of two float16 numbers.
- Rows X that the model has in half precision fit into one number. They are applied instead of W, which is not computed;
  T and the vectors it is applied to are then the sums of two numbers.

The error in ⟨g, V a⟩ is then smaller than the error of rounding the result to bfloat16, as models in bfloat16 do.

The largest entry of M, or of XXᵀ, may be 4e9 times δ. Beyond that numbers leave the range of float16 and the result is
not finite; the hypergradient's check of its result reports this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperkron.kernels.linalg import Halves, MatrixStack
from hyperkron.kernels.split_products import (
    PIECE,
    add_half_product,
    float32_sums,
    full_precision,
    half_product,
    put_half_product,
)

MAX_NORM = 2.0**15
"""The largest norm of a float16 matrix that contractions are applied to."""
UNIT = 2.0**12
"""Contractions are stored multiplied by this number, so that small entries keep all their bits."""
STRIPES, NARROWEST = 4, 512
"""A triangle is multiplied in this many stripes, which skip most of its zeros, each at least this wide."""
NORM, GAIN = 10, 2.0**4
"""Rows are scaled to a norm of at most 2 to the power NORM, the vectors that they are applied to last by 1/GAIN."""
MIN_ROWS = 64
"""Fewer rows than this are multiplied in float32, which costs little."""


@dataclass(frozen=True)
class HalfInverse(MatrixStack, ABC):
    """(M + δI)⁻¹ of a stack of L factors."""

    shift: Tensor
    kind: ClassVar[str]

    @property
    @abstractmethod
    def size(self) -> int:
        """n, the size of the stored matrices; M may be smaller and is then padded with zeros."""

    @abstractmethod
    def contract(self, v: Tensor) -> None:
        """Replace V (L, n, k), in float16, by δ (M + δI)⁻¹ V."""

    @abstractmethod
    def times(self, v: Tensor) -> Tensor:
        """(M + δI) V for V in float32."""

    def solve(self, v: Tensor, overwrite: bool = False) -> Tensor:
        """(M + δI)⁻¹ V for V of shape (L, d, k) in float32."""
        unit = _units(list(v))[:, None, None]
        half = F.pad((v / unit).half(), (0, 0, 0, self.size - v.shape[1]))
        self.contract(half)
        return half[:, : v.shape[1]] * (unit / self.shift[:, None, None])


@dataclass(frozen=True)
class HalfPrimal(HalfInverse):
    """Stored as T (L, n, n), of which only the lower triangle is read."""

    triangle: Tensor
    kind: ClassVar[str] = "primal"

    @classmethod
    def of(cls, system: Halves, shift: Tensor) -> HalfPrimal:
        """From the factorisation of M + δI."""
        found = torch.empty(len(shift), system.size, system.size, device=shift.device, dtype=torch.float16)
        with float32_sums():
            system.put_half_inverse(found, shift.sqrt()[:, None, None], UNIT)
        return cls(shift, found)

    @property
    def size(self) -> int:
        return self.triangle.shape[-1]

    def contract(self, v: Tensor) -> None:
        n, t, half = self.size, self.triangle, torch.empty_like(v)
        with float32_sums():
            for begin, end in _stripes(n):
                put_half_product(half[:, begin:end], t[:, begin:end, :end], v[:, :end], 1 / UNIT)
            for begin, end in _stripes(n):
                put_half_product(v[:, begin:end], t[:, begin:, begin:end].mT, half[:, begin:], 1 / UNIT)

    def times(self, v: Tensor) -> Tensor:
        t = self.triangle.float() / UNIT
        longer = F.pad(v, (0, 0, 0, self.size - v.shape[1]))
        half = torch.linalg.solve_triangular(t.mT, longer * self.shift[:, None, None], upper=True)
        return torch.linalg.solve_triangular(t, half, upper=False)[:, : v.shape[1]]


@dataclass(frozen=True)
class HalfDual(HalfInverse):
    """Stored as W (R rows), as two float16 matrices W₁ and W₂ one below the other: (L, 2R, n)."""

    pair: Tensor
    kind: ClassVar[str] = "dual"

    @classmethod
    def of(cls, rows: Tensor, system: Halves, shift: Tensor) -> HalfDual:
        """From the rows X (L, R, n) and the factorisation of XXᵀ + δI, which may be padded beyond R."""
        count, r, n = rows.shape
        found = torch.empty(count, 2 * r, n, device=rows.device, dtype=torch.float16)
        for some in _chunks(count, r * n):
            given = F.pad(rows[some], (0, 0, 0, system.size - r)) if system.size > r else rows[some]
            made = system.part(some.start, some.stop).contraction(given, UNIT)[:, :r]
            found[some, :r] = made
            torch.sub(made, found[some, :r], out=found[some, r:])
        return cls(shift, found)

    @property
    def size(self) -> int:
        return self.pair.shape[-1]

    def contract(self, v: Tensor) -> None:
        r = self.pair.shape[1] // 2
        with float32_sums():
            both = half_product(self.pair, v)
            along = both[:, :r].add_(both[:, r:]).mul_(1 / UNIT)
            high = along.half()
            low = along.sub_(high).half()
            put_half_product(v, self.pair.mT, torch.cat([high, high], 1), -1 / UNIT, beta=1.0)
            put_half_product(v, self.pair[:, :r].mT, low, -1 / UNIT, beta=1.0)

    def times(self, v: Tensor) -> Tensor:
        high, low = self.pair.double().chunk(2, 1)
        w, wide = (high + low) / UNIT, v.double()
        rest = torch.eye(w.shape[1], dtype=w.dtype, device=w.device) - w @ w.mT
        found = wide + w.mT @ torch.linalg.solve(rest, w @ wide)
        return (found * self.shift[:, None, None]).to(v.dtype)


@dataclass(frozen=True)
class HalfRows(HalfInverse):
    """Stored as rows p X (L, R, n) with p a power of two, T as two float16 matrices (L, R, R), and a gain (L,)."""

    rows: Tensor
    high: Tensor
    low: Tensor
    gain: Tensor
    kind: ClassVar[str] = "dual"

    @classmethod
    def of(cls, rows: Tensor, shares: Tensor, system: Halves, shift: Tensor) -> HalfRows:
        """Of c XᵀX + δI, from X in half precision, c (L,) and the factorisation of c XXᵀ + δI."""
        count, r, _ = rows.shape
        norm = torch.linalg.vector_norm(rows, 2, (1, 2), dtype=torch.float32)
        p = torch.ldexp(torch.ones_like(norm), NORM - torch.frexp(norm)[1])
        high, low = (torch.empty(count, r, r, device=rows.device, dtype=torch.float16) for _ in range(2))
        for some in _chunks(count, system.size**2 // 2):  # many small launches
            with full_precision():
                made = system.part(some.start, some.stop).inverse_triangle(UNIT * shift[some, None, None].sqrt())
            high[some] = made[:, :r, :r]
            torch.sub(made[:, :r, :r], high[some], out=low[some])
        scaled = torch.mul(rows, p[:, None, None], out=torch.empty_like(rows, dtype=torch.float16))
        gain = shares.double() / shift / p / p * (2.0**NORM / GAIN)
        return cls(shift, scaled, high, low, gain.float())

    @property
    def size(self) -> int:
        return self.rows.shape[-1]

    def contract(self, v: Tensor) -> None:
        y = half_product(self.rows, v).mul_(2.0**-NORM)  # its norm is at most that of v
        y = self._times_triangle(self._times_triangle(y, False), True).mul_(self.gain[:, None, None])
        high = y.half()
        low = y.sub_(high).half()
        with float32_sums():
            put_half_product(v, self.rows.mT, high, -GAIN, beta=1.0)
            put_half_product(v, self.rows.mT, low, -GAIN, beta=1.0)

    def _times_triangle(self, y: Tensor, transposed: bool) -> Tensor:
        """T Y or Tᵀ Y; overwrites Y."""
        found, high = torch.empty_like(y), y.half()
        low = y.sub_(high).half()
        for begin, end in _stripes(self.high.shape[-1]):
            reads = slice(begin, None) if transposed else slice(end)
            first, second = (
                t[:, reads, begin:end].mT if transposed else t[:, begin:end, reads] for t in (self.high, self.low)
            )
            add_half_product(found[:, begin:end], first, high[:, reads], 1 / UNIT, beta=0.0)
            add_half_product(found[:, begin:end], first, low[:, reads], 1 / UNIT)
            add_half_product(found[:, begin:end], second, high[:, reads], 1 / UNIT)
        return found

    def times(self, v: Tensor) -> Tensor:
        shift, rows = self.shift[:, None, None], self.rows.float()
        return shift * (v + self.gain[:, None, None] * (GAIN / 2.0**NORM) * (rows.mT @ (rows @ v)))


def load_half_inverse(state: dict[str, Any]) -> HalfInverse:
    """The inverse whose :meth:`state_dict` this is."""
    return (HalfPrimal if "triangle" in state else HalfDual if "pair" in state else HalfRows)(**state)


def _stripes(n: int) -> list[tuple[int, int]]:
    """The stripes of a triangle."""
    step = max(NARROWEST, -(-n // (64 * STRIPES)) * 64)
    return [(begin, min(begin + step, n)) for begin in range(0, n, step)]


def _units(parts: list[Tensor]) -> Tensor:
    """What each part is divided by, so that its products with inverses stay in the range of float16."""
    norms = torch._foreach_norm(parts, dtype=torch.float64)  # squares of float32 may have no place in float32
    return torch.stack(norms).float().clamp_min(1e-30) / MAX_NORM


def solve_both_sides(b: HalfInverse, a: HalfInverse, parts: list[Tensor], overwrite: bool = False) -> list[Tensor]:
    """(B + δ_B I)⁻¹ V (A + δ_A I)⁻¹ for the stack of V that ``parts``, of shape (groups, d_out, d_in), make up.

    With ``overwrite`` the results are written to ``parts``.
    """
    groups, (rows, columns) = [len(x) for x in parts], parts[0].shape[1:]
    found = parts if overwrite else list(parts[0].new_empty(sum(groups), rows, columns).split(groups))
    units = _units(parts)
    made = torch.empty if (rows, columns) == (b.size, a.size) else torch.zeros
    begin = 0
    for some in _chunks(len(parts), max(groups) * b.size * a.size):
        end = begin + sum(groups[some])
        half = made(end - begin, b.size, a.size, device=units.device, dtype=torch.float16)
        inside = half[:, :rows, :columns].split(groups[some])
        for x, unit, place in zip(parts[some], units[some], inside, strict=True):
            torch.div(x, unit, out=place)
        b.part(begin, end).contract(half)
        a.part(begin, end).contract(half.mT)
        unit = torch.cat([u.expand(g) for u, g in zip(units[some], groups[some], strict=True)])
        scale = unit / b.shift[begin:end] / a.shift[begin:end]
        for x, times, place in zip(inside, scale[:, None, None].split(groups[some]), found[some], strict=True):
            torch.mul(x, times, out=place)
        begin = end
    return found


def _chunks(count: int, numbers: int) -> Iterator[slice]:
    """Slices of a stack of ``count`` matrices with ``numbers`` entries each."""
    step = max(1, PIECE // numbers)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))
