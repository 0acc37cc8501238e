"""One training run: a network fitted to the evidence about the rows it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor, nn

from hyperkron.cleaning.evidence import likelihood
from hyperkron.solution import NonFiniteError


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

    def loss(self, output: Tensor, part: Tensor) -> Tensor:
        """Of logits of the rows at these positions: −log Σ_k f(k) e(k), and −log f of the believed label."""
        weight = None if self.weight is None else self.weight[part]
        if self.believed is None:
            return likelihood(output, self.evidence[part], weight).value
        log_f, (label, belief) = output.log_softmax(1), (x[part] for x in self.believed)
        seen = torch.logsumexp(log_f + self.evidence[part], dim=1)
        both = (seen if weight is None else weight * seen) + belief * log_f.gather(1, label[:, None])[:, 0]
        return -both.mean()


Tick = Callable[[int], None]
"""Called after every step with the number of steps done; may raise to stop."""


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
    groups = [
        {"params": [p for p in network.parameters() if p.requires_grad and id(p) not in fine], "lr": plan.rate},
        {"params": [p for p in network.parameters() if p.requires_grad and id(p) in fine], "lr": plan.fine_rate},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=plan.decay)


def schedule_for(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """One cycle: up over the first fifth, down to nearly nothing at the end."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1, pct_start=0.2)


def batches(count: int, size: int, random: torch.Generator | None, device: torch.device) -> Iterator[Tensor]:
    """Positions of the rows of one step after the other, without end: each epoch in an order of its own.

    Without a generator the orders are drawn from the global random state.
    """
    while True:
        order = torch.randperm(count, generator=random, device=device)
        for part in order.split(size):
            if len(part) > 1 or count == 1:  # one row alone has no batch statistics
                yield part


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
        network = build().to(device).train()
        total = plan.steps(count) if steps is None else steps
        optimizer = optimizer_for(network, plan)
        schedule = schedule_for(optimizer, total)
        for part in islice(batches(count, plan.batch_for(count), None, device), total):
            loss = targets.loss(network(*inputs.batch(targets.rows[part])), part)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            if tick is not None:
                tick(1)
    refuse_not_finite(loss.detach(), plan, total)
    return network.eval()


def refuse_not_finite(loss: Tensor, plan: TrainingPlan, steps: int) -> None:
    """Meet a training that went wrong."""
    if not bool(torch.isfinite(loss).all()):
        value = float(loss[~torch.isfinite(loss)][0]) if loss.dim() else float(loss)
        raise NonFiniteError(
            f"the training loss became {value} after {steps} steps; look for extreme values in the inputs, or "
            f"give a model that trains at a learning rate of {plan.rate}."
        )


@torch.no_grad()
def predict(network: nn.Module, inputs: Inputs, rows: Tensor, size: int = 2048) -> Tensor:
    """Class probabilities (n, C) of the rows."""
    training = network.training
    network.eval()
    found = [network(*inputs.batch(part)).float().softmax(1) for part in rows.split(size)]
    network.train(training)
    return torch.cat(found)
