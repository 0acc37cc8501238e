"""Unlearnable examples on CIFAR-10 (table 6): which perturbations keep published images from being learnt?

Each row of the table is made of pieces, most important rows first: short attacks that choose the step size of λ, the
attack, and the training of a victim on the published images. Every piece is kept as soon as it is finished, and
attackers are kept in ``FOLDER/attackers``, so that a run can be interrupted and its pieces shared by processes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from experiments.paper import costs, datasets
from experiments.paper import unlearnable_page as page
from experiments.paper.networks import seeded
from experiments.paper.recipe import LISTED, Job, Recipe, Scale
from experiments.paper.side_by_side import share_cells
from experiments.paper.unlearnable_attack import (
    ERROR_MINIMISING,
    METHODS,
    NO_NOISE,
    PRINTED_RATE,
    UNTRAINED,
    Arm,
    Attack,
    attack,
    prices,
)
from experiments.paper.unlearnable_networks import SampleNoise, UNet
from experiments.paper.unlearnable_page import LARGE, SMALL
from experiments.paper.unlearnable_victims import Case, Data, Victim, judge, victim_accuracy
from experiments.pieces import OutOfTime
from experiments.workers import stopped_at

BILEVEL = ("AID-KFAC", "AID-CG", "BOME", "stocBiO")
BESIDE = ("AID-KFAC-mc", "AID-EKFAC")
PRICED = (*METHODS,)
LONG = 4.9
"""How many times longer than the case's an attack of the arm ``long`` is: at small scale 4900 steps, as printed."""


@dataclass(frozen=True)
class Row:
    """A line of the table for one victim: ε in 1/255 (0 without perturbations), the method, the arm and a seed.

    The arms ``own`` and ``long`` have one step size of λ.
    """

    radius: int
    method: str
    arm: Arm
    victim: Victim
    seed: int = 1


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        data: ``cifar10``, or ``made up`` for smoke runs.
        held_out: training images that judge attackers and are not published.
        case: sizes and lengths.
        rows: in the order of their importance.
        rates: step sizes of λ that are tried in the arm ``own``, at the first radius.
        short: steps of such a trial as a share of the attack's.
        priced: steps that a price is measured over.
    """

    data: str
    held_out: int
    case: Case
    rows: tuple[Row, ...] = field(metadata=LISTED)
    rates: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    short: float = 0.2
    priced: int = 15


def table(radius: int, methods: tuple[str, ...], arm: Arm, victim: Victim, seed: int = 1) -> tuple[Row, ...]:
    """One row for each method."""
    return tuple(Row(0 if name == NO_NOISE else radius, name, arm, victim, seed) for name in methods)


@dataclass(frozen=True)
class Piece:
    """A piece of work: ``tune``, ``attack``, ``victim``, or ``judge``, the attackers' judge without an attacker."""

    kind: str
    row: Row
    rate: float = 0.0

    @property
    def key(self) -> list[Any]:
        """What it is called in the file of finished pieces."""
        row = self.row
        if self.kind == "tune":
            return ["tune", row.radius, row.method, self.rate]
        if self.kind == "judge":
            return ["judge", row.radius, row.method]
        found = [self.kind, row.radius, row.method, row.arm, row.seed]
        return [*found, row.victim] if self.kind == "victim" else found


def is_attack(row: Row) -> bool:
    """Whether an attacker is trained for this row."""
    return row.method not in (NO_NOISE, UNTRAINED)


def trials(job: Job, row: Row) -> list[Piece]:
    """Short attacks that choose the step size of λ: at the first radius of the table, with seed 0."""
    if row.method not in METHODS or row.arm == "printed":
        return []
    first = next(one.radius for one in job.settings.rows if one.radius)
    return [Piece("tune", Row(first, row.method, "own", "CNN", 0), rate) for rate in job.settings.rates]


def ready(job: Job) -> Iterator[Piece]:
    """The pieces that are missing and whose requirements are there, in the order of the rows."""
    given: set[str] = set()
    for row in job.settings.rows:
        if row.seed not in job.seeds:
            continue
        tuned, made = trials(job, row), Piece("attack", row)
        steps = [*tuned, made if is_attack(row) else Piece("judge", row), Piece("victim", row)]
        for piece in steps:
            if job.cells.get(piece.key) is not None:
                continue
            blocked = piece.kind == "attack" and any(job.cells.get(one.key) is None for one in tuned)
            blocked |= piece.kind == "victim" and is_attack(row) and job.cells.get(made.key) is None
            if not blocked and (name := json.dumps(piece.key)) not in given:
                given.add(name)
                yield piece


def chosen_rate(job: Job, row: Row) -> float:
    """The printed step size of λ, or the one whose short attack was best on held-out images."""
    if row.arm == "printed" or row.method not in METHODS:
        return PRINTED_RATE.get(row.method, 1.0)
    values = {piece.rate: job.cells.get(piece.key) or {} for piece in trials(job, row)}
    found = {rate: value["held_out"] for rate, value in values.items() if value.get("held_out") is not None}
    return min(found, key=lambda rate: float(found[rate]), default=job.settings.rates[0])


class Work:
    """Carries out pieces, with the data loaded once."""

    def __init__(self, job: Job) -> None:
        self.job, self.case = job, job.settings.case
        if job.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self.data = load(job)

    def __call__(self, piece: Piece) -> dict[str, Any]:
        """The value of a piece."""
        row, case, data = piece.row, self.case, self.data
        if piece.kind == "tune":
            steps = max(1, round(self.job.settings.short * case.steps))
            return attack(case, data, Attack(row.method, row.arm, piece.rate, row.radius / 255, 0), steps)[1]
        if piece.kind == "attack":
            return self.attack(row)[1]
        if piece.kind == "judge":
            return {"held_out": judge(case, data, self.noise(row), 0)}
        return victim_accuracy(case, data, self.noise(row), row.victim, row.seed)

    def attack(self, row: Row) -> tuple[nn.Module, dict[str, Any]]:
        """Train the attacker of a row and keep it."""
        rate = chosen_rate(self.job, row)
        path = self.path(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = path.with_suffix("")  # what is not finished continues from here
        given = Attack(row.method, row.arm, rate, row.radius / 255, row.seed)
        case = replace(self.case, steps=round(LONG * self.case.steps)) if row.arm == "long" else self.case
        noise, found = attack(case, self.data, given, folder=saved)
        save_file({name: x.contiguous() for name, x in noise.state_dict().items()}, path)
        shutil.rmtree(saved, ignore_errors=True)
        return noise, {**found, "rate": rate, "picture": page.encoded(noise, self.data.train[0])}

    def path(self, row: Row) -> Path:
        """Where the attacker of a row is kept."""
        name = hashlib.sha256(json.dumps([self.job.cells.mark, Piece("attack", row).key]).encode()).hexdigest()[:16]
        return self.job.cells.path.parent / "attackers" / f"{name}.safetensors"

    def noise(self, row: Row) -> nn.Module | None:
        """The attacker of a row: from its file, or trained again where that is gone."""
        if row.method == NO_NOISE:
            return None
        x, device = self.data.train[0], self.data.device
        if row.method == UNTRAINED:
            return seeded(lambda: UNet(row.radius / 255, self.case.unet), row.seed, device)
        if not self.path(row).exists():
            return self.attack(row)[0]
        if row.method == ERROR_MINIMISING:
            noise: nn.Module = SampleNoise(len(x), tuple(x.shape[1:]), row.radius / 255)
        else:
            noise = UNet(row.radius / 255, self.case.unet)
        noise.load_state_dict(load_file(self.path(row)))
        return noise.to(device)


def load(job: Job) -> Data:
    """The images on the job's device: published, held out and test."""
    if job.settings.data == "made up":
        images = _made_up(240, 100)
    else:
        found = datasets.cifar10(job.data)
        images = found.train, found.test
    (x, y), test = images
    count = job.settings.held_out
    parts = [(x[count:], y[count:]), (x[:count], y[:count]), test]
    return Data(*((a.to(job.device), b.to(job.device)) for a, b in parts))


def _made_up(train: int, test: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Ten blurred prototypes under noise, 3 × 8 × 8, in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(10, 3, 8, 8, generator=generator)

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(count) % 10
        x = 0.5 + 0.3 * (prototypes[y] - 0.5) + 0.1 * torch.randn(count, 3, 8, 8, generator=generator)
        return x.clamp(0, 1), y

    return part(train), part(test)


def priced(job: Job, work: Callable[[], Work]) -> None:
    """The prices of all methods, measured before anything else runs."""

    def measured() -> dict[str, Any]:
        made = work()
        return prices(made.case, made.data, PRICED, job.settings.priced)

    job.cell(["prices"], measured)


def work(job: Job) -> dict[str, Any]:
    """All rows, as far as the time allows."""
    made: list[Work] = []

    def worker() -> Work:
        made[:] = made or [Work(job)]
        return made[0]

    try:
        priced(job, worker)
        while (piece := next(ready(job), None)) is not None:
            job.cell(piece.key, lambda p=piece: worker()(p))  # type: ignore[misc]
    except OutOfTime:
        pass
    return gathered(job)


def gathered(job: Job) -> dict[str, Any]:
    """The figures of all finished pieces."""
    found: dict[str, Any] = {}
    tried: dict[str, list[Any]] = {}
    rows = [row for row in job.settings.rows if row.seed in job.seeds]
    for row in rows:
        scores = {piece.rate: (job.cells.get(piece.key) or {}).get("held_out") for piece in trials(job, row)}
        if any(score is not None for score in scores.values()):
            tried[row.method] = [[rate, score] for rate, score in scores.items()]
        victim, attacked = job.cells.get(Piece("victim", row).key), job.cells.get(Piece("attack", row).key)
        if victim is None:
            continue
        line = found.setdefault(page.line(row.radius, row.method, row.arm), {"test": {}, "published": {}})
        for name in ("test", "published"):
            line[name].setdefault(row.victim, []).append(victim[name])
        if attacked is not None:
            kept = ("rate", "moved", "noise_moved", "noise_size", "held_out", "step", "steps", "failure", "curve")
            line.setdefault("attack", {})[str(row.seed)] = {name: attacked[name] for name in kept}
            if row.seed == job.seeds[0]:
                line["picture"] = attacked["picture"]
        if judged := job.cells.get(Piece("judge", row).key):
            line["held_out"] = judged["held_out"]
    times = job.cells.get(["prices"])
    missing = any(job.cells.get(Piece("victim", row).key) is None for row in rows)
    own = costs.alone(job.scale, "unlearnable")
    cut_short = missing or not (times or own)
    return {"lines": found, "tried": tried, "seconds": times or {}, "alone": own, "cut_short": cut_short}


def fill(job: Job, recipe: Recipe, count: int) -> None:
    """Measure the prices here, then carry out what is missing in ``count`` processes.

    An attack that is not finished at the deadline continues from its last save.
    """
    try:
        priced(job, lambda: Work(job))
    except OutOfTime:
        return
    make = partial(_worker, partial(recipe.job, *job.place))
    with suppress(OutOfTime), stopped_at(job.deadline):
        share_cells(job, count, make, lambda: ((piece.key, piece) for piece in ready(job)), _short)


def _short(value: dict[str, Any]) -> str:
    names = ("test", "published", "held_out", "rate", "moved", "noise_moved", "failure")
    return "".join(f", {name} {value[name]}" for name in names if value.get(name) is not None)


def _worker(job: Callable[[], Job]) -> Callable[[Piece], dict[str, Any]]:
    """What carries out pieces in another process; each piece reads the file of finished ones again."""
    kept = Work(job())

    def carry_out(piece: Piece) -> dict[str, Any]:
        kept.job = job()
        return kept(piece)

    return carry_out


MAIN = (ERROR_MINIMISING, *BILEVEL)
ROWS = (
    *table(LARGE, (NO_NOISE, *MAIN), "own", "CNN"),
    *table(LARGE, BILEVEL, "long", "CNN"),
    *table(LARGE, (NO_NOISE, ERROR_MINIMISING), "own", "ResNet-18"),
    *table(LARGE, BILEVEL, "long", "ResNet-18"),
    *table(LARGE, BILEVEL, "printed", "CNN"),
    *table(LARGE, BILEVEL, "own", "ResNet-18"),
    *table(LARGE, (UNTRAINED,), "own", "CNN"),
    *table(SMALL, MAIN, "own", "CNN"),
    *table(LARGE, BESIDE, "own", "CNN"),
    *table(LARGE, (*BILEVEL,), "printed", "ResNet-18"),
    *table(SMALL, MAIN, "own", "ResNet-18"),
    *table(LARGE, (UNTRAINED, *BESIDE), "own", "ResNet-18"),
    *(row for seed in (2, 3) for row in table(LARGE, (NO_NOISE, *MAIN), "own", "CNN", seed)),
    *(row for seed in (2, 3) for row in table(LARGE, (NO_NOISE, *MAIN), "own", "ResNet-18", seed)),
)

SETTINGS: dict[Scale, Settings] = {
    "smoke": Settings(
        "made up",
        40,
        Case(2, 2, 8, 2, 50, 4, 0.05, 2, 1, (4, 1), 50, 2, 1e-3, 1),
        (
            *table(LARGE, (NO_NOISE, UNTRAINED, *MAIN, *BESIDE), "own", "CNN"),
            *table(LARGE, ("AID-KFAC", "BOME"), "printed", "CNN"),
            *table(LARGE, ("AID-CG",), "long", "CNN"),
            *table(SMALL, ("AID-KFAC",), "own", "ResNet-18"),
        ),
        (1e-3,),
        0.5,
        priced=1,
    ),
    "small": Settings(
        "cifar10",
        5000,
        Case(unet=16, steps=1000, looks=4, scratch=3, epochs=(45, 12), rounds=8, bome=0.25),
        ROWS,
        short=0.25,
    ),
    "paper": Settings("cifar10", 5000, Case(), ROWS, short=0.1),
}

RECIPES = (
    Recipe(
        name="unlearnable",
        title="Unlearnable examples, CIFAR-10",
        place="Table 6",
        experiment=13,
        settings=SETTINGS,
        work=work,
        verdict=page.verdict,
        tables=page.tables,
        plot=page.plot,
        note=page.NOTE,
        answer=page.answer,
        gpu=("small", "paper"),
        seeds={"smoke": 1, "small": 3, "paper": 3},
        partial=True,
        fill=fill,
    ),
)
