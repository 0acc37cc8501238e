"""Which runs of a network on CIFAR-10 with noisy labels follow from which: trials, winners, and runs of all steps.

For :mod:`experiments.paper.resnet_length`, whose docstring has the rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments import records
from experiments.paper import references, resnet_runs
from experiments.paper.resnet_runs import TAUS, Network, Size
from experiments.paper.tuning import Setting, beyond

RESULT = records.RESULTS / "paper" / "resnet-length.jsonl"
CNN = RESULT.with_stem("cnn-length")
TIMES = RESULT.with_stem("resnet-length-times")
BATCHES: dict[Network, int] = {"resnet18": Size().batch, "cnn": 1000}
"""Rows of a batch."""
LARGE = 2500
"""Rows of the batches of the runs of ResNet-18 that decide."""
OWN, PRINTED = "each its own", "as printed"
ARMS = (OWN, PRINTED)
RELATIVE = (0.03, 0.1, 0.3)
BEYOND = (0.003, 0.01, *RELATIVE, 1.0, 3.0)
"""Where relative step sizes may go on."""
ABSOLUTE = (0.1, 1.0, 10.0, 100.0, 500.0, 1000.0)
PRINTED_NAMES = ("AID-KFAC", "AID-CG-3", "AID-identity")
"""Methods of the arm ``as printed``."""
OTHERS: dict[str, tuple[float, tuple[float, ...]]] = {
    "damping": (0.1, (0.01, 1.0)),
    "step": (0.03, (0.01, 0.1)),
    "epsilon": (0.1, (0.01, 1.0)),
    "eta": (0.1, (0.01, 1.0)),
    "weight": (0.01, (0.001, 0.1)),
}
"""What else a method has: its value while the step size of λ is tried, and other values to try."""
WIDER: dict[str, tuple[float, ...]] = {
    "damping": (1e-3, 0.01, 0.1, 1.0, 10.0),
    "step": (3e-3, 0.01, 0.03, 0.1, 0.3),
    "epsilon": (1e-3, 0.01, 0.1, 1.0),
    "eta": (1e-3, 0.01, 0.1, 1.0),
    "weight": (1e-4, 1e-3, 0.01, 0.1, 1.0),
}
"""Where these may go on."""
SETTLED = {name: first for name, (first, _) in OTHERS.items()} | {"step": 0.01}
"""The same without trials; a larger step of the v of AmIGO and Neumann diverged in shorter runs."""
WITHOUT_MOMENTUM = (3.0, 10.0)
"""By what the step size of θ is multiplied in further trials of methods whose θ has no momentum; without trials by the
last, for momentum 0.9 makes a step ten times as long.
"""
USES = {
    **dict.fromkeys(("AID-KFAC", "AID-CG-3", "AID-GGN-CG-3", "AID-GGN-CG-10", "AID-CG-10", "MRBO-KFAC"), "damping"),
    **dict.fromkeys(("AmIGO", "AID-Neumann-10", "stocBiO", "MRBO"), "step"),
    **{"BSG-1": "epsilon", "BOME": "eta", "BVFSM": "weight"},
}
"""Which of these a method has."""
NAMES = (
    *("AID-KFAC", "AID-CG-3", "AID-identity", *references.KINDS, "MRBO-KFAC", "BSG-1", "AID-GGN-CG-3", "AmIGO"),
    *("AID-Neumann-10", "AID-GGN-CG-10", "AID-CG-10", "BOME", "stocBiO", "BVFSM", "MRBO"),
)
"""Most important first."""
SHARED = tuple(f"AID-{name}-τ{tau}" for tau in TAUS for name in ("EKFAC", "KFAC") if (name, tau) != ("KFAC", 1))
"""The lines of table 2, which take the setting of AID-KFAC."""


AS = {"AmIGO": "AID-Neumann-10", "stocBiO": "AID-Neumann-10", "BVFSM": "BOME"}
"""Methods whose step was not timed, and others with as many products."""


class Task(NamedTuple):
    """A run of a method with a setting for a number of outer steps; the test part is looked at in long ones."""

    name: str
    setting: Setting
    seed: int
    steps: int


class Plan(NamedTuple):
    """How much is run, with which step size of θ and which relative one of λ (0: by trials)."""

    steps: int = 1000
    seeds: int = 3
    short: float = 0.1
    inner: float = 0.001
    rate: float = 0.3

    @property
    def first(self) -> int:
        """Outer steps of a trial."""
        return max(1, round(self.short * self.steps))


def loss_of(row: dict[str, Any]) -> float:
    """What a run is judged by; a diverged one is the worst."""
    found = row["best"]["second_loss"]
    return math.inf if row["failed"] or found is None else float(found)


def key(task: Task) -> str:
    """A run by its name, setting, seed and length."""
    return json.dumps([task.name, dict(sorted(task.setting.items())), task.seed, task.steps])


def task_of(row: dict[str, Any]) -> Task:
    """The task of a recorded run."""
    return Task(row["method"], row["setting"], row["seed"], row["wanted"])


LENGTHS: dict[Network, Plan] = {"resnet18": Plan(), "cnn": Plan(short=0.25, inner=0.1, rate=0.0)}
"""The plans with the usual batches."""


def plan_of(batch: int, network: Network = "resnet18") -> Plan:
    """The plan with batches of ``batch`` rows: with large ones a weight has as many updates as with the usual ones.

    Example:
        >>> [plan_of(batch).steps for batch in (250, 500, 2500)], plan_of(2500, "cnn").steps
        ([1000, 1000, 200], 400)
    """
    plan = LENGTHS[network]
    return plan._replace(steps=max(1, min(plan.steps, plan.steps * BATCHES[network] // batch)))


def result_of(batch: int, network: Network = "resnet18") -> Path:
    """The file of the runs with a size of batches.

    Example:
        >>> result_of(2500).name, result_of(1000, "cnn").name
        ('resnet-length-batch-2500.jsonl', 'cnn-length.jsonl')
    """
    file = CNN if network == "cnn" else RESULT
    return file if batch == BATCHES[network] else file.with_stem(f"{file.stem}-batch-{batch}")


def times_of(network: Network) -> Path:
    """The file of the times of a step, alone on the device."""
    return CNN.with_stem("cnn-length-times") if network == "cnn" else TIMES


class Contest:
    """What has been run so far, what comes next, and who won.

    Args:
        rows: finished runs.
        plan: how much is run.
        names: of the methods, most important first.
        alone: milliseconds of a step of each method, where they are known.
        arms: what is run.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        plan: Plan = LENGTHS["resnet18"],
        names: Sequence[str] = NAMES,
        alone: Mapping[str, float] = MappingProxyType({}),
        arms: Sequence[str] = ARMS,
    ) -> None:
        self.rows, self.plan, self.names, self.alone, self.arms = rows, plan, names, alone, arms
        self.done = {key(task_of(row)): row for row in rows if row["failed"] or row["steps"] == row["wanted"]}
        inner = [plan.inner * factor for factor in (1.0, *WITHOUT_MOMENTUM)]
        long = [row for row in rows if row["wanted"] == plan.steps and row["setting"]["inner"] in inner]
        self.cut_short = [row for row in long if key(task_of(row)) not in self.done]

    def _short(self, name: str, setting: Setting) -> Task:
        return Task(name, setting, 0, self.plan.first)

    def _best(self, tasks: Sequence[Task]) -> list[Task] | None:
        """Tasks that are all done, best first; ``None`` before that."""
        if any(key(task) not in self.done for task in tasks):
            return None
        return sorted(tasks, key=lambda task: loss_of(self.done[key(task)]))

    def first(self, name: str) -> Setting:
        """What a method's settings are while its step size of λ is tried."""
        own = USES.get(name)
        return ({} if own is None else {own: OTHERS[own][0]}) | {"inner": self.plan.inner}

    def settled(self, name: str) -> Setting:
        """What a method's settings are without trials."""
        own, longer = USES.get(name), WITHOUT_MOMENTUM[-1] if name in resnet_runs.NO_MOMENTUM else 1.0
        setting = {"outer": self.plan.rate} | ({} if own is None else {own: SETTLED[own]})
        return setting | {"inner": self.plan.inner * longer}

    def rates(self, name: str, arm: str) -> list[Task]:
        """Trials at the step sizes of λ; in the arm of its own also beyond an edge that is best."""
        if arm == PRINTED:
            return [self._short(name, {"absolute": rate, **self.first(name)}) for rate in ABSOLUTE]
        tried = list(RELATIVE)
        while True:
            tasks = [self._short(name, {"outer": rate, **self.first(name)}) for rate in tried]
            order = self._best(tasks)
            more = None if order is None else beyond(order[0].setting["outer"], tried, BEYOND)
            if more is None:
                return tasks
            tried = sorted([*tried, more])

    def others(self, name: str, arm: str) -> list[Task]:
        """Trials of what else a method has, at the middle step size of λ; in the arm of its own also beyond an edge
        that is the best of all trials.
        """
        own = USES.get(name)
        if own is None:
            return []
        middle = {"outer": RELATIVE[1]} if arm == OWN else {"absolute": ABSOLUTE[2]}
        first, more = OTHERS[own]
        tried = sorted([first, *more])
        while True:
            tasks = [self._short(name, {**middle, **self.first(name), own: value}) for value in tried]
            order = self._best([*self.rates(name, arm), *tasks]) if arm == OWN else None
            further = None if order is None else beyond(order[0].setting[own], tried, WIDER[own])
            if further is None:
                return tasks
            tried = sorted([*tried, further])

    def trials(self, name: str, arm: str) -> list[Task]:
        """All trials: step sizes of λ, and at the middle one every other setting changed alone; none of a line."""
        if name in references.KINDS or (arm == OWN and self.plan.rate):
            return []
        middle = {"outer": RELATIVE[1]} if arm == OWN else {"absolute": ABSOLUTE[2]}
        inner = [factor * self.plan.inner for factor in WITHOUT_MOMENTUM if name in resnet_runs.NO_MOMENTUM]
        longer = [self._short(name, {**middle, **self.first(name), "inner": x}) for x in inner]
        return self.rates(name, arm) + self.others(name, arm) + longer

    def winner(self, name: str, arm: str) -> Setting | None:
        """The setting of the best trial, once all are done; of AID-KFAC's, where table 2 shares them."""
        if name in references.KINDS:
            return {"inner": self.plan.inner}
        name = "AID-KFAC" if name in SHARED else name
        if arm == OWN and self.plan.rate:
            return self.settled(name)
        order = self._best(self.trials(name, arm))
        return None if order is None else order[0].setting

    def finals(self, name: str, arm: str) -> list[Task]:
        """The long runs of the winner."""
        won = self.winner(name, arm)
        return [] if won is None else [Task(name, won, seed, self.plan.steps) for seed in range(self.plan.seeds)]

    def results(self, name: str, arm: str = OWN) -> list[dict[str, Any]]:
        """The long runs of the winner, one for each seed that is done."""
        return [self.done[key(task)] for task in self.finals(name, arm) if key(task) in self.done]

    def expected(self, task: Task, slower: float, reached: int = 0) -> float:
        """Seconds of the steps after ``reached`` if each takes ``slower`` times as long as alone; 0 if not known."""
        return self.alone.get(AS.get(task.name, task.name), 0.0) / 1e3 * (task.steps - reached) * slower

    def missing(self) -> Iterator[tuple[list[Any], Task]]:
        """The runs that can begin now, most important first.

        Trials come before the long runs of less important methods. Of reference lines the first seed comes in its
        place and the others last.
        """
        wanted: list[Task] = []
        for name in self.names:
            wanted += [] if name in SHARED else self.trials(name, OWN)
            if any(key(task) not in self.done for task in wanted if task.steps < self.plan.steps):
                continue
            wanted += self.finals(name, OWN)
        wanted.sort(key=lambda task: task.name in references.KINDS and task.seed > 0)
        wanted = wanted if OWN in self.arms else []
        for name in (name for name in self.names if name in PRINTED_NAMES and PRINTED in self.arms):
            wanted += [*self.trials(name, PRINTED), *self.finals(name, PRINTED)]
        seen = set(self.done)
        for task in wanted:
            if key(task) not in seen:
                seen.add(key(task))
                yield list(task), task
