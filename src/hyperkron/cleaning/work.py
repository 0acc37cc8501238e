"""What every stage of a cleaning run needs: the rows, the plans of its trainings, and how to train a network.

A candidate is a function of the rows that it may see. The whole :class:`Work` holds all trusted rows, and what comes
out is made from it. :meth:`Work.views` gives the same work without one fold of the trusted rows after the other: all
that looks at trusted labels is done again in each view, and the fold that was left out judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning.batched_training import stackable, train_batched
from hyperkron.cleaning.config import BOOSTED, CleanConfig
from hyperkron.cleaning.evidence import certain
from hyperkron.cleaning.models.trees import MAX_SAMPLE
from hyperkron.cleaning.stages import Stages, Tensors
from hyperkron.cleaning.trainer import Dense, Inputs, TrainingPlan, TrainingTargets, predict

MANY_ROWS = 3
"""There are many rows where a plain training takes this many times the least number of steps."""
SHORT_TRAINING = 0.5
"""Length of the trainings that only give an opinion, as a part of the full length."""
FINAL_TRAINING = 0.75
"""Length of the training of every candidate's network, as a part of the full length."""
BOOSTED_STEPS, FOREST_STEPS = 350, 1000
"""Steps that boosting of one class, and a small forest, count for."""
JUDGING_FOLDS, FEW_JUDGING_FOLDS = 5, 2
"""Folds of the trusted rows where networks are trained side by side, and where each costs its whole training."""


@dataclass
class Work:
    """What every stage needs; all of the trusted rows, or a view without some of them.

    Attributes:
        inputs: of all rows, noisy ones first.
        given: labels of all rows, on the device; those of trusted rows are right.
        noisy, trusted: numbers of the rows that may be used.
        classes: how many.
        fold: the half, 0 or 1, of every row, balanced over classes; the same for noisy rows in all views.
        build: makes a fresh network.
        plan: of a full training.
        config: the settings.
        stages: finished results.
        tick: called with the stage's name and steps done; and, before trees are fitted, what these will count for.
        trees: whether there are forests among the experts.
        tree_model: whether trees may be delivered in place of a network.
        probabilities: of all rows (rows, C), from a model of the user's; None where there is none.
        estimator: a classifier of the user's; None where there is none.
        held_out: numbers of the trusted rows that are left out of a view, to judge what is made from it.
        scope: begins the names of a view's stages.
        votes: of several sources on the noisy rows (N, S), −1 where one is silent; None where labels are single.
        shift: added to the seeds of a view's networks.
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
    tick: Callable[..., None]
    trees: bool = False
    tree_model: bool = False
    probabilities: Tensor | None = None
    estimator: Any = None
    held_out: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    scope: str = ""
    votes: Tensor | None = None
    shift: int = 0

    def views(self) -> list[Work]:
        """The same without one fold of the trusted rows after the other, of each class as many in every fold."""
        with torch.random.fork_rng(devices=[]):
            beside = stackable([self.build()], self.inputs)
        count = min(JUDGING_FOLDS if beside else FEW_JUDGING_FOLDS, len(self.trusted))
        part = folds(self.given, [self.trusted], count, self.config.seed)[self.trusted]
        found = []
        for k in range(count):
            kept = self.trusted[part != k]
            halves = folds(self.given, [self.noisy, kept], 2, self.config.seed)
            apart = replace(self, trusted=kept, held_out=self.trusted[part == k], fold=halves)
            found.append(replace(apart, scope="without-fold-", shift=100 * (k + 1)))
        return found

    @property
    def short(self) -> TrainingPlan:
        """A shorter training, for networks that are only asked for an opinion."""
        return replace(self.plan, epochs=SHORT_TRAINING * self.plan.epochs, least=round(0.8 * self.plan.least))

    @property
    def last(self) -> TrainingPlan:
        """Of the network of every candidate: where there are few rows not longer than the short one."""
        return replace(self.short, epochs=FINAL_TRAINING * self.plan.epochs)

    @property
    def brief(self) -> TrainingPlan:
        """An even shorter one, for networks of few trusted rows."""
        return replace(self.plan, epochs=SHORT_TRAINING * self.plan.epochs, least=self.plan.least // 3)

    @property
    def alone(self) -> TrainingPlan:
        """Of networks of all trusted rows alone: they count most, and are trained longer where that costs little."""
        return self.short if self.plan.steps(len(self.given)) >= MANY_ROWS * self.plan.least else self.brief

    def quick(self, rows: int) -> TrainingPlan:
        """The same for networks of this many rows, half of all: if they are few, half the steps at twice the rate."""
        plan = replace(self.short, least=self.short.least // 2)
        faster = self.short.steps(rows) / plan.steps(rows)
        return plan.faster(faster)

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.given.device

    def fitting(self, name: str, kind: str, rows: int) -> None:
        """Tell that trees of this kind are fitted to this many rows."""
        self.tick(name, 0, fit_steps(kind, rows, self.classes))

    @property
    def every(self) -> Tensor:
        """The noisy rows, then the trusted ones."""
        return torch.cat([self.noisy, self.trusted])

    def side(self, half: int, which: Tensor) -> Tensor:
        """Those of the rows that lie in this half."""
        return which[self.fold[which] == half]

    def crossed(self, half: int) -> Tensor:
        """The noisy rows of this half and the trusted rows of the other."""
        return torch.cat([self.side(half, self.noisy), self.side(1 - half, self.trusted)])

    def answers(self, models: Iterable[nn.Module] = (), asked: Iterable[Tensor] = ()) -> Tensor:
        """What models say (rows, C), each of the rows it is asked about; zeros for all others."""
        found = torch.zeros(len(self.given), self.classes, device=self.device)
        for model, rows in zip(models, asked, strict=True):
            found[rows] = predict(model, self.inputs, rows)
        return found

    def vectors(self, rows: Tensor) -> Tensor:
        """The inputs of rows as trees take them (n, d)."""
        assert isinstance(self.inputs, Dense)
        return self.inputs.values[rows].flatten(1)

    def labelled(self, rows: Tensor) -> Tensor:
        """Those of the rows that have a label."""
        return rows[self.given[rows] >= 0]

    @property
    def unseen(self) -> list[int]:
        """The classes of given labels that no trusted row has."""
        there, trusted = (set(self.given[self.labelled(rows)].tolist()) for rows in (self.noisy, self.trusted))
        return sorted(there - trusted)

    def known(self, rows: Tensor) -> Tensor:
        """The evidence that takes the labels as they are given."""
        return certain(self.given[rows], self.classes)

    def as_given(self, rows: Tensor, weight: Tensor | None = None) -> TrainingTargets:
        """The rows with their labels as they are given."""
        return TrainingTargets(rows, self.known(rows), weight)

    def fit(
        self, targets: Sequence[TrainingTargets], plan: TrainingPlan, name: str, *, seeds: list[int]
    ) -> list[nn.Module]:
        """Train a network on each of the targets."""
        own = [self.config.seed + seed for seed in seeds]
        return train_batched(self.build, self.inputs, targets, plan, seeds=own, tick=partial(self.tick, name))


def staged(works: Sequence[Work], name: str, compute: Callable[[], list[Tensors]]) -> list[Tensors]:
    """The results of a stage for one or several views, found or computed all together."""
    first = works[0]

    def joined() -> Tensors:
        return {f"{i}-{key}": x for i, found in enumerate(compute()) for key, x in found.items()}

    kept = first.stages(first.scope + name, joined)
    return [
        {key.partition("-")[2]: x for key, x in kept.items() if key.partition("-")[0] == str(i)}
        for i in range(len(works))
    ]


def fit_steps(kind: str, rows: int, classes: int) -> int:
    """Steps of networks that take about as long as fitting trees, to show how far a run is.

    Boosting fits a tree for every class in every round; a tree of a forest has at most MAX_SAMPLE rows. Measured on one
    core with tables of 800 to 200,000 rows; the truth is within a factor of about three.
    """
    if kind == BOOSTED:
        return BOOSTED_STEPS * (classes if classes > 2 else 1)
    return FOREST_STEPS + min(rows, MAX_SAMPLE) // 5


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
