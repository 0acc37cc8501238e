"""Functions of tensors that are divided among processes (:mod:`hyperkron.sharding`), with derivatives of every order.

    gathered:       own rows ↦ all rows,    whose derivative sums over ranks and leaves each its rows    (fully_shard)
    taken:          x, i_r ↦ x[i_r],        whose derivative goes to the ranks that hold rows i_r    (example weights)
    squared_norms:  x ↦ ‖x‖²,               a number that every rank has    (penalties)

As in :mod:`hyperkron.collectives`, what is differentiated is J = Σ_r J_r, of which each rank has its J_r.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual

from hyperkron.collectives import Group
from hyperkron.sharding import local, own_rows, with_rows


def divided_over(group: Group, rows: Tensor, count: int) -> Tensor:
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
    """All rows of divided tensors; gradients are summed over ranks, and each gets those of its rows."""
    return list(_Gathered.apply(group, *tensors))


class _Gathered(torch.autograd.Function):
    """Own rows ↦ all rows."""

    @staticmethod
    def forward(group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(group.gather_rows(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.like = inputs[0], [x.detach() for x in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *_SummedRows.apply(ctx.group, ctx.like, *gradients))


class _SummedRows(torch.autograd.Function):
    """x_r ↦ the own rows of Σ_r x_r; what no rank has stays ``None``."""

    @staticmethod
    def forward(group: Group, like: list[Tensor], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        here = [x is not None for x in tensors]
        flags = local(like[0]).new_tensor(here).expand(group.size, -1)
        dense = [
            torch.zeros(y.shape, dtype=y.dtype, device=y.device) if x is None else x.to_dense()
            for x, y in zip(tensors, like, strict=True)
        ]
        *found, counts = group.sum_rows([*dense, flags])
        there = here if all(here) else (counts[0] > 0).tolist()
        return tuple(with_rows(x, y) if some else None for x, y, some in zip(found, like, there, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.like, ctx.here = inputs[0], inputs[1], [x is not None for x in inputs[2:]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [torch.zeros_like(y) if g is None else g for g, y in zip(gradients, ctx.like, strict=True)]
        found = _Gathered.apply(ctx.group, *given)
        return (None, None, *(g if here else None for g, here in zip(found, ctx.here, strict=True)))


def squared_norms(tensors: Sequence[Any]) -> Tensor:
    """‖x‖² of each divided tensor, by its ranks; one number of each is sent."""
    group = Group(tensors[0]._spec.mesh.get_group())
    return _AllSummed.apply(group, torch.stack([_own(x).square().sum() for x in tensors]))


def _own(x: Any) -> Tensor:
    """The own rows of a divided tensor, with its graph and its tangent (:func:`hyperkron.evaluation.sharded.dual`)."""
    rows: Tensor = _OwnRows.apply(x)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return make_dual(rows.detach(), local(x.tangent).to(rows.dtype)) if hasattr(x, "tangent") else rows


class _OwnRows(torch.autograd.Function):
    """A divided tensor ↦ its own rows."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return local(x).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.like = inputs[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _WithRows.apply(ctx.like, gradient)


class _WithRows(torch.autograd.Function):
    """Own rows ↦ the tensor divided so."""

    @staticmethod
    def forward(like: Tensor, rows: Tensor) -> Tensor:
        return with_rows(rows, like)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _OwnRows.apply(gradient)


class _AllSummed(torch.autograd.Function):
    """x_r ↦ Σ_r x_r, a number that each rank uses for its own: their gradients are summed as well."""

    @staticmethod
    def forward(group: Group, x: Tensor) -> Tensor:
        return group.sum([x])[0].clone()  # of one process it is x itself

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _AllSummed.apply(ctx.group, gradient)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Tensor:
        return ctx.group.sum([tangent])[0].clone()


def taken(group: Group, x: Tensor, index: Tensor) -> Tensor:
    """The rows ``index`` of a divided vector, whichever ranks hold them; every rank has its own ``index``.

    What is sent does not depend on the length of the vector: the numbers of rows, and a value for each of them.
    """
    flat = index.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < len(x):
        raise IndexError(f"index runs from {int(flat.min())} to {int(flat.max())} in a vector of {len(x)} rows")
    table = group.lists(flat)
    return _Taken.apply(group, table, x)[: flat.numel()].reshape(index.shape)


class _Taken(torch.autograd.Function):
    """x ↦ x at this rank's row of a table of indices."""

    @staticmethod
    def forward(group: Group, table: Tensor, x: Tensor) -> Tensor:
        values, mine = _held(group, table, x)
        found = values.new_zeros(table.shape)
        found[mine] = values[table[mine] - own_rows(len(x), group.rank, group.size).start]
        return group.sum_rows([found])[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group, ctx.table, ctx.like = inputs[0], inputs[1], inputs[2].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _Put.apply(ctx.group, ctx.table, ctx.like, gradient)


class _Put(torch.autograd.Function):
    """The transpose of :class:`_Taken`: values at all ranks' indices, added up in the rows that this rank holds."""

    @staticmethod
    def forward(group: Group, table: Tensor, like: Tensor, gradient: Tensor) -> Tensor:
        given = group.gather(gradient)
        values, mine = _held(group, table, like)
        found = torch.zeros_like(values)
        found.index_add_(0, table[mine] - own_rows(len(like), group.rank, group.size).start, given[mine].to(found))
        return with_rows(found, like)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group, ctx.table = inputs[0], inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, _Taken.apply(ctx.group, ctx.table, gradient)


def _held(group: Group, table: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The values that this rank holds, and which entries of the table are among them."""
    rows = own_rows(len(x), group.rank, group.size)
    return local(x), (table >= rows.start) & (table < rows.stop)
