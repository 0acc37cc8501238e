"""The tables of ``experiments/mnist/compare.py``."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.mnist.problem import SOLVER


def table(record: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| method | θ step | λ step | solver | loss on second validation |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in record["tuned"].items():
        x = found["setting"]
        solver = f"{SOLVER[name][0]} {x['solver']:g}"
        lines.append(f"| {name} | {x['inner']:g} | {x['outer']:g} | {solver} | {found['second_loss']:.4f} |")
    lines += [
        "",
        "| pair | seed | best test loss | of KFAC | ms a step | of KFAC | steps to the first | of KFAC | time ratio | "
        "within 0.1 % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in record["verdicts"].items():
        for seed, x in rows.items():
            lines.append(
                f"| {name} | {seed} | {x['target']:.4f} | {x['kfac_best']:.4f} | "
                f"{x['milliseconds_a_step']:.0f} | {x['kfac_milliseconds_a_step']:.0f} | {x['step']} | "
                f"{_or_never(x['kfac_step'], '', 0)} | {_or_never(x['seconds_ratio'], '×')} | "
                f"{_or_never(x['near_seconds_ratio'], '×')} |"
            )
        kinds = ("seconds", "near_seconds")
        medians = (_or_never(_median([x[f"{kind}_ratio"] for x in rows.values()]), "×") for kind in kinds)
        lines.append(f"| **{name}** | **median** | | | | | | | {' | '.join(f'**{x}**' for x in medians)} |")
    lines += [
        "",
        "| hypergradient | cosine with the exact one | norm, relative | ms |",
        "| --- | --- | --- | --- |",
    ]
    for name, x in record.get("diagnosis", {}).items():
        if name != "exact":
            lines.append(f"| {name} | {x['cosine']:.3f} | {x['norm']:.3f} | {x['milliseconds']:.0f} |")
    return "\n".join(lines)


def _median(ratios: list[float | None]) -> float | None:
    """The median, a run that never got there counting as zero."""
    return statistics.median(x or 0.0 for x in ratios) or None


def _or_never(x: float | None, unit: str, digits: int = 2) -> str:
    return "never" if x is None else f"{x:.{digits}f}{unit}"
