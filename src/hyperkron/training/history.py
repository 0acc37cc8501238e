"""What happened: one row of figures for every step."""

from __future__ import annotations

import json
import math
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, overload

from hyperkron.solution import HyperkronError
from hyperkron.validation import check_one_of

Value = float | int | str | None


def plain(value: Any) -> Any:
    """A figure as strict JSON has it: ``None`` for what is not finite."""
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
    """The figures of one name and the rows they belong to; 16 bytes each where all are floats or all are integers."""

    def __init__(self) -> None:
        self._places = array("q")
        self._values: array[float] | array[int] | list[Value] = array("d")

    def append(self, place: int, value: Value) -> None:
        kind = {float: "d", int: "q"}.get(type(value), "")
        if not self._places and kind:
            self._values = array(kind)
        if isinstance(self._values, array) and (
            self._values.typecode != kind or (kind == "q" and not -(2**63) <= value < 2**63)  # type: ignore[operator]
        ):
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
