"""The image methods and reference lines as entries, with step sizes of λ that mean the same for every method.

Hypergradients of different methods differ by orders of magnitude (v = b for the identity, about b/δ for a curvature
damped by δ), so that a grid of absolute step sizes small enough for minutes suits some methods and not others. Here
``outer`` is relative: by how much the weights of a batch move in the first step that counts, as a root mean square.
The two steps before it (the first two along which λ would move at all), which are on the clock like all others, leave λ
where it is and measure the unit.
"""

from __future__ import annotations

from typing import Any

from experiments.paper import cleaning, references
from experiments.paper.cleaning import Budget
from experiments.paper.compare import Contest, Splits
from experiments.paper.entries import Entry
from experiments.paper.methods import Method
from experiments.paper.tuning import Grid, Setting


def method_entry(contest: Contest, splits: Splits, method: Method) -> Entry:
    """A method of :mod:`experiments.paper.methods` with relative steps; trials get the search's short share of time."""

    def score(setting: Setting) -> float:
        cleaning.warm_up(contest.case, splits[0], method, setting, relative=True)
        budget = contest.budget.share(contest.search.short)
        return cleaning.tuning_loss(contest.case, splits[0], method, setting, budget, relative=True)

    def final(setting: Setting, seed: int) -> dict[str, Any]:
        return cleaning.final(contest.case, splits[seed], method, setting, contest.budget, seed, relative=True)

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
