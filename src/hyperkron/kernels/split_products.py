"""Products of float32 matrices on the tensor cores of a GPU, with nearly full float32 precision.

Tensor cores multiply float16 numbers of 11 bits and add in float32. A float32 number x, scaled into the range of
float16, is x₁ + x₂ to 22 bits, and

    x y  =  x₁ y₁ + x₁ y₂ + x₂ y₁  +  O(2⁻²²) ,

three products that together take a fraction of the time of one float32 product. They are used inside
:func:`full_precision` if TF32 is allowed elsewhere (``torch.set_float32_matmul_precision("high")``). Scaling takes more
time than the products. Inside :func:`bounded` it is skipped, because all numbers are already in range.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MIN_SIZE = 256
"""Smaller matrices are multiplied in float32: splitting them takes longer than it saves."""
PIECE = 2**27
"""At most this many numbers are split at a time, to save memory."""
MAX_EXPONENT = 14
"""The largest number is scaled to less than 2 to this power; numbers above 2⁻²⁸ of it keep their bits."""

_split_allowed = [False]
"""Whether products in full precision may be split, because TF32 is allowed elsewhere."""
_bounded = [False]
"""Whether all numbers are in the range of float16 as they are."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products and convolutions in true float32, restoring the global settings afterwards.

    :func:`product`, :func:`subtract_product` and :func:`gram_product` may split theirs, if TF32 was allowed.
    """
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    before = _split_allowed[0]
    try:
        if products != "highest":
            torch.set_float32_matmul_precision("highest")
            _split_allowed[0] = True
        if convolutions:
            torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        _split_allowed[0] = before
        if products != "highest":
            torch.set_float32_matmul_precision(products)
        if convolutions:
            torch.backends.cudnn.allow_tf32 = True


@contextmanager
def bounded() -> Iterator[None]:
    """Inside the block, products are split without scaling: numbers are below 2¹⁵; those below 2⁻¹² do not matter."""
    before = _bounded[0]
    try:
        _bounded[0] = True
        yield
    finally:
        _bounded[0] = before


def splits(*sizes: int, like: Tensor) -> bool:
    """Whether a product of matrices of these sizes is split."""
    return like.is_cuda and like.dtype == torch.float32 and _split_allowed[0] and min(sizes) >= MIN_SIZE


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b for a of shape (L, n, k) and b of shape (L, k, m)."""
    if not splits(*a.shape[1:], b.shape[2], like=a):
        return torch.bmm(a, b)
    found = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for some in _chunks(a, b):
        found[some] = _split_product(a[some], b[some])
    return found


def subtract_product(v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """v − a b, in the memory of v."""
    if not splits(*a.shape[1:], b.shape[2], like=a):
        return v.baddbmm_(a, b, alpha=-1)
    for some in _chunks(a, b):
        if _bounded[0]:
            add_half_product(v[some], _thrice(a[some], -1, 2), _thrice(b[some], -2, 1), alpha=-1.0)
        else:
            v[some].sub_(_split_product(a[some], b[some]))
    return v


def subtract_gram(v: Tensor, x: Tensor) -> Tensor:
    """v − xᵀ x, in the memory of v."""
    if not (_bounded[0] and splits(*x.shape[1:], like=x)):
        return subtract_product(v, x.mT, x)
    k = x.shape[1]
    for some in _chunks(x):
        pieces = torch.empty(*x[some].shape[:1], 4 * k, x.shape[2], dtype=torch.float16, device=x.device)
        high, again, low, last = pieces.split(k, 1)  # the first three times the last three
        high.copy_(x[some])
        again.copy_(high)
        last.copy_(high)
        torch.sub(x[some], high, out=low)
        add_half_product(v[some], pieces[:, : 3 * k].mT, pieces[:, k:], alpha=-1.0)
    return v


def gram_product(rows: Tensor) -> Tensor:
    """rowsᵀ rows for rows of shape (L, R, n) by two split products: x₁ᵀ x₂ and x₂ᵀ x₁ are transposes of each other."""
    found = rows.new_empty(rows.shape[0], rows.shape[2], rows.shape[2])
    for some in _chunks(rows):
        scaled, unit = _in_range(rows[some])
        high = scaled.half()
        low = torch.sub(scaled, high, out=torch.empty_like(high))
        mixed = half_product(high.mT, low)
        torch.add(half_product(high.mT, high), mixed, out=found[some])
        found[some].add_(mixed.mT).mul_(unit.square())
    return found


def _chunks(*matrices: Tensor) -> Iterator[slice]:
    """Slices of the batch that fit into :data:`PIECE`."""
    step = max(1, PIECE // max(m.shape[1:].numel() for m in matrices))
    for begin in range(0, len(matrices[0]), step):
        yield slice(begin, begin + step)


def _split_product(a: Tensor, b: Tensor) -> Tensor:
    """The three products as one, of matrices side by side: [a₁ a₁ a₂] [b₁; b₂; b₁]."""
    (a, a_unit), (b, b_unit) = _in_range(a), _in_range(b)
    return half_product(_thrice(a, -1, 2), _thrice(b, -2, 1)).mul_(a_unit * b_unit)


def _thrice(x: Tensor, dim: int, low: int) -> Tensor:
    """[x₁ x₁ x₂] (``low`` 2) or [x₁ x₂ x₁] (1), side by side (dim −1) or one below the other (−2), in x's layout."""
    if x.stride(-1) > x.stride(-2):
        return _thrice(x.mT, -3 - dim, low).mT
    shape = list(x.shape)
    shape[dim] *= 3
    found = torch.empty(shape, dtype=torch.float16, device=x.device)
    parts = found.split(x.shape[dim], dim)
    parts[0].copy_(x)
    parts[3 - low].copy_(parts[0])
    torch.sub(x, parts[0], out=parts[low])
    return found


def add_half_product(v: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float = 1.0) -> None:
    """v ← β v + α a b for float16 a and b and float32 v."""
    if v.is_cuda:
        torch.baddbmm(v, a, b, alpha=alpha, beta=beta, out_dtype=torch.float32, out=v)
    else:
        v.baddbmm_(a.float(), b.float(), alpha=alpha, beta=beta)


def _in_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / c, which is in the range of float16, and c, a power of two for each matrix."""
    exponent = torch.frexp(torch.linalg.vector_norm(x, float("inf"), (1, 2), keepdim=True))[1] - MAX_EXPONENT
    unit = torch.ldexp(torch.ones_like(exponent, dtype=x.dtype), exponent)
    return x / unit, unit


def half_product(a: Tensor, b: Tensor) -> Tensor:
    """a b of float16 matrices, summed in float32."""
    if not a.is_cuda:
        return torch.bmm(a.float(), b.float())
    if len(a) == 1:
        return torch.mm(a[0], b[0], out_dtype=torch.float32)[None]
    found: Tensor = torch.bmm(a, b, out_dtype=torch.float32)
    return found


@contextmanager
def float32_sums() -> Iterator[None]:
    """Inside the block, products of float16 matrices are summed in float32."""
    settings: Any = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction
    parts = getattr(settings, "allow_fp16_reduced_precision_reduction_split_k", None)  # a second setting, in torch 2.10
    try:
        settings.allow_fp16_reduced_precision_reduction = False
        yield
    finally:
        settings.allow_fp16_reduced_precision_reduction = before if parts is None else (before, parts)


def put_half_product(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float = 0.0) -> None:
    """out ← β out + α a b in float16, rounded once."""
    if out.is_cuda:
        out.baddbmm_(a, b, beta=beta, alpha=alpha)
    else:
        found = torch.bmm(a.float(), b.float()) * alpha
        out.copy_(found + beta * out if beta else found)
