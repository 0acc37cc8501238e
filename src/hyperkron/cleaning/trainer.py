"""Training by ``fit``: networks fitted to the evidence about the rows they are given."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from hyperkron import losses
from hyperkron.algorithms import InnerOnly, Source, Updates
from hyperkron.cleaning.evidence import likelihood
from hyperkron.losses import Loss
from hyperkron.problem import BilevelProblem
from hyperkron.solution import NonFiniteError
from hyperkron.training import fit


class Inputs(Protocol):
    """The inputs of all rows, training rows first, then trusted ones; given out by row number."""

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What the network takes for these rows."""


@dataclass(frozen=True)
class Dense:
    """Inputs that are one tensor (N, ...), standardised, on the device where training happens."""

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def batch(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (self.values[rows],)


@dataclass(frozen=True)
class TrainingPlan:
    """How to train; the same for every candidate.

    Attributes:
        epochs: over the rows given.
        batch: rows per step, fewer where there are few rows.
        rate: the highest learning rate of AdamW, under a one-cycle schedule.
        fine_rate: the same for pretrained layers.
        decay: weight decay.
        least: steps at least, so that small sets are learnt too.
    """

    epochs: float = 15
    batch: int = 128
    rate: float = 2e-3
    fine_rate: float = 5e-5
    decay: float = 1e-2
    least: int = 300

    def faster(self, factor: float) -> TrainingPlan:
        """The same with both rates this many times as high."""
        return replace(self, rate=factor * self.rate, fine_rate=factor * self.fine_rate)

    def batch_for(self, rows: int) -> int:
        """Rows per step for a training set of this size."""
        return min(self.batch, max(16, rows // 8), rows)

    def steps(self, rows: int) -> int:
        """Steps of a training set of this size."""
        return max(self.least, math.ceil(self.epochs * rows / self.batch_for(rows)))


@dataclass(frozen=True)
class TrainingTargets:
    """Which rows a network learns from, with what evidence.

    Attributes:
        rows: their numbers (n,).
        evidence: log e of those rows (n, C).
        weight: of those rows; None for 1.
        believed: labels of those rows (n,) to be learnt beside the evidence, and how much each counts (n,).
    """

    rows: Tensor
    evidence: Tensor
    weight: Tensor | None = None
    believed: tuple[Tensor, Tensor] | None = None

    def objective(self, output: Tensor, part: Tensor) -> Loss:
        """Of logits of the rows at these positions: −log Σ_k f(k) e(k), and −log f of the believed label."""
        weight = None if self.weight is None else self.weight[part]
        found = likelihood(output, self.evidence[part], weight)
        if self.believed is None:
            return found
        label, belief = (x[part] for x in self.believed)
        return found + losses.cross_entropy(output, label, weight=belief)


Tick = Callable[[int], None]
"""Called at every step with the number of networks that make it; may raise to stop."""


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Initialisation and dropout under a seed; what is drawn afterwards is as if nothing had been drawn here."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def optimizer_for(network: nn.Module, plan: TrainingPlan) -> torch.optim.AdamW:
    """AdamW with a low rate for pretrained layers (a submodule ``upper``) and the usual one for all others."""
    upper = getattr(network, "upper", None)
    fine = {id(p) for p in upper.parameters()} if isinstance(upper, nn.Module) else set()
    groups = []
    for low, rate in ((False, plan.rate), (True, plan.fine_rate)):
        own = [p for p in network.parameters() if p.requires_grad and (id(p) in fine) is low]
        groups += [{"params": own, "lr": rate}] if own else []
    return torch.optim.AdamW(groups, weight_decay=plan.decay)


def batches(count: int, size: int, random: torch.Generator | None, device: torch.device) -> Iterator[Tensor]:
    """Positions of the rows of one step after the other, without end: each epoch in an order of its own.

    Without a generator the orders are drawn from the global random state.
    """
    while True:
        order = torch.randperm(count, generator=random, device=device)
        for part in order.split(size):
            if len(part) > 1 or count == 1:  # one row alone has no batch statistics
                yield part


class NetworkGroup(nn.Module, ABC):
    """Networks that are trained at the same time, each on targets of its own.

    The rows are private, because ``fit`` describes everything else that it is given.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self._networks, self._losses = list(networks), [torch.zeros(())]

    @abstractmethod
    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """J_in at these positions in the targets of each: the sum of their losses."""

    @abstractmethod
    def optimizer(self, plan: TrainingPlan) -> torch.optim.AdamW:
        """What moves their parameters."""

    def finish(self, plan: TrainingPlan, steps: int) -> list[nn.Module]:
        """The networks, in evaluation mode; those whose loss is not finite are refused."""
        last = torch.cat([loss.reshape(-1) for loss in self._losses])
        wrong = last[~last.isfinite()].tolist()
        if wrong:
            raise NonFiniteError(
                f"the training loss became {wrong[0]} after {steps} steps; look for extreme values in the inputs, or "
                f"give a model that trains at a learning rate of {plan.rate}."
            )
        return [network.eval() for network in self._networks]


class Single(NetworkGroup):
    """One network of any kind."""

    def __init__(self, network: nn.Module, inputs: Inputs, targets: TrainingTargets) -> None:
        super().__init__([network])
        self.network, self._inputs, self._targets = network, inputs, targets

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        [part] = parts
        loss = self._targets.objective(self.network(*self._inputs.batch(self._targets.rows[part])), part).value
        self._losses[:] = [loss.detach()]
        return loss

    def optimizer(self, plan: TrainingPlan) -> torch.optim.AdamW:
        return optimizer_for(self.network, plan)


def updates(optimizer: torch.optim.Optimizer, steps: int) -> Updates:
    """One cycle: the rate goes up over the first fifth (one step at least), and down to nearly nothing at the end."""
    rates = [group["lr"] for group in optimizer.param_groups]
    rising = max(0.2, 2 / (steps + 1)) if steps else 0.2
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1, pct_start=rising)
    return Updates(optimizer, cycle, schedule="update")


class Positions(Source):
    """What each network learns from, one step after the other; private, as the rows are."""

    def __init__(self, streams: Sequence[Iterator[Tensor]], tick: Tick | None) -> None:
        self._streams, self._tick = streams, tick

    def next(self) -> tuple[Tensor, ...]:
        """Positions in the targets of each."""
        if self._tick is not None:
            self._tick(len(self._streams))
        return tuple(map(next, self._streams))


def descend(
    networks: NetworkGroup,
    streams: Sequence[Iterator[Tensor]],
    plan: TrainingPlan,
    steps: int,
    tick: Tick | None = None,
) -> list[nn.Module]:
    """Train the networks on positions in their targets, which the streams give."""
    fit(
        BilevelProblem(lambda group, _, parts: group(parts)),
        networks,
        None,
        InnerOnly(steps, report_every=2),  # so never: ``finish`` refuses a loss that is not finite
        Positions(streams, tick),
        steps=1,
        inner_optimizer=updates(networks.optimizer(plan), steps),
        seed=None,
    )
    return networks.finish(plan, steps)


def train(
    build: Callable[[], nn.Module],
    inputs: Inputs,
    targets: TrainingTargets,
    plan: TrainingPlan,
    *,
    seed: int,
    steps: int | None = None,
    tick: Tick | None = None,
) -> nn.Module:
    """A fresh network, initialised under ``seed`` and fitted to the targets; left in evaluation mode.

    Takes as many steps as the plan says for this many rows, or ``steps``.
    """
    device, count = targets.rows.device, len(targets.rows)
    with seeded(seed, device):
        network = Single(build().to(device).train(), inputs, targets)
        stream = batches(count, plan.batch_for(count), None, device)
        [trained] = descend(network, [stream], plan, plan.steps(count) if steps is None else steps, tick)
    return trained


def device_of(model: nn.Module) -> torch.device:
    """Where a model is; one without tensors computes on the CPU."""
    found = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if found is None else found.device


@torch.no_grad()
def predict(network: nn.Module, inputs: Inputs, rows: Tensor, size: int = 2048) -> Tensor:
    """Class probabilities (n, C) of the rows."""
    training = network.training
    network.eval()
    found = [network(*inputs.batch(part)).float().softmax(1) for part in rows.split(size)]
    network.train(training)
    return torch.cat(found)
