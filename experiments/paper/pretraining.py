"""Table 4: continued pretraining with a learned weight for every auxiliary text.

    python -m experiments.paper run pretraining --scale small --device cuda --workers 8 --limit-minutes 5

θ's step size is chosen on dev for each task by the Baseline and serves every method. λ has two arms: ``printed`` (Adam
1e-5) and ``own``, the best on dev of a grid that contains it, chosen with the first seed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.paper import costs
from experiments.paper.pretraining_page import NOTE, answer, tables, verdict
from experiments.paper.pretraining_trial import BILEVEL, METHODS, Case, Source, Trial
from experiments.paper.recipe import LISTED, Job, Recipe, Scale
from experiments.paper.side_by_side import share_cells
from experiments.paper.texts import MADE_UP
from experiments.pieces import OutOfTime
from hyperkron.solution import HyperkronError

PRINTED = 1e-5
"""The printed step size of λ."""
MAIN = ("Baseline", "TARTAN-MT", "SAMA", "KFAC-EMP")
MORE = ("KFAC-mc", "EKFAC", "KFAC-EMP, one weight")
REFERENCES = ("TARTAN-MT, all rows", "Baseline, files as they are")
CAUSES = ("TARTAN-MT, longer head", "TARTAN-MT, weight 0.1")
"""Whether masked-language modelling hurts because its head starts fresh, or because it counts too much."""


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        encoder: its folder in the data folder.
        lengths: tokens of a row, by task; with others, begin another file of cells.
        groups: tasks that are done together, in the order of their importance.
        methods: the rows of the table that are done first, then the others.
        case: batch, steps and so on, the same for all.
        inner: step sizes of θ that the Baseline tries.
        outer: step sizes of λ, the printed one among them; a single weight has a hundred times these.
        priced: the task on which prices are measured, and
        timed: over how many outer iterations.
    """

    encoder: str
    lengths: dict[str, int] = field(metadata=LISTED)
    groups: tuple[tuple[str, ...], ...] = field(metadata=LISTED)
    methods: tuple[tuple[str, ...], ...] = field(metadata=LISTED)
    case: Case
    inner: tuple[float, ...] = field(metadata=LISTED)
    outer: tuple[float, ...] = field(metadata=LISTED)
    priced: str = field(metadata=LISTED)
    timed: int = field(default=10, metadata=LISTED)

    def outer_of(self, method: str) -> tuple[float, ...]:
        """The grid of λ's step size."""
        return tuple(100 * x for x in self.outer) if METHODS[method].scalar else self.outer


class Task(NamedTuple):
    """One run: its key in the cell cache. ``outer`` is ``None`` for plain training."""

    dataset: str
    method: str
    inner: float
    outer: float | None
    seed: int


def chosen(job: Job, trials: Sequence[Task]) -> Task | None:
    """The trial with the best F1 on dev (the lower dev loss among equals); ``None`` where one is missing."""
    found = [(task, job.cells.get(list(task))) for task in trials]
    if not all(cell for _, cell in found):
        return None
    scored = [(cell["dev"], -cell["dev_loss"], -i) for i, (_, cell) in enumerate(found) if cell and cell["dev"]]
    return trials[-max(scored)[2]] if scored else trials[0]


def rate_trials(job: Job, dataset: str) -> list[Task]:
    """What chooses θ's step size."""
    return [Task(dataset, "Baseline", rate, None, job.seeds[0]) for rate in job.settings.inner]


def own_trials(job: Job, dataset: str, method: str, inner: float) -> list[Task]:
    """What chooses λ's step size."""
    return [Task(dataset, method, inner, rate, job.seeds[0]) for rate in job.settings.outer_of(method)]


def planned(job: Job) -> Iterator[Task]:
    """Every run that is known to be wanted by now, the most important first; some come only when others are done."""
    settings: Settings = job.settings
    waiting = 0  # groups whose step size of θ is not known yet: of those that come later nothing is begun
    for names in settings.methods:
        for group in settings.groups:
            yield from _planned(job, group, names)
            waiting += any(chosen(job, rate_trials(job, dataset)) is None for dataset in group)
            if waiting == 2:
                return


def _planned(job: Job, group: Sequence[str], names: Sequence[str]) -> Iterator[Task]:
    rates: dict[str, float] = {}
    for dataset in group:
        yield from (trials := rate_trials(job, dataset))
        if (best := chosen(job, trials)) is not None:
            rates[dataset] = best.inner

    def plain(wanted: Sequence[str]) -> Iterator[Task]:
        for seed in job.seeds:
            for dataset, inner in rates.items():
                yield from (Task(dataset, x, inner, PRINTED if x in BILEVEL else None, seed) for x in wanted)

    yield from plain([name for name in names if name not in CAUSES and not METHODS[name].scalar])
    for dataset, inner in rates.items():
        for name in (name for name in names if name in BILEVEL):
            yield from (trials := own_trials(job, dataset, name, inner))
            if (best := chosen(job, trials)) is not None:
                yield from (best._replace(seed=seed) for seed in job.seeds)
    yield from plain([name for name in names if name in CAUSES])


def _missing(job: Job) -> list[Task]:
    return [task for task in dict.fromkeys(planned(job)) if job.cells.get(list(task)) is None]


def _source(job: Job) -> Source:
    return Source(job.settings.encoder, job.data, job.device, job.settings.lengths)


def _run(source: Source, case: Case, task: Task) -> dict[str, Any]:
    _prepare(source.device)
    return Trial(source, case, *task).train()


def _prepare(device: torch.device) -> None:
    """Tensor cores for products, and the memory of the last run given back: its graphs keep theirs."""
    torch.set_float32_matmul_precision("high")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _prices(job: Job, source: Callable[[], Source], names: Sequence[str]) -> dict[str, Any]:
    """Seconds of an outer iteration by method, each with the device to itself; without those there was no time for."""
    settings: Settings = job.settings
    dataset, found = settings.priced, {}
    for name in names:

        def price(name: str = name) -> dict[str, Any]:
            _prepare(job.device)
            trial = Trial(source(), settings.case, dataset, name, settings.inner[0], PRINTED, job.seeds[0])
            try:
                return trial.price(settings.timed)
            except (HyperkronError, torch.OutOfMemoryError) as error:
                return {"seconds": None, "error": f"{error!s:.200}"}

        try:
            found[name] = job.cell(["price", dataset, name], price)
        except OutOfTime:
            break
    return found


class _Once:
    """The source, made when it is first needed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.made: Source | None = None

    def __call__(self) -> Source:
        self.made = self.made or _source(self.job)
        return self.made


def work(job: Job) -> dict[str, Any]:
    """Prices, then every run in order, and what they found."""
    source = _Once(job)
    unpriced = (*REFERENCES, *CAUSES)
    prices = _prices(job, source, [name for names in job.settings.methods for name in names if name not in unpriced])
    try:
        while left := _missing(job):
            job.cell(list(left[0]), partial(_run_from, source, job.settings.case, left[0]))
    except OutOfTime:
        pass
    found = {dataset: summary(job, dataset) for group in job.settings.groups for dataset in group}
    found = {dataset: of for dataset, of in found.items() if of}
    if not found:
        raise OutOfTime("the time limit was reached before the first run was done; run the same command again.")
    return {
        "prices": prices,
        "alone": costs.alone(job.scale, "pretraining"),
        "tasks": found,
        "steps": job.settings.case.steps,
        "cut_short": bool(_missing(job)),
    }


def _run_from(source: Callable[[], Source], case: Case, task: Task) -> dict[str, Any]:
    return _run(source(), case, task)


def summary(job: Job, dataset: str) -> dict[str, Any]:
    """Of a task: θ's step size, and by method the figures of every seed, for both arms of λ's step size."""
    settings: Settings = job.settings
    best = chosen(job, rate_trials(job, dataset))
    if best is None:
        return {}
    found: dict[str, Any] = {}
    for name in (name for names in settings.methods for name in names):
        if name not in BILEVEL:
            arms = {"plain": best._replace(method=name)}
        else:
            arms = {"printed": Task(dataset, name, best.inner, PRINTED, 0)}
            if (own := chosen(job, own_trials(job, dataset, name, best.inner))) is not None:
                arms["own"] = own
        runs = {arm: _runs(job, task) for arm, task in arms.items()}
        if any(runs.values()):
            found[name] = {arm: figures for arm, figures in runs.items() if figures}
    edges = (min(settings.inner), max(settings.inner))
    edge = len(settings.inner) > 1 and best.inner in edges
    return {"inner": best.inner, "edge": edge, "methods": found, "tried": _tried(job, dataset, best.inner)}


def _tried(job: Job, dataset: str, inner: float) -> dict[str, dict[str, Any]]:
    """By method and step size of λ: dev F1 of the first seed, and the mean weight at the end."""
    found: dict[str, dict[str, Any]] = {}
    for name in (name for name in MAIN if name in BILEVEL):
        for task in own_trials(job, dataset, name, inner):
            if (cell := job.cells.get(list(task))) is not None and cell["dev"] is not None:
                found.setdefault(name, {})[f"{task.outer:g}"] = [cell["dev"], cell["weights"]["mean"]]
    return found


def _runs(job: Job, task: Task) -> dict[str, Any]:
    """The figures of the seeds that are done."""
    cells = [(seed, job.cells.get(list(task._replace(seed=seed)))) for seed in job.seeds]
    done = [(seed, cell) for seed, cell in cells if cell is not None]
    if not done:
        return {}
    grid = job.settings.outer_of(task.method)
    return {
        "outer": task.outer,
        "edge": task.outer is not None and len(grid) > 1 and task.outer == max(grid),
        "seeds": [seed for seed, _ in done],
        **{key: [cell[key] for _, cell in done] for key in ("dev", "test", "failed", "weights")},
    }


def fill(job: Job, recipe: Recipe, count: int) -> None:
    """Prices of the main methods, with the device to themselves; then the runs, in ``count`` processes."""
    source = _Once(job)
    _prices(job, source, MAIN)
    source.made = None
    make = partial(_worker, job.settings, job.data, str(job.device))
    ready = lambda: [(list(task), task) for task in _missing(job)]  # noqa: E731
    share_cells(job, count, make, ready, lambda value: f", test {value['test']}")


def _worker(settings: Settings, data: Path | None, device: str) -> Callable[[Task], dict[str, Any]]:
    """What carries out a run in another process, with the encoder and the texts loaded once."""
    source = Source(settings.encoder, data, torch.device(device), settings.lengths)
    return partial(_run, source, settings.case)


LENGTHS = {"sciie": 128, "citation_intent": 128, "chemprot": 128, "hyperpartisan": 256}
GROUPS = tuple((name,) for name in LENGTHS)
SETTINGS: dict[Scale, Settings] = {
    "smoke": Settings(
        MADE_UP,
        {MADE_UP: 16},
        ((MADE_UP,),),
        (MAIN, (*MORE, *REFERENCES, *CAUSES)),
        Case(batch=8, inner_steps=2, steps=2, looks=2, head_steps=4),
        inner=(1e-3,),
        outer=(PRINTED, 1e-2),
        priced=MADE_UP,
        timed=1,
    ),
    "small": Settings(
        "minilm",
        LENGTHS,
        GROUPS,
        (MAIN, CAUSES, MORE, REFERENCES),
        Case(),
        inner=(2e-5, 6e-5, 2e-4, 6e-4),
        outer=(PRINTED, 1e-4, 1e-3, 1e-2),
        priced="citation_intent",
    ),
}

RECIPES = (
    Recipe(
        name="pretraining",
        title="Continued pretraining with a learned weight for every auxiliary text",
        place="Table 4",
        experiment=9,
        settings=SETTINGS,
        work=work,
        verdict=verdict,
        tables=tables,
        note=NOTE,
        answer=answer,
        gpu=("small",),
        seeds={"smoke": 1, "small": 3},
        partial=True,
        fill=fill,
    ),
)
