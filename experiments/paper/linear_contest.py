"""Which runs of the linear model follow from which: studies, trials, winners, and runs of all steps.

For :mod:`experiments.paper.linear_length`, whose docstring has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments import records
from experiments.paper import references
from experiments.paper.linear_runs import Task, key, loss_of, order_of, task_of
from experiments.paper.methods import Rates, methods
from experiments.paper.tuning import Grid, Setting, settings_of

RESULT = records.RESULTS / "paper" / "linear-length.jsonl"
ROWS = 50_000
PRINTED = Rates(momentum=(0.9,), step=(0.003, 0.01, 0.03, 0.1, 0.3))
"""The printed grid; the steps of Neumann and AmIGO are not printed."""
WIDE = replace(PRINTED, inner=(0.3, 0.1, 0.03, 0.01), outer=(1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6))
PLAIN = {"inner": (0.01, 0.03, 0.1, 0.3), "momentum": (0.9,)}
"""The grid of the reference lines."""
ARMS = {"as printed": PRINTED, "each its own": WIDE}
NAMES = (
    *("AID-KFAC", "AID-CG-3", "AID-identity", "AmIGO", "MRBO-KFAC", "MRBO", *references.KINDS),
    *("AID-Neumann-10", "BOME", "BSG-1", "AID-EKFAC"),
)
"""Most important first. With a batch of all rows stocBiO is AID with Neumann-10; AmIGO with KFAC is AID with KFAC,
because a direct solve leaves nothing to amortise.
"""
COMPARED = ("AID-KFAC", "AID-CG-3", "AmIGO", "MRBO-KFAC", "MRBO")
BATCHES = (128, 1000, 5000, 10_000, ROWS)
DAMPINGS = (1e-3, 1e-5, 1e-10)
DECAYS = (0.0, 0.3, 0.5, 0.9)
AVERAGED = (1000, ROWS)
"""The batches of figure 6."""
TAUS = (1, 5, 10, 50)
TAU_BATCH = 1000


class Line(NamedTuple):
    """What is tuned and run: a method on a grid.

    Attributes:
        study, title: unique together.
        fixed: joins every setting of the grid; a grid's own value wins.
        variants: each joins the winner in runs of its own.
        rank: lines of a lower one come first.
    """

    study: str
    title: str
    method: str
    grid: Grid
    fixed: Mapping[str, float] = MappingProxyType({})
    variants: tuple[Mapping[str, float], ...] = (MappingProxyType({}),)
    rank: int = 0


class Plan(NamedTuple):
    """How much is run."""

    steps: int = 1000
    tried: int = 24
    kept: int = 2
    seeds: int = 3
    short: float = 0.1

    @property
    def first(self) -> int:
        """Outer steps of a trial."""
        return max(1, round(self.short * self.steps))


def figure_5(rows: int = ROWS) -> list[Line]:
    """Every method in both arms."""
    plain: dict[str, Grid] = dict.fromkeys(references.KINDS, PLAIN)
    grids = {arm: {x.name: x.grid for x in methods(rates).values()} | plain for arm, rates in ARMS.items()}
    return [
        Line("figure 5", f"{name}, {arm}", name, grids[arm][name], rank=_rank(name, arm))
        for arm in ARMS
        for name in NAMES
    ]


def _rank(name: str, arm: str) -> int:
    """What the rule on figure 5 compares comes first, then batches, intervals, other methods, and the other arm."""
    return 4 if arm != "as printed" else 0 if name in COMPARED else 3


def _printed(name: str, *leave_out: str) -> Grid:
    return {x: values for x, values in methods(PRINTED)[name].grid.items() if x not in leave_out}


def averages(rows: int = ROWS) -> list[Line]:
    """Figure 6; without the penalty α, whose curvature would hide the dampings below it."""
    grid, betas = _printed("AID-KFAC", "damping"), tuple({"ema": beta} for beta in DECAYS)
    cases = [(_of_all(batch, rows), damping) for batch in AVERAGED for damping in DAMPINGS]
    return [
        Line(
            "averages",
            _titled(batch, rows, damping),
            "AID-KFAC",
            grid,
            batch | {"damping": damping, "decay": 0.0},
            betas,
            rank=5,
        )
        for batch, damping in cases
    ]


def batches(rows: int = ROWS) -> list[Line]:
    """Figures 3 and 7."""
    return [
        Line("batches", f"{name}, batch {batch}", name, _printed(name), _of_all(batch, rows), rank=1)
        for batch in BATCHES
        for name in ("AID-KFAC", "AID-CG-3")
    ]


def intervals(rows: int = ROWS) -> list[Line]:
    """Table 2 with the linear model."""
    every, fixed = tuple({"refresh": float(tau)} for tau in TAUS), _of_all(TAU_BATCH, rows) | {"refresh": 5.0}
    return [Line("intervals", name, name, _printed(name), fixed, every, 2) for name in ("AID-KFAC", "AID-EKFAC")]


def _of_all(batch: int, rows: int) -> dict[str, float]:
    """The batch in a setting; none where it is all rows, and at most a fifth of fewer rows."""
    return {} if batch == ROWS else {"batch": float(min(batch, max(1, rows // 5)))}


def _titled(batch: Mapping[str, float], rows: int, damping: float) -> str:
    return f"batch {batch.get('batch', rows):.0f}, damping {damping:g}"


STUDIES: dict[str, Callable[[int], list[Line]]] = {
    "figure 5": figure_5,
    "averages": averages,
    "batches": batches,
    "intervals": intervals,
}
LENGTH = Plan()


class Contest:
    """What has been run so far, what comes next, and who won.

    Args:
        rows: finished runs.
        plan: how much is run.
        lines: most important first.
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], plan: Plan = LENGTH, lines: Sequence[Line] | None = None
    ) -> None:
        self.plan = plan
        self.lines = [line for study in STUDIES.values() for line in study(ROWS)] if lines is None else list(lines)
        self.done = {key(task_of(row)): row for row in rows}

    def trials(self, line: Line) -> list[Task]:
        """The short runs of a line, at random places of its grid."""
        count = min(self.plan.tried, math.prod(map(len, line.grid.values())))
        tried = settings_of(line.grid, count)
        return [Task(line.method, {**line.fixed, **setting}, 0, self.plan.first, False) for setting in tried]

    def kept(self, line: Line) -> list[Task]:
        """The best trials, for all steps; none before all trials are done."""
        tried = self.trials(line)
        if any(key(task) not in self.done for task in tried):
            return []
        best = sorted(tried, key=lambda task: order_of(self.done[key(task)]))[: self.plan.kept]
        return [task._replace(steps=self.plan.steps) for task in best]

    def winner(self, line: Line) -> Setting | None:
        """The setting with the lowest second validation loss after all steps, once that is known."""
        kept = self.kept(line)
        if not kept or any(key(task) not in self.done for task in kept):
            return None
        return min(kept, key=lambda task: loss_of(self.done[key(task)])).setting

    def finals(self, line: Line, variants: Sequence[Mapping[str, float]] | None = None) -> list[Task]:
        """The runs of the winner, seed by seed; none before it is known."""
        won = self.winner(line)
        if won is None:
            return []
        settings = [{**won, **variant} for variant in (line.variants if variants is None else variants)]
        seeds = range(1, self.plan.seeds + 1)
        return [Task(line.method, x, seed, self.plan.steps, True) for seed in seeds for x in settings]

    def results(self, line: Line, variant: Mapping[str, float] = MappingProxyType({})) -> list[dict[str, Any]]:
        """The finished runs of the winner in a variant, seed by seed."""
        return [self.done[key(task)] for task in self.finals(line, [variant]) if key(task) in self.done]

    def missing(self) -> Iterator[tuple[list[Any], Task]]:
        """The runs that can begin now, by rank, and of a rank those that complete a line first."""
        seen = set(self.done)
        for rank in sorted({line.rank for line in self.lines}):
            lines = [line for line in self.lines if line.rank == rank]
            for task in (
                task for stage in (self.finals, self.kept, self.trials) for line in lines for task in stage(line)
            ):
                if key(task) not in seen:
                    seen.add(key(task))
                    yield list(task), task
