"""What every stage of a cleaning run needs: the rows, the plans of its trainings, and how to train a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hyperkron.cleaning.batched_training import train_batched
from hyperkron.cleaning.config import CleanConfig
from hyperkron.cleaning.evidence import certain
from hyperkron.cleaning.stages import Stages, Tensors
from hyperkron.cleaning.trainer import Inputs, Tick, TrainingPlan, TrainingTargets, train

MANY_ROWS = 3
"""There are many rows where a plain training takes this many times the least number of steps."""
SHORT_TRAINING = 0.5
"""Length of the trainings that only give an opinion, as a part of the full length."""
FINAL_TRAINING = 0.75
"""Length of the training of the network that comes out, as a part of the full length."""


@dataclass
class Work:
    """What every stage needs.

    Attributes:
        inputs: of all rows, noisy ones first.
        given: labels of all rows, on the device; those of trusted rows are right.
        noisy, trusted: row numbers.
        classes: how many.
        fold: 0 or 1 for every row, balanced over classes.
        build: makes a fresh network.
        plan: of a full training.
        config: the settings.
        stages: finished results.
        tick: called with the stage's name and steps done.
        votes: of several sources on the noisy rows (N, S), −1 where one is silent; None where labels are single.
    """

    inputs: Inputs
    given: Tensor
    noisy: Tensor
    trusted: Tensor
    classes: int
    fold: Tensor
    build: Callable[[], nn.Module]
    plan: TrainingPlan
    config: CleanConfig
    stages: Stages
    tick: Callable[[str, int], None]
    votes: Tensor | None = None

    @property
    def short(self) -> TrainingPlan:
        """A shorter training, for networks that are only asked for an opinion."""
        return replace(self.plan, epochs=SHORT_TRAINING * self.plan.epochs, least=round(0.8 * self.plan.least))

    @property
    def last(self) -> TrainingPlan:
        """Of the network that comes out: where there are few rows not longer than the short one."""
        return replace(self.short, epochs=FINAL_TRAINING * self.plan.epochs)

    @property
    def many(self) -> bool:
        """Whether a plain training on all rows takes several times the minimum number of steps."""
        return self.plan.steps(len(self.given)) >= MANY_ROWS * self.plan.least

    @property
    def brief(self) -> TrainingPlan:
        """An even shorter one, for networks of few trusted rows."""
        return replace(self.plan, epochs=SHORT_TRAINING * self.plan.epochs, least=self.plan.least // 3)

    def quick(self, rows: int) -> TrainingPlan:
        """The same for networks of this many rows, half of all: if they are few, half the steps at twice the rate."""
        plan = replace(self.short, least=self.short.least // 2)
        faster = self.short.steps(rows) / plan.steps(rows)
        return plan.faster(faster)

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.given.device

    def ticker(self, name: str) -> Tick:
        """The tick of one stage."""
        return lambda steps: self.tick(name, steps)

    def side(self, half: int, which: Tensor) -> Tensor:
        """Those of the rows that lie in this half."""
        return which[self.fold[which] == half]

    def labelled(self, rows: Tensor) -> Tensor:
        """Those of the rows that have a label."""
        return rows[self.given[rows] >= 0]

    def known(self, rows: Tensor) -> Tensor:
        """The evidence that takes the labels as they are given."""
        return certain(self.given[rows], self.classes)

    def fit(
        self, targets: list[TrainingTargets], plan: TrainingPlan, name: str, *, seeds: list[int]
    ) -> list[nn.Module]:
        """Train a network on each of the targets."""
        own = [self.config.seed + seed for seed in seeds]
        return train_batched(self.build, self.inputs, targets, plan, seeds=own, tick=self.ticker(name))


def folds(given: Tensor, groups: list[Tensor], count: int, seed: int) -> Tensor:
    """A fold for every row: within each group and label as even as can be, and at random."""
    random = torch.Generator().manual_seed(seed)
    labels, found = given.cpu(), torch.zeros(len(given), dtype=torch.long)
    for group in groups:
        rows, offset = group.cpu(), 0
        for label in labels[rows].unique().tolist():
            mine = rows[labels[rows] == label]
            mine = mine[torch.randperm(len(mine), generator=random)]
            found[mine] = (torch.arange(len(mine)) + offset) % count
            offset += len(mine)
    return found.to(given.device)


def train_on(
    work: Work, name: str, targets: TrainingTargets, plan: TrainingPlan | None = None, seed: int = 0
) -> nn.Module:
    """A network trained on targets, from disk if it was trained before."""
    trained: list[nn.Module] = []

    def compute() -> Tensors:
        network = train(
            work.build,
            work.inputs,
            targets,
            plan or work.plan,
            seed=work.config.seed + seed,
            tick=work.ticker(name),
        )
        trained.append(network)
        return dict(network.state_dict())

    weights = work.stages(name, compute)
    if trained:
        return trained[0]
    with torch.random.fork_rng(devices=[]):
        network = work.build().to(work.device)
    network.load_state_dict(weights)
    return network.eval()
