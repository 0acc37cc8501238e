"""Tasks of an experiment shared by several processes on one device; each result is kept as soon as it comes."""

from __future__ import annotations

import json
import math
import multiprocessing
import queue
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from experiments.pieces import OutOfTime
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

PATIENCE = 2.0
"""Seconds after which it is checked that all processes are still alive."""

Key = list[Any]


def share(
    count: int,
    make: Callable[[], Callable[[Any], Any]],
    ready: Callable[[], Iterable[tuple[Key, Any]]],
    keep: Callable[[Key, Any, float, float], object],
    *,
    late: Callable[[], bool] = lambda: False,
    near: Callable[[Any], Any] = lambda task: None,
) -> None:
    """Carry out tasks in ``count`` processes until none is left or the time is up.

    A task that fails ends everything; what was finished before has been kept.

    Args:
        count: number of processes.
        make: called once in each process, before its first task; returns the function that carries out a task. Must be
            picklable: a function of a module, or a ``functools.partial`` of one.
        ready: the tasks that can be carried out now, with their keys, most important first; called again whenever a
            process is free. A task that was kept must not come again.
        keep: called here with the key, the value, and the seconds and processor seconds of each finished task.
        late: whether the time is up; then no further task begins.
        near: among the next ``count`` tasks a process takes one for which this is the same as for its last one, because
            it has their data loaded; later tasks do not get ahead of more important ones.
    """
    context = multiprocessing.get_context("spawn")
    inboxes, done = [context.Queue() for _ in range(count)], context.Queue()
    workers: list[BaseProcess] = [
        context.Process(target=_work, args=(make, i, inboxes[i], done), daemon=True) for i in range(count)
    ]
    busy: dict[int, Key] = {}
    last: dict[int, Any] = {}
    try:
        while True:
            taken = {json.dumps(key) for key in busy.values()}
            tasks = [(key, task) for key, task in ready() if json.dumps(key) not in taken]
            for i in (i for i in range(count) if i not in busy):
                if not tasks or late():
                    break
                key, task = tasks.pop(nearest([near(task) for _, task in tasks], last.get(i), count))
                if workers[i].pid is None:
                    workers[i].start()
                busy[i], last[i] = key, near(task)
                inboxes[i].put(task)
            if not busy:
                return
            _take_in(workers, done, busy, keep)
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()


@contextmanager
def stopped_at(deadline: float) -> Iterator[None]:
    """:class:`OutOfTime` inside the block when the deadline (of ``time.monotonic``) comes, also while tasks are carried
    out; those that save themselves continue next time.
    """

    def stop(number: int, frame: object) -> None:
        raise OutOfTime("the time limit was reached; run the same command again to continue.")

    if math.isinf(deadline):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, deadline - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def nearest(places: list[Any], last: Any, count: int) -> int:
    """The position of the first of ``count`` places that is the last one, or else 0."""
    return next((i for i, place in enumerate(places[:count]) if place == last), 0)


def _take_in(
    workers: list[BaseProcess], done: Any, busy: dict[int, Key], keep: Callable[[Key, Any, float, float], object]
) -> None:
    """Wait for one result and keep it."""
    try:
        number, value, failure, seconds, own = done.get(timeout=PATIENCE)
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
    if failure is not None:
        raise HyperkronError(f"{' '.join(map(str, key))} failed: {failure}")
    keep(key, value, seconds, own)


def _work(make: Callable[[], Callable[[Any], Any]], number: int, tasks: Any, done: Any) -> None:
    """One process: carry out tasks until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    torch.set_num_threads(1)
    carry_out: Callable[[Any], Any] | None = None
    while True:
        task = tasks.get()
        begin, busy = time.monotonic(), time.process_time()
        value, failure = None, None
        try:
            carry_out = carry_out or make()
            value = carry_out(task)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        done.put((number, value, failure, time.monotonic() - begin, time.process_time() - busy))
