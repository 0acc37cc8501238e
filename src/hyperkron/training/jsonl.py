"""The log of a run: one line of JSON for every step, whole and without repetition whatever happened before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hyperkron.solution import HyperkronError, warn_once
from hyperkron.training.history import History, plain
from hyperkron.training.writing import open_ordinary, open_plain

MAX_LINE = 2**20
"""Bytes of a line; a longer one is not of this library."""


class JSONLog:
    """``folder/log-rank00000.jsonl``, which always holds the rows of the history, a line each.

    The file is opened, appended to and closed at every step, so that a kill can tear at most the last line. A resumed
    run first cuts off a torn line and all steps it is going to do again, and adds those that are missing: the history
    in the checkpoint has them. What is not finite is ``null``, so that every line is JSON. A write that fails (a full
    disk) is a warning, and the lines follow when there is room again. Links are not followed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "log-rank00000.jsonl"
        self._written: int | None = None  # lines that are known to be in the file

    def begin(self, history: History) -> None:
        """Make the file hold the rows of ``history`` and nothing else."""
        self._written = None
        self.write(history)

    def write(self, history: History) -> None:
        """Append the rows that are not in the file yet."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_ordinary(self.path, os.O_RDWR | os.O_CREAT, follow=False), "r+b") as file:
                if self._written is None:
                    self._written = _agreeing(file, history)
                    file.truncate()
                file.seek(0, os.SEEK_END)
                lines = [line(history[i]) for i in range(self._written, len(history))]
                file.write(b"".join(lines))
            self._written = len(history)
        except OSError as error:
            self._written = None  # perhaps half of a line was written
            warn_once(f"log {self.path}", f"{self.path} could not be written ({error.strerror}); the run goes on.")


def line(row: dict[str, Any]) -> bytes:
    """A row as a line of strict JSON."""
    return json.dumps({name: plain(value) for name, value in row.items()}, allow_nan=False).encode("ascii") + b"\n"


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a log; a torn last line is left out."""
    rows: list[dict[str, Any]] = []
    try:
        with open_plain(Path(path)) as file:
            for text in iter(lambda: file.readline(MAX_LINE), b""):
                if not text.endswith(b"\n"):
                    break
                rows.append(_row(text, path))
    except OSError as error:
        raise HyperkronError(f"path={str(path)!r} cannot be read ({error.strerror or error}).") from error
    return rows


def _row(text: bytes, path: str | Path) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HyperkronError(
            f"path={str(path)!r} holds the line {text[:60]!r}, which is not JSON ({str(error)[:80]}); remove the line."
        ) from error
    if not isinstance(row, dict):
        raise HyperkronError(f"path={str(path)!r} holds the line {text[:60]!r}, which is not a row of a run.")
    return row


def _agreeing(file: Any, history: History) -> int:
    """How many of the first lines are the first rows of ``history``; the file stands behind them."""
    for count in range(len(history)):
        place = file.tell()
        if file.readline(MAX_LINE) != line(history[count]):
            file.seek(place)
            return count
    return len(history)
