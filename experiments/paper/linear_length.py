"""The linear model on MNIST at the paper's length: figure 5, and the studies of batch sizes, averages and intervals.

Every line of a study is tried at up to 24 settings of its grid for a tenth of the steps, the two best are run for all
steps, and the winner by the second validation loss is run with three further seeds in every variant of the study, with
the test part looked at. Studies share their runs and one file of records.

    figure 5    all methods, in the arms ``as printed`` (printed grid) and ``each its own`` (wider grid)
    averages    figure 6: KFAC with moving averages, by batch and damping; tuned without averaging
    batches     figures 3 and 7: KFAC and CG-3 by batch size, printed grid
    intervals   table 2 with the linear model: KFAC and EKFAC by refresh interval; tuned at an interval of 5

    python -m experiments.paper.linear_length --device cuda --workers 14 --limit-minutes 9   # continues an earlier run
    python -m experiments.paper.linear_length --table                                        # the recorded runs
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from experiments import records
from experiments.paper import cleaning, datasets, linear_runs, references
from experiments.paper.cleaning import Split
from experiments.paper.linear_runs import Task, key, loss_of, order_of, task_of
from experiments.paper.methods import Rates, methods
from experiments.paper.tuning import Grid, Setting, settings_of
from experiments.pieces import Lines
from experiments.workers import share
from hyperkron.solution import HyperkronError

RESULT = records.RESULTS / "paper" / "linear-length.jsonl"
ROWS = 50_000
PRINTED = Rates(momentum=(0.9,), step=(0.003, 0.01, 0.03, 0.1, 0.3))
"""The printed grid; the steps of Neumann and AmIGO are not printed."""
WIDE = replace(PRINTED, inner=(0.3, 0.1, 0.03, 0.01), outer=(1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6))
PLAIN = {"inner": (0.01, 0.03, 0.1, 0.3), "momentum": (0.9,)}
"""The grid of the reference lines."""
ARMS = {"as printed": PRINTED, "each its own": WIDE}
NAMES = (
    *("AID-KFAC", "AID-CG-3", "AID-identity", "AmIGO", "MRBO-KFAC", "MRBO", *references.KINDS),
    *("AID-Neumann-10", "BOME", "BSG-1", "AID-EKFAC"),
)
"""Most important first. With a batch of all rows stocBiO is AID with Neumann-10; AmIGO with KFAC is AID with KFAC,
because a direct solve leaves nothing to amortise.
"""
COMPARED = ("AID-KFAC", "AID-CG-3", "AmIGO", "MRBO-KFAC", "MRBO")
BATCHES = (128, 1000, 5000, 10_000, ROWS)
DAMPINGS = (1e-3, 1e-5, 1e-10)
DECAYS = (0.0, 0.3, 0.5, 0.9)
AVERAGED = (1000, ROWS)
"""The batches of figure 6."""
TAUS = (1, 5, 10, 50)
TAU_BATCH = 1000


class Line(NamedTuple):
    """What is tuned and run: a method on a grid.

    Attributes:
        study, title: unique together.
        fixed: joins every setting of the grid; a grid's own value wins.
        variants: each joins the winner in runs of its own.
        rank: lines of a lower one come first.
    """

    study: str
    title: str
    method: str
    grid: Grid
    fixed: Mapping[str, float] = MappingProxyType({})
    variants: tuple[Mapping[str, float], ...] = (MappingProxyType({}),)
    rank: int = 0


class Plan(NamedTuple):
    """How much is run."""

    steps: int = 1000
    tried: int = 24
    kept: int = 2
    seeds: int = 3
    short: float = 0.1

    @property
    def first(self) -> int:
        """Outer steps of a trial."""
        return max(1, round(self.short * self.steps))


def figure_5(rows: int = ROWS) -> list[Line]:
    """Every method in both arms."""
    plain: dict[str, Grid] = dict.fromkeys(references.KINDS, PLAIN)
    grids = {arm: {x.name: x.grid for x in methods(rates).values()} | plain for arm, rates in ARMS.items()}
    return [
        Line("figure 5", f"{name}, {arm}", name, grids[arm][name], rank=_rank(name, arm))
        for arm in ARMS
        for name in NAMES
    ]


def _rank(name: str, arm: str) -> int:
    """What the rule on figure 5 compares comes first, then batches, intervals, other methods, and the other arm."""
    return 4 if arm != "as printed" else 0 if name in COMPARED else 3


def _printed(name: str, *leave_out: str) -> Grid:
    return {x: values for x, values in methods(PRINTED)[name].grid.items() if x not in leave_out}


def averages(rows: int = ROWS) -> list[Line]:
    """Figure 6; without the penalty α, whose curvature would hide the dampings below it."""
    grid, betas = _printed("AID-KFAC", "damping"), tuple({"ema": beta} for beta in DECAYS)
    cases = [(_of_all(batch, rows), damping) for batch in AVERAGED for damping in DAMPINGS]
    return [
        Line(
            "averages",
            _titled(batch, rows, damping),
            "AID-KFAC",
            grid,
            batch | {"damping": damping, "decay": 0.0},
            betas,
            rank=5,
        )
        for batch, damping in cases
    ]


def batches(rows: int = ROWS) -> list[Line]:
    """Figures 3 and 7."""
    return [
        Line("batches", f"{name}, batch {batch}", name, _printed(name), _of_all(batch, rows), rank=1)
        for batch in BATCHES
        for name in ("AID-KFAC", "AID-CG-3")
    ]


def intervals(rows: int = ROWS) -> list[Line]:
    """Table 2 with the linear model."""
    every, fixed = tuple({"refresh": float(tau)} for tau in TAUS), _of_all(TAU_BATCH, rows) | {"refresh": 5.0}
    return [Line("intervals", name, name, _printed(name), fixed, every, 2) for name in ("AID-KFAC", "AID-EKFAC")]


def _of_all(batch: int, rows: int) -> dict[str, float]:
    """The batch in a setting; none where it is all rows, and at most a fifth of fewer rows."""
    return {} if batch == ROWS else {"batch": float(min(batch, max(1, rows // 5)))}


def _titled(batch: Mapping[str, float], rows: int, damping: float) -> str:
    return f"batch {batch.get('batch', rows):.0f}, damping {damping:g}"


STUDIES: dict[str, Callable[[int], list[Line]]] = {
    "figure 5": figure_5,
    "averages": averages,
    "batches": batches,
    "intervals": intervals,
}
LENGTH = Plan()


class Contest:
    """What has been run so far, what comes next, and who won.

    Args:
        rows: finished runs.
        plan: how much is run.
        lines: most important first.
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], plan: Plan = LENGTH, lines: Sequence[Line] | None = None
    ) -> None:
        self.plan = plan
        self.lines = [line for study in STUDIES.values() for line in study(ROWS)] if lines is None else list(lines)
        self.done = {key(task_of(row)): row for row in rows}

    def trials(self, line: Line) -> list[Task]:
        """The short runs of a line, at random places of its grid."""
        count = min(self.plan.tried, math.prod(map(len, line.grid.values())))
        tried = settings_of(line.grid, count)
        return [Task(line.method, {**line.fixed, **setting}, 0, self.plan.first, False) for setting in tried]

    def kept(self, line: Line) -> list[Task]:
        """The best trials, for all steps; none before all trials are done."""
        tried = self.trials(line)
        if any(key(task) not in self.done for task in tried):
            return []
        best = sorted(tried, key=lambda task: order_of(self.done[key(task)]))[: self.plan.kept]
        return [task._replace(steps=self.plan.steps) for task in best]

    def winner(self, line: Line) -> Setting | None:
        """The setting with the lowest second validation loss after all steps, once that is known."""
        kept = self.kept(line)
        if not kept or any(key(task) not in self.done for task in kept):
            return None
        return min(kept, key=lambda task: loss_of(self.done[key(task)])).setting

    def finals(self, line: Line, variants: Sequence[Mapping[str, float]] | None = None) -> list[Task]:
        """The runs of the winner, seed by seed; none before it is known."""
        won = self.winner(line)
        if won is None:
            return []
        settings = [{**won, **variant} for variant in (line.variants if variants is None else variants)]
        seeds = range(1, self.plan.seeds + 1)
        return [Task(line.method, x, seed, self.plan.steps, True) for seed in seeds for x in settings]

    def results(self, line: Line, variant: Mapping[str, float] = MappingProxyType({})) -> list[dict[str, Any]]:
        """The finished runs of the winner in a variant, seed by seed."""
        return [self.done[key(task)] for task in self.finals(line, [variant]) if key(task) in self.done]

    def missing(self) -> Iterator[tuple[list[Any], Task]]:
        """The runs that can begin now, by rank, and of a rank those that complete a line first."""
        seen = set(self.done)
        for rank in sorted({line.rank for line in self.lines}):
            lines = [line for line in self.lines if line.rank == rank]
            for task in (
                task for stage in (self.finals, self.kept, self.trials) for line in lines for task in stage(line)
            ):
                if key(task) not in seen:
                    seen.add(key(task))
                    yield list(task), task


def _splits(options: argparse.Namespace) -> Callable[[int], Split]:
    """The split of a seed, made once; all data are on the device."""
    torch.set_float32_matmul_precision(options.precision)
    read = cleaning.made_up((20,), options.rows + 200, 100) if options.smoke else datasets.mnist(options.data)
    parts = [(x.to(options.device), y.to(options.device)) for x, y in (read.train, read.test)]
    data, made = datasets.Images(*parts), dict[int, Split]()
    counts = (options.rows, *((100, 100) if options.smoke else (5000, 5000)))

    def split(seed: int) -> Split:
        if seed not in made:
            made[seed] = cleaning.noisy_split(data, counts, seed, scaling="one")
        return made[seed]

    return split


def _worker(options: argparse.Namespace) -> Callable[[Task], dict[str, Any]]:
    """What carries out a run."""
    split = _splits(options)

    def carry_out(task: Task) -> dict[str, Any]:
        task = Task(*task)
        precision = "highest" if "decay" in task.setting else options.precision
        torch.set_float32_matmul_precision(precision)  # dampings down to 1e-10 ask for all digits
        try:
            return linear_runs.run(task, split(task.seed)) | {"precision": precision}
        except (RuntimeError, HyperkronError) as error:
            if "CUDA error" in str(error) or isinstance(error, torch.OutOfMemoryError):
                raise  # the process cannot go on
            return linear_runs.broken(task, error)

    return carry_out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables of the recorded runs")
    parser.add_argument("--figure", action="store_true", help="draw the figures of the recorded runs")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the runs; finished ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder with mnist/")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--precision", default="high", choices=("highest", "high"), help="high: TF32 products (default)"
    )
    parser.add_argument("--smoke", action="store_true", help="made-up rows: does everything run?")
    parser.add_argument("--rows", type=int, default=ROWS, help="noisy rows; default: 50 000")
    parser.add_argument("--studies", nargs="+", default=list(STUDIES), choices=STUDIES)
    parser.add_argument("--methods", nargs="+", default=None, choices=NAMES, help="only lines of these; default: all")
    parser.add_argument("--batches", nargs="+", type=int, default=None, help="only lines with these batch sizes")
    for name, value in Plan()._asdict().items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--workers", type=int, default=1, help="runs that share the device; default: 1")
    parser.add_argument("--beside", type=int, default=0, help="runs of other commands on the device; default: 0")
    parser.add_argument("--limit-minutes", type=float, default=1e9, help="no run begins that would end after this time")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(*(getattr(options, name) for name in Plan._fields))


def main(arguments: list[str] | None = None) -> None:
    """Run what is not recorded yet, or show what is."""
    options = _parser().parse_args(arguments)
    lines = [line for study in options.studies for line in STUDIES[study](options.rows)]
    chosen = [line for line in lines if options.methods is None or line.method in options.methods]
    if options.batches is not None:
        chosen = [line for line in chosen if line.fixed.get("batch", options.rows) in options.batches]
    kept = Lines(options.out)

    def contest() -> Contest:
        return Contest(kept.rows, _plan(options), chosen)

    if options.table or options.figure:
        from experiments.paper import linear_page as page

        print(page.tables(contest()) if options.table else page.figures(contest(), records.PAGES / "figures" / "paper"))
    else:
        _run_all(options, kept, contest)


def _run_all(options: argparse.Namespace, lines: Lines, contest: Callable[[], Contest]) -> None:
    deadline = time.monotonic() + 60 * options.limit_minutes
    pace: dict[str, float] = {}  # seconds of a step in the last long run of a method

    def ready() -> Iterator[tuple[list[Any], Task]]:
        left = deadline - time.monotonic()
        return ((name, task) for name, task in contest().missing() if pace.get(task.name, 0.0) * task.steps < left)

    def keep(name: list[Any], row: dict[str, Any], seconds: float, busy: float) -> None:
        shared = {"workers": options.workers + options.beside, "device": options.device}
        lines.append({**row, "seconds": round(seconds, 2), **shared})
        if row["wanted"] == _plan(options).steps:
            pace[row["method"]] = seconds / row["wanted"]
        print(f"{row['method']} {row['setting']} {row['wanted']}: {loss_of(row):.4f}, {seconds:.1f} s", flush=True)

    print(f"{len(contest().done)} runs are recorded.", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    late = lambda: time.monotonic() > deadline  # noqa: E731
    share(options.workers, partial(_worker, options), ready, keep, late=late)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
