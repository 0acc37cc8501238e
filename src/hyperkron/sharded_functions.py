"""Functions of sharded tensors (:mod:`hyperkron.sharding`), with derivatives of every order.

    gathered:       own rows ↦ all rows,    whose derivative sums over ranks and leaves each its rows    (fully_shard)
    taken:          x, i_r ↦ x[i_r],        whose derivative goes to the ranks that hold rows i_r    (example weights)
    squared_norms:  x ↦ ‖x‖²,               a number that every rank has    (penalties)

As in :mod:`hyperkron.collectives`, what is differentiated is J = Σ_r J_r, of which each rank has its J_r.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual

from hyperkron.collectives import Group, LinearMap
from hyperkron.sharding import local, own_rows, with_rows


def sharded_over(group: Group, rows: Tensor, count: int) -> Tensor:
    """A tensor of ``count`` rows, of which ``rows`` are those of this rank (:func:`hyperkron.sharding.own_rows`)."""
    from torch.distributed.device_mesh import DeviceMesh  # takes seconds
    from torch.distributed.tensor import DTensor, Shard

    assert group.handle is not None
    place = group.device or rows.device
    mesh = DeviceMesh.from_group(group.handle, place.type)
    shape = torch.Size((count, *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows.to(place), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def gathered(group: Group, tensors: Sequence[Tensor]) -> list[Tensor]:
    """All rows of sharded tensors; gradients are summed over ranks, and each gets those of its rows."""
    like = [x.detach() for x in tensors]
    return list(LinearMap.apply(partial(_all_rows, group, like), partial(_summed_rows, group, like), True, *tensors))


def _all_rows(group: Group, like: list[Tensor], *tensors: Tensor | None) -> list[Tensor]:
    return group.gather_rows([torch.zeros_like(y) if x is None else x for x, y in zip(tensors, like, strict=True)])


def _summed_rows(group: Group, like: list[Tensor], *tensors: Tensor | None) -> list[Tensor | None]:
    """The own rows of Σ_r x_r; what no rank has stays ``None``."""
    here = [x is not None for x in tensors]
    flags = local(like[0]).new_tensor(here).expand(group.size, -1)
    dense = [
        torch.zeros(y.shape, dtype=y.dtype, device=y.device) if x is None else x.to_dense()
        for x, y in zip(tensors, like, strict=True)
    ]
    *found, counts = group.sum_rows([*dense, flags])
    there = here if all(here) else (counts[0] > 0).tolist()
    return [with_rows(x, y) if some else None for x, y, some in zip(found, like, there, strict=True)]


def squared_norms(tensors: Sequence[Any]) -> Tensor:
    """‖x‖² of each sharded tensor, by its ranks; one number of each is sent."""
    group = Group(tensors[0]._spec.mesh.get_group())

    def summed(x: Tensor) -> list[Tensor]:  # each rank uses the number for its own: gradients are summed as well
        return [group.sum([x])[0].clone()]  # of one process it is x itself

    (found,) = LinearMap.apply(summed, summed, False, torch.stack([_own(x).square().sum() for x in tensors]))
    return found


def _own(x: Any) -> Tensor:
    """The own rows of a sharded tensor, with its graph and its tangent (:func:`hyperkron.evaluation.sharded.dual`)."""
    like = x.detach()
    (rows,) = LinearMap.apply(lambda y: [local(y).clone()], lambda g: [with_rows(g, like)], False, x)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return make_dual(rows.detach(), local(x.tangent).to(rows.dtype)) if hasattr(x, "tangent") else rows


def taken(group: Group, x: Tensor, index: Any) -> Tensor:
    """The rows ``index`` of a sharded vector, whichever ranks hold them; every rank has its own ``index``.

    What is sent does not depend on the length of the vector: the numbers of rows, and a value for each of them. An
    index that does not fit on one rank is an ``IndexError`` on all of them.
    """
    wrong, flat = IndexError("another process was given an index that does not fit"), None
    try:
        index = _numbers(index, len(x))
        flat = index.reshape(-1)
    except IndexError as error:
        wrong = error
    table, like = group.lists(flat), x.detach()
    if table is None or flat is None:
        raise wrong
    rows = own_rows(len(x), group.rank, group.size)
    mine = (table >= rows.start) & (table < rows.stop)  # of all ranks' rows, those that this rank holds

    def taken_rows(values: Tensor) -> list[Tensor]:
        found = local(values).new_zeros(table.shape)
        found[mine] = local(values)[table[mine] - rows.start]
        return [group.sum_rows([found])[0][0]]

    def put_back(gradient: Tensor) -> list[Tensor]:
        found = torch.zeros_like(local(like))
        given = group.gather(gradient)[mine]
        return [with_rows(found.index_add_(0, table[mine] - rows.start, given.to(found)), like)]

    (found,) = LinearMap.apply(taken_rows, put_back, False, x)
    return found[: flat.numel()].reshape(index.shape)


def _numbers(index: Any, count: int) -> Tensor:
    """The numbers of rows that ``index`` gives, which may be a mask over all of them."""
    if not isinstance(index, Tensor):
        raise IndexError(f"it is a {type(index).__name__}, not a tensor")
    if index.is_floating_point():
        raise IndexError(f"it is {index.dtype}")
    if index.dtype == torch.bool:
        index = torch.arange(count, device=index.device)[index]
    index = index.long()
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise IndexError(f"index runs from {int(index.min())} to {int(index.max())} in a vector of {count} rows")
    return index
