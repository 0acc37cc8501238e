"""Tasks of an experiment shared by several processes on one device; each result is kept as soon as it comes."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
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

    A task that fails is tried once more, in a new process: after an error of the device the old one is of no use. If it
    fails again no further task begins, those that run are finished and kept, and the error is raised.

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
    crew = Crew(make)
    last: dict[int, Any] = {}
    try:
        while True:
            taken = {json.dumps(key) for key in crew.busy.values()}
            tasks = [] if crew.failure else [(k, task) for k, task in ready() if json.dumps(k) not in taken]
            for i in (i for i in range(count) if i not in crew.busy):
                if not tasks or late():
                    break
                key, task = tasks.pop(nearest([near(task) for _, task in tasks], last.get(i), count))
                crew.begin(i, key, task)
                last[i] = near(task)
            if not crew.busy:
                break
            crew.take_in(keep)
    finally:
        crew.dismiss()
    if crew.failure:
        raise HyperkronError(crew.failure)


class Crew:
    """Processes that carry out tasks, what each is busy with, and the failure of a task that was tried twice."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self.context, self.make = multiprocessing.get_context("spawn"), make
        self.done = self.context.Queue()
        self.inboxes: dict[int, Any] = {}
        self.workers: dict[int, BaseProcess] = {}
        self.busy: dict[int, Key] = {}
        self.failed: set[str] = set()
        self.failure = ""

    def begin(self, i: int, key: Key, task: Any) -> None:
        """Give a task to process ``i``, which is started if it is not there."""
        if i not in self.workers:
            self.inboxes[i] = self.context.Queue()
            given = (self.make, i, self.inboxes[i], self.done)
            self.workers[i] = self.context.Process(target=_work, args=given, daemon=True)
            self.workers[i].start()
        self.busy[i] = key
        self.inboxes[i].put((task,))

    def take_in(self, keep: Callable[[Key, Any, float, float], object]) -> None:
        """Wait for one result and keep it."""
        try:
            number, value, failure, seconds, own = self.done.get(timeout=PATIENCE)
        except queue.Empty:
            for i, key in self.busy.items():
                if not self.workers[i].is_alive():
                    raise HyperkronError(
                        f"the process at {' '.join(map(str, key))} ended with code {self.workers[i].exitcode}, perhaps "
                        "for want of memory; use fewer workers."
                    ) from None
            return
        key = self.busy.pop(number)
        if failure is None:
            keep(key, value, seconds, own)
        else:
            self._failed(number, key, f"{' '.join(map(str, key))} failed: {failure}")

    def _failed(self, number: int, key: Key, what: str) -> None:
        name = json.dumps(key)
        if name in self.failed:
            self.failure = self.failure or what
            return
        print(f"{what}; it is tried once more.", file=sys.stderr, flush=True)
        self.failed.add(name)
        self.inboxes[number].put(None)  # it ends by itself: killed, it might leave a queue locked
        del self.workers[number]

    def dismiss(self) -> None:
        """End all processes: those with a task at once, the others by themselves, so that they free what they share."""
        for i, worker in self.workers.items():
            if i in self.busy:
                worker.kill()
            else:
                self.inboxes[i].put(None)
        for worker in self.workers.values():
            worker.join(PATIENCE)
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


def _work(make: Callable[[], Callable[[Any], Any]], number: int, tasks: Any, done: Any) -> None:
    """One process: carry out tasks until there is a ``None``, or it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    torch.set_num_threads(1)
    carry_out: Callable[[Any], Any] | None = None
    while given := tasks.get():
        begin, busy = time.monotonic(), time.process_time()
        value, failure = None, None
        try:
            carry_out = carry_out or make()
            value = carry_out(*given)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        done.put((number, value, failure, time.monotonic() - begin, time.process_time() - busy))


def _end_with(parent: BaseProcess | None) -> None:
    """End this process when the one that started it is gone, even where that was killed."""
    if parent is not None:
        parent.join()
        os._exit(1)
