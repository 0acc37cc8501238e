"""The tuning of ``experiments/mnist/compare.py``: the trials of all methods from one queue, each kept once done."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from experiments.mnist.problem import SOLVER, Plan, Setting, Split, Trial, noisy_mnist, prepare

SAME = {"AmIGO-KFAC": "AID-KFAC"}
"""A direct solve leaves nothing to amortise: these two are one method."""
Save = Callable[[], None]
Task = tuple[str, Setting]

# --- the limit ---------------------------------------------------------------------------------------------


class OutOfTime(Exception):
    """The limit is reached."""


@dataclass
class Deadline:
    """So many seconds from now; ``None`` for no limit."""

    seconds: float | None = None
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._end = self.now() + (math.inf if self.seconds is None else self.seconds)

    def left(self) -> float | None:
        """The seconds that are left; :class:`OutOfTime` where there are none."""
        if self.seconds is None:
            return None
        if (left := self._end - self.now()) <= 0:
            raise OutOfTime
        return left


# --- one trial ---------------------------------------------------------------------------------------------


def trial(name: str, setting: Setting, split: Split, plan: Plan) -> float:
    """The lowest loss on the second validation part within the plan's steps."""
    run = Trial(name, setting, split, plan, 0)
    steps = plan.steps(name)
    for done in range(0, steps, plan.block):
        run.advance(min(plan.block, steps - done))
        run.look(second=split.second)
    return min(row["second_loss"] for row in run.curve)


_worker: dict[str, Any] = {}
"""What a worker process has loaded: ``split`` and ``plan``."""


def _start(folder: str, plan: Plan, device: str) -> None:
    prepare(device)
    _worker.update(split=noisy_mnist(folder, plan.counts, seed=0).to(device), plan=plan)


def _carry_out(task: Task) -> tuple[Task, float]:
    return task, trial(*task, **_worker)


# --- all of them -------------------------------------------------------------------------------------------


def key(name: str, setting: Setting) -> str:
    """What a trial is called in the record."""
    return f"{name} {setting.inner:g} {setting.outer:g} {setting.solver:g}"


def grid(name: str, plan: Plan) -> list[Setting]:
    """The settings that are tried."""
    return [Setting(*x) for x in product(plan.inner, plan.outer, SOLVER[name][1])]


def tune(
    folder: str, plan: Plan, record: dict[str, Any], device: str, workers: int, deadline: Deadline, write: Save
) -> None:
    """Find the setting of every method in ``record`` that has none, by the trials that ``record`` does not hold yet."""
    trials, tuned = record["trials"], record["tuned"]
    names = [name for name in SOLVER if name not in tuned and name not in SAME]
    tasks = [(name, x) for name in names for x in grid(name, plan) if key(name, x) not in trials]
    for (name, setting), loss in _results(tasks, folder, plan, device, workers, deadline):
        trials[key(name, setting)] = loss
        write()
        print(f"{key(name, setting)}: {loss:.4f}, {len(trials)} trials done", flush=True)
    found = tuned | {name: choice(name, plan, trials) for name in names}
    record["tuned"] = {name: found.get(SAME.get(name, name)) for name in SOLVER}
    record["trials"] = {}
    write()


def choice(name: str, plan: Plan, trials: dict[str, float]) -> dict[str, Any]:
    """The setting with the lowest loss on the second validation part, and every trial that led to it."""
    order = sorted((trials[key(name, x)], i, x) for i, x in enumerate(grid(name, plan)))
    return {
        "setting": asdict(order[0][2]),
        "second_loss": order[0][0],
        "trials": [asdict(x) | {"second_loss": loss} for loss, _, x in order],
    }


def _results(
    tasks: list[Task], folder: str, plan: Plan, device: str, workers: int, deadline: Deadline
) -> Iterator[tuple[Task, float]]:
    """The losses of the trials, as they come; every worker loads the data once."""
    if not tasks:
        return
    noisy_mnist(folder, plan.counts, seed=0).to(device)  # an error here is seen, one in a worker's start is not
    pool = multiprocessing.get_context("spawn").Pool(workers, _start, (folder, plan, device))
    try:
        results = pool.imap_unordered(_carry_out, tasks, chunksize=1)
        for _ in tasks:
            try:
                yield results.next(timeout=deadline.left())
            except multiprocessing.TimeoutError:
                raise OutOfTime from None
    finally:
        pool.terminate()
        pool.join()
