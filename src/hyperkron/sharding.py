"""Sharded tensors: their rows are spread over processes, as by ``fully_shard`` and ``SampleWeights(…, group=…)``.

Such a tensor is a ``DTensor`` placed as ``Shard(0)``: process r of R holds rows r·c to (r + 1)·c, c = ⌈n/R⌉.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


def is_sharded(x: Any) -> bool:
    """Whether ``x`` is sharded.

    Example:
        >>> import torch
        >>> is_sharded(torch.ones(2))
        False
    """
    if type(x) is Tensor or type(x) is Parameter:  # nearly all, in a fifth of the time
        return False
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes seconds
    return module is not None and isinstance(x, module.DTensor)


def any_sharded(xs: Collection[Any]) -> bool:
    """Whether any of ``xs`` is sharded."""
    return not {Tensor, Parameter}.issuperset(map(type, xs)) and any(map(is_sharded, xs))


def local(x: Any) -> Tensor:
    """The rows of this process, detached; all of ``x`` where it is not sharded."""
    own: Tensor = x._local_tensor if is_sharded(x) else x
    return own.detach()


def with_rows(rows: Tensor, like: Any) -> Tensor:
    """A tensor sharded as ``like`` is, of which ``rows`` are those of this process."""
    spec, kind = like._spec, sys.modules["torch.distributed.tensor"].DTensor
    if rows.dtype != spec.tensor_meta.dtype:
        meta = spec.tensor_meta._replace(dtype=rows.dtype)
        spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    made: Tensor = kind(rows.detach().contiguous(), spec, requires_grad=False)
    return made


def own_rows(count: int, rank: int, size: int) -> slice:
    """Which of ``count`` rows process ``rank`` of ``size`` holds.

    Example:
        >>> [own_rows(5, rank, 4) for rank in range(4)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 5, None)]
    """
    each = -(-count // size)
    return slice(min(count, rank * each), min(count, (rank + 1) * each))


def place_of(x: Any) -> slice:
    """The rows of a sharded ``x`` that this process holds."""
    mesh = x._spec.mesh
    return own_rows(x.shape[0] if x.dim() else 1, mesh.get_local_rank(), mesh.size())


def over_processes(number: Tensor, like: Any, how: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or other reduction) of a number over the processes that hold ``like``."""
    number = number.detach().clone()
    dist.all_reduce(number, how, group=like._spec.mesh.get_group())
    return number


def sharded_like(x: Tensor, like: Any) -> Tensor:
    """A whole tensor, the same on every process, sharded as ``like`` is."""
    return with_rows(x.detach()[place_of(like)], like)
