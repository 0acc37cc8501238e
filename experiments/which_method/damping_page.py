"""The tables of pages/damping.md, from the record of ``damping.py``.

python -m experiments.which_method.damping_page
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from experiments import records
from experiments.pieces import Lines
from experiments.seeds import Difference, interval
from experiments.which_method.damping import DEVELOPMENT, GRID, MLP, RESULT, RULES, SEEDS, Case, cases
from experiments.which_method.problems import PROBLEMS

DEFAULT = "0.001"
CLOSE = 1.0
"""Hundredths of a cosine that do not count."""
FIXED = tuple(f"{d:g}" for d in GRID)
OTHERS = tuple(problem for problem in (*PROBLEMS, MLP) if problem not in DEVELOPMENT)
Row = dict[str, Any]


def lost(row: Row, rule: str) -> float:
    """By how many hundredths the cosine is below the best of the grid."""
    found = row["cosines"]
    return 100 * (max(found[d] for d in FIXED) - found[rule])


def regrets(rows: Sequence[Row]) -> str:
    """What every rule loses against the best δ of the grid: the mean over problems and points, and the worst seed."""
    columns = ["δ"]
    lines: dict[str, list[str]] = {}
    for curvature in ("KFAC", "EKFAC"):
        for title, problems in (("development", DEVELOPMENT), ("the others", OTHERS)):
            here = [row for row in rows if row.get("curvature") == curvature and row["problem"] in problems]
            columns += [f"{curvature}, {title}", "worst"]
            for rule in _rules(rows):
                lines.setdefault(rule, [rule])
                known = rule in here[0]["cosines"]
                lines[rule] += (
                    [_mean(here, rule), f"{max(lost(row, rule) for row in here):.0f}"] if known else ["–", "–"]
                )
    return records.markdown(columns, lines.values())


def _rules(rows: Sequence[Row]) -> Iterable[str]:
    return next(row for row in rows if row.get("curvature") == "KFAC")["cosines"]


def _mean(rows: Sequence[Row], rule: str) -> str:
    """Over problems and points of each seed; the interval is over seeds."""
    by_seed = [statistics.mean(lost(row, rule) for row in rows if row["seed"] == seed) for seed in SEEDS]
    mean, half = interval(by_seed)
    return f"{mean:.1f} ± {half:.1f}"


def verdicts(rows: Sequence[Row], rules: Sequence[str]) -> str:
    """At how many points a rule is nearer to the best δ than the default, in the mean over seeds."""
    lines = []
    for rule in rules:
        cells = [rule]
        for curvature in ("KFAC", "EKFAC"):
            gains = [
                statistics.mean(lost(row, DEFAULT) - lost(row, rule) for row in here)
                for here in _points([row for row in rows if row.get("curvature") == curvature])
            ]
            nearer, further = sum(gain > CLOSE for gain in gains), sum(gain < -CLOSE for gain in gains)
            cells.append(f"nearer at {nearer}, further away at {further} of {len(gains)}")
        lines.append(cells)
    return records.markdown(["by more than 0.01", "KFAC", "EKFAC"], lines)


def _points(rows: Sequence[Row]) -> list[list[Row]]:
    """The seeds of each problem, with or without penalty, at each look."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["problem"], row["plain"], row["look"]), []).append(row)
    return list(found.values())


def near(rows: Sequence[Row], rules: Sequence[str]) -> str:
    """KFAC's cosines, problem by problem: means over seeds and points."""
    lines = []
    for case in (case for problem in (*DEVELOPMENT, *OTHERS) for case in cases(problem)):
        here = [row for row in rows if row.get("curvature") == "KFAC" and Case(row["problem"], row["plain"]) == case]
        best = statistics.mean(max(row["cosines"][d] for d in FIXED) for row in here)
        means = [statistics.mean(row["cosines"][rule] for row in here) for rule in rules]
        lines.append([str(case), f"{best:.2f}", *(f"{mean:.2f}" for mean in means)])
    return records.markdown(["cosine", "best δ", *rules], lines)


def trained(rows: Sequence[Row], title: str, figure: str, digits: int) -> str:
    """What training λ with each rule gives, less that of the default δ, seed by seed; bold where it is clear."""
    lines = []
    for problem in (p for p in (*DEVELOPMENT, *OTHERS) if p != MLP):
        case = cases(problem)[-1]
        values = {
            rule: [
                row[figure] for row in rows if row.get("rule") == rule and Case(row["problem"], row["plain"]) == case
            ]
            for rule in RULES
        }
        mean, half = interval(values[DEFAULT])
        line = [str(case), f"{mean:.{digits}f} ± {half:.{digits}f}"]
        for rule in (rule for rule in RULES if rule != DEFAULT):
            gap = Difference.of(values[DEFAULT], values[rule])
            text = "–" if gap is None else f"{gap.mean:+.{digits}f} ± {gap.half:.{digits}f}"
            line.append(f"**{text}**" if gap is not None and gap.sign else text)
        lines.append(line)
    return records.markdown([title, DEFAULT, *(rule for rule in RULES if rule != DEFAULT)], lines)


def tables(rows: Sequence[Row]) -> list[str]:
    """All tables of the page."""
    rules = "0.1 · mean", "model, mean", "model, 1/τ"
    cosines = regrets(rows), verdicts(rows, rules), near(rows, (DEFAULT, *rules, "pcg(1)", "pcg(3)"))
    held = trained(rows, "J_out on held-out rows (less is better)", "held", 3)
    wanted = trained(rows, "what was wanted, in % (more is better)", "wanted", 1)
    return [*cosines, held, wanted]


if __name__ == "__main__":
    print("\n\n".join(tables(Lines(RESULT).rows)))
