"""What happened: one row of figures for every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hyperkron.solution import HyperkronError

Value = float | int | str | None


class History:
    """Rows of named figures, in the order of the steps.

    Example:
        >>> history = History()
        >>> history.append({"step": 0, "outer_loss": 2.0})
        >>> history.append({"step": 1, "outer_loss": 1.0, "accuracy": 0.9})
        >>> history.column("outer_loss"), history.column("accuracy"), history.best("outer_loss")["step"]
        ([2.0, 1.0], [None, 0.9], 1)
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Value]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Value]:
        return self._rows[index]

    def append(self, row: dict[str, Value]) -> None:
        """Add a row."""
        self._rows.append(dict(row))

    def to_rows(self) -> list[dict[str, Value]]:
        """All rows, as copies."""
        return [dict(row) for row in self._rows]

    def column(self, name: str) -> list[Value]:
        """The values of one figure, ``None`` in rows without it."""
        if not any(name in row for row in self._rows):
            known = sorted({key for row in self._rows for key in row})
            raise HyperkronError(f"name={name!r} is in no row of the history; it has {', '.join(known) or 'no rows'}.")
        return [row.get(name) for row in self._rows]

    def best(self, name: str, mode: str = "min") -> dict[str, Value]:
        """The row with the smallest (``mode="max"``: largest) value of a figure."""
        self.column(name)
        rows = [row for row in self._rows if isinstance(row.get(name), (int, float))]
        pick = min if mode == "min" else max
        return dict(pick(rows, key=lambda row: float(row[name])))  # type: ignore[arg-type]

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as JSON, written to ``path`` if one is given."""
        text = json.dumps(self._rows)
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
            pairs: list[tuple[Any, Any]] = [(r["step"], r[name]) for r in self._rows if r.get(name) is not None]
            if not pairs:
                self.column(name)
            axes.plot([x for x, _ in pairs], [y for _, y in pairs], label=name)
        axes.set_xlabel("step")
        axes.legend()
        return axes

    def state_dict(self) -> dict[str, Any]:
        """The rows as one JSON string."""
        return {"rows": self.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from earlier rows."""
        self._rows = json.loads(state["rows"])
