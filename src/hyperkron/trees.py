"""Arithmetic on trees of tensors.

A *tree* is a flat dictionary from parameter names to tensors, the vector type of the whole library: θ, ∂_θ J and A⁻¹b
are all trees. Every function here is out of place, uses one fused call where that pays, and is differentiable where its
arguments are. Binary functions match tensors by name, and refuse trees whose names or shapes differ. Tensors may
be sharded (:mod:`hyperkron.sharding`): products and norms are those of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hyperkron.sharding import any_sharded, is_sharded, local, over_processes, sharded_like, with_rows

Tree = dict[str, Tensor]
"""A vector made of named tensors."""

_DOT_LIMIT = 2**31 - 1  # torch.dot refuses longer vectors
_SMALL_NORM = 1e-15  # above it, squares that float32 loses do not matter
HALF_TYPES = (torch.float16, torch.bfloat16)
"""The dtypes of half precision."""


def _paired(a: Tree, b: Tree) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of ``a`` and ``b``, in the order of ``a``; ``ValueError`` where names or shapes differ."""
    if a.keys() != b.keys():
        only_a, only_b = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
        raise ValueError(
            f"the trees have different names: only in the first {only_a}, only in the second {only_b}; "
            "pass two trees over the same parameters"
        )
    left, right = list(a.values()), [b[name] for name in a]
    for name, x, y in zip(a, left, right, strict=True):
        if x.shape != y.shape:
            raise ValueError(
                f"the tensors named {name!r} have shapes {tuple(x.shape)} and {tuple(y.shape)}; "
                "pass two trees over the same parameters"
            )
    return left, right


def add(a: Tree, b: Tree, alpha: float | Tensor = 1.0) -> Tree:
    """a + alpha·b, with ``alpha`` a number or a 0-dimensional tensor (which is never copied to the host)."""
    left, right = _paired(a, b)
    if not left:
        return {}
    if isinstance(alpha, Tensor):
        return dict(zip(a, _each(torch._foreach_add, left, _times(right, alpha)), strict=True))
    return dict(zip(a, _each(lambda x, y: torch._foreach_add(x, y, alpha=alpha), left, right), strict=True))


def subtract(a: Tree, b: Tree) -> Tree:
    """a − b."""
    return add(a, b, alpha=-1.0)


def scale(a: Tree, c: float | Tensor) -> Tree:
    """c·a, with ``c`` a number or a 0-dimensional tensor (which is never copied to the host)."""
    if not a:
        return {}
    return dict(zip(a, _times(list(a.values()), c), strict=True))


def _times(tensors: list[Tensor], c: float | Tensor) -> list[Tensor]:
    if isinstance(c, Tensor) and any(x.dim() == 0 and x.dtype != c.dtype for x in tensors):
        return [(x * c).to(x.dtype) for x in tensors]  # a 0-dimensional x would take the dtype of c
    return _each(lambda x: torch._foreach_mul(x, c), tensors)


def _each(function: Callable[..., Sequence[Tensor]], *columns: list[Tensor]) -> list[Tensor]:
    """``function`` of lists of tensors; those that are sharded apart, by their rows here."""
    if not any_sharded(columns[0]):
        return list(function(*columns))
    sharded = [i for i, x in enumerate(columns[0]) if is_sharded(x)]
    found = dict.fromkeys(range(len(columns[0])), columns[0][0])
    plain = [i for i in found if i not in sharded]
    if plain:
        found.update(zip(plain, function(*([column[i] for i in plain] for column in columns)), strict=True))
    there = [[column[i] for i in sharded] for column in columns]
    if torch.is_grad_enabled() and any(x.requires_grad for column in there for x in column):
        found.update(zip(sharded, function(*there), strict=True))
    else:
        rows = function(*([local(x) for x in column] for column in there))
        found.update((i, with_rows(x, columns[0][i])) for i, x in zip(sharded, rows, strict=True))
    return list(found.values())


def dot(a: Tree, b: Tree) -> Tensor:
    """The inner product aᵀb = Σ_name Σ_i a_i·b_i, as a 0-dimensional tensor (half precision sums in float32)."""
    left, right = _paired(a, b) if a is not b else (list(a.values()),) * 2
    if not left:
        return torch.zeros((), device="cpu")
    if a is b and _normed_together(left):
        return norm(a).square()
    found = [_dot(x, y) for x, y in zip(left, right, strict=True) if not is_sharded(x)]
    if len(found) < len(left):
        pairs = [(x, y) for x, y in zip(left, right, strict=True) if is_sharded(x)]
        parts = torch.stack([_dot(local(x), local(y)) for x, y in pairs]).sum()
        found.append(over_processes(parts, pairs[0][0]))
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    if x is y and x.dtype not in HALF_TYPES and x.numel() <= _DOT_LIMIT:
        x = x.reshape(-1)
        return torch.dot(x, x)
    if x.dtype in HALF_TYPES or y.dtype in HALF_TYPES:
        x, y = x.float(), y.float()
    if x.dtype != y.dtype or x.numel() > _DOT_LIMIT:
        return (x * y).sum()
    return torch.dot(x.reshape(-1), y.reshape(-1))


def _normed_together(tensors: list[Tensor]) -> bool:
    """Whether one launch makes the norms of all tensors, in float64 at the price of float32."""
    alike = all(x.is_cuda and x.dtype not in HALF_TYPES for x in tensors)
    return bool(tensors) and alike and not any_sharded(tensors)


def norm(a: Tree) -> Tensor:
    """The Euclidean norm ‖a‖ = √(aᵀa), as a 0-dimensional tensor; also where the squares have no place in the range of
    the dtype, except for sharded tensors and half precision on a GPU."""
    tensors = list(a.values())
    if _normed_together(tensors):
        parts = torch.stack(torch._foreach_norm(tensors, dtype=torch.float64))
        return torch.linalg.vector_norm(parts).to(reduce(torch.promote_types, {x.dtype for x in tensors}))
    found = dot(a, a).sqrt()  # float32 vector_norm sums naively on the CPU: 20 times the error of torch.dot
    return _of_any_size(found, a) if found.is_cpu else found


def _of_any_size(found: Tensor, a: Tree) -> Tensor:
    """A norm that is read, and computed again from numbers of at most 1 if squares were out of range."""
    if not _SMALL_NORM < float(found) < math.inf and 0 < float(peak := largest(a)) < math.inf:
        unit = map(lambda x: x / peak, a)
        return dot(unit, unit).sqrt() * peak
    return found


def widened(a: Tree) -> Tree:
    """``a`` with tensors in half precision as float32; ``a`` itself where there are none."""
    if all(x.dtype not in HALF_TYPES for x in a.values()):
        return a
    return {name: x.float() if x.dtype in HALF_TYPES else x for name, x in a.items()}


def cast(a: Tree, like: Tree) -> Tree:
    """``a`` with the dtypes of ``like``; ``a`` itself where it has them."""
    if all(x.dtype == like[name].dtype for name, x in a.items()):
        return a
    return {name: x.to(like[name].dtype) for name, x in a.items()}


def zeros_like(a: Tree) -> Tree:
    """The zero vector with the names, shapes, dtypes and devices of ``a``."""
    return {name: torch.zeros_like(x) for name, x in a.items()}


def map(f: Callable[[Tensor], Tensor], a: Tree) -> Tree:
    """``f`` applied to every tensor."""
    return {name: f(x) for name, x in a.items()}


def stacked(parts: Sequence[Tree]) -> Tree:
    """Several trees over the same parameters as one, with a leading index for the tree."""
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def joined(parts: Iterable[Tree], count: int) -> Tree:
    """:func:`stacked` trees one after the other as one of ``count``; each is let go before the next one is made."""
    whole: Tree = {}
    start = 0
    for part in parts:
        size = len(next(iter(part.values())))
        if size == count:
            return part
        whole = whole or {name: x.new_empty(count, *x.shape[1:]) for name, x in part.items()}
        for name, x in part.items():
            whole[name][start : start + size] = x
        start += size
        del part, x
    return whole


def unstacked(a: Tree) -> Iterator[Tree]:
    """The trees of a :func:`stacked` one, as views."""
    columns = [x.unbind(0) for x in a.values()]
    return (dict(zip(a, row, strict=True)) for row in zip(*columns, strict=True))


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """``a`` if a 0-dimensional ``condition`` holds, else ``b``, by no copy to the host; the other may hold NaN."""
    left, right = _paired(a, b)

    def chosen(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        return [torch.where(condition, x, y) for x, y in zip(xs, ys, strict=True)]

    return dict(zip(a, _each(chosen, left, right), strict=True))


def filled(like: Tree, gradients: Sequence[Tensor | None]) -> Tree:
    """Gradients of ``like`` as autograd gives them, made dense and contiguous; zero where there is none."""
    return {
        name: torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g.contiguous()
        for (name, p), g in zip(like.items(), gradients, strict=True)
    }


def largest(a: Tree) -> Tensor:
    """The largest absolute entry max_i |a_i|, as a 0-dimensional tensor; not finite where any entry is NaN."""
    sharded = next((x for x in a.values() if is_sharded(x)), None)
    tensors = [x for x in (local(x) for x in a.values()) if x.numel() > 0]
    found = torch.stack(torch._foreach_norm(tensors, float("inf"))).max() if tensors else torch.zeros((), device="cpu")
    if sharded is None:
        return found
    one = found.to(sharded.device, reduce(torch.promote_types, {x.dtype for x in a.values()}))  # also without own rows
    return over_processes(one.nan_to_num(math.inf), sharded, ReduceOp.MAX)  # MAX may lose NaN


def is_finite(a: Tree) -> bool:
    """Whether no entry is NaN or infinite (one copy to the host for the whole tree).

    A CPU sums squares eight times as fast as it finds the largest entry; only where they overflow is that looked for.
    """
    plain = all(x.device.type == "cpu" and x.dtype not in HALF_TYPES and not is_sharded(x) for x in a.values())
    return (plain and bool(norm(a).isfinite())) or bool(largest(a).isfinite())


def normal_like(a: Tree, generator: torch.Generator | None) -> Tree:
    """Independent standard normal entries shaped like ``a``, from ``generator`` (``None``: torch's global one)."""
    drawn = {n: torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device) for n, x in a.items()}
    return {name: sharded_like(x, a[name]) if is_sharded(a[name]) else x for name, x in drawn.items()}
