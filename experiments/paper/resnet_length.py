"""ResNet-18 or a CNN on CIFAR-10 at the paper's length: which method cleans best (figures 1, 2, 3 and 5, table 2)?

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

Figure 3 compares KFAC with CG at five batch sizes, for which 250, 500, 1250, 2500 and 5000 stand here (they divide all
parts); the plan is the same, with at most 1000 steps. Figure 5's three-layer CNN (``--network cnn``) has batches of
1000, 1000 steps (25 updates of a weight), and settings by trials a quarter as long. θ's step size follows the rule
above; if none passes, batches have 2500 rows and runs 400 steps, with θ's step size by the rule again. This was written
before these runs.

    python -m experiments.paper.resnet_length --device cuda --workers 7 --limit-minutes 9    # continues an earlier run
    python -m experiments.paper.resnet_length --batch 2500 --arms "each its own" --device cuda --workers 4
    python -m experiments.paper.resnet_length --batch 5000 --methods AID-KFAC AID-CG-3 --arms "each its own" --workers 4
    python -m experiments.paper.resnet_length --network cnn --device cuda --workers 12
    python -m experiments.paper.resnet_length --times --device cuda                          # ms a step, each alone
    python -m experiments.paper.resnet_length --table       # the recorded runs; or --figure
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from experiments import records
from experiments.paper import cleaning, datasets, resnet_batches, resnet_runs
from experiments.paper import resnet_length_page as page
from experiments.paper.cleaning import Split
from experiments.paper.image_contest import (
    ARMS,
    BATCHES,
    LENGTHS,
    NAMES,
    OTHERS,
    RESULT,
    SHARED,
    Contest,
    Plan,
    Task,
    key,
    loss_of,
    plan_of,
    result_of,
    times_of,
)
from experiments.paper.resnet_runs import Network, Size
from experiments.pieces import Lines
from experiments.trial import Saved
from experiments.workers import share

TIMED = Size((10_000, 1_000, 1_000))
"""What times are measured with; they do not depend on the number of rows."""
SMOKE = Size((20, 10, 10), 10, 2, 2)
SHARING = 1.5
"""How much more work six processes get done on one H200 than one process, measured."""
SAVED_EVERY = 30.0
"""Seconds between two checkpoints of a long run; a cut-off loses no more."""
UNKNOWN: dict[Network, float] = {"resnet18": 1000.0, "cnn": 100.0}
"""Milliseconds of a step whose time has not been measured, for the distance of checkpoints."""


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


def _worker(options: argparse.Namespace) -> Callable[[Task], dict[str, Any]]:
    """What carries out a run; the data are on the device, and a split is made once for a seed."""
    torch.set_float32_matmul_precision("high")
    size = replace(SMOKE if options.smoke else Size(batch=options.batch), network=options.network)
    shape = (3, 32, 32)
    found = cleaning.made_up(shape, sum(size.counts), 10) if options.smoke else datasets.cifar10(options.data)
    data, made = found.to(options.device), dict[int, Split]()

    def carry_out(task: Task) -> dict[str, Any]:
        task = Task(*task)
        if task.seed not in made:
            made.clear()
            made[task.seed] = cleaning.noisy_split(data, size.counts, task.seed)
        pace = options.alone.get(task.name, UNKNOWN[options.network]) / 1e3 * max(1.0, options.workers / SHARING)
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
        setting = {
            "outer": 0.1,
            "inner": LENGTHS[size.network].inner,
            **{own: first for own, (first, _) in OTHERS.items()},
        }
        tau = int(name.rpartition("τ")[2]) if "τ" in name else 1
        found = resnet_runs.step_times(name, setting, split, size, max(10, 2 * tau), warm=6 + 2 * tau)
        print(lines.append({"method": name, **found}), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables of the recorded runs")
    parser.add_argument("--sizes", action="store_true", help="print the table by size of batches, figure 3")
    parser.add_argument("--figure", action="store_true", help="draw the figure of the recorded runs")
    parser.add_argument("--times", action="store_true", help="measure an outer step of each method alone")
    parser.add_argument("--out", type=Path, default=None, help="file of the runs; finished ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder with cifar10/")
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/resnet-length"), help="folder of cut-off runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=list(NAMES), choices=[*NAMES, *SHARED])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--smoke", action="store_true", help="made-up images and a tiny network: does everything run?")
    parser.add_argument("--network", default="resnet18", choices=get_args(Network))
    for name, value in Plan()._asdict().items():
        parser.add_argument(f"--{name}", type=type(value), help=f"default of ResNet-18: {value}")
    parser.add_argument("--batch", type=int, help=f"rows of a batch; default: {BATCHES}")
    parser.add_argument("--workers", type=int, default=1, help="runs that share the device; default: 1")
    parser.add_argument("--beside", type=int, default=0, help="runs of other commands on the device; default: 0")
    parser.add_argument(
        "--limit-minutes", type=float, default=1e9, help="a run ends by this time, and begins if it can"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run what is not recorded yet, measure times, print the tables or draw the figure."""
    options = _parser().parse_args(arguments)
    usual = BATCHES[options.network]
    options.batch = options.batch or usual
    for name, value in plan_of(options.batch, options.network)._asdict().items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    timed, recorded = times_of(options.network), result_of(options.batch, options.network)
    lines = Lines(options.out or (timed if options.times else recorded))
    alone = options.alone = {row["method"]: options.batch / usual * row["mean"] for row in Lines(timed).rows}
    if options.smoke:
        options.checkpoints = None
    elif recorded != RESULT:
        options.checkpoints /= recorded.stem

    def contest() -> Contest:
        return Contest(lines.rows, _plan(options), options.methods, alone, options.arms)

    if options.times:
        times(options.device, options.methods, lines, replace(TIMED, network=options.network, batch=usual))
    elif options.table:
        print(page.tables(contest(), Lines(timed).rows, options.network))
    elif options.sizes:
        print(resnet_batches.table(resnet_batches.by_size()))
    elif options.figure:
        path = (records.PAGES / "figures" / "paper" / recorded.name).with_suffix(".svg")
        print(page.figure(contest(), Lines(timed).rows, path))
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
