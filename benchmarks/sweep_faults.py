"""One of four sweep workers is killed, again and again: no trial may be lost, stuck, or end twice.

    python benchmarks/sweep_faults.py [--kills 20 --trials 12 --seconds 0.5 --storage postgresql://user@host/database]

Every worker is a process of its own, forked from this one. Each time one of four gets SIGKILL at a random moment of the
sweep, every other time while it holds the lock of the queue (it takes or records a trial). Then the others finish, and
the database and the workers' own log are compared. A trial is *lost* if it has no result, *stuck* if it waits or runs
although all workers are gone (or these do not end), and *twice* if two attempts have a result. An attempt whose
function returned but whose worker was killed before it was recorded is *repeated*: its result was never known to
anyone. The record goes to benchmarks/results/sweep_faults.json.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import write_result

from hyperkron.sweeps import Range, Trial, read_sweep, sweep
from hyperkron.sweeps.queue import TrialQueue

WORKERS, LIMIT = 4, 180
SPACE = {"x": Range(0.0, 1.0)}


def worker(storage: str, study: str, log: Path, trials: int, seconds: float, die_at: int | None) -> None:
    """A sweep whose trials sleep and write down when they begin and end; with ``die_at``, until that lock is held."""

    def note(what: str, number: int) -> None:
        with log.open("a") as file:
            file.write(f"{what} {number}\n")

    def function(trial: Trial) -> float:
        note("begin", trial.number)
        time.sleep(seconds)
        note("end", trial.number)
        return float(trial["x"])

    if die_at is not None:
        _suicidal(die_at)
    sweep(function, SPACE, trials=trials, storage=storage, study=study, heartbeat=1)


def _suicidal(die_at: int) -> None:
    """Let this process kill itself in the middle of the writes that it makes under the ``die_at``-th lock."""
    locked, count = TrialQueue._locked, 0

    @contextmanager
    def dying(queue: TrialQueue) -> Iterator[None]:
        nonlocal count
        count += 1
        if count == die_at:
            import sqlalchemy

            left = random.Random(die_at).randrange(1, 7)

            def commit(connection: Any) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            sqlalchemy.event.listen(queue.storage.engine, "commit", commit)
        with locked(queue):
            yield

    TrialQueue._locked = dying  # type: ignore[method-assign]


def one_kill(index: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One sweep with a kill, and what became of its trials."""
    rng, context = random.Random(index), get_context("fork")
    storage, study, log = (
        options.storage or str(folder / f"{index}.db"),
        f"kill {index} {os.getpid()}",
        folder / f"{index}.log",
    )
    inside = index % 2 == 1
    begun = time.monotonic()
    dies = [rng.randrange(2, 6) if inside and i == 0 else None for i in range(WORKERS)]
    settings = (options.trials, options.seconds)
    workers = [context.Process(target=worker, args=(storage, study, log, *settings, die)) for die in dies]
    for process in workers:
        process.start()
    if not inside:
        wanted = rng.randrange(1, options.trials)
        while not log.exists() or log.read_text().count("begin") < wanted:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, options.seconds))
        if workers[0].pid and workers[0].is_alive():
            os.kill(workers[0].pid, signal.SIGKILL)
    for process in workers:
        process.join(max(0.1, LIMIT - (time.monotonic() - begun)))
    hanging = [process for process in workers if process.is_alive()]
    for process in hanging:
        process.kill()
    took = time.monotonic() - begun
    found = read_sweep(storage, study)
    chains = TrialQueue(storage, study, None).chains()
    ends = [sum(trial.state.name == "COMPLETE" for trial in chain) for chain in chains]
    returned = Counter(line.split()[1] for line in log.read_text().splitlines() if line.startswith("end"))
    return {
        "kill": "under the lock" if inside else "at a random time",
        "killed": workers[0].exitcode == -signal.SIGKILL,
        "trials": len(found.trials),
        "retried": sum(trial.attempts > 1 for trial in found.trials),
        "lost": options.trials - sum(trial.state == "done" for trial in found.trials),
        "stuck": sum(trial.state in ("running", "waiting") for trial in found.trials) + len(hanging),
        "twice": sum(end > 1 for end in ends) + max(0, len(chains) - options.trials),
        "repeated": sum(count > 1 for count in returned.values()),
        "seconds": round(took, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one trial")
    parser.add_argument("--storage", help="a PostgreSQL database (default: SQLite files in a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for index in range(options.kills):
            rows.append(one_kill(index, Path(folder), options))
            print(rows[-1], flush=True)
    names = ("killed", "retried", "lost", "stuck", "twice", "repeated")
    totals = {"sweeps": len(rows), "workers": WORKERS} | {name: sum(int(row[name]) for row in rows) for name in names}
    kind = "postgresql" if options.storage else "sqlite"
    print(f"{kind}: {totals}")
    write_result(
        "sweep_faults" + ("_postgresql.json" if options.storage else ".json"),
        {"storage": kind, "totals": totals, "sweeps": rows},
    )
    if totals["lost"] or totals["stuck"] or totals["twice"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
