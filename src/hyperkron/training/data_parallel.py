"""One problem on several processes: each evaluates its part of every batch, and all get the same derivatives.

The objectives of a :class:`DataParallel` problem return J of the whole batch. Its gradients in θ and λ are summed over
ranks (:mod:`hyperkron.collectives`), so everything that is computed from them is the same on all ranks. KFAC sums its
factors in the same way. ``docs/scaling.md`` lists what is sent when.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.parallel import DistributedDataParallel

from hyperkron.batch_tensors import cut, tensors_of
from hyperkron.collectives import Group, replicated
from hyperkron.evaluation.point import Level
from hyperkron.evaluation.sharded import check, gathering, reshard, units
from hyperkron.losses import BatchPlace, Loss, as_loss
from hyperkron.problem import BilevelProblem, Both, Objective, call_with, check_problem
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.training.accumulation import Accumulated, batch_norms, check_is_mean, length
from hyperkron.trees import Tree


class DataParallel(BilevelProblem):
    """A problem whose batches are divided among the processes of ``torch.distributed``: the same numbers on each.

        J(batch) = Σ_r R_r J(part r) / Σ_r R_r ,    R_r the rows that count on rank r

    It serves wherever the problem does, also in loops by hand: every process calls the same functions with its own
    copies of model and λ, as under ``DistributedDataParallel``. :func:`hyperkron.fit` makes the copies alike first.

    Monte-Carlo vectors of KFAC depend on an example's place in the whole batch, so that any number of processes draws
    the same ones. Dropout masks are drawn by each process for itself.

    Losses that are not means over examples are refused (weights normalised over the batch, contrastive losses).
    BatchNorm in training mode uses the statistics of each part, as under ``DistributedDataParallel``, with a warning.

    Args:
        problem: the two objectives, each a mean over the examples of its batch (penalties may be added).
        group: the processes; ``None`` for all of them, or for this one where ``torch.distributed`` is not initialised.
        divide: ``True`` (default): every process is given the same batch and takes its part of it, along the first
            dimension of its tensors (and of lists with a text for each example); then the batches do not depend on the
            number of processes, and a checkpoint can be continued with another number. ``False``: every process is
            given its own part (``DistributedSampler``).

    Example:
        >>> import hyperkron as hk
        >>> problem = hk.BilevelProblem(lambda m, h, b: m(b).square().mean(), lambda m, h, b: m(b).mean())
        >>> hk.training.DataParallel(problem).group.size  # in a program started by torchrun: the number of processes
        1
    """

    def __init__(self, problem: BilevelProblem, group: dist.ProcessGroup | None = None, *, divide: bool = True) -> None:
        check_problem(problem)
        if isinstance(problem, (Accumulated, DataParallel)):
            raise HyperkronError(
                f"problem is a {type(problem).__name__}, whose batches are divided already; pass the BilevelProblem "
                "itself, and batches whose parts fit into memory."
            )
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup | None):
            raise HyperkronError(
                f"group={group!r:.60} is not a process group that this process is in; pass one that "
                "torch.distributed.new_group made, on its processes alone, or None for all of them."
            )
        object.__setattr__(self, "_group", Group(group))
        inner = _Divided("inner", problem.inner, self._group, divide)
        outer = _Divided("outer", problem.outer, self._group, divide)
        super().__init__(inner, outer, autocast=problem.autocast)

    _group: Group

    @property
    def group(self) -> Group:
        return self._group

    @property
    def divided(self) -> bool:
        return True

    @property
    def divides(self) -> bool:
        assert isinstance(self.inner, _Divided)
        return self.inner.divide


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel``; any other model as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def synchronised(problem: BilevelProblem, model: nn.Module, hyper: nn.Module | None) -> nn.Module:
    """The unwrapped model; copies θ, λ, buffers and torch's random state of the first process to all processes.

    Refuses a ``DistributedDataParallel`` model if the problem is not a :class:`DataParallel`.
    """
    group = problem.group
    if isinstance(model, DistributedDataParallel) and not isinstance(problem, DataParallel):
        raise HyperkronError(
            "model is a DistributedDataParallel, but problem is not divided among processes, so each process would "
            "train its own λ; use hyperkron.training.DataParallel(problem)."
        )
    model = unwrapped(model)
    check(model, hyper, group if problem.divided else None)
    if group.size > 1:
        random = torch.get_rng_state()
        own = [*model.state_dict().values(), *({} if hyper is None else hyper.state_dict()).values()]
        group.adopt([*(x for x in own if not is_sharded(x)), random])
        torch.set_rng_state(random)
    return model


@dataclass(frozen=True)
class _Divided:
    """An objective that evaluates this rank's part of a batch and returns the loss of the whole batch."""

    level: Level
    function: Objective
    group: Group
    divide: bool
    checked: set[Level] = field(default_factory=set)

    def __call__(self, model: nn.Module, hyper: nn.Module, batch: Any) -> Loss | Tensor:
        model = unwrapped(model)
        if self.group.size == 1 and not units(model):
            return self.function(model, hyper, batch)
        reshard(model)
        device = next(model.parameters()).device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("collectives of several processes are not recorded")
        part = _part(batch, self.group, self.level) if self.divide else _own_part(batch, self.group, self.level)
        if not self.checked:
            self._check(model, hyper, batch, part)
        both = Both(model, hyper)
        live = {name: x for name, x in both.named_parameters() if x.requires_grad and torch.is_grad_enabled()}
        seen: Tree = {}
        for level in ("model.", "hyper."):  # separately: what depends on λ must not seem to depend on θ
            here: Tree = {name: x for name, x in live.items() if name.startswith(level) and not is_sharded(x)}
            seen |= replicated(self.group, here)
        with _own_draws(self.group.rank, device), gathering(model, self.group):
            loss = as_loss(call_with(both, seen, self.function, part), self.level)
        return self._whole(loss, part, {id(x): live[name] for name, x in seen.items()})

    def _whole(self, loss: Loss, part: Any, own: dict[int, Tensor]) -> Loss:
        """The loss of the whole batch on this rank: the value of the whole, this rank's rows, and all penalties."""
        value = unpack_dual(loss.value).primal.detach()
        table = self.group.gather(_row(loss, part, value))
        shares = table[:, 2:] / table[:, 2:].sum(0)
        if len(loss.terms) > 1 and bool((shares - shares[:, :1]).abs().max() > 1e-9):
            raise HyperkronError(
                f"the criteria of the {self.level} loss run over different shares of the rows ({shares.tolist()}, by "
                "rank), so no single weight of a rank is right; give all the same mask."
            )
        share, total = shares[self.group.rank, 0], (shares[:, 0] * table[:, 0]).sum()
        place, weight = BatchPlace(table[:, 1], self.group.rank), share.to(value)
        return Loss(
            loss.value * weight + (total.to(value) - value * weight),  # gradient of the part, value of the whole
            tuple(replace(term.scale(share), place=place) for term in loss.terms),
            tuple(  # each rank has a share of the penalty, but its whole coefficient for the curvature
                replace(p.scale(share), coefficient=p.coefficient, parameter=own.get(id(p.parameter), p.parameter))
                for p in loss.l2
            ),
            loss.plain,
        )

    def _check(self, model: nn.Module, hyper: nn.Module, batch: Any, part: Any) -> None:
        """At the first evaluation: refuse θ, λ or batches that differ between processes, and losses that are not
        means."""
        _check_alike(self.group, {"model": model, "hyper": hyper})
        if self.divide and len(set(map(tuple, self.group.numbers(*checksums(batch))))) > 1:
            raise HyperkronError(
                f"the processes were given different batches of {self.level}; seed their data alike, so that each can "
                "take its part of the same batch, or use DataParallel(..., divide=False) where each has its own."
            )
        mixing = batch_norms(model)
        if mixing:
            warn_once(
                "data-parallel-batch-norm",
                f"{mixing[0]} is a BatchNorm layer in training mode: it uses the statistics of each process's part of "
                "a batch, so results depend on the number of processes; use eval() for it, GroupNorm or LayerNorm.",
            )
        elif self.group.all(length(part) > 1):
            refusal: HyperkronError | None = None
            try:
                with gathering(model, self.group):
                    check_is_mean(self.level, self.function, model, hyper, part, set())
            except HyperkronError as error:
                refusal = error
            if not self.group.all(refusal is None):  # on all processes, for the others would wait
                raise refusal or HyperkronError(
                    f"{self.level} is not a mean over examples, which another process found on its part of the batch."
                )
        self.checked.add(self.level)  # now, so that what is refused is refused again


def _check_alike(group: Group, modules: dict[str, nn.Module]) -> None:
    """Refuse trainable parameters that are others on other processes, or differ by more than rounding, by their
    sums."""
    named = {f"{label} parameter {n}": p for label, m in modules.items() for n, p in m.named_parameters()}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    kinds = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in trained.items()]
    if len(set(map(tuple, group.numbers(zlib.crc32(repr(kinds).encode()))))) > 1:
        raise HyperkronError(
            f"the processes train different parameters, number {group.rank} {', '.join(kinds):.600}; make the same "
            "modules on all of them, and freeze the same parameters."
        )
    whole = {name: p.detach() for name, p in trained.items() if not is_sharded(p)}
    facts = [f(p, dtype=torch.float64) for p in whole.values() for f in (torch.sum, torch.linalg.vector_norm)]
    columns = list(zip(*group.numbers(*map(float, facts)), strict=True))
    for name, sums, norms in zip(whole, columns[::2], columns[1::2], strict=True):
        if max(sums) - min(sums) > 1e-4 * max(norms):  # a sum alone may be nothing but rounding
            raise HyperkronError(
                f"{name} differs between the processes (its sums are {', '.join(f'{x:.4g}' for x in sums)}), but all "
                "must train the same; call torch.manual_seed with one seed before making the module, or "
                "torch.distributed.broadcast(p.detach(), 0) for each of its parameters p."
            )


def _part(batch: Any, group: Group, level: str) -> Any:
    """This rank's part of a batch; the examples are divided in order, as evenly as possible."""
    count = length(batch)
    if count < group.size and any(x.dim() for _, x in tensors_of("", batch)):
        raise HyperkronError(
            f"a batch of {level} has {count} examples, too few for {group.size} processes; use larger batches or fewer "
            "processes."
        )
    begin, end = (count * rank // group.size for rank in (group.rank, group.rank + 1))
    return cut(batch, count, slice(begin, end))


def _own_part(batch: Any, group: Group, level: str) -> Any:
    """The batch that this rank was given, refused if it has no examples."""
    if any(x.dim() and not len(x) for _, x in tensors_of("", batch)):
        raise HyperkronError(
            f"process {group.rank} was given an empty batch of {level}, but each of the {group.size} processes needs "
            "examples at every evaluation, and the others wait for it; give them batches of nearly one size, as "
            "torch.utils.data.DistributedSampler does, and drop the last batch on all of them alike."
        )
    return batch


def checksums(batch: Any) -> list[float]:
    """A checksum of every tensor of a batch."""
    flat = [x.detach().reshape(-1).double().nan_to_num() for _, x in tensors_of("", batch)]
    return [float(x @ torch.linspace(1, 2, len(x), dtype=x.dtype, device=x.device)) for x in flat]


def _row(loss: Loss, part: Any, value: Tensor) -> Tensor:
    """J, the number of examples and the rows of every criterion, in float64; nothing is read from the device."""
    examples = float(len(loss.terms[0].row_losses)) if loss.terms else float(length(part) or 1)
    found = [value.double(), value.new_tensor(examples, dtype=torch.float64)]
    for t in loss.terms:
        rows = t.row_losses.numel() if t.valid is None else t.valid.sum()
        found.append(torch.as_tensor(rows, dtype=torch.float64, device=value.device))
    return torch.stack(found if loss.terms else [*found, found[1]])


@contextlib.contextmanager
def _own_draws(rank: int, device: torch.device) -> Iterator[None]:
    """Inside the block this rank draws its own random numbers; afterwards all ranks have the same random state.

    If nothing was drawn it is the state before, so that the order of data does not depend on the number of ranks.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [g.get_state() for g in generators]
    seed = int(torch.randint(2**62, (), device="cpu")) + rank
    seeded = [g.manual_seed(seed).get_state() for g in generators]
    try:
        yield
    finally:
        for g, old, new in zip(generators, before, seeded, strict=True):
            drew = not torch.equal(g.get_state(), new)
            g.set_state(old)
            if drew:
                torch.rand((), generator=g, device=g.device)
