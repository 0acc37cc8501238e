"""The tuning of ``experiments/mnist/compare.py``: every setting of every method, on the second validation part."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from experiments.mnist.problem import SOLVER, Plan, Setting, Trial, noisy_mnist, prepare
from experiments.paper.cleaning import Split
from experiments.paper.entries import Entry, Stage, Task, carry_out
from experiments.paper.recipe import Job
from experiments.paper.side_by_side import fill_stages
from experiments.paper.tuning import Grid, Search, Tuned, tune

SAME = {"AmIGO-KFAC": "AID-KFAC"}
"""A direct solve leaves nothing to amortise: these two are one method."""


def trial(name: str, setting: Setting, split: Split, plan: Plan) -> float:
    """The lowest loss on the second validation part within the plan's steps."""
    run = Trial(name, setting, split, plan, 0)
    steps = plan.steps(name)
    for done in range(0, steps, plan.block):
        run.advance(min(plan.block, steps - done))
        run.look(second=split.second)
    return min(row["second_loss"] for row in run.curve)


def grid(name: str, plan: Plan) -> Grid:
    """The values that are tried."""
    return {"inner": plan.inner, "outer": plan.outer, "solver": SOLVER[name][1]}


def trials(name: str, plan: Plan) -> int:
    """How many settings are tried: all."""
    return math.prod(len(values) for values in grid(name, plan).values())


def stages(plan: Plan, split: Callable[[], Split]) -> list[Stage]:
    """Each method on its own, since the sizes of grids may differ; nothing but trials."""

    def entry(name: str) -> Entry:
        def score(setting: dict[str, float]) -> float:
            return trial(name, Setting(**setting), split(), plan)

        return Entry(name, grid(name, plan), score, lambda setting, seed: {})

    names = [name for name in SOLVER if name not in SAME]
    return [Stage("all settings", [entry(name)], seeds=0, trials=trials(name, plan)) for name in names]


def tuned(job: Job, workers: int) -> dict[str, Any]:
    """The setting of every method with the lowest loss, and all trials that led to it."""
    plan: Plan = job.settings
    split = cache(partial(_split, job.data, plan, str(job.device)))
    found: dict[str, Any] = {}
    every = stages(plan, split)
    if workers > 1:
        fill_stages(job, every, 1, workers, partial(_worker, job.data, plan, str(job.device)))
    for stage in every:
        [entry] = stage.entries
        search = Search(trials(entry.name, plan), 1, 1.0)
        found[entry.name] = _record(tune(job, [stage.name, entry.name], entry.grid, search, _scoring(entry)))
    return {name: found[SAME.get(name, name)] for name in SOLVER}


def _scoring(entry: Entry) -> Any:
    """The score of an entry, as the search calls it."""
    return lambda found, _: entry.score(found)


def _record(found: Tuned) -> dict[str, Any]:
    names = ("inner", "outer", "solver")
    rows = [{**{name: row[name] for name in names}, "second_loss": row["loss"]} for row in found.trials]
    return {"setting": found.setting, "second_loss": found.loss, "trials": rows}


def _split(folder: Path | None, plan: Plan, device: str) -> Split:
    assert folder is not None
    return noisy_mnist(folder, plan.counts, seed=0).to(device)


def _worker(folder: Path | None, plan: Plan, device: str) -> Callable[[Task], dict[str, Any]]:
    """What carries out a trial in a process of its own, which loads the data once."""
    prepare(device)
    split = _split(folder, plan, device)
    return partial(carry_out, stages(plan, lambda: split))
