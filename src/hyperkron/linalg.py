"""Many symmetric positive definite systems at once, factorised for solves.

On a GPU, library routines treat a batch of large matrices one after the other. :func:`factorize` instead halves the
matrices until the pieces are small and eliminates one half with batched matrix products,

    [P  Qᵀ]   [I   ] [P   ] [I  Wᵀ]
    [Q  D ] = [W  I] [   S] [   I ] ,     W = Q P⁻¹ ,   S = D − W Qᵀ ,

the same again for P and S: 2/3·n³ operations, half those of an explicit inverse, and half its memory, while a solve
costs no more than a product with the inverse would. Building runs in full float32 whatever the global setting, for W
and S feed everything below them; solves follow the setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEAF = 256
"""Matrices of this size are inverted by the library's batched Cholesky, where operations are what costs."""
LARGE_LEAF = 1152
"""The same where launches are what costs: for at most ``FEW`` matrices of at most twice this size."""
FEW = 8


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products and convolutions in true float32, restoring the global settings afterwards."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        if products != "highest":
            torch.set_float32_matmul_precision("highest")
        if convolutions:
            torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        if products != "highest":
            torch.set_float32_matmul_precision(products)
        if convolutions:
            torch.backends.cudnn.allow_tf32 = True


@dataclass(frozen=True)
class Leaf:
    """Explicit inverses (L, n, n)."""

    inverse: Tensor

    def solve(self, v: Tensor) -> Tensor:
        """M⁻¹ V for V of shape (L, n, k)."""
        return self.inverse @ v

    def times(self, v: Tensor) -> Tensor:
        """M V."""
        return torch.linalg.solve(self.inverse, v)

    def part(self, begin: int, end: int) -> Leaf:
        """The matrices ``begin`` to ``end`` of the batch."""
        return Leaf(self.inverse[begin:end])

    def state_dict(self) -> dict[str, Any]:
        """Its tensors, by name."""
        return {"inverse": self.inverse}


@dataclass(frozen=True)
class Node:
    """The elimination of one half: factorisations of P (``head``) and S (``tail``), and W."""

    head: Factorization
    w: Tensor
    tail: Factorization

    def solve(self, v: Tensor) -> Tensor:
        """M⁻¹ V for V of shape (L, n, k)."""
        k = self.w.shape[2]
        first = v[:, :k]
        second = self.tail.solve(torch.baddbmm(v[:, k:], self.w, first, alpha=-1))
        return torch.cat([torch.baddbmm(self.head.solve(first), self.w.mT, second, alpha=-1), second], dim=1)

    def times(self, v: Tensor) -> Tensor:
        """M V."""
        k = self.w.shape[2]
        first = self.head.times(torch.baddbmm(v[:, :k], self.w.mT, v[:, k:]))
        return torch.cat([first, torch.baddbmm(self.tail.times(v[:, k:]), self.w, first)], dim=1)

    def part(self, begin: int, end: int) -> Node:
        """The matrices ``begin`` to ``end`` of the batch."""
        return Node(self.head.part(begin, end), self.w[begin:end], self.tail.part(begin, end))

    def state_dict(self) -> dict[str, Any]:
        """Its tensors, by name."""
        return {"head": self.head.state_dict(), "w": self.w, "tail": self.tail.state_dict()}


Factorization = Leaf | Node


def load_factorization(state: dict[str, Any]) -> Factorization:
    """The factorisation whose :meth:`state_dict` this is."""
    if "inverse" in state:
        return Leaf(state["inverse"])
    return Node(load_factorization(state["head"]), state["w"], load_factorization(state["tail"]))


def factorize(matrices: Tensor) -> tuple[Factorization, Tensor]:
    """(factorisation, info) of a batch (L, n, n); ``info`` is non-zero where a matrix is not positive definite."""
    with full_precision():
        if matrices.device.type == "cpu":
            return _leaf(matrices)
        few_and_small = matrices.shape[0] <= FEW and matrices.shape[1] <= 2 * LARGE_LEAF
        return _halved(matrices, LARGE_LEAF if few_and_small else LEAF)


def _halved(m: Tensor, leaf: int) -> tuple[Factorization, Tensor]:
    n = m.shape[-1]
    if n <= leaf:
        return _leaf(m)
    k = (n // 2 + 63) // 64 * 64  # aligned products; a lone last row, such as that of a bias, ends in the tail
    head, info_head = _halved(m[:, :k, :k], leaf)
    q = m[:, k:, :k]
    w = head.solve(q.mT).mT
    tail, info_tail = _halved(torch.baddbmm(m[:, k:, k:], w, q.mT, alpha=-1), leaf)
    return Node(head, w, tail), info_head + info_tail


def _leaf(m: Tensor) -> tuple[Leaf, Tensor]:
    factor, info = torch.linalg.cholesky_ex(m)
    if m.device.type == "cpu":
        if bool(info.any()):  # cholesky_inverse raises for the whole batch at a pivot of zero
            factor[info != 0] = torch.eye(m.shape[-1], dtype=m.dtype)
        return Leaf(torch.cholesky_inverse(factor)), info
    eye = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device).expand_as(m)
    root = torch.linalg.solve_triangular(factor, eye, upper=False)
    return Leaf(root.mT @ root), info
