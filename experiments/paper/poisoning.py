"""Experiment 11: data poisoning as a measurement of robustness (table 5), with cleaning as the defence.

The problem is in :mod:`experiments.paper.poisoning_problem`, the methods are in
:mod:`experiments.paper.poisoning_attacks`, and what the page says is in :mod:`experiments.paper.poisoning_page`.

    python -m experiments.paper run poisoning --scale small --device cuda --workers 10
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.paper import costs, datasets, side_by_side
from experiments.paper import poisoning_attacks as attacks
from experiments.paper import poisoning_problem as base
from experiments.paper.costs import FOLLOWER
from experiments.paper.datasets import Images
from experiments.paper.entries import Entry, Found, Stage, chosen, compete, missing
from experiments.paper.poisoning_attacks import ALGORITHMS, Poison
from experiments.paper.poisoning_page import AS_PRINTED, NOTE, by_networks, tables, verdict
from experiments.paper.poisoning_problem import Case, Split, Starts
from experiments.paper.recipe import LISTED, Job, Recipe, Scale
from experiments.paper.tuning import Grid, Setting
from experiments.pieces import OutOfTime
from experiments.trial import tensor_cores
from experiments.workers import stopped_at
from hyperkron.solution import HyperkronError

REFERENCES = ("clean", "label flip")
NOISE = "error-max noise"
DECISIVE = ("TGDA-CG", "TGDA-KFAC-EMP")
FIRST = (*DECISIVE, "BOME")
BESIDE = ("TGDA-KFAC", "TGDA-EKFAC")
LONG = 12
"""How many times longer than the case's an attack of the arm ``long`` is: at small scale 12 000 steps, as printed."""
PASSES = 2
"""Over the parts: those of the arm ``long`` begin when step sizes have been chosen."""
DEFENDED = ("label flip", NOISE, "TGDA-CG", "TGDA-KFAC-EMP")
"""The poisoned sets that the defence is measured on, for the first seed; of TGDA those of its own step sizes."""
FINER = (3e-7, 1e-6)
"""Of the CNN, where CG's best step was the smallest of the others."""
SHEETS = 5
"""Training sheets of CIFAR-10."""


@dataclass(frozen=True)
class Part:
    """A piece of the experiment: a model, an arm, methods, and a number of seeds.

    In the arm ``printed`` all have the step sizes that the paper prints. In the arm ``own`` each has the relative step
    of λ that costs a network trained from scratch most on held-out rows. ``long`` is ``own`` with :data:`LONG` times as
    many steps, and ``reference`` needs none. ``finer`` are relative steps that are tried besides those of the settings.
    """

    model: str
    arm: str
    methods: tuple[str, ...]
    seeds: int | None = None
    finer: tuple[float, ...] = ()

    @property
    def stage(self) -> str:
        """Its name among the stages."""
        return f"{self.model}/{self.arm}"


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        cases: by model.
        parts: in the order of their importance.
        outer: relative steps of λ, for the arm ``own``.
        bounds: of the error-maximising noise; inputs lie in [−1, 1].
        trials: settings tried in the arm ``own``.
        short: steps of a trial as a share of a full run's.
        timed: steps that a price is measured over.
    """

    cases: dict[str, Case]
    parts: tuple[Part, ...] = field(metadata=LISTED)
    outer: tuple[float, ...] = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
    bounds: tuple[float, ...] = (0.1, 0.3, 0.6, 1.2, 2.0)
    trials: int = 5
    short: float = 1 / 3
    timed: int = 20


PRINTED: Grid = {"inner": (0.01,), "outer": (0.1,), "damping": (1e-3,)}
"""The paper's step sizes of both levels, and its damping."""


class Source:
    """Data, splits and pretrained networks of every model, each made when it is first asked for."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._data: dict[str, Images] = {}
        self._splits: dict[tuple[str, int], Split] = {}
        self._starts: dict[str, Starts] = {}

    def case(self, model: str) -> Case:
        """The case of a model."""
        found: Case = self.job.settings.cases[model]
        return found

    def split(self, model: str, seed: int) -> Split:
        """The rows of a seed."""
        case = self.case(model)
        if case.data not in self._data:
            self._data[case.data] = base.load(case, self.job.data)
        if (model, seed) not in self._splits:
            self._splits[model, seed] = base.split_of(case, self._data[case.data], seed, self.job.device)
        return self._splits[model, seed]

    def starts(self, model: str) -> Starts:
        """The pretrained networks of a model."""
        if model not in self._starts:
            self._starts[model] = Starts(self.case(model), partial(self.split, model))
        return self._starts[model]


def precision(case: Case) -> AbstractContextManager[None]:
    """Matrix products in TF32, where there is a GPU, for all but the linear model."""
    return nullcontext() if case.network == "linear" else tensor_cores()


def saved(job: Job, key: list[Any]) -> Path:
    """Where an attack that is not finished is saved."""
    name = hashlib.sha256(json.dumps([job.cells.mark, key]).encode()).hexdigest()[:16]
    return job.cells.path.parent / "poisoning-checkpoints" / name


def entry(job: Job, source: Source, part: Part, name: str, tuned: Setting | None = None) -> Entry:
    """A method of a part; its score is the accuracy on held-out rows, which it is to lower.

    ``tuned`` is the setting of the arm ``long``.
    """
    settings: Settings = job.settings
    model, own = part.model, part.arm == "own"
    case, starts = source.case(model), source.starts(model)
    if part.arm == "long":
        case = replace(case, steps=LONG * case.steps)
    defends = name in DEFENDED and part.arm in ("reference", "own")

    def poison(setting: Setting, seed: int, share: float) -> Poison | None:
        split = source.split(model, seed)
        if name in ALGORITHMS:
            folder = saved(job, [part.stage, name, setting, seed]) if share == 1 else None
            relative = part.arm != "printed"
            found = attacks.bilevel(
                case, split, starts, name, setting, seed, relative=relative, part=share, folder=folder
            )
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            return found
        if name == NOISE:
            return attacks.error_maximising(case, split, starts, setting["bound"], seed)
        return attacks.flipped(split) if name == "label flip" else None

    def score(setting: Setting) -> float:
        if not own:
            return 0.0  # one setting
        with precision(case):
            return float(
                attacks.judged(case, source.split(model, 0), poison(setting, 0, settings.short), 0)["held_out"]
            )

    def final(setting: Setting, seed: int) -> dict[str, Any]:
        split = source.split(model, seed)
        with precision(case):
            made = poison(setting, seed, 1.0)
            found = {**({} if made is None else made.facts), **attacks.judged(case, split, made, seed, test=True)}
            if made is not None and case.cleaned and seed == 1 and defends:
                found["defence"] = attacks.defended(case, split, made, seed)
        return found

    grid: Grid = {} if name in REFERENCES else PRINTED
    if own:
        outer = (*part.finer, *settings.outer)
        grid = {"bound": settings.bounds} if name == NOISE else {**PRINTED, "inner": (0.1,), "outer": outer}
    if tuned is not None:
        grid = {key: (value,) for key, value in tuned.items()}
    return Entry(name, grid, score, final)


def absent(job: Job, model: str) -> bool:
    """Whether the data of a model are not there: then it waits for another run."""
    data = job.settings.cases[model].data
    if data == "digits":
        return False
    try:
        sheets = [path.name for path in datasets.find(data, job.data).glob("train_*.webp")]
    except HyperkronError:
        return True
    return 0 < len(sheets) < SHEETS


def prices(job: Job, source: Source) -> dict[str, dict[str, float | None]]:
    """Seconds of a step by model and method, measured one after the other before anything else is run.

    ``None`` where a step fails.
    """
    settings: Settings = job.settings
    found: dict[str, dict[str, float | None]] = {}

    def take(model: str, name: str) -> dict[str, Any]:
        case = source.case(model)
        with precision(case):
            try:
                return {"seconds": attacks.price(case, source.split(model, 0), name, settings.timed)}
            except (RuntimeError, HyperkronError) as error:
                return {"seconds": None, "error": f"{error!s:.200}"}

    for model in settings.cases:
        for name in (FOLLOWER, *ALGORITHMS):
            key = ["price", model, name]
            if job.cells.get(key) is None and (job.late or absent(job, model)):
                continue
            found.setdefault(model, {})[name] = job.cell(key, partial(take, model, name))["seconds"]
    return found


def stages_of(job: Job) -> tuple[list[Stage], int]:
    """What competes, and over how many trials; prices are measured first."""
    source = Source(job)
    prices(job, source)
    return _stages(job, source), job.settings.trials


def _stages(job: Job, source: Source) -> list[Stage]:
    """One for each part; it is empty where its data are absent and nothing of it is in the cache, and in the arm
    ``long`` until the step sizes are chosen.
    """
    made: list[Stage] = []
    for part in job.settings.parts:
        waits = job.cells.get(["price", part.model, FOLLOWER]) is None and absent(job, part.model)
        tuned: dict[str, Setting | None] = dict.fromkeys(part.methods)
        if part.arm == "long":
            tuned = dict(_chosen(job, [stage for stage in made if stage.name == f"{part.model}/own"], part.methods))
        entries = [] if waits else [entry(job, source, part, name, setting) for name, setting in tuned.items()]
        trials = int(job.settings.trials) + len(part.finer) if part.arm == "own" else 1
        made.append(Stage(part.stage, entries, part.seeds, trials))
    return made


def _chosen(job: Job, stages: Sequence[Stage], names: Sequence[str]) -> Iterator[tuple[str, Setting]]:
    """The settings of methods, from ``stages`` of the arm ``own``, if the trials of all of them are in the cache."""
    left = {(task.stage, task.entry) for _, task in missing(job, stages, 1) if task.seed is None}
    found = {
        e.name: (stage, e)
        for s, stage in enumerate(stages)
        for i, e in enumerate(stage.entries)
        if (s, i) not in left and e.name in names
    }
    if found.keys() == set(names):
        yield from ((name, chosen(job, *found[name], 1)) for name in names)


def work(job: Job) -> dict[str, Any]:
    """Prices, then every part, in order."""
    source = Source(job)
    price = prices(job, source)
    for _ in range(PASSES):
        found = compete(job, _stages(job, source), job.settings.trials)
    return {
        "models": {model: summary(found, model) for model in job.settings.cases},
        "networks": by_networks() if job.scale == "small" else {},
        "as_printed": by_networks(AS_PRINTED) if job.scale == "small" else {},
        "prices": price,
        "alone": costs.alone(job.scale, *(f"poisoning {model}" for model in job.settings.cases)),
        "cut_short": found.cut_short or any(model not in price for model in job.settings.cases),
    }


def summary(found: Found, model: str) -> dict[str, Any]:
    """Of one model: the clean accuracies by seed, and by arm and method the drops and what became of λ."""
    arms = {arm: found.stages.get(f"{model}/{arm}", {}) for arm in ("reference", "printed", "own", "long")}
    clean = [run["test"] for run in arms["reference"].get("clean", {"runs": []})["runs"]]
    made: dict[str, Any] = {"clean": clean, "arms": {}, "defence": {}}
    for arm, entries in arms.items():
        for name, x in entries.items():
            runs: Sequence[dict[str, Any]] = x["runs"][: len(clean)]
            if name == "clean" or not runs:
                continue
            made["arms"].setdefault(arm, {})[name] = {
                "setting": x["setting"],
                "edge": x["edge"],
                "drop": [before - run["test"] for before, run in zip(clean, runs, strict=False)],
                **{key: [run.get(key) for run in runs] for key in ("moved", "pixels", "rate", "failed", "indefinite")},
            }
            for run in runs:
                if "defence" in run:
                    made["defence"][name] = run["defence"]
    return made


def fill(job: Job, recipe: Recipe, count: int) -> None:
    """Carry out what is missing in ``count`` processes; what is not finished at the deadline continues next time."""
    with suppress(OutOfTime), stopped_at(job.deadline):
        for _ in range(PASSES):
            side_by_side.fill(job, recipe, count)


def parts_for(models: Sequence[str], seeds: int | None = None) -> tuple[Part, ...]:
    """The decisive methods of every model first, then a long attack, the printed step sizes, and further curvatures."""
    first = []
    for model in models:
        finer = FINER if model == "CNN" else ()
        first += [Part(model, "reference", REFERENCES, seeds), Part(model, "own", DECISIVE, seeds, finer)]
        first += [Part(model, "long", DECISIVE[1:], 1)] if model == "MLP" else []
    first += [Part(model, "long", DECISIVE[:1], 1) for model in models if model == "MLP"]
    first += [Part(model, "own", (*FIRST[2:], NOISE), seeds) for model in models]
    printed = [Part(model, "printed", FIRST, seeds) for model in models]
    return (*first, *printed, *(Part(model, arm, BESIDE, seeds) for model in models for arm in ("own", "printed")))


LR = Case("mnist", "linear", (42_000, 13_000, 5_000), cleaned=10_000)
MLP = replace(LR, network="mlp", cleaned=0)
CNN = Case("cifar10", "cnn", (35_000, 10_000, 5_000), batch=500, added=270)
TINY = Case("digits", "linear", (300, 100, 100), 50, 12, steps=3, inner_steps=2, epochs=2, leader_epochs=1, trusted=40)
SETTINGS: dict[Scale, Settings] = {
    "smoke": Settings(
        {"LR": replace(TINY, cleaned=120), "MLP": replace(TINY, network="mlp"), "CNN": replace(TINY, network="cnn")},
        (
            *parts_for(("LR",)),
            Part("MLP", "own", ("TGDA-CG",)),
            Part("MLP", "long", ("TGDA-CG",)),
            *parts_for(("CNN",))[:3],
        ),
        trials=1,
        short=0.5,
        timed=1,
    ),
    "small": Settings({"LR": LR, "MLP": MLP, "CNN": CNN}, parts_for(("LR", "MLP", "CNN"))),
    "paper": Settings(
        {
            "LR": replace(LR, steps=12_000),
            "MLP": replace(MLP, steps=12_000),
            "CNN": replace(CNN, batch=250, added=135, steps=36_000),
        },
        parts_for(("LR", "MLP", "CNN")),
    ),
}

RECIPES = (
    Recipe(
        name="poisoning",
        title="Data poisoning as a measurement of robustness: ε = 3 %, MNIST and CIFAR-10",
        place="Table 5",
        experiment=11,
        settings=SETTINGS,
        work=work,
        verdict=verdict,
        tables=tables,
        note=NOTE,
        gpu=("small", "paper"),
        partial=True,
        stages=stages_of,
        fill=fill,
    ),
)
