"""What tuned.py has recorded, read: medians, ranks, and tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from typing import Any

from experiments import records
from experiments.suite.problems import FLOOR

CALLS = {"SABA": 4, "SOBA": 4, "AmIGO": 22, "MRBO": 26, "FSLA": 7, "stocBiO": 22, "F2SA": 33, "F2SA-paper": 33}
"""Oracle calls on a batch in one step (∂f, ∂g, Hv and X count one each), as in docs/algorithms.md."""
FIGURES = {
    "logistic": ("suboptimality", 1e-3),
    "cleaning": ("validation loss", 0.8),
    "sized": ("suboptimality", 1e-3),
    "long": ("suboptimality", 1e-3),
    "digits": ("suboptimality", 1e-3),
    "covtype": ("suboptimality", 1e-3),
}
"""The figure each problem is judged by, and the level the tables say when it is reached."""
LOOPS = ("long", "digits", "covtype")
"""The problems whose steps are those of numpy_algorithms.py."""
MARGIN = 1e-4
"""The published figure shows h(λ) less the lowest median seen, plus this."""


def columns(curve: list[dict[str, float]]) -> dict[str, str]:
    """A curve by column, each as one JSON string so that the file stays readable."""
    return {key: json.dumps([float(f"{row[key]:.4g}") for row in curve]) for key in curve[0]}


def curve(runs: list[dict[str, str]], axis: str, figure: str, grid: list[float]) -> list[float]:
    """The median over the runs of a figure, each read at the last mark not after ``grid``."""
    found = []
    for run_ in runs:
        at, values = json.loads(run_[axis]), json.loads(run_[figure])
        found.append([values[max(i for i, x in enumerate(at) if x <= g)] for g in grid])
    return [statistics.median(column) for column in zip(*found, strict=True)]


def reach(runs: list[dict[str, str]], axis: str, figure: str, level: float) -> float:
    """The median over the runs of where a figure is first at ``level`` or below; infinite where it never is."""
    found = []
    for run_ in runs:
        pairs = zip(json.loads(run_[axis]), json.loads(run_[figure]), strict=True)
        found.append(next((x for x, value in pairs if value <= level), math.inf))
    return statistics.median(found)


def common_calls(record: dict[str, Any], problem: str) -> int:
    """The oracle calls that every run that did not fail has made: where algorithms are compared at equal calls."""
    found = record["problems"][problem].values()
    pairs = [pair for x in found for pair in zip(x["runs"], x["failed"], strict=True)]
    return int(min(json.loads(run_["calls"])[-1] for run_, failed in pairs if not failed))


def summary(record: dict[str, Any], problem: str) -> list[dict[str, Any]]:
    """One row for each algorithm, the best final median first; a run that failed ends at infinity."""
    figure, level = FIGURES[problem]
    calls, rows = common_calls(record, problem), []
    for name, found in record["problems"][problem].items():
        runs = found["runs"]
        ends = [math.inf if failed else x for x, failed in zip(last_values(runs, figure), found["failed"], strict=True)]
        row = {"name": name, "step": found["step"], "ratio": found["ratio"], "end": statistics.median(ends)}
        row |= {"low": min(ends), "high": max(ends)}
        row["steps"] = statistics.median(last_values(runs, "calls")) / CALLS[name]
        row |= {axis: reach(runs, axis, figure, level) for axis in ("seconds", "calls")}
        row["equal"] = curve(runs, "calls", figure, [calls])[0]
        if "test error" in runs[0]:
            row["error"] = statistics.median(last_values(runs, "test error"))
        rows.append(row)
    if problem in ("sized", *LOOPS):
        for row, more in zip(rows, as_published(record, problem), strict=True):
            row |= more
    by_calls = sorted(row["equal"] for row in rows)
    return sorted(({**row, "place": by_calls.index(row["equal"]) + 1} for row in rows), key=lambda row: row["end"])


def as_published(record: dict[str, Any], problem: str) -> list[dict[str, float]]:
    """For each algorithm, figures measured as in the published figure, from the lowest median seen less a margin.

    ``least``: the lowest point of the median curve; ``below``: when it is first below the level; ``settled``: when it
    is first within a tenth of its lowest point.
    """
    figure, level = FIGURES[problem]
    curves = []
    for found in record["problems"][problem].values():
        times = sorted({x for run_ in found["runs"] for x in json.loads(run_["seconds"])})
        curves.append((times, curve(found["runs"], "seconds", figure, times)))
    base = min(min(values) for _, values in curves) - MARGIN
    rows = []
    for times, values in curves:
        pairs, least = list(zip(times, (x - base for x in values), strict=True)), min(values) - base
        below = next((t for t, x in pairs if x <= level), math.inf)
        rows.append({"least": least, "below": below, "settled": next(t for t, x in pairs if x <= 1.1 * least)})
    return rows


def last_values(runs: list[dict[str, str]], column: str) -> list[float]:
    """The last value of a column in each run."""
    return [json.loads(x[column])[-1] for x in runs]


def table(record: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for problem, (figure, level) in FIGURES.items():
        if problem not in record["problems"]:
            continue
        error = " test error |" if problem == "cleaning" else ""
        more = (
            " lowest as published | s to 0.001 as published | s to its lowest |" if problem in ("sized", *LOOPS) else ""
        )
        heads = f"| rank | algorithm | {figure} at the end (lowest – highest) |{error} at"
        heads += f" {common_calls(record, problem)} calls (rank) | s to {level:g} | calls to {level:g} |{more}"
        heads += " steps | step | ratio |"
        lines += [heads, "| --- " * (heads.count("|") - 1) + "|"]
        for rank, row in enumerate(summary(record, problem), 1):
            cells = [str(rank), row["name"], f"{_short(row['end'])} ({_short(row['low'])} – {_short(row['high'])})"]
            cells += [f"{row['error']:.1%}"] if error else []
            cells += [f"{_short(row['equal'])} ({row['place']})", _when(row["seconds"]), _when(row["calls"])]
            cells += [_short(row["least"]), _when(row["below"]), _when(row["settled"])] if more else []
            cells += [f"{row['steps']:.0f}", f"{row['step']:g}", f"{row['ratio']:g}"]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def ends(found: Mapping[str, tuple[dict[str, Any], str]]) -> str:
    """The median score at the end and the rank of every algorithm, a column for each record and its problem."""
    cells: dict[str, dict[str, str]] = {}
    for column, (record, problem) in found.items():
        for rank, row in enumerate(summary(record, problem), 1):
            cells.setdefault(row["name"], {})[column] = f"{_short(row['end'])} ({rank})"
    rows = [[name, *(of.get(column, "–") for column in found)] for name, of in cells.items()]
    return records.markdown(["algorithm", *found], rows)


def _when(x: float) -> str:
    return f"{x:.3g}" if math.isfinite(x) else "–"


def _short(x: float) -> str:
    return "failed" if math.isinf(x) else "0" if x <= FLOOR else f"{x:.3g}"


def word(parts: tuple[bool, ...] | None) -> str:
    """A verdict, from whether each part of a statement holds; None is no verdict."""
    if parts is None:
        return "–"
    return "agrees" if all(parts) else "**partly**" if any(parts) else "**differs**"
