"""Experiment 8: Meta-Weight-Net for class imbalance, long-tailed CIFAR-10 with ResNet-32 (table 3).

A run trains the network once. Every method with a number to tune is tried on its grid in short runs at one imbalance,
judged on held-out training images; the chosen number serves all imbalances ("own"). Methods that the paper prints are
run with the printed number too ("printed"). What an outer iteration costs is measured before anything else, so that the
runs themselves may share a device.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from experiments.paper import costs
from experiments.paper.long_tail_data import LongTail, Part, decoded, keep_decoded, long_tailed, moved
from experiments.paper.long_tail_page import LEAST_CASES, LEAST_SEEDS, NOTE, answer, plot, tables, verdict
from experiments.paper.long_tail_training import METHODS, Case, Training
from experiments.paper.recipe import LISTED, Job, Recipe
from experiments.paper.side_by_side import share_cells
from experiments.paper.tuning import at_edge
from experiments.pieces import OutOfTime
from experiments.workers import stopped_at

Arm = Literal["own", "printed"]

MAIN = ("Base", "MWN + KFAC-emp", "MWN + SAMA")
MORE = ("MWN + T1–T2", "MWN + KFAC-mc", "MWN + EKFAC")
LOSSES = ("Logit adjustment", "Deferred re-weighting", "Class-balanced", "Focal")
PRINTED = ("MWN + KFAC-emp", "MWN + SAMA", "MWN + T1–T2")
COMPARED = ("MWN + KFAC-emp", "MWN + SAMA")
FIRST_PRICED = ("Base", "MWN + SAMA", "MWN + KFAC-emp")


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        data: ``cifar10``, or ``digits`` for smoke runs.
        case: what all runs share.
        epochs, short: of a full run and of a trial.
        meta, held_out: images of each class for λ, and to choose numbers.
        tuned_at: the imbalance of the trials.
        imbalances: in the order of their importance; the first ``first`` come with all plain losses before the rest.
        timed: outer iterations that a price is measured over.
    """

    data: str = "cifar10"
    case: Case = field(default_factory=Case)
    epochs: float = 100
    short: float = 20
    meta: int = 10
    held_out: int = 200
    tuned_at: float = 100
    imbalances: tuple[float, ...] = field(default=(100, 200, 10, 20, 50), metadata=LISTED)
    first: int = field(default=1, metadata=LISTED)
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


def groups(settings: Settings) -> Iterator[tuple[list[Row], int | None]]:
    """Everything that is wanted, most important first, and for how many seeds (``None``: all); a group is done for
    these before the next one begins.

    What the verdict compares comes first, and is the only thing that gets all seeds: the two inverses as printed, at as
    many imbalances as it asks for.
    """
    every, first = settings.imbalances, settings.imbalances[: settings.first]
    judged = every[:LEAST_CASES]
    compared = [Row(x, name, "printed") for x in judged for name in COMPARED]
    yield compared, LEAST_SEEDS
    yield [Row(x, "Base", "own") for x in judged], LEAST_SEEDS
    yield compared, None
    for imbalances, names in ((first, MAIN), (first, LOSSES), (every, MAIN), (first, MORE), (every, (*LOSSES, *MORE))):
        printed = [Row(x, name, "printed") for x in imbalances for name in names if name in PRINTED]
        yield [*printed, *(Row(x, name, "own") for x in imbalances for name in names)], LEAST_SEEDS


def rows(settings: Settings) -> list[Row]:
    """The rows of all groups, each once."""
    return list(dict.fromkeys(row for group, _ in groups(settings) for row in group))


def trials(job: Job, name: str) -> list[Task]:
    """The short runs that choose a method's number."""
    s: Settings = job.settings
    return [Task(s.tuned_at, name, value, s.short, 0) for value in METHODS[name].grid]


def chosen(job: Job, name: str) -> float | None:
    """The number with the highest held-out accuracy, ``None`` where trials are missing; of a plain loss the published
    one.
    """
    if METHODS[name].make is None:
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
    for group, seeds in groups(job.settings):
        for seed in job.seeds[:seeds]:
            for row in group:
                value = METHODS[row.method].usual if row.arm == "printed" else chosen(job, row.method)
                full = [] if value is None else [Task(row.imbalance, row.method, value, job.settings.epochs, seed)]
                for task in full or trials(job, row.method):
                    if task not in asked and job.cells.get([*task]) is None:
                        asked.add(task)
                        yield task


class Runner:
    """Carries out tasks, with all data that were needed so far on the device."""

    def __init__(
        self, settings: Settings, device: torch.device, folder: Path | None, saved: Path | None = None
    ) -> None:
        self.settings, self.device, self.folder, self.saved = settings, device, folder, saved
        self._decoded: tuple[Part, Part] | None = None
        self._data: dict[tuple[float, int], LongTail] = {}
        if device.type == "cuda":
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
        """A run, continued where it was interrupted; the test images are looked at in full runs alone."""
        torch.backends.cudnn.benchmark = self.device.type == "cuda"  # a sixth faster; prices are without it
        test, folder = task.epochs == self.settings.epochs, None
        if self.saved is not None:
            folder = self.saved / hashlib.sha256(repr([*task]).encode()).hexdigest()[:16]
        found = self.training(task).train(test=test, folder=folder)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def price(self, name: str) -> dict[str, Any]:
        """What an outer iteration of a method costs."""
        s = self.settings
        return self.training(Task(s.tuned_at, name, METHODS[name].usual, s.epochs, 0)).price(s.timed)


def prices(job: Job, runner: Runner, names: Sequence[str] = FIRST_PRICED) -> None:
    """Measure what an outer iteration of each method costs, one after the other."""
    for name in names:
        job.cell(["price", name], partial(runner.price, name))


def work(job: Job) -> dict[str, Any]:
    """Prices, then every run in order of importance, as far as the time allows."""
    runner, cut_short = Runner(job.settings, job.device, job.data), False
    try:
        prices(job, runner)
        while (task := next(missing(job), None)) is not None:
            job.cell([*task], partial(runner, task))
        prices(job, runner, [name for name, method in METHODS.items() if method.make is not None])
    except OutOfTime:
        cut_short = True
    found, tried = summary(job), _tried(job)
    if not (found or tried):
        raise OutOfTime("the time limit was reached before the first run was done; run the same command again.")
    known = {name: cell for name in METHODS if (cell := job.cells.get(["price", name])) is not None}
    own = costs.alone(job.scale, "long-tail")
    return {"found": found, "trials": tried, "prices": known, "alone": own, "cut_short": cut_short}


def _tried(job: Job) -> dict[str, dict[str, Any]]:
    """What every trial reached and what its weights did, by method and number; ``None`` where it failed."""
    kept = ("held_out", "moved", "class_weights", "last_weights")
    found: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        for task in trials(job, name):
            if (cell := job.cells.get([*task])) is not None:
                short = {key: cell[key] for key in kept if key in cell}
                found.setdefault(name, {})[f"{task.value:g}"] = None if cell["failed"] else short
    return found


def summary(job: Job) -> dict[str, dict[str, dict[str, Any]]]:
    """By imbalance, then by method and arm: the number, whether it is at an edge of its grid, and the runs."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows(job.settings):
        method = METHODS[row.method]
        value = method.usual if row.arm == "printed" else chosen(job, row.method)
        if value is None:
            continue
        tasks = [Task(row.imbalance, row.method, value, job.settings.epochs, seed) for seed in job.seeds]
        runs = [{"seed": t.seed, **cell} for t in tasks if (cell := job.cells.get([*t])) is not None]
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
    """Carry out what is missing in ``count`` processes.

    What is not finished at the deadline is saved in a folder (``HYPERKRON_CHECKPOINTS``, or beside the cells), and
    continues from there.
    """
    settings: Settings = job.settings
    with tempfile.TemporaryDirectory() if settings.data != "digits" else nullcontext() as place:
        folder = job.data
        if place is not None:
            keep_decoded(decoded(settings.data, job.data), Path(place) / settings.data)
            folder = Path(place)
        try:
            prices(job, Runner(settings, job.device, folder))
        except OutOfTime:
            return

        def told(value: dict[str, Any]) -> str:
            return f", {100 * value.get('test', value.get('held_out', 0.0)):.1f} %"

        saved = Path(os.environ.get("HYPERKRON_CHECKPOINTS") or job.cells.path.parent / "long-tail-checkpoints")
        make = partial(_worker, settings, str(job.device), folder, saved)
        with suppress(OutOfTime), stopped_at(job.deadline):
            share_cells(job, count, make, lambda: (([*task], task) for task in missing(job)), told)


def _worker(settings: Settings, device: str, folder: Path | None, saved: Path) -> Callable[[Task], dict[str, Any]]:
    return Runner(settings, torch.device(device), folder, saved)


SMOKE = Settings(
    "digits",
    Case(batch=30, width=2, blocks=1, shift=1, looks=1, inner_steps=2, hidden=8),
    epochs=0.5,
    short=0.25,
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
        seeds={"smoke": 1, "small": 9},
        partial=True,
        fill=fill,
    ),
)
