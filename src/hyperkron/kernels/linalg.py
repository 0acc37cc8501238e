"""Many symmetric positive definite systems at once: Cholesky factorisations M = L Lᵀ, made for solves.

On a GPU, library routines treat a batch of large matrices one after the other. :func:`factorize` instead halves the
matrices until the pieces are small,

    [P  Qᵀ]   [K    ] [Kᵀ  Cᵀ]
    [Q  D ] = [C  R ] [    Rᵀ] ,     P = K Kᵀ ,   C = Q K⁻ᵀ ,   D − C Cᵀ = R Rᵀ ,

so that nearly all work is in batched matrix products: n³/2 operations, and half the memory of an explicit inverse. The
small triangles are kept inverted, and a solve is a sequence of products too. Building runs in full float32 whatever the
global setting (:mod:`~hyperkron.kernels.split_products`), for every piece feeds those below it; solves follow the
setting. No entry of L is larger than the root of the largest entry of M, so large matrices are scaled once
(:class:`Scaled`) and their pieces never.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

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

LEAF = 256
"""Matrices of this size are inverted by the library's batched Cholesky, where operations are what costs."""
LARGE_LEAF = 1152
"""The same where launches are what costs (not in a CUDA graph): at most ``FEW`` matrices of at most twice this size."""
FEW = 8

LARGEST = 7
"""Matrices are scaled so that no entry of L is larger than 2 to this power."""

WIDE = {"cpu": 128}
"""Gram matrices at least so wide are computed by blocks, by device type; on a GPU it gains nothing."""


def tf32_products(device: torch.device) -> bool:
    """Whether float32 matrix products may run in TF32 on ``device``."""
    return device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


@dataclass(frozen=True)
class Cholesky:
    """M = L Lᵀ by L itself (L, n, n), for the library's triangular solves."""

    factor: Tensor

    @property
    def size(self) -> int:
        """n."""
        return self.factor.shape[-1]

    def solve(self, v: Tensor, own: bool = False) -> Tensor:
        """M⁻¹ V for V of shape (L, n, k)."""
        half = torch.linalg.solve_triangular(self.factor.mT, v.mT, upper=True, left=False)
        return torch.linalg.solve_triangular(self.factor, half, upper=False, left=False).mT

    def times(self, v: Tensor) -> Tensor:
        """M V."""
        return self.factor @ (self.factor.mT @ v)

    def part(self, begin: int, end: int) -> Cholesky:
        """The matrices ``begin`` to ``end`` of the batch."""
        return Cholesky(self.factor[begin:end])

    def state_dict(self) -> dict[str, Any]:
        """Its tensors, by name."""
        return {"factor": self.factor}


class Halves(ABC):
    """M = L Lᵀ as something that applies L⁻¹, L⁻ᵀ, L and Lᵀ to V of shape (L, n, k).

    ``forward`` writes L⁻¹ V to ``out`` and ``backward`` L⁻ᵀ V; both use V up. So a solve goes to and fro between two
    pieces of memory, laid out as V is, and copies nothing. ``lower`` is L V and ``upper`` is Lᵀ V.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """n."""

    def solve(self, v: Tensor, own: bool = False) -> Tensor:
        """M⁻¹ V; in the memory of V where that is the caller's ``own`` to give."""
        v = v if own else v.clone()
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

    def put_inverse_triangle(self, out: Tensor, times: Tensor) -> None:
        """c L⁻¹ as matrices (L, n, n), with ``times`` the c of each, (L, 1, 1); products follow the setting."""
        leaf = self._corner()
        found = leaf.new_zeros(leaf.shape[0], self.size, self.size)
        self._put_inverse(found)
        torch.mul(found, times, out=out)

    @abstractmethod
    def put_half_inverse(self, out: Tensor, root: Tensor, unit: float) -> None:
        """u r L⁻¹ in float16, by products in float16, for the ``root`` r of the least eigenvalue of M, (L, 1, 1)."""

    def contraction(self, x: Tensor, times: float) -> Tensor:
        """c L⁻¹ X in full precision, of which no entry reaches 2¹⁵."""
        given = x * times
        found = torch.empty_like(given)
        with full_precision():
            self.forward(given, found)
        return found

    @abstractmethod
    def _corner(self) -> Tensor:
        """The first of the leaves."""

    @abstractmethod
    def _put_inverse(self, out: Tensor) -> None:
        """L⁻¹ in place of zeros."""

    def part(self, begin: int, end: int) -> Halves:
        """The matrices ``begin`` to ``end`` of the batch."""
        pieces: list[Any] = list(vars(self).values())
        return type(self)(*(x[begin:end] if isinstance(x, Tensor) else x.part(begin, end) for x in pieces))

    def state_dict(self) -> dict[str, Any]:
        """Its tensors, by name."""
        return {name: x if isinstance(x, Tensor) else x.state_dict() for name, x in vars(self).items()}


@dataclass(frozen=True)
class Leaf(Halves):
    """A small L by its inverse."""

    inverse: Tensor

    @property
    def size(self) -> int:
        return self.inverse.shape[-1]

    def forward(self, v: Tensor, out: Tensor) -> None:
        torch.bmm(self.inverse, v, out=out)  # one call; ``@`` makes six of it

    def backward(self, v: Tensor, out: Tensor) -> None:
        torch.bmm(self.inverse.mT, v, out=out)

    def _corner(self) -> Tensor:
        return self.inverse

    def _put_inverse(self, out: Tensor) -> None:
        out.copy_(self.inverse)

    def put_half_inverse(self, out: Tensor, root: Tensor, unit: float) -> None:
        # what is larger belongs to the ones that a system may be enlarged by, whose eigenvalue may be less than r²
        torch.mul(self.inverse, unit * root, out=out).clamp_(max=2 * unit)

    def lower(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.inverse, v, upper=False)

    def upper(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.inverse.mT, v, upper=True)


@dataclass(frozen=True)
class Node(Halves):
    """A large L by its diagonal halves K (``head``) and R (``tail``) and the block C below the diagonal."""

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

    def _corner(self) -> Tensor:
        return self.head._corner()

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
    """L by s L (``scaled``), which is no larger than two to the power :data:`LARGEST`, and s, a power of two, (L,)."""

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

    def solve(self, v: Tensor, own: bool = False) -> Tensor:
        return self.scaled.solve(v.mul_(self._times**2) if own else v * self._times**2, own=True)

    def lower(self, v: Tensor) -> Tensor:
        return self.scaled.lower(v) / self._times

    def upper(self, v: Tensor) -> Tensor:
        return self.scaled.upper(v) / self._times

    def put_inverse_triangle(self, out: Tensor, times: Tensor) -> None:
        self.scaled.put_inverse_triangle(out, times * self._times)

    def put_half_inverse(self, out: Tensor, root: Tensor, unit: float) -> None:
        self.scaled.put_half_inverse(out, root * self._times, unit)

    def contraction(self, x: Tensor, times: float) -> Tensor:
        given = x * (times * self._times)
        found = torch.empty_like(given)
        with full_precision(), bounded():
            self.scaled.forward(given, found)
        return found

    def _corner(self) -> Tensor:
        return self.scaled._corner()

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


def factorize(matrices: Tensor, lean: bool = False, own: bool = False) -> tuple[Factorization, Tensor]:
    """(factorisation, info) of a batch (L, n, n); ``info`` is non-zero where a matrix is not positive definite.

    Where memory counts more than launches (``lean``) leaves are small: they are squares of which a half is zero.
    Matrices that are the caller's ``own`` to give are used up.
    """
    if matrices.device.type == "cpu":
        factor, info = torch.linalg.cholesky_ex(matrices)
        return Cholesky(factor), info
    recorded = matrices.is_cuda and torch.cuda.is_current_stream_capturing()
    with full_precision():
        few_and_small = matrices.shape[0] <= FEW and matrices.shape[1] <= 2 * LARGE_LEAF
        leaf = LARGE_LEAF if few_and_small and not (recorded or lean) else LEAF
        given = matrices if own else matrices.clone()
        make = _scaled if splits(matrices.shape[1] // 2, like=matrices) else _halved
        return make(given, leaf, recorded)


def _scaled(m: Tensor, leaf: int, recorded: bool = False) -> tuple[Halves, Tensor]:
    """The factorisation of M, which is used up, with its entries in the range of float16."""
    largest = m.diagonal(dim1=1, dim2=2).amax(-1).clamp(1e-25, 1e25)
    scale = torch.ldexp(torch.ones_like(largest), LARGEST - torch.frexp(largest.sqrt())[1])
    with bounded():
        found, info = _halved(m.mul_(scale.square()[:, None, None]), leaf, recorded)
    return Scaled(found, scale), info


def _halved(m: Tensor, leaf: int, recorded: bool = False) -> tuple[Halves, Tensor]:
    """The factorisation of M, which is used up; launches cost nothing where they are ``recorded``."""
    n = m.shape[-1]
    if n <= leaf:
        factor, info = torch.linalg.cholesky_ex(m)
        return Leaf(triangles.inverse(factor, blocks=recorded)), info
    k = n // 2 if n <= 128 else (n // 2 + 63) // 64 * 64  # aligned; a lone last row, a bias, ends in the tail
    head, info_head = _halved(m[:, :k, :k], leaf, recorded)
    found = m.new_empty(m.shape[0], k, n - k)
    head.forward(m[:, :k, k:], found)
    tail, info_tail = _halved(subtract_gram(m[:, k:, k:], found), leaf, recorded)
    return Node(head, found.mT, tail), info_head + info_tail


def in_blocks(rows: Tensor) -> bool:
    """Whether :func:`gram` computes a block triangle only."""
    least = WIDE.get(rows.device.type)
    return least is not None and rows.shape[0] == 1 and rows.shape[2] >= least


def gram(rows: Tensor) -> Tensor:
    """rowsᵀ rows for rows of shape (L, R, n).

    Where operations are what it costs, a block triangle is computed and mirrored: five eighths of the operations, and
    the result is exactly symmetric.
    """
    if splits(*rows.shape[1:], like=rows):
        return gram_product(rows)
    if rows.shape[0] > 1:
        return torch.bmm(rows.mT, rows)
    x, n = rows[0], rows.shape[2]
    if not in_blocks(rows):
        return (x.mT @ x)[None]  # faster as such than as a batch of one
    found = x.new_empty(n, n)
    step = -(-n // 4)
    for begin in range(0, n, step):
        end = begin + step
        torch.mm(x[:, begin:end].mT, x[:, begin:], out=found[begin:end, begin:])
        found[end:, begin:end] = found[begin:end, end:].mT
    return found[None]
