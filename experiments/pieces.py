"""Finished pieces of an experiment on disk, one JSON line each, so that an interrupted run continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import records
from hyperkron.solution import HyperkronError


class OutOfTime(HyperkronError):
    """The time limit was reached; what is done is on disk and the next run continues from there."""


class Lines:
    """A file of JSON objects that grows by one line at a time. A last line cut short by a crash is ignored.

    Attributes:
        path: of the ``.jsonl`` file.
        rows: its objects.

    Example:
        >>> Lines(Path("missing.jsonl")).rows
        []
    """

    def __init__(self, path: Path) -> None:
        content = path.read_text("utf-8") if path.exists() else ""
        self.path = path
        self.rows: list[dict[str, Any]] = [row for line in content.splitlines() if (row := _parsed(line)) is not None]
        self._torn = bool(content) and not content.endswith("\n")

    def append(self, row: dict[str, Any]) -> dict[str, Any]:
        """Write a row down at once, and return it as it will be read back."""
        text = json.dumps(records.plain(row), ensure_ascii=False, allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if self._torn else "") + text + "\n")
        self._torn = False
        self.rows.append(json.loads(text))
        return self.rows[-1]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None  # cut short
    return row if isinstance(row, dict) else None


class Cells:
    """Finished pieces by their keys. Pieces of a run with other settings stay in the file but are not used.

    Args:
        path: of the ``.jsonl`` file.
        settings: what the pieces depend on besides their key.
    """

    def __init__(self, path: Path, settings: Any) -> None:
        text = json.dumps(records.plain(settings), sort_keys=True)
        self.mark = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.lines = Lines(path)
        own = (row for row in self.lines.rows if row.get("settings") == self.mark and {"key", "value"} <= row.keys())
        self.found = {json.dumps(row["key"]): row for row in own}

    @property
    def path(self) -> Path:
        """The file."""
        return self.lines.path

    def get(self, key: Sequence[Any]) -> dict[str, Any] | None:
        """The value of a finished piece, or ``None``."""
        row = self.found.get(json.dumps(list(key)))
        return None if row is None else dict(row["value"])

    def put(
        self, key: Sequence[Any], value: dict[str, Any], seconds: float, busy: float | None = None
    ) -> dict[str, Any]:
        """Write a finished piece down at once, and return its value as it will be read back."""
        row: dict[str, Any] = {"key": list(key), "settings": self.mark, "seconds": round(seconds, 3), "value": value}
        if busy is not None:
            row["busy"] = round(busy, 3)
        self.found[json.dumps(list(key))] = row = self.lines.append(row)
        return dict(row["value"])

    def seconds(self) -> float:
        """Time spent on all finished pieces."""
        return float(sum(row["seconds"] for row in self.found.values()))

    def busy(self) -> float | None:
        """Processor time of all finished pieces; ``None`` where one does not have it."""
        rows = self.found.values()
        return float(sum(row["busy"] for row in rows)) if all("busy" in row for row in rows) else None
