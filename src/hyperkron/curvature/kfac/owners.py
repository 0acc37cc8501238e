"""Divides the factors and inverses of the layers among several processes that train one model.

Every Kronecker block belongs to one rank, its owner. The owner sums the factors that all ranks measure, inverts them,
receives the right-hand side, solves, and returns the result:

    A = Σ_r A_r ,  B = Σ_r B_r   →   owner   ;      V   →   owner:  B⁻¹ V A⁻¹   →   all, or each its rows of it

so that a rank holds about 1/ranks of all factors and inverses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hyperkron.collectives import Group, balanced, from_triangle, triangle
from hyperkron.curvature.kfac.coverage import Block, Plan
from hyperkron.sharding import is_sharded, local, own_rows
from hyperkron.solution import FactorizationError, HyperkronError, NonFiniteError, Status
from hyperkron.trees import Tree

T = TypeVar("T")


class Owners:
    """Assigns each block of a plan to a rank, balanced by the cost n³ of inversion, the most expensive first.

    Blocks of one parent module with inputs of one size (query, key and value) may share a factor. So they stay together
    unless their cost is more than the share of a rank.
    """

    def __init__(self, plan: Plan, group: Group) -> None:
        self.group, self.blocks = group, plan.blocks
        cost = {name: self._cost(block) for name, block in plan.blocks.items()}
        families: dict[tuple[object, ...], list[str]] = {}
        for name, block in plan.blocks.items():
            families.setdefault((name.rpartition(".")[0], *block.shape[::2]), []).append(name)
        share = sum(cost.values()) / group.size
        pieces: list[list[str]] = []
        for names in families.values():
            together = sum(cost[name] for name in names) <= share
            pieces += [names] if together else [[name] for name in names]
        ranks = balanced([sum(cost[name] for name in names) for names in pieces], group.size)
        self.of = {name: rank for names, rank in zip(pieces, ranks, strict=True) for name in names}

    @staticmethod
    def _cost(block: Block) -> float:
        groups, b, a = block.shape
        return groups * (float(a) ** 3 + float(b) ** 3)

    @property
    def part(self) -> str:
        """Which part of all blocks this rank has, in words."""
        return f"{self.group.rank} of {self.group.size}"

    def mine(self, name: str) -> bool:
        """Whether a block belongs to this rank."""
        return self.of[name] == self.group.rank

    def sums(self, name: str, tensors: Sequence[Tensor], symmetric: bool = True) -> Callable[[], list[Tensor] | None]:
        """Begin to sum ``tensors`` of a block over ranks; the returned function waits for the sums.

        It returns the sums on the owner and ``None`` on other ranks.
        """
        pending = self.group.reduce([triangle(x) if symmetric else x for x in tensors], self.of[name])
        likes = tensors if self.mine(name) else ()

        def found() -> list[Tensor] | None:
            sums = pending()
            if sums is None or not symmetric:
                return sums
            return [from_triangle(x, like) for x, like in zip(sums, likes, strict=True)]

        return found

    def shared(self, name: str, pair: tuple[Tensor, Tensor] | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two matrices of the sizes of A and B, from the owner of the block, on every rank."""
        groups, b, a = self.blocks[name].shape
        shapes = [torch.Size((groups, n, n)) for n in (a, b)]
        first, second = self.group.share(pair if self.mine(name) else None, shapes, like, self.of[name])
        return first, second

    def applied(self, names: Sequence[str], v: Tree, function: Callable[[Tree], Tree]) -> Tree:
        """Apply ``function`` to the parameters of each rank's blocks; every rank gets all results.

        Of sharded parameters every rank gets its own rows.

        Args:
            names: the blocks.
            v: the right-hand side: whole and alike on all ranks, or sharded.
            function: takes and returns the parameters of the blocks that belong to this rank.
        """
        parts: list[list[str]] = [[] for _ in range(self.group.size)]
        for name in names:
            parts[self.of[name]] += self.blocks[name].names
        mine = parts[self.group.rank]
        sharded = [[n for n in part if is_sharded(v[n])] for part in parts]
        whole = {n: v[n] for n in mine if not is_sharded(v[n])} | self._gathered(sharded, v)
        solved = function(whole) if mine else {}
        found = self._scattered(sharded, v, solved)
        plain = [[n for n in part if not is_sharded(v[n])] for part in parts]
        for rank, part in enumerate(plain):
            if part:
                own = [solved[n] for n in part] if rank == self.group.rank else None
                values = self.group.share(own, [v[n].shape for n in part], _common(v, part), rank)
                found.update(zip(part, values, strict=True))
        return found

    def _gathered(self, sharded: list[list[str]], v: Tree) -> Tree:
        """All rows of the sharded parameters of this rank."""
        names, ranks = sharded[self.group.rank], range(self.group.size)
        if not any(sharded):
            return {}
        like = _common(v, [n for part in sharded for n in part])
        sent = [_joined([local(v[n]) for n in part], like) for part in sharded]
        sizes = [[self._held(v[n], rank) for n in names] for rank in ranks]
        given = self.group.exchange(sent, [sum(one) for one in sizes])
        rows = [x.split(one) if one else () for x, one in zip(given, sizes, strict=True)]
        return {n: torch.cat([rows[r][i] for r in ranks]).view(v[n].shape).to(v[n].dtype) for i, n in enumerate(names)}

    def _scattered(self, sharded: list[list[str]], v: Tree, solved: Tree) -> Tree:
        """This rank's rows of the sharded parameters of all ranks."""
        names, ranks = sharded[self.group.rank], range(self.group.size)
        if not any(sharded):
            return {}
        like = _common(v, [n for part in sharded for n in part])
        cuts = {n: [own_rows(v[n].shape[0], rank, self.group.size) for rank in ranks] for n in names}
        sent = [_joined([solved[n][cuts[n][rank]] for n in names], like) for rank in ranks]
        sizes = [[self._held(v[n], self.group.rank) for n in part] for part in sharded]
        given = self.group.exchange(sent, [sum(one) for one in sizes])
        found: Tree = {}
        for part, one, values in zip(sharded, sizes, given, strict=True):
            for n, x in zip(part, values.split(one) if one else (), strict=True):
                found[n] = x.view(local(v[n]).shape)
        return found

    def _held(self, x: Tensor, rank: int) -> int:
        """How many numbers of a sharded tensor a rank has."""
        rows = own_rows(x.shape[0], rank, self.group.size)
        return (rows.stop - rows.start) * x.shape[1:].numel()


class Deliveries:
    """Sends each block to its owner in one collective, during the backward pass of the next; one block at a time.

    Attributes:
        sent: the blocks that were sent; their owners have them after :meth:`finish`.
        shares_sums: whether an A that its owner already has is not sent again; the same on all ranks.
    """

    def __init__(self, owners: Owners) -> None:
        self.owners, self.sent, self.shares_sums = owners, set[str](), True
        self._sums: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}  # A and its sum, by id and owner
        self._coming: tuple[Callable[[], list[Tensor] | None], Callable[[list[Tensor]], None]] | None = None

    def send_factors(self, name: str, sides: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Remove A and B of a block from pairs of dictionaries and send them; the owner's dictionaries get the sums."""
        self._receive()
        self.sent.add(name)
        inputs, gradients = zip(*((a.pop(name), b.pop(name)) for a, b in sides), strict=True)
        keys = [(id(a), self.owners.of[name]) for a in inputs]
        known = self.shares_sums and all(key in self._sums for key in keys)
        if not known:
            self._sums = {key: (a, None) for key, a in zip(keys, inputs, strict=True)}
        sums = self.owners.sums(name, gradients if known else (*gradients, *inputs))

        def put(found: list[Tensor]) -> None:
            for key, total in zip(keys, found[len(keys) :], strict=False):  # none if the owner already had A
                self._sums[key] = (self._sums[key][0], total)
            for (a, b), key, total in zip(sides, keys, found, strict=False):
                a[name], b[name] = self._sums[key][1], total

        self._coming = sums, put

    def send_spectrum(self, name: str, spectra: dict[str, Tensor]) -> None:
        """The same for EKFAC's S."""
        self._receive()
        self.sent.add(name)
        sums = self.owners.sums(name, [spectra.pop(name)], symmetric=False)
        self._coming = sums, lambda found: spectra.update({name: found[0]})

    def _receive(self) -> None:
        """Wait for the block that is being sent; its owner stores the sums."""
        coming, self._coming = self._coming, None
        if coming is not None and (found := coming[0]()) is not None:
            coming[1](found)

    def finish(self) -> None:
        """Wait for the last block, and forget the sums that layers share."""
        self._receive()
        self._sums.clear()


def _common(v: Tree, names: Sequence[str]) -> Tensor:
    """A tensor of the dtype in which these are sent, on their device."""
    dtype = functools.reduce(torch.promote_types, (v[n].dtype for n in names))
    return local(v[names[0]]).new_empty(0, dtype=dtype)


def _joined(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like, *(x.reshape(-1).to(like) for x in tensors)])


_OUTCOMES = (Status.DIRECT, Status.MORE_DAMPING, NonFiniteError, FactorizationError)


def agreed(group: Group, work: Callable[[], tuple[T, Status]]) -> tuple[T, Status]:
    """The result of ``work``, and the worst status of all ranks; an error on one rank is an error on all.

    ``work`` must not use collectives.
    """
    if group.size == 1:
        return work()
    error: HyperkronError | None = None
    try:
        found, status = work()
        code = _OUTCOMES.index(status)
    except HyperkronError as caught:
        error, code = caught, 3 if isinstance(caught, FactorizationError) else 2
    worst = _OUTCOMES[int(max(x for (x,) in group.numbers(code)))]
    if error is not None:
        raise error
    if worst is NonFiniteError:
        raise NonFiniteError("factors of another process are not finite; its own message names them.")
    if worst is FactorizationError:
        raise FactorizationError("factors of another process could not be factorised; its own message names them")
    assert isinstance(worst, Status)
    return found, worst
