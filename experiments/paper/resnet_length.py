"""ResNet-18 on CIFAR-10 at the paper's length: which method cleans best (figures 1 and 2, table 2)?

Runs of all steps have the seeds 0, 1 and 2. θ's step size is the same for all methods (``--inner``). In the arm ``each
its own`` step sizes of λ are relative.

The first runs had θ's step size 0.05, and settings by trials (``--inner 0.05 --rate 0``): a tenth of the steps, seed 0,
three step sizes of λ and more beyond an edge that is best, and at the middle one two other dampings (or what a method
has in place of a damping); the lowest held-out loss wins. KFAC, CG-3 and the identity all chose λ's relative step size
0.3, the first two the damping 0.1. But θ memorised wrong labels before λ's weights had been updated. The rule
for the further runs, written before them: θ's step size is the largest of the printed 0.1, 0.01 and 0.001 at which
AID-KFAC with seed 0 has updated at least four fifths of the weights when its held-out loss is lowest. Trials would be
too short for it, so that all methods take λ's step size 0.3 and :data:`SETTLED`. No step size passed (38 % of the
weights were left at 0.001, 74 % at 0.01); the runs with 0.001 are the ones that are shown.

So the runs that decide have batches of 2500. By the same rule θ's step size is 0.001: AID-KFAC with seed 0 has its
lowest held-out loss at step 48 of 150, when 5 % of the weights were left; at 0.01 at step 14, when 43 % were. They have
200 outer steps, as many updates of a weight (12.5) as 1000 steps with batches of 500. All this was written before
them. With 0.05 a run of 1000 steps (AID-KFAC, seed 0) does not come back to its early loss: 2.18 in place of 1.71.

    python -m experiments.paper.resnet_length --device cuda --workers 7 --limit-minutes 9    # continues an earlier run
    python -m experiments.paper.resnet_length --batch 2500 --arms "each its own" --device cuda --workers 4
    python -m experiments.paper.resnet_length --times --device cuda                          # ms a step, each alone
    python -m experiments.paper.resnet_length --table       # the recorded runs; or --figure
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from experiments import records
from experiments.paper import cleaning, datasets, references, resnet_runs
from experiments.paper.cleaning import Split
from experiments.paper.resnet_runs import TAUS, Size
from experiments.paper.tuning import Setting, beyond
from experiments.pieces import Lines
from experiments.trial import Saved
from experiments.workers import share

RESULT = records.RESULTS / "paper" / "resnet-length.jsonl"
TIMED = Size((10_000, 1_000, 1_000))
"""What times are measured with; they do not depend on the number of rows."""
BATCH = Size().batch
LARGE = 2500
"""Rows of the batches of the runs that decide."""
SMOKE = Size((20, 10, 10), 10, 2, 2)
SHARING = 1.5
"""How much more work six processes get done on one H200 than one process, measured."""
SAVED_EVERY = 30.0
"""Seconds between two checkpoints of a long run; a cut-off loses no more."""
UNKNOWN = 1000.0
"""Milliseconds of a step whose time has not been measured, for the distance of checkpoints."""
TIMES = records.RESULTS / "paper" / "resnet-length-times.jsonl"
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


LENGTH = Plan()


def plan_of(batch: int) -> Plan:
    """The plan with batches of ``batch`` rows: every weight has as many updates as in the plan with 500.

    Example:
        >>> plan_of(BATCH).steps, plan_of(LARGE).steps
        (1000, 200)
    """
    return LENGTH._replace(steps=max(1, LENGTH.steps * BATCH // batch))


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
        plan: Plan = LENGTH,
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

    def trials(self, name: str, arm: str) -> list[Task]:
        """All trials: step sizes of λ, and at the middle one every other setting changed alone; none of a line."""
        if name in references.KINDS or (arm == OWN and self.plan.rate):
            return []
        own = USES.get(name)
        middle = {"outer": RELATIVE[1]} if arm == OWN else {"absolute": ABSOLUTE[2]}
        changed = [{own: value} for value in OTHERS[own][1]] if own else []
        if name in resnet_runs.NO_MOMENTUM:
            changed += [{"inner": factor * self.plan.inner} for factor in WITHOUT_MOMENTUM]
        return self.rates(name, arm) + [self._short(name, {**middle, **self.first(name), **x}) for x in changed]

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


def saved(task: Task, folder: Path | None, step_seconds: float) -> Saved | None:
    """Where and how often a run is saved: every :data:`SAVED_EVERY` seconds or so, if a step takes ``step_seconds``."""
    return Saved.of(key(task), folder, round(SAVED_EVERY / max(step_seconds, 1e-3)))


def reached(task: Task, folder: Path | None) -> int:
    """Outer steps that the checkpoint of an earlier run holds."""
    kept = saved(task, folder, 1.0)
    return 0 if kept is None else kept.reached()


def run(
    task: Task, split: Split, size: Size, plan: Plan, deadline: float = math.inf, kept: Saved | None = None
) -> dict[str, Any]:
    """A recorded run; one that the deadline cuts short is recorded, too, but does not count.

    A long run goes on from the checkpoint of ``kept``, if there is one.
    """
    test = task.steps == plan.steps
    options = {"test": test, "deadline": deadline, "saved": kept if test else None}
    found = resnet_runs.run(task.name, task.setting, split, task.seed, task.steps, size, **options)  # type: ignore[arg-type]
    if not test:
        del found["curve"]
    named = {"method": task.name, "setting": task.setting, "seed": task.seed, "wanted": task.steps}
    return {**named, "batch": size.batch, **found}


def result_of(batch: int) -> Path:
    """The file of the runs with a size of batches.

    Example:
        >>> result_of(2500).name
        'resnet-length-batch-2500.jsonl'
    """
    return RESULT if batch == BATCH else RESULT.with_stem(f"{RESULT.stem}-batch-{batch}")


def _worker(options: argparse.Namespace) -> Callable[[Task], dict[str, Any]]:
    """What carries out a run; the data are on the device, and a split is made once for a seed."""
    torch.set_float32_matmul_precision("high")
    size = SMOKE if options.smoke else Size(batch=options.batch)
    shape = (3, 32, 32)
    found = cleaning.made_up(shape, sum(size.counts), 10) if options.smoke else datasets.cifar10(options.data)
    parts = [(x.to(options.device), y.to(options.device)) for x, y in (found.train, found.test)]
    data, made = datasets.Images(*parts), dict[int, Split]()

    def carry_out(task: Task) -> dict[str, Any]:
        task = Task(*task)
        if task.seed not in made:
            made.clear()
            made[task.seed] = cleaning.noisy_split(data, size.counts, task.seed)
        pace = options.alone.get(task.name, UNKNOWN) / 1e3 * max(1.0, options.workers / SHARING)
        kept = saved(task, options.checkpoints, pace)
        return run(task, made[task.seed], size, _plan(options), options.deadline, kept)

    return carry_out


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(*(getattr(options, name) for name in Plan._fields))


def times(device: str, names: Sequence[str], lines: Lines, size: Size = TIMED) -> None:
    """Write down the time of an outer step of each method that has none, alone on the device, with made-up images."""
    torch.set_float32_matmul_precision("high")
    data = cleaning.made_up((3, 32, 32), sum(size.counts), 100)
    split = cleaning.noisy_split(data, size.counts, 0).to(device)
    known = {row["method"] for row in lines.rows}
    for name in (name for name in names if name not in known):
        setting = {"outer": 0.1, "inner": LENGTH.inner, **{own: first for own, (first, _) in OTHERS.items()}}
        tau = int(name.rpartition("τ")[2]) if "τ" in name else 1
        found = resnet_runs.step_times(name, setting, split, size, max(10, 2 * tau), warm=6 + 2 * tau)
        print(lines.append({"method": name, **found}), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables of the recorded runs")
    parser.add_argument("--figure", action="store_true", help="draw the figure of the recorded runs")
    parser.add_argument("--times", action="store_true", help="measure an outer step of each method alone")
    parser.add_argument("--out", type=Path, default=None, help="file of the runs; finished ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder with cifar10/")
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/resnet-length"), help="folder of cut-off runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=list(NAMES), choices=[*NAMES, *SHARED])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--smoke", action="store_true", help="made-up images and a tiny network: does everything run?")
    for name, value in Plan()._asdict().items():
        given = None if name == "steps" else value  # by the batch
        parser.add_argument(f"--{name}", type=type(value), default=given, help=f"default: {value}")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"rows of a batch; default: {BATCH}")
    parser.add_argument("--workers", type=int, default=1, help="runs that share the device; default: 1")
    parser.add_argument("--beside", type=int, default=0, help="runs of other commands on the device; default: 0")
    parser.add_argument(
        "--limit-minutes", type=float, default=1e9, help="a run ends by this time, and begins if it can"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run what is not recorded yet, measure times, print the tables or draw the figure."""
    from experiments.paper import resnet_length_page as page

    options = _parser().parse_args(arguments)
    options.steps = options.steps or plan_of(options.batch).steps
    lines, more = Lines(options.out or (TIMES if options.times else result_of(options.batch))), options.batch / BATCH
    alone = options.alone = {row["method"]: more * row["mean"] for row in Lines(TIMES).rows}
    if options.batch != BATCH:
        options.checkpoints /= f"batch-{options.batch}"

    def contest() -> Contest:
        return Contest(lines.rows, _plan(options), options.methods, alone, options.arms)

    if options.times:
        times(options.device, options.methods, lines)
    elif options.table:
        print(page.tables(contest(), Lines(TIMES).rows))
    elif options.figure:
        path = (records.PAGES / "figures" / "paper" / result_of(options.batch).name).with_suffix(".svg")
        print(page.figure(contest(), Lines(TIMES).rows, path))
    else:
        _run_all(options, lines, contest)


def _run_all(options: argparse.Namespace, lines: Lines, contest: Callable[[], Contest]) -> None:
    options.deadline = time.time() + 60 * options.limit_minutes
    slower = [max(1.0, options.workers / SHARING)]  # a guess, then the last one measured

    def ready() -> Iterator[tuple[list[Any], Task]]:
        now, left = contest(), options.deadline - time.time()
        return (
            (name, task)
            for name, task in now.missing()
            if now.expected(task, slower[-1], reached(task, options.checkpoints)) < left
        )

    def keep(name: list[Any], row: dict[str, Any], seconds: float, busy: float) -> None:
        lines.append({**row, "workers": options.workers + options.beside})
        if row["method"] in options.alone:
            slower.append(row["step_ms"] / options.alone[row["method"]])
        done = f"{row['steps']} of {row['wanted']} steps, {row['step_ms']:.0f} ms each"
        print(f"{row['method']} {row['setting']} seed {row['seed']}, {done}: {loss_of(row):.4f}", flush=True)

    print(f"{len(contest().done)} runs are recorded.", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    late = lambda: time.time() > options.deadline  # noqa: E731
    share(options.workers, partial(_worker, options), ready, keep, late=late)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
