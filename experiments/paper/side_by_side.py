"""Trials and runs of one recipe in several processes on one device.

For recipes that measure their times beforehand, so that the runs need not have the device to themselves. Each process
makes the recipe's stages anew and carries out what it is told to; this one writes the cells down, and the recipe's own
``work`` then finds everything in the cache.
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments.paper.entries import Task, carry_out, missing
from experiments.paper.recipe import Job, Recipe
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

PATIENCE = 2.0
"""Seconds after which it is looked whether all processes are still there."""


@dataclass(frozen=True)
class _Order:
    """What a process needs to make the job anew."""

    recipe: str
    scale: Any
    seeds: int
    device: str
    folder: Path
    data: Path | None


def fill(job: Job, recipe: Recipe, count: int) -> None:
    """Carry out what is missing among the stages of ``recipe`` in ``count`` processes, until all is done or time is up.

    A task that fails ends all; what was finished before is in the cache.
    """
    assert recipe.stages is not None
    stages, trials = recipe.stages(job)
    context = multiprocessing.get_context("spawn")
    order = _Order(recipe.name, job.scale, len(job.seeds), str(job.device), job.cells.path.parent, job.data)
    inboxes, done = [context.Queue() for _ in range(count)], context.Queue()
    workers: list[BaseProcess] = [
        context.Process(target=_work, args=(order, i, inboxes[i], done), daemon=True) for i in range(count)
    ]
    busy: dict[int, list[Any]] = {}
    last: dict[int, int] = {}
    try:
        while True:
            taken = {json.dumps(key) for key in busy.values()}
            tasks = [(key, task) for key, task in missing(job, stages, trials) if json.dumps(key) not in taken]
            for i in (i for i in range(count) if i not in busy):
                if not tasks or time.monotonic() > job.deadline:
                    break
                key, task = tasks.pop(_nearest(tasks, last.get(i)))
                if workers[i].pid is None:
                    workers[i].start()
                busy[i], last[i] = key, task.stage
                inboxes[i].put(task)
            if not busy:
                return
            _take_in(job, workers, done, busy)
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()


def _nearest(tasks: list[tuple[list[Any], Task]], stage: int | None) -> int:
    """The position of the first task of a stage, for which a process has its data at hand, or else of the first."""
    return next((i for i, (_, task) in enumerate(tasks) if task.stage == stage), 0)


def _take_in(job: Job, workers: list[BaseProcess], done: Any, busy: dict[int, list[Any]]) -> None:
    """Wait for one answer and write it down."""
    try:
        number, value, seconds, own = done.get(timeout=PATIENCE)
    except queue.Empty:
        for i, key in busy.items():
            if not workers[i].is_alive():
                code = workers[i].exitcode
                raise HyperkronError(
                    f"the process at {' '.join(map(str, key))} ended with code {code}, perhaps for want of memory; "
                    "use fewer workers."
                ) from None
        return
    key = busy.pop(number)
    if isinstance(value, str):
        raise HyperkronError(f"{' '.join(map(str, key))} failed: {value}")
    job.say(f"{' '.join(map(str, key))}: {seconds:.1f} s")
    job.cells.put(key, value, seconds, own)


def _work(order: _Order, number: int, tasks: Any, done: Any) -> None:
    """One process: carry out tasks until it is killed."""
    from experiments import paper

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    torch.set_num_threads(1)
    recipe = paper.recipes()[order.recipe]
    job = recipe.job(order.scale, order.seeds, torch.device(order.device), order.folder)
    job.data = order.data
    assert recipe.stages is not None
    stages: Any = None
    while True:
        task = tasks.get()
        begin, busy = time.monotonic(), time.process_time()
        try:
            stages = stages or recipe.stages(job)[0]
            value: dict[str, Any] | str = carry_out(stages, task)
        except Exception as error:
            value = f"{type(error).__name__}: {error}"
        done.put((number, value, time.monotonic() - begin, time.process_time() - busy))
