"""The ranks of a data-parallel run: sums, gathers and shared work, and tensors that all of them hold alike.

Every rank holds the same θ and λ and its own part of each batch. With J = Σ_r J_r the sum of the ranks' parts, two
rules of differentiation make every derivative of J, of any order, the same on all ranks:

    replicated: x ↦ x,               whose derivative sums over ranks    (θ and λ on their way into J_r)
    summed:     x_r ↦ Σ_r x_r,       whose derivative is replicated      (∂J_r on its way out)

so ∂_θ J, Hessian products, cross terms and unrolled steps need no further communication. A collective takes all
tensors of a stage at once, in one piece of memory.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hyperkron.sharding import local, own_rows
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.trees import Tree

SECONDS_ALONE = 10.0
"""How long a process waits for others in :meth:`Group.meet`."""
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name until torch 2.12
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Map = Callable[..., Sequence[Tensor | None]]
"""A linear function of tensors, some of which may be ``None``."""


class LostProcessError(HyperkronError):
    """Another process of the group has ended, or does not answer."""


@contextmanager
def _answering() -> Iterator[None]:
    """Says what it means that a collective fails."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            f"another process has ended or does not answer ({error!s:.120}); its own message says why. Start all of "
            "them again, as torchrun --max-restarts does, with fit(…, resume=folder) to continue from a checkpoint."
        ) from error


class Group:
    """The processes that train one model together; with ``handle=None`` this process alone, at no cost.

    Args:
        handle: a process group of ``torch.distributed``.

    Attributes:
        size, rank: how many there are, and which one this is.
        device: where its tensors must be, if not anywhere.
        sent: bytes of the tensors given to collectives so far, by kind: ``sum``, ``gather`` and ``share``; of sums
            whose rows are left sharded, ``scatter``, and of sums for one rank, ``reduce``; of what ranks
            send to each other, ``exchange``.
        calls: how many collectives of each kind.

    Example:
        >>> alone = Group()
        >>> alone.size, alone.sum([torch.ones(2)])
        (1, [tensor([1., 1.])])
    """

    def __init__(self, handle: dist.ProcessGroup | None = None) -> None:
        self.handle = handle
        self.size = 1 if handle is None else dist.get_world_size(handle)
        self.rank = 0 if handle is None else dist.get_rank(handle)
        cuda = handle is not None and dist.get_backend(handle) == "nccl"
        self.device = torch.device("cuda") if cuda else None
        self.sent = dict.fromkeys(("sum", "gather", "share", "scatter", "reduce", "exchange"), 0)
        self.calls = dict(self.sent)

    def __deepcopy__(self, memory: object) -> Group:
        return self  # of a module that holds it: the processes stay the same

    def meet(self, call: str, store: dist.Store | None = None) -> None:
        """Wait until every rank has come to ``call``; one that is alone there says so after some seconds and goes on.

        Then its collectives notice a rank that has ended. But one that is elsewhere does not match them, and nobody
        could say why: so this uses the store where ranks have met at first.
        """
        if self.size == 1:
            return
        store = dist.distributed_c10d._get_default_store() if store is None else store
        name = "" if self.handle is None else self.handle.group_name
        key, begin = f"hyperkron {call} {name}", time.monotonic()
        wanted = -(-store.add(key, 1) // self.size) * self.size
        while store.add(key, 0) < wanted:
            if time.monotonic() - begin > SECONDS_ALONE:
                return warn_once(
                    key,
                    f"process {self.rank} is alone in {call}, which all {self.size} processes must call: do not call "
                    f"it on one process only. Or the others are over {SECONDS_ALONE:g} s late, and it waits for them.",
                )
            time.sleep(0.001)

    def _count(self, kind: str, x: Tensor) -> None:
        self.sent[kind] += x.numel() * x.element_size()
        self.calls[kind] += 1

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Σ over ranks of each tensor, in one collective; half precision is summed in float32."""
        if self.size == 1 or not tensors:
            return list(tensors)
        flat = _flat(tensors)
        self._count("sum", flat)
        with _answering():
            dist.all_reduce(flat, group=self.handle)
        return _apart(flat, tensors)

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, which have one shape, stacked in the order of ranks."""
        if self.size == 1:
            return x[None]
        x = x.detach().contiguous()
        self._count("gather", x)
        found = [torch.empty_like(x) for _ in range(self.size)]
        with _answering():
            dist.all_gather(found, x, group=self.handle)
        return torch.stack(found)

    def gather_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All rows of tensors of which every rank has its own, in one collective; each has memory of its own."""
        sizes = [self._each(x.shape) for x in tensors]
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
        own = local(tensors[0]).new_zeros(sum(sizes), dtype=dtype)
        for part, x in zip(own.split(sizes), tensors, strict=True):
            rows = local(x).reshape(-1)
            part[: rows.numel()] = rows
        self._count("gather", own)
        table = own.new_empty(self.size * own.numel())
        with _answering():
            _GATHER(table, own, group=self.handle)
        parts = table.view(self.size, -1).split(sizes, dim=1)
        own_memory = [part.clone(memory_format=torch.contiguous_format).view(-1) for part in parts]
        return [part[: x.shape.numel()].view(x.shape).to(x.dtype) for part, x in zip(own_memory, tensors, strict=True)]

    def sum_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Σ over ranks of each tensor, of which every rank gets its own rows, in one collective."""
        sizes = [self._each(x.shape) for x in tensors]
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
        table = tensors[0].new_zeros(self.size, sum(sizes), dtype=dtype)
        for part, x in zip(table.split(sizes, dim=1), tensors, strict=True):
            padded = torch.zeros(part.shape, dtype=dtype, device=x.device).view(-1)
            padded[: x.numel()] = x.detach().reshape(-1)
            part.copy_(padded.view(part.shape))
        self._count("scatter", table)
        own = table.new_empty(table.shape[1])
        with _answering():
            _SCATTER(own, table.view(-1), group=self.handle)
        found = []
        for part, x in zip(own.split(sizes), tensors, strict=True):
            rows = own_rows(x.shape[0], self.rank, self.size)
            shape = (rows.stop - rows.start, *x.shape[1:])
            found.append(part[: torch.Size(shape).numel()].reshape(shape).to(x.dtype))
        return found

    def _each(self, shape: torch.Size) -> int:
        """Numbers that a rank has of a tensor of this shape, the last rows filled up."""
        return -(-shape[0] // self.size) * shape[1:].numel()

    def lists(self, index: Tensor | None) -> Tensor | None:
        """The whole numbers (int64) of all ranks, (ranks, longest), filled up with −1; ``None`` on all ranks if one has
        none to give."""
        lengths = [int(n) for (n,) in self.numbers(-1 if index is None else len(index))]
        if index is None or min(lengths) < 0:
            return None
        own = index.new_full((max(lengths),), -1)
        own[: len(index)] = index
        return self.gather(own)

    def numbers(self, *values: float) -> list[list[float]]:
        """Numbers of every rank, read at once.

        Example:
            >>> Group().numbers(3, True)
            [[3.0, 1.0]]
        """
        own = [float(x) for x in values]
        if self.size == 1:
            return [own]
        found: list[list[float]] = self.gather(torch.tensor(own, dtype=torch.float64, device=self.device)).tolist()
        return found

    def all(self, condition: bool) -> bool:
        """Whether ``condition`` holds on every rank."""
        return all(holds for (holds,) in self.numbers(condition))

    def norm(self, x: Tensor) -> Tensor:
        """The Euclidean norm of the tensors of all ranks together."""
        return x.norm() if self.size == 1 else self.sum([x.square().sum()])[0].sqrt()

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Every rank takes the values of the first one."""
        with torch.no_grad():
            for x in tensors if self.size > 1 else ():
                value = x.detach().to(self.device or x.device, copy=True).contiguous()
                with _answering():
                    dist.broadcast(value, group=self.handle, group_src=0)
                x.copy_(value)

    def reduce(self, tensors: Sequence[Tensor], to: int) -> Callable[[], list[Tensor] | None]:
        """What waits for Σ over ranks of each tensor on rank ``to``, one collective that begins now; ``None`` on the
        others."""
        flat, mine = _flat(tensors), tensors if self.rank == to else None
        self._count("reduce", flat)
        with _answering():
            work = dist.reduce(flat, group=self.handle, group_dst=to, async_op=True)

        def found() -> list[Tensor] | None:
            with _answering():
                work.wait()
            return None if mine is None else _apart(flat, mine)

        return found

    def share(
        self, tensors: Sequence[Tensor] | None, shapes: Sequence[torch.Size], like: Tensor, by: int
    ) -> list[Tensor]:
        """The tensors of rank ``by`` on every rank, by their shapes, in the dtype and on the device of ``like``."""
        sizes = [shape.numel() for shape in shapes]
        flat = like.new_empty(sum(sizes))
        if tensors is not None:
            torch.cat([x.detach().reshape(-1).to(like) for x in tensors], out=flat)
            self._count("share", flat)
        with _answering():
            dist.broadcast(flat, group=self.handle, group_src=by)
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    def exchange(self, sent: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Rank r is given the vector ``sent[r]``, and gives this one a vector of ``sizes[r]`` numbers."""
        given = torch.cat(list(sent))
        self._count("exchange", given)
        found = given.new_empty(sum(sizes))
        with _answering():
            dist.all_to_all_single(found, given, list(sizes), [len(x) for x in sent], group=self.handle)
        return list(found.split(list(sizes)))

    def of_all(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """For the first rank the nested dictionaries of all ranks, nothing for the others.

        They hold tensors, which keep every bit and their memory layout, and what JSON holds.
        """
        leaves = list(_leaves(own)) if self.rank else []
        tensors = [x.detach() for _, x in leaves if isinstance(x, Tensor)]
        kinds = [(path, *((_layout(x), None) if isinstance(x, Tensor) else (None, x))) for path, x in leaves]
        text = _bytes(torch.frombuffer(bytearray(json.dumps(kinds).encode()), dtype=torch.uint8), fill=ord(" "))
        sent = torch.cat([x.to(self.device or "cpu") for x in (text, *map(_bytes, tensors))])
        table = self.numbers(len(text), len(sent))
        sizes = [0 if self.rank else int(size) for _, size in table]
        found = self.exchange([sent, *[sent[:0]] * (self.size - 1)], sizes)
        others = zip(found[1:], table[1:], strict=True)
        return [] if self.rank else [own, *(_unpacked(x, int(length)) for x, (length, _) in others)]


ONE_PROCESS = Group()
"""The group of a problem that is not data parallel."""


def balanced(costs: Sequence[float], size: int) -> list[int]:
    """Which of ``size`` ranks does each piece of work: the most expensive first, each to the one with least to do.

    Example:
        >>> balanced([1.0, 8.0, 4.0, 4.0], 2)
        [0, 0, 1, 1]
    """
    load, found = [0.0] * size, [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[piece] = min(range(size), key=load.__getitem__)
        load[found[piece]] += costs[piece]
    return found


def triangle(matrices: Tensor) -> Tensor:
    """The n (n + 1)/2 entries of each matrix (…, n, n) on and below its diagonal, (…, n (n + 1)/2)."""
    return matrices[..., _below(matrices)]


def from_triangle(triangles: Tensor, like: Tensor) -> Tensor:
    """The symmetric matrices, shaped as ``like``, of which these are the :func:`triangle`.

    Example:
        >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> bool((from_triangle(triangle(matrix), matrix) == matrix).all())
        True
    """
    found = torch.zeros_like(like)
    found[..., _below(like)] = triangles
    return found + found.tril(-1).mT


def _below(matrices: Tensor) -> Tensor:
    return torch.ones(matrices.shape[-2:], dtype=torch.bool, device=matrices.device).tril()


class LinearMap(torch.autograd.Function):
    """A linear map of tensors, given with its transpose: each is the derivative of the other.

    A gradient that is ``None`` counts as zero: with ``optional`` the map and its transpose are given the ``None``,
    otherwise zeros.
    """

    @staticmethod
    def forward(along: Map, transpose: Map, optional: bool, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(along(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.along, ctx.transpose, ctx.optional, *tensors = inputs
        ctx.set_materialize_grads(not ctx.optional)
        ctx.here = [x is not None for x in tensors]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = LinearMap.apply(ctx.transpose, ctx.along, ctx.optional, *gradients)
        return (None, None, None, *(g if here else None for g, here in zip(found, ctx.here, strict=True)))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(ctx.along(*tangents))


def replicated(group: Group, tensors: Tree) -> Tree:
    """The same tensors, whose gradients are summed over ranks, all of them in one collective."""
    summed = partial(_summed, group, [x.detach() for x in tensors.values()])
    return dict(zip(tensors, LinearMap.apply(_viewed, summed, True, *tensors.values()), strict=True)) if tensors else {}


def _viewed(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.view_as(x) for x in tensors]


def _summed(group: Group, like: list[Tensor], *tensors: Tensor | None) -> list[Tensor | None]:
    """Σ_r x_r: one that a rank does not have counts as zero there; one that no rank has stays ``None``."""
    dense = [torch.zeros_like(y) if x is None else x.to_dense() for x, y in zip(tensors, like, strict=True)]
    here = [x is not None for x in tensors]
    *found, counts = group.sum([*dense, dense[0].new_tensor(here)])
    there = here if all(here) else (counts > 0).tolist()
    return [x if some else None for x, some in zip(found, there, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
    return torch.cat([x.detach().reshape(-1).to(dtype) for x in tensors])


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([x.numel() for x in like])
    return [part.reshape(x.shape).to(x.dtype) for part, x in zip(parts, like, strict=True)]


def _leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, x in tree.items():
        if isinstance(x, dict) and x:
            yield from _leaves(x, (*path, key))
        else:
            yield (*path, key), x


def _layout(x: Tensor) -> tuple[Any, ...]:
    """Dtype, shape, strides without gaps, and kind of device."""
    return str(x.dtype).removeprefix("torch."), x.shape, torch.empty_like(x, device="meta").stride(), x.device.type


def _bytes(x: Tensor, fill: int = 0) -> Tensor:
    """The bytes of a tensor, filled up to a multiple of 16, so that one of any dtype can follow."""
    data = torch.empty_like(x).copy_(x).as_strided((x.numel(),), (1,)).view(torch.uint8)  # the copy has no gaps
    return F.pad(data, (0, -len(data) % 16), value=fill)


def _unpacked(data: Tensor, length: int) -> dict[str, Any]:
    """The dictionary from its bytes: those of a description, then those of its tensors."""
    tree: dict[str, Any] = {}
    for (*path, last), layout, x in json.loads(bytes(data[:length].tolist())):
        if layout is not None:
            name, shape, stride, device = layout
            size = math.prod(shape) * getattr(torch, name).itemsize
            x = data[length : length + size].view(getattr(torch, name)).to(device).as_strided(shape, stride)
            length += -(-size // 16) * 16
        reduce(lambda at, key: at.setdefault(key, {}), path, tree)[last] = x
    return tree
