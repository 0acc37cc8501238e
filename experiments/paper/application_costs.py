"""What an outer iteration of the four applications costs (tables 3 to 6), all methods of a task in turns.

    python -m experiments.paper.application_costs --device cuda --out costs.jsonl     # less than a minute
    python -m experiments.paper.application_costs --toy                               # toys on the CPU

Every task has a process of its own, which loads its data and records its CUDA graphs while the others do. Then they
measure one after the other, so that nothing else uses the device. A line of the result has the median over blocks of
the milliseconds of an outer iteration, and what part of that the GPU was busy.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import records
from experiments.paper import poisoning, unlearnable
from experiments.paper import poisoning_attacks as attacks
from experiments.paper import poisoning_problem as base
from experiments.paper.costs import FOLLOWER
from experiments.paper.recipe import Job, Scale
from experiments.paper.unlearnable_attack import Attack, start
from experiments.pieces import Cells, Lines
from experiments.trial import clock_of
from hyperkron.solution import HyperkronError
from hyperkron.training import Run

Runs = dict[str, Run]
WARM, BLOCKS = 6, 5
"""Outer iterations before the clock counts, and blocks of every method."""
BLOCK_SECONDS, LONGEST_BLOCK = 0.2, 20
"""What a block takes, about, and its most iterations; the fewest are two."""
PATIENCE = 120.0
"""Seconds that a process waits for the others."""


def poisoned(model: str, scale: Scale, device: torch.device, data: Path | None) -> Runs:
    """Table 5: networks that are not pretrained."""
    case = poisoning.SETTINGS[scale].cases[model]
    split = base.split_of(case, base.load(case, data), 0, device)

    def starts(seed: int) -> tuple[nn.Module, nn.Module]:
        return base.leader(split.train, seed), base.network(case, split.train, seed)

    setting = {"inner": 0.01, "outer": 1e-6, "damping": 1e-3}
    with poisoning.precision(case):
        return {
            name: attacks.prepare(case, split, starts, name, setting, 0, relative=False, clock=clock_of(device))
            for name in (FOLLOWER, "TGDA-CG", "TGDA-KFAC-EMP")
        }


def _job(recipe: Any, scale: Scale, device: torch.device, data: Path | None) -> Job:
    return Job(scale, recipe.SETTINGS[scale], (1,), device, Cells(Path("none"), {}), data)


def unlearnable_runs(scale: Scale, device: torch.device, data: Path | None) -> Runs:
    """Table 6."""
    work = unlearnable.Work(_job(unlearnable, scale, device, data))
    names = (FOLLOWER, "AID-CG", "AID-CG-16", "AID-KFAC")
    return {name: start(work.case, work.data, Attack(name, "own", 1e-4, 25 / 255, 0)) for name in names}


def long_tail_runs(scale: Scale, device: torch.device, data: Path | None) -> Runs:
    """Table 3."""
    from experiments.paper import long_tail
    from experiments.paper.long_tail_training import METHODS

    settings = long_tail.RECIPES[0].settings[scale]
    runner = long_tail.Runner(settings, device, data)
    tasks = [
        long_tail.Task(settings.tuned_at, name, METHODS[name].usual, settings.epochs, 0)
        for name in ("Base", "MWN + SAMA", "MWN + KFAC-emp")
    ]
    return {task.method: runner.training(task).prepare() for task in tasks}


def pretraining_runs(scale: Scale, device: torch.device, data: Path | None) -> Runs:
    """Table 4."""
    from experiments.paper import pretraining
    from experiments.paper.pretraining_trial import Source, Trial

    settings = pretraining.SETTINGS[scale]
    torch.set_float32_matmul_precision("high")
    source = Source(settings.encoder, data, device, settings.lengths)
    names = ("TARTAN-MT", "SAMA", "KFAC-EMP")
    task = settings.priced, settings.inner[0], pretraining.PRINTED, 1
    return {name: Trial(source, settings.case, task[0], name, *task[1:]).run for name in names}


TASKS: dict[str, tuple[str, Callable[[Scale, torch.device, Path | None], Runs]]] = {
    "poisoning MLP": ("TGDA-CG", lambda *where: poisoned("MLP", *where)),
    "poisoning LR": ("TGDA-CG", lambda *where: poisoned("LR", *where)),
    "poisoning CNN": ("TGDA-CG", lambda *where: poisoned("CNN", *where)),
    "unlearnable": ("AID-CG-16", unlearnable_runs),
    "pretraining": ("SAMA", pretraining_runs),
    "long-tail": ("MWN + SAMA", long_tail_runs),
}
"""The method that others are compared with, and what prepares the runs of a task."""


@contextmanager
def _precise(task: str) -> Iterator[None]:
    """The precision of products in which a task is run: TF32 but for the linear model."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if task == "poisoning LR" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def busy(run: Run, steps: int, top: int = 12) -> dict[str, Any]:
    """Milliseconds per outer iteration in which the GPU computes, its number of kernels, and the longest of them."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            run.advance(steps, seconds=math.inf)
    except RuntimeError as error:  # a profiler that cannot be used here
        return {"profile": f"{error!s:.200}"}
    kernels = [event for event in found.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return {
        "busy_ms": sum(event.self_device_time_total for event in kernels) / 1000 / steps,
        "kernels": sum(event.count for event in kernels) / steps,
        "longest": [
            [event.key[:90], event.count / steps, round(event.self_device_time_total / 1000 / steps, 3)]
            for event in kernels[:top]
        ],
    }


def milliseconds(run: Run, steps: int) -> float:
    """Of one of the next ``steps`` outer iterations, on average."""
    before = run.seconds
    run.advance(steps, seconds=math.inf)
    return 1000 * (run.seconds - before) / steps


def measured(task: str, runs: Runs, *, blocks: int = BLOCKS) -> Iterator[dict[str, Any]]:
    """A line for each method; the methods take turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    with _precise(task):
        steps = {
            name: min(LONGEST_BLOCK, max(2, round(1000 * BLOCK_SECONDS / milliseconds(run, 1))))
            for name, run in runs.items()
        }
        for _ in range(blocks):
            for name, run in runs.items():
                found[name].append(milliseconds(run, steps[name]))
        for name, run in runs.items():
            if run.failure is not None:
                raise run.failure
            loop = run.state.loop
            yield {
                "task": task,
                "method": name,
                "ms": statistics.median(found[name]),
                "blocks": found[name],
                "steps": steps[name],
                "relative": statistics.median(found[name]) / statistics.median(found[TASKS[task][0]]),
                "recorded": loop.recorded,
                "step_recorded": loop.step_recorded,
                **(busy(run, 2) if loop.device.type == "cuda" and "CG" not in name else {}),
            }


def warmed(task: str, scale: Scale, device: torch.device, data: Path | None, steps: int = WARM) -> Runs:
    """The runs of a task after their first steps, which record CUDA graphs."""
    with _precise(task):
        runs = TASKS[task][1](scale, device, data)
        for run in runs.values():
            run.advance(steps, seconds=math.inf)
    return runs


def _process(names: Sequence[str], place: tuple[Scale, str, Path | None], out: Path, barrier: Any, lock: Any) -> None:
    """Prepare, wait for all others, then measure when nobody else does."""
    scale, device, data = place
    runs: dict[str, Runs] = {}
    begin = time.perf_counter()
    try:
        for name in names:
            runs[name] = warmed(name, scale, torch.device(device), data)
    finally:
        ready = time.perf_counter() - begin
        barrier.wait(PATIENCE)
    with lock:
        for name in names:
            for line in measured(name, runs[name]):
                Lines(out).append({**line, "prepared_s": round(ready, 1)})


def main() -> None:
    """Measure all tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--toy", action="store_true", help="toys in place of the real tasks")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], help="each a process; “a,b” are measured by one")
    parser.add_argument("--out", type=Path, default=Path("runs/application-costs.jsonl"))
    args = parser.parse_args()
    groups = [name.split(",") for name in args.tasks]
    unknown = [name for group in groups for name in group if name not in TASKS]
    if unknown:
        raise HyperkronError(f"tasks={unknown[0]!r} is unknown; choose from {', '.join(TASKS)}.")
    place: tuple[Scale, str, Path | None] = ("smoke" if args.toy else "small", args.device, args.data)
    Lines(args.out).append({"hardware": records.hardware(torch.device(args.device)), "versions": records.versions()})
    context = multiprocessing.get_context("spawn")
    barrier, lock = context.Barrier(len(groups)), context.Lock()
    processes = [context.Process(target=_process, args=(group, place, args.out, barrier, lock)) for group in groups]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
