"""The linear model on MNIST at the paper's length: all methods of figure 5, in two arms.

The printed set-up: 50 000 noisy rows in one batch, 5000 trusted ones, ten inner steps, 1000 outer steps, momentum 0.9
on θ and λ, weights within [0, 1], pixels scaled by one mean and one deviation. In each arm every method is tried at the
same number of settings for a tenth of the steps, the best of them are run for all steps, and the winner by the second
validation loss is run with five further seeds. The arm ``as printed`` has the printed grid, ``each its own`` one that
goes a thousand times further in the step size of λ and has more inner step sizes.

    python -m experiments.paper.linear_length --device cuda --workers 12 --limit-minutes 9   # continues an earlier run
    python -m experiments.paper.linear_length --table                                        # the recorded runs
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments import records
from experiments.paper import cleaning, datasets, references
from experiments.paper.cleaning import Budget, Case, Split
from experiments.paper.methods import Rates, methods
from experiments.paper.tuning import Grid, Setting, at_edge, interval, settings_of
from experiments.pieces import Lines
from experiments.workers import share

RESULT = records.RESULTS / "paper" / "linear-length.jsonl"
PRINTED = Rates(momentum=(0.9,), step=(0.003, 0.01, 0.03, 0.1, 0.3))
"""The printed grid; the steps of Neumann and AmIGO are not printed."""
WIDE = replace(PRINTED, inner=(0.3, 0.1, 0.03, 0.01), outer=(1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6))
PLAIN = {"inner": (0.01, 0.03, 0.1, 0.3), "momentum": (0.9,)}
"""The grid of the reference lines."""
ARMS = {"as printed": PRINTED, "each its own": WIDE}
NAMES = (
    *("AID-KFAC", "AID-CG-3", "AID-identity", "AID-Neumann-10", "AmIGO", "MRBO", "MRBO-KFAC", "AID-EKFAC"),
    *("stocBiO", "BOME", "BSG-1"),
    *references.KINDS,
)
"""AmIGO with KFAC is AID with KFAC: a direct solve leaves nothing to amortise."""


class Task(NamedTuple):
    """A run: of a method with a setting, for so many outer steps, perhaps with the test part looked at."""

    name: str
    setting: Setting
    seed: int
    steps: int
    test: bool


class Plan(NamedTuple):
    """How much is run."""

    steps: int = 1000
    tried: int = 24
    kept: int = 3
    seeds: int = 5
    short: float = 0.1

    @property
    def first(self) -> int:
        """Outer steps of a trial."""
        return max(1, round(self.short * self.steps))


def loss_of(row: dict[str, Any]) -> float:
    """What a run is judged by; a diverged one is the worst."""
    found = row["best"]["second_loss"]
    return math.inf if found is None else float(found)


class Contest:
    """What has been run so far, what comes next, and who won.

    Args:
        rows: finished runs.
        plan: how much is run.
        names: of the methods, most important first.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], plan: Plan, names: Sequence[str] = NAMES) -> None:
        self.plan, self.names = plan, names
        self.done = {key(_task(row)): row for row in rows}
        lines: dict[str, Grid] = dict.fromkeys(references.KINDS, PLAIN)
        self.grids = {arm: {x.name: x.grid for x in methods(rates).values()} | lines for arm, rates in ARMS.items()}

    def trials(self, name: str, arm: str) -> list[Task]:
        """The short runs of a method, at random places of its grid."""
        grid = self.grids[arm][name]
        count = min(self.plan.tried, math.prod(map(len, grid.values())))
        return [Task(name, setting, 0, self.plan.first, False) for setting in settings_of(grid, count)]

    def kept(self, name: str, arm: str) -> list[Task]:
        """The best trials of an arm, for all steps; none before all trials are done."""
        tried = self.trials(name, arm)
        if any(key(task) not in self.done for task in tried):
            return []
        best = sorted(tried, key=lambda task: loss_of(self.done[key(task)]))[: self.plan.kept]
        return [task._replace(steps=self.plan.steps) for task in best]

    def winner(self, name: str, arm: str) -> Setting | None:
        """The setting with the lowest second validation loss after all steps, once that is known."""
        kept = self.kept(name, arm)
        if not kept or any(key(task) not in self.done for task in kept):
            return None
        return min(kept, key=lambda task: loss_of(self.done[key(task)])).setting

    def finals(self, name: str, arm: str) -> list[Task]:
        """The runs of the winner; none before it is known."""
        won = self.winner(name, arm)
        seeds = range(1, self.plan.seeds + 1)
        return [] if won is None else [Task(name, won, seed, self.plan.steps, True) for seed in seeds]

    def missing(self) -> Iterator[tuple[list[Any], Task]]:
        """The runs that can begin now, those that complete a method first."""
        seen = set(self.done)
        for stage in (self.finals, self.kept, self.trials):
            for task in (task for name in self.names for arm in ARMS for task in stage(name, arm)):
                if key(task) not in seen:
                    seen.add(key(task))
                    yield list(task), task


def key(task: Task) -> str:
    """A run by its name, setting, seed and length."""
    return json.dumps(list(task))


def _task(row: dict[str, Any]) -> Task:
    return Task(row["method"], row["setting"], row["seed"], row["wanted"], row["test"])


def run(task: Task, split: Split, batch: int) -> dict[str, Any]:
    """One run; its curve, and how well its weights find the right labels."""
    case, budget = Case(batch=batch), Budget(math.inf, task.steps, 25 if task.test else 5)
    if task.name in references.KINDS:
        rows = references.train(case, split, task.name, task.setting, budget, task.seed, task.test)
        weights, failed = torch.full((), 0.5), not math.isfinite(rows[-1]["second_loss"])
    else:
        setting = {**task.setting, "outer_momentum": task.setting.get("momentum", 0.0)}
        method = methods(WIDE)[task.name]
        made, rows = cleaning.run(case, split, method, setting, budget, task.seed, test=task.test)
        weights, failed = next(made.state.hyper.parameters()).detach(), made.failure is not None
    return {
        "method": task.name,
        "setting": task.setting,
        "seed": task.seed,
        "wanted": task.steps,
        "test": task.test,
        "failed": failed,
        "best": min(rows, key=lambda row: row["second_loss"]),
        "f1": cleaning.f1(weights.expand(len(split.clean)), split.clean),
        "moved": float((weights - 0.5).abs().mean()),
        **({"curve": {name: [float(f"{row[name]:.5g}") for row in rows] for name in rows[0]}} if task.test else {}),
    }


def _worker(options: argparse.Namespace) -> Callable[[Task], dict[str, Any]]:
    """What carries out a run; splits are made once in a process."""
    data = datasets.mnist(options.data)
    made: dict[int, Split] = {}
    counts = (options.rows, 5000, 5000)

    def carry_out(task: Task) -> dict[str, Any]:
        task = Task(*task)
        if task.seed not in made:
            made.clear()
            made[task.seed] = cleaning.noisy_split(data, counts, task.seed, scaling="one").to(options.device)
        return run(task, made[task.seed], options.rows)

    return carry_out


def table(contest: Contest) -> str:
    """Test loss and error where the second validation loss is lowest, the lowest test loss, F1, and the winner."""
    lines = []
    for arm in ARMS:
        lines += [
            f"| {arm} | test loss | error in % | lowest test loss on the way | F1 | mean move of a weight | winner |",
            "| --- " * 7 + "|",
        ]
        found = {name: _figures(contest, name, arm) for name in contest.names}
        known = {name: x for name, x in found.items() if x}
        lines += [f"| {name} | {' | '.join(known[name][1:])} |" for name in sorted(known, key=lambda n: known[n][0])]
        absent = [name for name in contest.names if name not in known]
        lines += ["", *([f"Not run: {', '.join(absent)}.", ""] if absent else [])]
    return "\n".join(lines)


def _figures(contest: Contest, name: str, arm: str) -> list[Any]:
    rows = [contest.done[key(task)] for task in contest.finals(name, arm) if key(task) in contest.done]
    if not rows or any(row["failed"] for row in rows):
        return [math.inf, "diverged", "–", "–", "–", "–", "–"] if rows else []
    setting = rows[0]["setting"]
    grid = {x: values for x, values in contest.grids[arm][name].items() if x != "momentum"}
    edge = at_edge(setting, grid)
    shown = ", ".join(f"{x} {setting[x]:g}" for x in grid) + (f" (edge: {', '.join(edge)})" if edge else "")
    columns = (
        ("{:.3f} ± {:.3f}", [row["best"]["test_loss"] for row in rows]),
        ("{:.1f} ± {:.1f}", [100 * row["best"]["test_error"] for row in rows]),
        ("{:.3f} ± {:.3f}", [min(row["curve"]["test_loss"]) for row in rows]),
        ("{:.3f} ± {:.3f}", [row["f1"] for row in rows]),
        ("{:.2f} ± {:.2f}", [row["moved"] for row in rows]),
    )
    cells = [form.format(*interval(values)) for form, values in columns]
    return [interval(columns[0][1])[0], *cells, shown]


def main(arguments: list[str] | None = None) -> None:
    """Run what is not recorded yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the recorded runs")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the runs; finished ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder with mnist/")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=50_000, help="noisy rows; default: 50 000")
    parser.add_argument("--methods", nargs="+", default=list(NAMES), choices=NAMES)
    for name, value in Plan()._asdict().items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--workers", type=int, default=1, help="runs that share the device; default: 1")
    parser.add_argument("--limit-minutes", type=float, default=1e9, help="no run begins after this time")
    options = parser.parse_args(arguments)
    plan = Plan(*(getattr(options, name) for name in Plan._fields))
    lines = Lines(options.out)

    def contest() -> Contest:
        return Contest(lines.rows, plan, options.methods)

    if options.table:
        print(table(contest()))
        return

    def keep(name: list[Any], row: dict[str, Any], seconds: float, busy: float) -> None:
        lines.append({**row, "seconds": round(seconds, 2)})
        print(f"{row['method']} {row['setting']} {row['wanted']}: {loss_of(lines.rows[-1]):.4f}", flush=True)

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    deadline = time.monotonic() + 60 * options.limit_minutes
    late = lambda: time.monotonic() > deadline  # noqa: E731
    share(
        options.workers,
        partial(_worker, options),
        lambda: contest().missing(),
        keep,
        late=late,
        near=lambda task: task.seed,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
