"""What an outer iteration cost with a GPU to itself, as :mod:`experiments.paper.application_costs` recorded it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import records
from experiments.paper.recipe import Result, Scale, Table
from experiments.pieces import Lines

RESULT = records.RESULTS / "paper" / "application-costs.jsonl"
EARLIER = " (an earlier measurement, perhaps beside other jobs)"
FOLLOWER = "steps of θ alone"
"""What is subtracted from the time of an iteration to get that of the hypergradient."""
KEPT = ("ms", "relative", "busy_ms", "kernels")


def alone(scale: Scale, *tasks: str, path: Path = RESULT) -> dict[str, dict[str, Any]]:
    """By task and method, the newest line of each; nothing at a scale that was not measured.

    Example:
        >>> alone("small", "no such task"), alone("smoke", "long-tail")
        ({}, {})
    """
    found: dict[str, dict[str, Any]] = {}
    for row in Lines(path).rows if scale == "small" else ():
        if row.get("task") in tasks:
            found.setdefault(row["task"], {})[row["method"]] = {name: row[name] for name in KEPT if name in row}
    return found


def of(result: Result, task: str) -> dict[str, dict[str, Any]]:
    """The methods of a task, in a result whose figures have them as ``alone``."""
    found: dict[str, dict[str, Any]] = result.figures.get("alone", {}).get(task, {})
    return found


def tables(result: Result) -> list[Table]:
    """Milliseconds of an iteration by task and method, and what the GPU did."""
    rows = []
    for task in result.figures.get("alone", {}):
        for name, x in of(result, task).items():
            busy = [f"{x['busy_ms']:.1f}", f"{x['kernels']:.0f}"] if "busy_ms" in x else ["–", "–"]
            rows.append([task, name, f"{x['ms']:.1f}", f"{x['relative']:.2f}", *busy])
    title = "An outer iteration, the GPU alone, methods in turns (relative to the method with 1.00)"
    return [Table(title, ["task", "method", "ms", "relative", "GPU busy, ms", "kernels"], rows)] if rows else []
