"""Many symmetric positive definite systems at once: Cholesky factorisations M = L Lᵀ, made for solves.

On a GPU, library routines treat a batch of large matrices one after the other. :func:`factorize` instead halves the
matrices until the pieces are small,

    [P  Qᵀ]   [K    ] [Kᵀ  Cᵀ]
    [Q  D ] = [C  R ] [    Rᵀ] ,     P = K Kᵀ ,   C = Q K⁻ᵀ ,   D − C Cᵀ = R Rᵀ ,

so that nearly all work is in batched matrix products: n³/2 operations, and half the memory of an explicit inverse. The
small triangles are kept inverted, so a solve consists of products too. The factorisation always runs in full float32
(:mod:`~hyperkron.kernels.split_products`), because errors would accumulate from piece to piece; solves follow the
global TF32 setting. No entry of L is larger than the root of the largest entry of M, so a large matrix is scaled once
(:class:`Scaled`) and its pieces need no scaling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hyperkron.kernels import triangles
from hyperkron.kernels.split_products import (
    bounded,
    full_precision,
    gram_product,
    product,
    put_half_product,
    splits,
    subtract_gram,
    subtract_product,
)

S = TypeVar("S", bound="MatrixStack")

LEAF = 256
"""Matrices up to this size are factorised by the library's batched Cholesky."""
LARGE_LEAF = 1152
"""The same for at most ``FEW_MATRICES`` matrices of at most twice this size, outside CUDA graphs: fewer launches."""
FEW_MATRICES = 8

MAX_EXPONENT = 7
"""Matrices are scaled so that no entry of L is larger than 2 to this power."""

MIN_BLOCKED_WIDTH = {"cpu": 128}
"""Gram matrices of at least this width are computed by blocks, by device type; on a GPU this gains nothing."""


def tf32_products(device: torch.device) -> bool:
    """Whether float32 matrix products may run in TF32 on ``device``."""
    return device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


class MatrixStack:
    """A dataclass of tensors that have one entry for each matrix of a batch, or of other such objects."""

    def part(self: S, begin: int, end: int) -> S:
        """The matrices ``begin`` to ``end`` of the batch."""
        pieces: list[Any] = list(vars(self).values())
        return type(self)(*(x[begin:end] if isinstance(x, Tensor) else x.part(begin, end) for x in pieces))

    def state_dict(self) -> dict[str, Any]:
        """Its tensors, by name."""
        return {name: x if isinstance(x, Tensor) else x.state_dict() for name, x in vars(self).items()}


@dataclass(frozen=True)
class Cholesky(MatrixStack):
    """M = L Lᵀ by L itself (L, n, n), for the library's triangular solves."""

    factor: Tensor

    @property
    def size(self) -> int:
        """n."""
        return self.factor.shape[-1]

    def solve(self, v: Tensor, overwrite: bool = False) -> Tensor:
        """M⁻¹ V for V of shape (L, n, k)."""
        half = torch.linalg.solve_triangular(self.factor.mT, v.mT, upper=True, left=False)
        return torch.linalg.solve_triangular(self.factor, half, upper=False, left=False).mT

    def times(self, v: Tensor) -> Tensor:
        """M V."""
        return self.factor @ (self.factor.mT @ v)


class Halves(MatrixStack, ABC):
    """M = L Lᵀ as something that applies L⁻¹, L⁻ᵀ, L and Lᵀ to V of shape (L, n, k).

    ``forward`` writes L⁻¹ V to ``out`` and ``backward`` writes L⁻ᵀ V; both overwrite V. So a solve alternates between
    two buffers with the layout of V and copies nothing. ``lower`` is L V and ``upper`` is Lᵀ V.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """n."""

    def solve(self, v: Tensor, overwrite: bool = False) -> Tensor:
        """M⁻¹ V; in the memory of V with ``overwrite``."""
        v = v if overwrite else v.clone()
        half = torch.empty_like(v)
        self.forward(v, half)
        self.backward(half, v)
        return v

    def times(self, v: Tensor) -> Tensor:
        """M V."""
        return self.lower(self.upper(v))

    @abstractmethod
    def forward(self, v: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def backward(self, v: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def lower(self, v: Tensor) -> Tensor: ...

    @abstractmethod
    def upper(self, v: Tensor) -> Tensor: ...

    def inverse_triangle(self, times: Tensor) -> Tensor:
        """c L⁻¹ (L, n, n), where ``times`` (L, 1, 1) holds c; products follow the TF32 setting."""
        found = times.new_zeros(len(times), self.size, self.size)
        self._put_inverse(found)
        return found.mul_(times)

    @abstractmethod
    def put_half_inverse(self, out: Tensor, root: Tensor, unit: float) -> None:
        """Write u r L⁻¹ to ``out`` by products in float16; ``root`` (L, 1, 1) is r, r² the least eigenvalue of M."""

    def contraction(self, x: Tensor, times: float) -> Tensor:
        """c L⁻¹ X in full precision; all its entries must be below 2¹⁵."""
        given = x * times
        found = torch.empty_like(given)
        with full_precision():
            self.forward(given, found)
        return found

    @abstractmethod
    def _put_inverse(self, out: Tensor) -> None:
        """Write L⁻¹ to ``out``, which holds zeros."""


@dataclass(frozen=True)
class Leaf(Halves):
    """A small L, stored as its inverse."""

    inverse: Tensor

    @property
    def size(self) -> int:
        return self.inverse.shape[-1]

    def forward(self, v: Tensor, out: Tensor) -> None:
        torch.bmm(self.inverse, v, out=out)  # one call; ``@`` makes six

    def backward(self, v: Tensor, out: Tensor) -> None:
        torch.bmm(self.inverse.mT, v, out=out)

    def _put_inverse(self, out: Tensor) -> None:
        out.copy_(self.inverse)

    def put_half_inverse(self, out: Tensor, root: Tensor, unit: float) -> None:
        # larger entries come from the ones that pad a system, whose eigenvalue may be below r²
        torch.mul(self.inverse, unit * root, out=out).clamp_(max=2 * unit)

    def lower(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.inverse, v, upper=False)

    def upper(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.inverse.mT, v, upper=True)


@dataclass(frozen=True)
class Node(Halves):
    """A large L, stored as its diagonal blocks K (``head``) and R (``tail``) and the block C below the diagonal."""

    head: Halves
    c: Tensor
    tail: Halves

    @property
    def size(self) -> int:
        return self.c.shape[1] + self.c.shape[2]

    def forward(self, v: Tensor, out: Tensor) -> None:
        k = self.c.shape[2]
        self.head.forward(v[:, :k], out[:, :k])
        self.tail.forward(subtract_product(v[:, k:], self.c, out[:, :k]), out[:, k:])

    def backward(self, v: Tensor, out: Tensor) -> None:
        k = self.c.shape[2]
        self.tail.backward(v[:, k:], out[:, k:])
        self.head.backward(subtract_product(v[:, :k], self.c.mT, out[:, k:]), out[:, :k])

    def _put_inverse(self, out: Tensor) -> None:
        k = self.c.shape[2]
        self.head._put_inverse(out[:, :k, :k])
        self.tail._put_inverse(out[:, k:, k:])
        subtract_product(out[:, k:, :k], out[:, k:, k:], product(self.c, out[:, :k, :k]))

    def put_half_inverse(self, out: Tensor, root: Tensor, unit: float) -> None:
        k = self.c.shape[2]
        head, tail = out[:, :k, :k], out[:, k:, k:]
        self.head.put_half_inverse(head, root, unit)
        self.tail.put_half_inverse(tail, root, unit)
        out[:, :k, k:] = 0.0
        c = torch.mul(self.c, 1 / root, out=torch.empty_like(self.c, dtype=out.dtype))
        between = torch.empty_like(out[:, k:, :k], memory_format=torch.contiguous_format)
        put_half_product(between, c, head, 1 / unit)  # C (r K⁻¹) / r, whose rows are no longer than those of L / r
        put_half_product(out[:, k:, :k], tail, between, -1.0)

    def lower(self, v: Tensor) -> Tensor:
        k = self.c.shape[2]
        return torch.cat([self.head.lower(v[:, :k]), torch.baddbmm(self.tail.lower(v[:, k:]), self.c, v[:, :k])], dim=1)

    def upper(self, v: Tensor) -> Tensor:
        k = self.c.shape[2]
        top = torch.baddbmm(self.head.upper(v[:, :k]), self.c.mT, v[:, k:])
        return torch.cat([top, self.tail.upper(v[:, k:])], dim=1)


@dataclass(frozen=True)
class Scaled(Halves):
    """L, stored as s L (``scaled``), whose entries are at most 2 to the power :data:`MAX_EXPONENT`, and s (L,)."""

    scaled: Halves
    scale: Tensor

    @property
    def size(self) -> int:
        return self.scaled.size

    @property
    def _times(self) -> Tensor:
        return self.scale[:, None, None]

    def forward(self, v: Tensor, out: Tensor) -> None:
        self.scaled.forward(v.mul_(self._times), out)

    def backward(self, v: Tensor, out: Tensor) -> None:
        self.scaled.backward(v.mul_(self._times), out)

    def solve(self, v: Tensor, overwrite: bool = False) -> Tensor:
        return self.scaled.solve(v.mul_(self._times**2) if overwrite else v * self._times**2, overwrite=True)

    def lower(self, v: Tensor) -> Tensor:
        return self.scaled.lower(v) / self._times

    def upper(self, v: Tensor) -> Tensor:
        return self.scaled.upper(v) / self._times

    def put_half_inverse(self, out: Tensor, root: Tensor, unit: float) -> None:
        self.scaled.put_half_inverse(out, root * self._times, unit)

    def contraction(self, x: Tensor, times: float) -> Tensor:
        given = x * (times * self._times)
        found = torch.empty_like(given)
        with full_precision(), bounded():
            self.scaled.forward(given, found)
        return found

    def _put_inverse(self, out: Tensor) -> None:
        self.scaled._put_inverse(out)
        out.mul_(self._times)


Factorization = Cholesky | Halves


def load_factorization(state: dict[str, Any]) -> Any:
    """The factorisation whose :meth:`state_dict` this is."""
    if "factor" in state:
        return Cholesky(state["factor"])
    if "inverse" in state:
        return Leaf(state["inverse"])
    if "scale" in state:
        return Scaled(load_factorization(state["scaled"]), state["scale"])
    return Node(load_factorization(state["head"]), state["c"], load_factorization(state["tail"]))


def factorize(matrices: Tensor, lean: bool = False, overwrite: bool = False) -> tuple[Factorization, Tensor]:
    """(factorisation, info) of a batch (L, n, n); ``info`` is non-zero where a matrix is not positive definite.

    With ``lean`` leaves are small: more launches, but less memory, because half of a leaf is zeros. With ``overwrite``
    the memory of ``matrices`` is used.
    """
    if matrices.device.type == "cpu":
        factor, info = torch.linalg.cholesky_ex(matrices)
        return Cholesky(factor), info
    recorded = matrices.is_cuda and torch.cuda.is_current_stream_capturing()
    with full_precision():
        few_and_small = matrices.shape[0] <= FEW_MATRICES and matrices.shape[1] <= 2 * LARGE_LEAF
        leaf = LARGE_LEAF if few_and_small and not (recorded or lean) else LEAF
        given = matrices if overwrite else matrices.clone()
        make = _scaled if splits(matrices.shape[1] // 2, like=matrices) else _halved
        return make(given, leaf, recorded)


def _scaled(m: Tensor, leaf: int, recorded: bool = False) -> tuple[Halves, Tensor]:
    """The factorisation of M with its entries in the range of float16; overwrites M."""
    largest = m.diagonal(dim1=1, dim2=2).amax(-1).clamp(1e-25, 1e25)
    scale = torch.ldexp(torch.ones_like(largest), MAX_EXPONENT - torch.frexp(largest.sqrt())[1])
    with bounded():
        found, info = _halved(m.mul_(scale.square()[:, None, None]), leaf, recorded)
    return Scaled(found, scale), info


def _halved(m: Tensor, leaf: int, recorded: bool = False) -> tuple[Halves, Tensor]:
    """The factorisation of M; overwrites M. If it is ``recorded``, more and smaller launches are used."""
    n = m.shape[-1]
    if n <= leaf:
        factor, info = torch.linalg.cholesky_ex(m)
        return Leaf(triangles.inverse(factor, blocks=recorded)), info
    k = n // 2 if n <= 128 else (n // 2 + 63) // 64 * 64  # aligned; an extra row for the bias goes into the tail
    head, info_head = _halved(m[:, :k, :k], leaf, recorded)
    found = m.new_empty(m.shape[0], k, n - k)
    head.forward(m[:, :k, k:], found)
    tail, info_tail = _halved(subtract_gram(m[:, k:, k:], found), leaf, recorded)
    return Node(head, found.mT, tail), info_head + info_tail


def in_blocks(rows: Tensor) -> bool:
    """Whether :func:`gram` computes a block triangle only."""
    least = MIN_BLOCKED_WIDTH.get(rows.device.type)
    return least is not None and rows.shape[0] == 1 and rows.shape[2] >= least


def gram(rows: Tensor) -> Tensor:
    """rowsᵀ rows for rows of shape (L, R, n).

    For wide matrices on a CPU, a block triangle is computed and mirrored: five eighths of the operations, and the
    result is exactly symmetric.
    """
    if splits(*rows.shape[1:], like=rows):
        return gram_product(rows)
    if rows.shape[0] > 1:
        return torch.bmm(rows.mT, rows)
    x, n = rows[0], rows.shape[2]
    if not in_blocks(rows):
        return (x.mT @ x)[None]  # faster than a batch of one
    found = x.new_empty(n, n)
    step = -(-n // 4)
    for begin in range(0, n, step):
        end = begin + step
        torch.mm(x[:, begin:end].mT, x[:, begin:], out=found[begin:end, begin:])
        found[end:, begin:end] = found[begin:end, end:].mT
    return found[None]
