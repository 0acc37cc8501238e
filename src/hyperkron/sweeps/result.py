"""The trials of a sweep, as a table and as a file."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperkron.solution import HyperkronError
from hyperkron.sweeps.queue import TrialQueue, settings_of
from hyperkron.training.writing import put

_STATES = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}


@dataclass(frozen=True)
class TrialRow:
    """A trial as it stands.

    Attributes:
        number: of the trial, from 0.
        state: done, pruned, failed, running or waiting.
        value: what the function returned, or ``None``.
        settings: by name.
        seconds: that the function ran, or ``None``.
        attempts: with retries.
        error: why it failed, or empty.
    """

    number: int
    state: str
    value: float | None
    settings: dict[str, Any]
    seconds: float | None
    attempts: int
    error: str


@dataclass(frozen=True)
class SweepResult:
    """The trials of a sweep in their order, each once; ``maximize`` says whether the largest value is the best."""

    trials: list[TrialRow]
    maximize: bool

    @property
    def ranked(self) -> list[TrialRow]:
        """The trials that are done, best first."""
        sign = -1 if self.maximize else 1
        return sorted((t for t in self.trials if t.state == "done"), key=lambda t: sign * (t.value or 0))

    @property
    def best(self) -> TrialRow:
        """The best trial."""
        if not self.ranked:
            last = next((t.error for t in reversed(self.trials) if t.error), "none has ended")
            raise HyperkronError(f"trials: none of {len(self.trials)} has a value ({last}); run more of them.")
        return self.ranked[0]

    def table(self, count: int = 10) -> str:
        """The best ``count`` trials, and how many there are of each state."""
        names = list(dict.fromkeys(name for t in self.trials for name in t.settings))
        lines = [["trial", "value", *names, "seconds"]]
        for t in self.ranked[:count]:
            cells = [t.number, t.value, *map(t.settings.get, names), t.seconds]
            lines.append([f"{cell:.5g}" if isinstance(cell, float) else str(cell) for cell in cells])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(map(str.rjust, line, widths)) for line in lines]
        states = [t.state for t in self.trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in _STATES.values() if state in states)
        return "\n".join([*rows, f"{len(states)} trials: {counts}"])

    def write(self, path: str | Path) -> None:
        """Write all trials as CSV or, if the name ends with ``.json``, as JSON."""
        rows, file = [asdict(trial) for trial in self.trials], io.StringIO(newline="")
        if str(path).endswith(".json"):
            json.dump(rows, file, indent=1)
        else:
            rows = [{f"settings.{k}": v for k, v in row.pop("settings").items()} | row for row in rows]
            table = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            table.writeheader()
            table.writerows(rows)
        put(Path(path), file.getvalue().encode("utf-8"))


def read_sweep(storage: str = "sweep.db", study: str = "sweep") -> SweepResult:
    """The result of the sweep ``study`` in the database ``storage``, also while it runs."""
    return result_of(TrialQueue(storage, study, None))


def result_of(queue: TrialQueue) -> SweepResult:
    """What the queue holds."""
    rows = []
    for number, chain in enumerate(queue.chains()):
        last, error = chain[-1], chain[-1].user_attrs.get("error", "")
        state = _STATES[last.state.name]
        if state == "failed" and not error:
            state, error = ("failed", "its worker was lost") if queue.ended(chain) else ("waiting", "")
        seconds = last.duration.total_seconds() if last.duration else None
        value = last.value if state == "done" else None
        rows.append(TrialRow(number, state, value, settings_of(chain), seconds, len(chain), error))
    return SweepResult(rows, queue.study.direction.name == "MAXIMIZE")
