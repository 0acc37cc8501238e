"""The history of a run, one row of values per step, and its log, one line of JSON per step."""

from __future__ import annotations

import json
import math
import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, overload

from hyperkron.solution import HyperkronError, warn_once
from hyperkron.training.writing import open_ordinary, open_plain
from hyperkron.validation import check_one_of

Value = float | int | str | None
MAX_LINE = 2**20
"""The largest size of a line in bytes."""


def plain(value: Any) -> Any:
    """A value for strict JSON: ``None`` if it is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class History:
    """Rows of named figures, in the order of the steps: ``history[-1]`` is a row, ``history["outer_loss"]`` a column.

    Example:
        >>> history = History()
        >>> history.append({"step": 0, "outer_loss": 2.0})
        >>> history.append({"step": 1, "outer_loss": 1.0, "accuracy": 0.9})
        >>> history.column("outer_loss"), history.column("accuracy"), history.best("outer_loss")["step"]
        ([2.0, 1.0], [None, 0.9], 1)
    """

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[str, Value]: ...
    @overload
    def __getitem__(self, index: str) -> list[Value]: ...
    def __getitem__(self, index: int | str) -> dict[str, Value] | list[Value]:
        if isinstance(index, str):
            return self.column(index)
        place = range(self._length)[index]
        return {name: column[place] for name, column in self._columns.items() if place in column}

    def append(self, row: dict[str, Value]) -> None:
        """Add a row."""
        for name, value in row.items():
            if name not in self._columns:
                self._columns[name] = _Column()
            self._columns[name].append(self._length, value)
        self._length += 1

    def to_rows(self) -> list[dict[str, Value]]:
        """All rows, as copies."""
        return [self[i] for i in range(self._length)]

    def column(self, name: str) -> list[Value]:
        """The values of one figure, ``None`` in rows without it."""
        if name not in self._columns:
            known = sorted(self._columns)
            raise HyperkronError(f"name={name!r} is in no row of the history; it has {', '.join(known) or 'no rows'}.")
        found: list[Value] = [None] * self._length
        for place, value in self._columns[name].items():
            found[place] = value
        return found

    def best(self, name: str, mode: str = "min") -> dict[str, Value]:
        """The row with the smallest (``mode="max"``: largest) value of a figure; ``nan`` is none."""
        check_one_of("mode", mode, ("min", "max"))
        values = enumerate(self.column(name))
        readings = [(x, i) for i, x in values if isinstance(x, (int, float)) and not math.isnan(x)]
        if not readings:
            raise HyperkronError(f"name={name!r} has no number in any row of the history; choose another figure.")
        return self[(min if mode == "min" else max)(readings, key=lambda reading: reading[0])[1]]

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as JSON, written to ``path`` if one is given."""
        text = f"[{', '.join(json.dumps(self[i]) for i in range(self._length))}]"
        if path is not None:
            Path(path).write_text(text, "utf-8")
        return text

    def plot(self, *names: str, ax: Any = None) -> Any:
        """Draw figures over the steps with matplotlib and return its axes; by default the two losses."""
        try:
            import matplotlib.pyplot as plt  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise HyperkronError("plot() needs matplotlib; install it, or use to_rows() or to_json().") from error
        axes = plt.subplots()[1] if ax is None else ax
        for name in names or ("inner_loss", "outer_loss"):
            pairs: list[tuple[Any, Any]] = [
                (x, y) for x, y in zip(self.column("step"), self.column(name), strict=True) if y is not None
            ]
            axes.plot([x for x, _ in pairs], [y for _, y in pairs], label=name)
        axes.set_xlabel("step")
        axes.legend()
        return axes

    def state_dict(self) -> dict[str, Any]:
        """The rows as one JSON string."""
        return {"rows": self.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from earlier rows."""
        self._columns, self._length = {}, 0
        for row in json.loads(state["rows"]):
            self.append(row)


class _Column:
    """The figures of one name and the rows they belong to; 16 bytes each where all are floats."""

    def __init__(self) -> None:
        self._places = array("q")
        self._values: array[float] | list[Value] = array("d")

    def append(self, place: int, value: Value) -> None:
        if isinstance(self._values, array) and type(value) is not float:
            self._values = list(self._values)
        self._values.append(sys.intern(value) if isinstance(value, str) else value)  # type: ignore[arg-type]
        self._places.append(place)

    def __contains__(self, place: int) -> bool:
        i = bisect_left(self._places, place)
        return i < len(self._places) and self._places[i] == place

    def __getitem__(self, place: int) -> Value:
        return self._values[bisect_left(self._places, place)]

    def items(self) -> Iterator[tuple[int, Value]]:
        return zip(self._places, self._values, strict=True)


# --- the log -----------------------------------------------------------------------------------------------


class JSONLog:
    """``folder/log-rank00000.jsonl``, with one line for every row of the history.

    The file is opened, appended to and closed at every step, so that a kill can damage at most the last line. A resumed
    run first removes a damaged line and the steps it will repeat, and adds missing steps from the history in the
    checkpoint. Values that are not finite are ``null``, so that every line is valid JSON. If a write fails (full disk),
    a warning is given, and the lines are written when there is room again. Links are not followed.
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
            warn_once(f"log {self.path}", f"{self.path} could not be written ({error.strerror}); the run continues.")


def line(row: dict[str, Any]) -> bytes:
    """A row as a line of strict JSON."""
    return json.dumps({name: plain(value) for name, value in row.items()}, allow_nan=False).encode("ascii") + b"\n"


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a log; an incomplete last line is left out."""
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
    """How many of the first lines agree with the rows of ``history``; the file position is after them."""
    for count in range(len(history)):
        place = file.tell()
        if file.readline(MAX_LINE) != line(history[count]):
            file.seek(place)
            return count
    return len(history)
