"""Experiment 8: Meta-Weight-Net for class imbalance, long-tailed CIFAR-10 with ResNet-32 (table 3).

A run trains the network once. Every method with a number to tune is tried on its grid in short runs at one imbalance,
judged on held-out training images; the chosen number serves all imbalances ("own"). Methods that the paper prints are
run with the printed number too ("printed"). What an outer iteration costs is measured before anything else, so that the
runs themselves may share a device.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from experiments.paper.long_tail_data import LongTail, Part, decoded, keep_decoded, long_tailed, moved
from experiments.paper.long_tail_page import NOTE, answer, plot, tables, verdict
from experiments.paper.long_tail_training import METHODS, Case, Training
from experiments.paper.recipe import LISTED, Job, Recipe
from experiments.paper.tuning import at_edge
from experiments.pieces import OutOfTime
from experiments.workers import share

Arm = Literal["own", "printed"]

MAIN = ("Base", "MWN + KFAC-emp", "MWN + SAMA")
MORE = ("MWN + T1–T2", "MWN + KFAC-mc", "MWN + EKFAC")
LOSSES = ("Logit adjustment", "Deferred re-weighting", "Class-balanced", "Focal")
PRINTED = ("MWN + KFAC-emp", "MWN + SAMA", "MWN + T1–T2")
MARGIN = 1.15
"""How much longer than forecast a run may take."""


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        data: ``cifar10``, or ``digits`` for smoke runs.
        case: what all runs share.
        epochs, short: of a full run and of a trial.
        meta, held_out: images of each class for λ, and to choose numbers.
        tuned_at: the imbalance of the trials.
        imbalances: in the order of their importance; the first ``first`` come with all of :data:`MORE` before the rest.
        timed: outer iterations that a price is measured over.
    """

    data: str = "cifar10"
    case: Case = field(default_factory=Case)
    epochs: float = 100
    short: float = 20
    meta: int = 10
    held_out: int = 200
    tuned_at: float = 100
    imbalances: tuple[float, ...] = field(default=(100, 50, 10, 200, 20), metadata=LISTED)
    first: int = field(default=2, metadata=LISTED)
    timed: int = field(default=20, metadata=LISTED)


class Task(NamedTuple):
    """One run."""

    imbalance: float
    method: str
    value: float
    epochs: float
    seed: int


class Row(NamedTuple):
    """A method at an imbalance, with the number that was chosen or with the printed one."""

    imbalance: float
    method: str
    arm: Arm


def rows(settings: Settings) -> Iterator[Row]:
    """Everything that is wanted, most important first."""
    first, rest = settings.imbalances[: settings.first], settings.imbalances[settings.first :]
    groups = [(x, names) for x in first for names in (MAIN, MORE)] + [(x, (*MAIN, *MORE)) for x in rest]
    for imbalance, names in [*groups, *((x, LOSSES) for x in settings.imbalances)]:
        yield from (Row(imbalance, name, "own") for name in names)
        yield from (Row(imbalance, name, "printed") for name in names if name in PRINTED)


def trials(job: Job, name: str) -> list[Task]:
    """The short runs that choose a method's number."""
    s: Settings = job.settings
    return [Task(s.tuned_at, name, value, s.short, 0) for value in METHODS[name].grid]


def chosen(job: Job, name: str) -> float | None:
    """The number with the highest held-out accuracy; ``None`` where trials are missing."""
    if not METHODS[name].grid:
        return METHODS[name].usual
    found = [(task.value, job.cells.get([*task])) for task in trials(job, name)]
    if any(cell is None for _, cell in found):
        return None
    scores = {value: _score(cell) for value, cell in found if cell is not None}
    return max(scores, key=lambda value: scores[value])


def _score(cell: dict[str, Any]) -> tuple[float, float]:
    """Held-out accuracy, and between equals the held-out loss."""
    return (-1.0, 0.0) if cell["failed"] else (cell["held_out"], -cell["held_out_loss"])


def missing(job: Job) -> Iterator[Task]:
    """The runs that are not done and can be started now, most important first."""
    asked: set[Task] = set()
    for seed in job.seeds:
        for row in rows(job.settings):
            value = METHODS[row.method].usual if row.arm == "printed" else chosen(job, row.method)
            full = [] if value is None else [Task(row.imbalance, row.method, value, job.settings.epochs, seed)]
            for task in full or trials(job, row.method):
                if task not in asked and job.cells.get([*task]) is None:
                    asked.add(task)
                    yield task


class Runner:
    """Carries out tasks, with all data that were needed so far on the device."""

    def __init__(self, settings: Settings, device: torch.device, folder: Path | None) -> None:
        self.settings, self.device, self.folder = settings, device, folder
        self._decoded: tuple[Part, Part] | None = None
        self._data: dict[tuple[float, int], LongTail] = {}
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")

    def data(self, imbalance: float, seed: int) -> LongTail:
        """The parts of a long-tailed data set, on the device."""
        s = self.settings
        if self._decoded is None:
            self._decoded = decoded(s.data, self.folder)
        if (imbalance, seed) not in self._data:
            train, test = self._decoded
            made = long_tailed(train, test, imbalance, meta=s.meta, held_out=s.held_out, seed=seed)
            self._data[imbalance, seed] = moved(made, self.device)
        return self._data[imbalance, seed]

    def training(self, task: Task) -> Training:
        """A run that has not begun."""
        data = self.data(task.imbalance, task.seed)
        return Training(self.settings.case, data, METHODS[task.method], task.value, task.epochs, task.seed)

    def __call__(self, task: Task) -> dict[str, Any]:
        """A run; the test images are looked at in full runs alone."""
        return self.training(task).train(test=task.epochs == self.settings.epochs)

    def price(self, name: str) -> dict[str, Any]:
        """What an outer iteration of a method costs, and how many a full run has at the first imbalance."""
        s = self.settings
        made = self.training(Task(s.tuned_at, name, METHODS[name].usual, s.epochs, 0))
        seconds = made.price(s.timed)
        return {"seconds": seconds, "inner_steps": made.inner_steps, "update": seconds / made.inner_steps}


def prices(job: Job, runner: Runner) -> dict[str, dict[str, Any]]:
    """What an outer iteration of Base and of each learned method costs, with the device to itself."""
    names = ("Base", *(name for name, method in METHODS.items() if method.make is not None))
    return {name: job.cell(["price", name], partial(runner.price, name)) for name in names}


def work(job: Job) -> dict[str, Any]:
    """Prices, then every run in order of importance, as far as the time allows."""
    runner, cut_short = Runner(job.settings, job.device, job.data), False
    price: dict[str, dict[str, Any]] = {}
    try:
        price = prices(job, runner)
        while (task := next(missing(job), None)) is not None:
            if not in_time(job, price, task, 1):
                raise OutOfTime("the next run would not end in time; run the same command again.")
            job.cell([*task], partial(runner, task))
    except OutOfTime:
        cut_short = True
    found = summary(job)
    if not found:
        raise OutOfTime("the time limit was reached before the first run was done; run the same command again.")
    return {"found": found, "trials": _tried(job), "prices": price, "cut_short": cut_short}


def _tried(job: Job) -> dict[str, dict[str, float | None]]:
    """Held-out accuracy of every trial, by method and number."""
    cells = {name: [(t.value, job.cells.get([*t])) for t in trials(job, name)] for name in METHODS}
    return {
        name: {f"{value:g}": None if cell["failed"] else cell["held_out"] for value, cell in of if cell is not None}
        for name, of in cells.items()
        if any(cell is not None for _, cell in of)
    }


def summary(job: Job) -> dict[str, dict[str, dict[str, Any]]]:
    """By imbalance, then by method and arm: the number, whether it is at an edge of its grid, and the runs."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows(job.settings):
        method = METHODS[row.method]
        value = method.usual if row.arm == "printed" else chosen(job, row.method)
        if value is None:
            continue
        tasks = [Task(row.imbalance, row.method, value, job.settings.epochs, seed) for seed in job.seeds]
        runs = [cell for task in tasks if (cell := job.cells.get([*task])) is not None]
        if runs:
            edge = row.arm == "own" and bool(at_edge({"value": value}, {"value": method.grid or (value,)}))
            cell = {"value": value, "edge": edge, "runs": [_short(run, i > 0) for i, run in enumerate(runs)]}
            found.setdefault(f"{row.imbalance:g}", {})[f"{row.method}, {row.arm}"] = cell
    return found


def _short(run: dict[str, Any], again: bool) -> dict[str, Any]:
    """A run without its curves, but for those of the first seed."""
    left = {"curve", "first_weights", "last_weights"} if again else set()
    return {name: value for name, value in run.items() if name not in left}


def fill(job: Job, recipe: Recipe, count: int) -> None:
    """Carry out what is missing in ``count`` processes; none begins a run that would not end in time."""
    settings: Settings = job.settings
    with tempfile.TemporaryDirectory() if settings.data != "digits" else nullcontext() as place:
        folder = job.data
        if place is not None:
            keep_decoded(decoded(settings.data, job.data), Path(place) / settings.data)
            folder = Path(place)
        try:
            price = prices(job, Runner(settings, job.device, folder))
        except OutOfTime:
            return
        began = time.monotonic()

        def ready() -> Iterator[tuple[list[Any], Task]]:
            return (([*task], task) for task in missing(job) if in_time(job, price, task, count))

        def keep(key: list[Any], value: dict[str, Any], seconds: float, busy: float) -> None:
            accuracy = value.get("test", value.get("held_out", 0.0))
            job.say(f"{time.monotonic() - began:5.0f} s: {key}: {100 * accuracy:.1f} %, {seconds:.0f} s")
            job.cells.put(key, value, seconds, busy)

        make = partial(_worker, settings, str(job.device), folder)
        share(count, make, ready, keep, late=lambda: job.late)


def _worker(settings: Settings, device: str, folder: Path | None) -> Callable[[Task], dict[str, Any]]:
    return Runner(settings, torch.device(device), folder)


def forecast(settings: Settings, price: dict[str, dict[str, Any]], task: Task) -> float:
    """Seconds that a run takes with the device to itself."""
    images = sum(1.0 / task.imbalance ** (c / 9) for c in range(10)) * (5000 - settings.meta - settings.held_out)
    update = price.get(task.method, price["Base"])["update"]
    return 2.0 + task.epochs * images / settings.case.batch * float(update)


def in_time(job: Job, price: dict[str, dict[str, Any]], task: Task, count: int) -> bool:
    """Whether a run that begins now, beside ``count`` − 1 others, would end before the deadline."""
    return forecast(job.settings, price, task) * count * MARGIN < job.deadline - time.monotonic()


SMOKE = Settings(
    "digits",
    Case(batch=30, width=4, blocks=1, shift=1, looks=2, inner_steps=3, hidden=8),
    epochs=1,
    short=0.5,
    meta=3,
    held_out=10,
    tuned_at=10,
    imbalances=(10,),
    first=1,
    timed=1,
)

RECIPES = (
    Recipe(
        name="long-tail",
        title="Meta-Weight-Net on long-tailed CIFAR-10, ResNet-32",
        place="Table 3",
        experiment=8,
        settings={"smoke": SMOKE, "small": Settings()},
        work=work,
        verdict=verdict,
        tables=tables,
        plot=plot,
        note=NOTE,
        answer=answer,
        gpu=("small",),
        seeds={"smoke": 1, "small": 3},
        partial=True,
        fill=fill,
    ),
)
