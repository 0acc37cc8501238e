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
import os
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from experiments import records
from experiments.paper import cleaning, datasets, linear_runs
from experiments.paper import linear_page as page
from experiments.paper.cleaning import Split
from experiments.paper.linear_contest import NAMES, RESULT, ROWS, STUDIES, Contest, Plan
from experiments.paper.linear_runs import Task, loss_of
from experiments.pieces import Lines
from experiments.workers import share
from hyperkron.solution import HyperkronError


def _splits(options: argparse.Namespace) -> Callable[[int], Split]:
    """The split of a seed, made once; all data are on the device."""
    torch.set_float32_matmul_precision(options.precision)
    read = cleaning.made_up((20,), options.rows + 200, 100) if options.smoke else datasets.mnist(options.data)
    data, counts = read.to(options.device), (options.rows, *((100, 100) if options.smoke else (5000, 5000)))
    return cache(lambda seed: cleaning.noisy_split(data, counts, seed, scaling="one"))


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
