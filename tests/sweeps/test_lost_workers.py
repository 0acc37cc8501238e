"""Sweeps whose workers die: no trial is lost or ends twice."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from hyperkron.sweeps import Range, Trial, read_sweep, sweep
from hyperkron.sweeps.queue import TrialQueue

SPACE = {"x": Range(0.0, 1.0)}


def age(file: Path) -> None:
    """Let an hour pass since every heartbeat."""
    with sqlite3.connect(file, timeout=5) as base:
        base.execute("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')")
    base.close()


class Killed(BaseException):
    """Ends a worker where it stands; the database is left as by a killed process."""


class Killer:
    """Kills a worker before its ``left``-th transaction that writes is committed."""

    def __init__(self, queue: TrialQueue) -> None:
        self.left, self._writes = 0, False
        sqlalchemy.event.listen(queue.storage.engine, "before_cursor_execute", self._execute)
        sqlalchemy.event.listen(queue.storage.engine, "commit", self._commit)

    def _execute(self, connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        self._writes |= statement.startswith(("INSERT", "UPDATE"))

    def _commit(self, connection: Any) -> None:
        self.left, self._writes = self.left - self._writes, False
        if self.left == 0:
            raise Killed


def work(queue: TrialQueue, trials: int) -> None:
    """What a worker does."""
    while (trial := queue.take(trials, 0)) is not None:
        queue.record(trial, "COMPLETE", trial.params["x"])


@pytest.mark.parametrize(("lost", "writes"), [(False, 5), (True, 7)])
def test_a_worker_may_die_at_any_write(tmp_path: Path, lost: bool, writes: int) -> None:
    """While it takes and records a new trial, and while it queues, takes and records the retry of a lost one."""
    file, moment, died = tmp_path / "s.db", 0, True
    other, victim = (TrialQueue(str(file), "sweep", SPACE, retries=3) for _ in range(2))
    killer = Killer(victim)
    while died:
        moment, died = moment + 1, False  # the moment of death, and the number of trials by then
        first = other.take(moment, 0) if lost else None
        age(file)
        killer.left = moment
        try:
            work(victim, moment)
        except Killed:
            died = True
            victim.storage.remove_session()  # as when a process ends
            victim.storage.engine.dispose()
        age(file)
        work(other, moment)
        chains = other.chains()
        assert len(chains) == moment and all(map(other.ended, chains))
        assert [t.state.name for t in chains[-1]].count("COMPLETE") == 1
        assert chains[-1][-1].value == chains[-1][-1].params["x"]
        assert first is None or chains[-1][-1].params == first.params
    assert moment > writes, "every write was the last one once"


def test_a_late_worker_is_not_counted(tmp_path: Path) -> None:
    """A worker that slept too long finds its trial given away; the result of the other one counts."""
    file = tmp_path / "s.db"
    slow, quick = (TrialQueue(str(file), "sweep", SPACE) for _ in range(2))
    late = slow.take(1, 0)
    age(file)
    retry = quick.take(1, 0)
    assert retry.params == late.params and retry.number == 1
    assert Trial(quick, retry).number == 0
    with pytest.raises(slow.optuna.TrialPruned, match="another worker"):
        Trial(slow, late).report(1.0, 1)
    assert slow.record(late, "COMPLETE", 1.0) is False
    assert quick.record(retry, "COMPLETE", 2.0) is True and quick.take(1, 0) is None
    (row,) = read_sweep(str(file)).trials
    assert (row.state, row.value, row.attempts) == ("done", 2.0, 2)


def test_a_trial_that_kills_its_workers_is_given_up(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    queue = TrialQueue(str(file), "sweep", SPACE)
    for _ in range(2):
        assert queue.take(1, 0) is not None
        age(file)
    assert queue.take(1, 0) is None
    (row,) = read_sweep(str(file)).trials
    assert (row.state, row.error, row.attempts) == ("failed", "its worker was lost", 2)


def _worker(storage: str, log: str) -> None:
    def function(trial: Trial) -> float:
        with open(log, "a") as file:
            print(trial.number, os.getpid(), file=file)
        time.sleep(0.2)
        return float(trial["x"])

    sweep(function, SPACE, trials=9, storage=storage, heartbeat=1)


def test_one_of_three_processes_is_killed(tmp_path: Path) -> None:
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    log.touch()
    workers = [context.Process(target=_worker, args=(str(tmp_path / "s.db"), str(log))) for _ in range(3)]
    for worker in workers:
        worker.start()
    while not (
        running := [line.split() for line in log.read_text().splitlines() if line.endswith(str(workers[0].pid))]
    ):
        time.sleep(0.01)
    os.kill(workers[0].pid or 0, signal.SIGKILL)
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0, 0]
    found = read_sweep(str(tmp_path / "s.db"))
    assert [t.state for t in found.trials] == ["done"] * 9
    begun = Counter(int(line.split()[0]) for line in log.read_text().splitlines())
    killed = int(running[-1][0])
    assert {n: c for n, c in begun.items() if c > 1} == {killed: 2} and found.trials[killed].attempts == 2
