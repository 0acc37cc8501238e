"""The table of `compare.py`, and what it says about each claim."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

OURS = "hyperkron"
ORDER = ("noisy", "trusted", "pooled", "small-loss", "trusted-confidence", "cleanlab", "sama")


def mean(values: list[float]) -> float:
    return statistics.fmean(values)


def half_interval(share: float, rows: int, seeds: int) -> float:
    """Half of the 95 % interval of a test accuracy, from its rows; seeds share the test rows only in part."""
    return 1.96 * math.sqrt(max(share * (1 - share), 1e-9) / (rows * seeds))


def grouped(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        found[record["setting"]].append(record)
    return dict(found)


def row(name: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """One setting, averaged over its seeds."""
    out = mean([r["test"][r["chosen"]] for r in records])
    others = {n: mean([r["test"][n] for r in records]) for n in ORDER if all(n in r["test"] for r in records)}
    best = max(others, key=lambda n: others[n])
    margin = half_interval(others[best], records[0]["test_rows"], len(records))
    ablated = [r["without_hypergradient"] for r in records if "without_hypergradient" in r]
    precision = {n: mean([r["average_precision"][n] for r in records]) for n in records[0]["average_precision"]}
    return {
        "name": name,
        "seeds": len(records),
        "out": out,
        "ours": mean([r["test"][OURS] for r in records]),
        "chosen": [r["chosen"] for r in records],
        "others": others,
        "best": best,
        "margin": margin,
        "ideal": mean([r["test"]["correct rows"] for r in records]),
        "precision": precision,
        "auroc": {n: mean([r["auroc"][n] for r in records]) for n in records[0]["auroc"]},
        "f1": {n: mean([r["f1"][n] for r in records]) for n in records[0]["f1"]},
        "without": mean(ablated) if len(ablated) == len(records) else None,
        "few": records[0]["per_class"] == 10,
        "wins": precision[OURS] > max(precision["cleanlab"], precision["trusted"]),
    }


def ratio_of(records: list[dict[str, Any]]) -> dict[str, float]:
    """How many plain trainings the method takes."""
    return {"ratio": mean([r["seconds"]["cleaning"] / r["seconds"]["plain"] for r in records])}


def table(records: list[dict[str, Any]], times: Sequence[dict[str, Any]] = ()) -> str:
    """Markdown: accuracy, label errors, and the claims counted.

    A setting with ``times`` of its own goes by these.
    """
    if not records:
        return "Nothing has been measured."
    again = grouped(list(times))
    rows = [row(name, found) | ratio_of(again.get(name, found)) for name, found in grouped(records).items()]
    return "\n".join([*_accuracy(rows), "", *_errors(rows), "", *claims(rows)])


def summary(records: list[dict[str, Any]], times: Sequence[dict[str, Any]] = ()) -> str:
    """Markdown: the settings with 10 trusted rows per class, and what a user asks first."""
    again = grouped(list(times))
    few = {name: found for name, found in grouped(records).items() if found[0]["per_class"] == 10}
    rows = [row(name, found) | ratio_of(again.get(name, found)) for name, found in few.items()]
    lines = ["| setting | plain training | best alternative | hyperkron | AP cleanlab | AP hyperkron | time |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for r in rows:
        lines.append(
            f"| {r['name'].removesuffix(' 10/class')} | {100 * r['others']['noisy']:.1f} | "
            f"{100 * r['others'][r['best']]:.1f} ± {100 * r['margin']:.1f} ({r['best']}) | **{100 * r['out']:.1f}** | "
            f"{r['precision']['cleanlab']:.3f} | {r['precision'][OURS]:.3f} | {r['ratio']:.1f}× |"
        )
    return "\n".join(lines)


def _accuracy(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| setting | comes out | ours | best alternative | ± | "
        + " | ".join(ORDER)
        + " | correct rows | ours without hypergradient | time |",
        "| --- | --- | --- | --- | --- | " + " | ".join("---" for _ in ORDER) + " | --- | --- | --- |",
    ]
    for r in rows:
        others = " | ".join(f"{100 * r['others'][n]:.1f}" if n in r["others"] else "–" for n in ORDER)
        fixed = "–" if r["without"] is None else f"{100 * r['without']:.1f}"
        lines.append(
            f"| {r['name']} | **{100 * r['out']:.1f}** | {100 * r['ours']:.1f} | {100 * r['others'][r['best']]:.1f} "
            f"({r['best']}) | {100 * r['margin']:.1f} | {others} | {100 * r['ideal']:.1f} | {fixed} | "
            f"{r['ratio']:.1f}× |"
        )
    return lines


def _errors(rows: list[dict[str, Any]]) -> list[str]:
    names = (OURS, "without hypergradient", "cleanlab", "trusted")
    lines = [
        "| setting | " + " | ".join(f"AP {n}" for n in names) + " | AUROC (ours) | F1 ours / cleanlab / trusted |",
        "| --- | " + " | ".join("---" for _ in names) + " | --- | --- |",
    ]
    for r in rows:
        scores = " | ".join(f"{r['precision'][n]:.3f}" for n in names)
        cuts = " / ".join(f"{r['f1'][n]:.2f}" for n in (OURS, "cleanlab", "trusted"))
        lines.append(f"| {r['name']} | {scores} | {r['auroc'][OURS]:.3f} | {cuts} |")
    return lines


def claims(rows: list[dict[str, Any]]) -> list[str]:
    """Each claim with its count."""
    few = [r for r in rows if r["few"]]
    below = [r for r in rows if r["out"] < r["others"][r["best"]] - r["margin"]]
    above = [r for r in few if r["out"] > r["others"][r["best"]]]
    clearly = [r for r in few if r["out"] > r["others"][r["best"]] + r["margin"]]
    wins = [r for r in rows if r["wins"]]
    gain = [r["precision"][OURS] - r["precision"]["without hypergradient"] for r in rows]
    slow = [r for r in rows if r["ratio"] > 3]
    better = [100 * (r["ours"] - r["without"]) for r in rows if r["without"] is not None]
    return [
        f"- Below the best alternative by more than the interval: {len(below)} of {len(rows)} settings"
        + (": " + ", ".join(r["name"] for r in below) if below else "")
        + ".",
        f"- Above the best alternative with 10 per class: {len(above)} of {len(few)} settings; by more than the "
        f"interval: {len(clearly)}.",
        f"- Average precision above cleanlab and above trusted confidence: {len(wins)} of {len(rows)} settings"
        + (" (not: " + ", ".join(r["name"] for r in rows if not r["wins"]) + ")" if len(wins) < len(rows) else "")
        + ".",
        f"- What the hypergradient adds to average precision: {mean(gain):+.4f} on average, from {min(gain):+.3f} to "
        f"{max(gain):+.3f}; more than 0.005 in {sum(g > 0.005 for g in gain)} settings, less than −0.005 in "
        f"{sum(g < -0.005 for g in gain)}.",
        f"- What the hypergradient adds to our network's accuracy, measured in {len(better)} settings: "
        + (f"{mean(better):+.2f} points on average, from {min(better):+.1f} to {max(better):+.1f}." if better else "–"),
        f"- Time over one plain training: {mean([r['ratio'] for r in rows]):.1f}× on average, at most "
        f"{max(r['ratio'] for r in rows):.1f}×; above 3× in {len(slow)} of {len(rows)} settings.",
    ]
