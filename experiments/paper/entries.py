"""Contestants tuned and run in the order of their importance, as far as the time allows.

A recipe that runs on a machine lent for minutes must leave something useful whenever it is stopped: its stages are
worked off in order, and a stopped run gives the entries and seeds that are in the cache by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.paper.recipe import Job
from experiments.paper.tuning import Grid, Search, Setting, at_edge, settings_of, trial_key, tune
from experiments.pieces import OutOfTime


@dataclass(frozen=True)
class Found:
    """What there was time for.

    Attributes:
        stages: by stage and entry: ``setting``, ``edge`` (names at an edge of the grid) and ``runs``, one for each
            finished seed.
        cut_short: whether something is missing.
    """

    stages: dict[str, dict[str, dict[str, Any]]]
    cut_short: bool


@dataclass(frozen=True)
class Entry:
    """Something that is tuned and run: a method or a reference line.

    Attributes:
        name: of the method.
        grid: of its settings.
        score: a short run of a setting with seed 0; what the second validation part says of it, lower is better.
        final: the full run of a setting with a seed, with the test part looked at.
    """

    name: str
    grid: Grid
    score: Callable[[Setting], float]
    final: Callable[[Setting, int], dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """Entries that are compared with each other.

    Attributes:
        name: unique; part of the key of every cell.
        entries: the first is tuned first.
        seeds: how many of the job's seeds at most; ``None`` for all.
        trials: of its entries; ``None`` for as many as in all stages.
    """

    name: str
    entries: Sequence[Entry]
    seeds: int | None = None
    trials: int | None = None


def _search(stage: Stage, trials: int) -> Search:
    """All settings run equally long, once."""
    return Search(trials if stage.trials is None else stage.trials, 1, 1.0)


def chosen(job: Job, stage: Stage, entry: Entry, trials: int) -> Setting:
    """The best of ``trials`` settings, all run equally long."""
    search = _search(stage, trials)
    return tune(job, [stage.name, entry.name], entry.grid, search, lambda setting, _: entry.score(setting)).setting


def _run(job: Job, stage: Stage, entry: Entry, trials: int, seed: int) -> dict[str, Any]:
    setting = chosen(job, stage, entry, trials)
    return job.cell([stage.name, entry.name, setting, seed], lambda: entry.final(setting, seed))


def compete(job: Job, stages: Sequence[Stage], trials: int) -> Found:
    """Tune and run all entries, stage by stage and in each seed by seed; when time is up, what there is.

    The recipe must be ``partial``.
    """
    cut_short = False
    try:
        for stage in stages:
            for entry in stage.entries:
                chosen(job, stage, entry, trials)
            for seed in job.seeds[: stage.seeds]:
                for entry in stage.entries:
                    _run(job, stage, entry, trials, seed)
    except OutOfTime:
        cut_short = True
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for stage in stages:
        for entry in stage.entries:
            seeds = job.seeds[: stage.seeds]
            runs = [run for seed in seeds if (run := _cached(job, stage, entry, trials, seed)) is not None]
            if runs:
                setting = chosen(job, stage, entry, trials)
                edge = at_edge(setting, entry.grid)
                found.setdefault(stage.name, {})[entry.name] = {"setting": setting, "edge": edge, "runs": runs}
    if not found:
        raise OutOfTime("the time limit was reached before the first run was done; run the same command again.")
    return Found(found, cut_short)


def _cached(job: Job, stage: Stage, entry: Entry, trials: int, seed: int) -> dict[str, Any] | None:
    try:
        return _run(job, stage, entry, trials, seed)
    except OutOfTime:
        return None


class Task(NamedTuple):
    """One cell of :func:`compete`: a trial, or the run of a seed."""

    stage: int
    entry: int
    setting: Setting
    seed: int | None


def missing(job: Job, stages: Sequence[Stage], trials: int) -> Iterator[tuple[list[Any], Task]]:
    """The cells that are not in the cache and can be computed now, with their keys, in the order of :func:`compete`.

    The run of a seed can be computed when all trials of its entry are done.
    """
    for s, stage in enumerate(stages):
        tuned: dict[int, Setting] = {}
        search = _search(stage, trials)
        for e, entry in enumerate(stage.entries):
            settings = settings_of(entry.grid, search.trials)
            keys = [trial_key([stage.name, entry.name], setting, search.short) for setting in settings]
            left = [i for i, key in enumerate(keys) if job.cells.get(key) is None]
            yield from ((keys[i], Task(s, e, settings[i], None)) for i in left)
            if not left:
                tuned[e] = chosen(job, stage, entry, trials)
        for seed in job.seeds[: stage.seeds]:
            for e, setting in tuned.items():
                key = [stage.name, stage.entries[e].name, setting, seed]
                if job.cells.get(key) is None:
                    yield key, Task(s, e, setting, seed)


def carry_out(stages: Sequence[Stage], task: Task) -> dict[str, Any]:
    """The value of a cell."""
    entry = stages[task.stage].entries[task.entry]
    return {"loss": entry.score(task.setting)} if task.seed is None else entry.final(task.setting, task.seed)
