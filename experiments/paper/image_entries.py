"""The image methods and reference lines as entries, with step sizes of λ that mean the same for every method.

Hypergradients of different methods differ by orders of magnitude (v = b for the identity, about b/δ for a curvature
damped by δ), so that a grid of absolute step sizes small enough for minutes suits some methods and not others. Here
``outer`` is relative: by how much the weights of a batch move in the first step that counts, as a root mean square.
The two steps before it (the first two along which λ would move at all), which are on the clock like all others, leave λ
where it is and measure the unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from experiments.paper import cleaning, references
from experiments.paper.cleaning import Budget, Case, Split
from experiments.paper.compare import Contest, Splits
from experiments.paper.entries import Entry
from experiments.paper.methods import Method
from experiments.paper.tuning import Grid, Setting
from hyperkron.solution import HyperkronError

MEASURED = 2
"""Steps that measure the unit."""
TINY = 1e-20
"""The step size of λ while it is measured; MRBO and others need one that is positive."""


def relative_step(norms: Sequence[float], touched: int) -> float:
    """The step size that moves ``touched`` weights by one each (root mean square), from norms of hypergradients.

    Example:
        >>> relative_step([0.2, 0.4], 4)  # 2 / 0.3
        6.666666666666666
    """
    return math.sqrt(touched) / (sum(norms) / len(norms))


class RelativeTrial(cleaning.Trial):
    """A run whose ``outer`` is relative, see :mod:`experiments.paper.image_entries`."""

    def __init__(self, case: Case, split: Split, method: Method, setting: Setting, seed: int) -> None:
        super().__init__(case, split, method, {**setting, "outer": TINY}, seed)
        self.wanted = setting["outer"]
        self.touched = min(case.batch, len(split.train[0]))
        self.norms: list[float] = []

    def advance(self, seconds: float, steps: int) -> None:
        """Go on as any run does; after the measuring steps set λ's step size."""
        while not self.failed and self.clock.seconds < seconds and self.state.step < steps:
            try:
                with self.clock:
                    report = self.algorithm.step(self.state, self.batches)
            except (HyperkronError, torch.linalg.LinAlgError):
                self.failed = True
                return
            if report.direction > 0 and len(self.norms) < MEASURED:
                self.norms.append(report.direction)
                if len(self.norms) == MEASURED:
                    self.state.outer.rescale(self.wanted * relative_step(self.norms, self.touched) / TINY)


def method_entry(contest: Contest, splits: Splits, method: Method) -> Entry:
    """A method of :mod:`experiments.paper.methods` with relative steps; trials get the search's short share of time."""

    def score(setting: Setting) -> float:
        cleaning.warm_up(contest.case, splits[0], method, setting, RelativeTrial)
        budget = contest.budget.share(contest.search.short)
        return cleaning.tuning_loss(contest.case, splits[0], method, setting, budget, kind=RelativeTrial)

    def final(setting: Setting, seed: int) -> dict[str, Any]:
        return cleaning.final(contest.case, splits[seed], method, setting, contest.budget, seed, RelativeTrial)

    return Entry(method.name, method.grid, score, final)


def reference_entry(contest: Contest, splits: Splits, kind: references.Kind, grid: Grid) -> Entry:
    """A reference line, tuned like a method."""

    def rows(setting: Setting, budget: Budget, seed: int, test: bool) -> list[dict[str, float]]:
        return references.train(contest.case, splits[seed], kind, setting, budget, seed, test)

    def score(setting: Setting) -> float:
        budget = contest.budget.share(contest.search.short)
        return min(row["second_loss"] for row in rows(setting, budget, 0, False))

    def final(setting: Setting, seed: int) -> dict[str, Any]:
        return {"best": min(rows(setting, contest.budget, seed, True), key=lambda row: row["second_loss"])}

    return Entry(kind, grid, score, final)
