"""What the runs of ``trust.py`` say about each promise.

python -m experiments.cleaning.trust_summary trust.jsonl --before trust-before.jsonl
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments.pieces import Lines
from hyperkron.cleaning import OURS
from hyperkron.cleaning.config import BOOSTED, FOREST

Run = dict[str, Any]
Z = 1.96
TREES = ("forest", "boosted")
"""Names of candidates that are trees."""


def mean(values: Iterable[float]) -> float:
    """Of no values: NaN."""
    found = list(values)
    return statistics.fmean(found) if found else math.nan


def candidate(run: Run, name: str) -> dict[str, Any]:
    """A candidate of a run by its name."""
    return next(c for c in run["candidates"] if c["name"] == name)


def error_of(share: float, rows: int) -> float:
    """The standard error of a share."""
    return math.sqrt(max(share * (1 - share), 1 / rows / 4) / rows)


def covered(one: dict[str, Any], test_rows: int, *, widened: bool = False) -> bool:
    """Whether the printed interval holds the test accuracy t.

    Widened, each side of length h becomes √(h² + (1.96 s)²) with the standard error s of t: an interval of level 95 %
    for the true accuracy then holds t in 95 % of cases, while the printed one would hold it less often.
    """
    test, extra = one["test_accuracy"], 0.0
    if widened:
        extra = Z * error_of(test, test_rows)
    middle = min(max(one["accuracy"], one["low"]), one["high"])
    low, high = (math.hypot(middle - one["low"], extra), math.hypot(one["high"] - middle, extra))
    return bool(middle - low - 1e-9 <= test <= middle + high + 1e-9)


def by_dataset(runs: list[Run], value: Callable[[Run], float]) -> tuple[float, float]:
    """The mean of a value over data sets, and its standard error; the runs of a data set are averaged first."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        groups[run["dataset"]].append(value(run))
    means = [mean(v) for v in groups.values()]
    return mean(means), statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan


def optimism(run: Run, name: str) -> float:
    """Held-out minus test accuracy, in points."""
    one = candidate(run, name)
    return 100 * float(one["accuracy"] - one["test_accuracy"])


def rivals(run: Run) -> dict[str, float]:
    """Test accuracies of all candidates but ours, and of scikit-learn with cleanlab outside the tool."""
    found = {c["name"]: float(c["test_accuracy"]) for c in run["candidates"] if c["name"] != OURS}
    return {**found, "outside": float(run["outside"]["test"])}


def delivered(run: Run) -> float:
    """Test accuracy of the chosen model."""
    return float(candidate(run, run["chosen"])["test_accuracy"])


def delivers_trees(run: Run) -> bool:
    """Whether the chosen model is one of trees; our own method's can be (older runs do not say)."""
    kind = run.get("learner") or run.get("model")  # older runs have the name of a class, or nothing
    return run["chosen"] in TREES or kind in (FOREST, BOOSTED, "TreeEnsemble")


def best_network(run: Run) -> float:
    """Test accuracy of the best candidate that is neither the chosen one nor named after trees."""
    return max(float(c["test_accuracy"]) for c in run["candidates"] if c["name"] not in (run["chosen"], *TREES))


def settings(runs: list[Run]) -> dict[tuple[str, int], list[Run]]:
    """By data set and trusted rows per class."""
    groups: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run["dataset"], run["per_class"]].append(run)
    return dict(groups)


def against_best(group: list[Run]) -> dict[str, Any]:
    """The delivered model of a setting against the rival that is best on its test rows, as the mean over seeds."""
    names = set.intersection(*(set(rivals(run)) for run in group))
    scores = {name: mean(rivals(run)[name] for run in group) for name in names}
    best = max(sorted(scores), key=lambda n: scores[n])
    margin = Z * error_of(scores[best], sum(run["test_rows"] for run in group))
    out = mean(delivered(run) for run in group)
    return {"out": out, "best": best, "score": scores[best], "margin": margin, "below": out < scores[best] - margin}


def switches(runs: list[Run]) -> dict[str, Any]:
    """How often another candidate than ours was chosen, and what that did to test accuracy; and what was missed."""
    gains = [(run, 100 * (delivered(run) - candidate(run, OURS)["test_accuracy"])) for run in runs]
    switched = [gain for run, gain in gains if run["chosen"] != OURS]
    stayed = [run for run in runs if run["chosen"] == OURS]
    missed = [
        run
        for run in stayed
        if max(c["test_accuracy"] for c in run["candidates"])
        > delivered(run) + Z * error_of(delivered(run), run["test_rows"])
    ]
    return {
        "switched": len(switched),
        "better": sum(gain > 0 for gain in switched),
        "worse": sum(gain < 0 for gain in switched),
        "gain": mean(switched),
        "missed": len(missed),
        "stayed": len(stayed),
        "chosen": Counter(run["chosen"] for run in runs),
    }


def pooled_reliability(runs: list[Run]) -> float:
    """The calibration error of the rows of all runs together, in tenths of the probability."""
    bins = [[sum(run["reliability"]["bins"][b][i] for run in runs) for i in range(3)] for b in range(10)]
    return sum(abs(p - wrong) for _, p, wrong in bins) / max(1, sum(n for n, _, _ in bins))


def by_counting(rate: float, rows: int, reach: float = 0.03) -> float:
    """How often the share of wrong labels among this many random rows is within ``reach`` of the rate (binomial).

    Example:
        >>> round(by_counting(0.25, 40), 2), round(by_counting(0.25, 400), 2)
        (0.42, 0.85)
    """
    if not 0 < rate < 1:
        return 1.0

    def chance(k: int) -> float:
        ways = math.lgamma(rows + 1) - math.lgamma(k + 1) - math.lgamma(rows - k + 1)
        return math.exp(ways + k * math.log(rate) + (rows - k) * math.log1p(-rate))

    return sum(chance(k) for k in range(rows + 1) if abs(k / rows - rate) <= reach + 1e-12)


def precision_change(runs: list[Run], before: list[Run]) -> list[tuple[Run, float]]:
    """Average precision minus that of the version before, for the runs that both have."""
    old = {(r["dataset"], r["seed"], r["per_class"]): r for r in before}
    keyed = [(run, old.get((run["dataset"], run["seed"], run["per_class"]))) for run in runs]
    return [(r, r["average_precision"] - o["average_precision"]) for r, o in keyed if o is not None]


def figures(runs: list[Run], before: list[Run]) -> dict[str, Any]:
    """Every figure of "must show"."""

    def share(values: Iterable[bool]) -> float:
        return mean(float(v) for v in values)

    def against(run: Run) -> float:
        others = [optimism(run, c["name"]) for c in run["candidates"] if c["name"] != OURS]
        return optimism(run, OURS) - mean(others)

    sure = [sum(run["reliability"]["sure"][i] for run in runs) for i in (0, 1)]
    compared = {key: against_best(group) for key, group in settings(runs).items()}
    change = precision_change(runs, before)
    return {
        "runs": len(runs),
        "coverage": share(covered(candidate(r, r["chosen"]), r["test_rows"]) for r in runs),
        "coverage_widened": share(covered(candidate(r, r["chosen"]), r["test_rows"], widened=True) for r in runs),
        "coverage_all": share(covered(c, r["test_rows"], widened=True) for r in runs for c in r["candidates"]),
        "width": 100 * mean((c := candidate(r, r["chosen"]))["high"] - c["low"] for r in runs),
        "optimism_ours": by_dataset(runs, lambda r: optimism(r, OURS)),
        "optimism_chosen": by_dataset(runs, lambda r: optimism(r, r["chosen"])),
        "optimism_against": by_dataset(runs, against),
        "calibration": mean(r["reliability"]["error"] for r in runs),
        "calibrated": share(r["reliability"]["error"] <= 0.05 for r in runs),
        "calibration_pooled": pooled_reliability(runs),
        "sure": sure,
        "sure_right": sure[0] / sure[1] if sure[1] else math.nan,
        "rate_within": share(abs(r["estimated"]["rate"] - r["wrong"]) <= 0.03 for r in runs),
        "rate_counted": mean(by_counting(r["wrong"], r["trusted"]) for r in runs),
        "rate_covered": mean(
            float(e["low"] <= r["wrong"] <= e["high"]) for r in runs if "low" in (e := r["estimated"])
        ),
        "rate_off": 100 * mean(abs(r["estimated"]["rate"] - r["wrong"]) for r in runs),
        "rate_bias": 100 * mean(r["estimated"]["rate"] - r["wrong"] for r in runs),
        "settings": len(compared),
        "below": {key: c for key, c in compared.items() if c["below"]},
        "over_best": 100 * mean(c["out"] - c["score"] for c in compared.values()),
        "switches": switches(runs),
        "precision": mean(r["average_precision"] for r in runs),
        "precision_outside": mean(r["outside"]["average_precision"] for r in runs),
        "precision_change": mean(d for _, d in change),
        "precision_compared": len(change),
        "precision_lower": [(r["dataset"], r["seed"], r["per_class"], d) for r, d in change if d < -0.005],
        "seconds": mean(r["seconds"]["clean"] for r in runs),
    }


def verdicts(runs: list[Run], before: list[Run]) -> list[tuple[str, str, str, str]]:
    """Promise, what was asked, what was measured, and whether it was reached."""
    f = figures(runs, before)
    tree_runs = [r for r in runs if delivers_trees(r)]
    right = [r for r in tree_runs if delivered(r) > best_network(r)]
    s, (gap, gap_error) = f["switches"], f["optimism_against"]
    lines = [
        (
            "the 95 % interval holds the test accuracy",
            "≥ 90 %",
            f"{f['coverage']:.0%}; {f['coverage_widened']:.0%} with the test rows' own error "
            f"({f['width']:.0f} points wide)",
            f["coverage"] >= 0.9,
        ),
        (
            "held-out minus test, ours against the alternatives",
            "within ±0.5 points",
            f"{gap:+.2f} points (standard error {gap_error:.2f})",
            abs(gap) <= 0.5,
        ),
        (
            "calibration error of the error probability",
            "≤ 0.05",
            f"{f['calibration']:.3f} on average, ≤ 0.05 in {f['calibrated']:.0%} of runs; all rows pooled "
            f"{f['calibration_pooled']:.3f}",
            f["calibration"] <= 0.05,
        ),
        (
            'rows "over 99 %" are wrong',
            "≥ 97 %",
            f"{f['sure_right']:.1%} ({f['sure'][0]} of {f['sure'][1]})" if f["sure"][1] else "no such rows",
            bool(f["sure_right"] >= 0.97),
        ),
        (
            "noise rate within 3 points",
            "≥ 80 % of settings",
            f"{f['rate_within']:.0%} of runs (counting the wrong labels of as many random rows as are trusted: "
            f"{f['rate_counted']:.0%}); off by {f['rate_off']:.1f} points on average ({f['rate_bias']:+.1f} signed); "
            f"inside the printed interval of the rate in {f['rate_covered']:.0%}",
            f["rate_within"] >= 0.8,
        ),
        (
            "delivered model below the best rival by more than the interval",
            "never",
            f"{len(f['below'])} of {f['settings']} settings; {f['over_best']:+.1f} points to the best on average",
            not f["below"],
        ),
        (
            "the choice switches rightly where trees win",
            "seen",
            f"switched in {s['switched']} of {f['runs']} runs"
            + (f" ({s['better']} better, {s['worse']} worse, {s['gain']:+.1f} points)" if s["switched"] else "")
            + f"; to trees in {len(tree_runs)}, rightly in {len(right)}",
            bool(tree_runs) and 2 * len(right) > len(tree_runs),
        ),
        (
            "average precision against the version before",
            "nowhere −0.005",
            f"{f['precision_change']:+.3f} on average; lower by more than 0.005 in {len(f['precision_lower'])} of "
            f"{f['precision_compared']} runs"
            if f["precision_compared"]
            else "not measured",
            bool(f["precision_compared"]) and not f["precision_lower"],
        ),
    ]
    return [(*line[:3], "reached" if line[3] else "**not reached**") for line in lines]


def load(path: Path) -> tuple[list[Run], list[Run]]:
    """Finished runs, and those that failed."""
    rows = Lines(path).rows
    return [r for r in rows if "failure" not in r], [r for r in rows if "failure" in r]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--before", type=Path, help="runs of the version before")
    options = parser.parse_args()
    found, failed = load(options.runs)
    runs = [r for r in found if r["outside"] is not None]  # others are of the labels alone
    before = load(options.before)[0] if options.before else []
    for name, part in (
        ("all", runs),
        ("unseen", [r for r in runs if r["unseen"]]),
        *((k, [r for r in runs if r["kind"] == k]) for k in ("table", "text", "image")),
        *((f"{n} per class", [r for r in runs if r["per_class"] == n]) for n in (10, 50)),
    ):
        if part:
            print(f"\n{name}: {len(part)} runs")
            for line in verdicts(part, before):
                print("  " + " | ".join(line))
    f = figures(runs, before)
    below = (
        f"{name} with {n} per class ({c['out']:.1%} against {c['score']:.1%}, {c['best']})"
        for (name, n), c in f["below"].items()
    )
    print(f"\nbelow the best rival by more than the interval: {'; '.join(below) or 'none'}")
    for who, key in (("our model", "optimism_ours"), ("the delivered model", "optimism_chosen")):
        print("held-out minus test accuracy of {}: {:+.2f} ± {:.2f} points".format(who, *f[key]))
    for name, seed, n, change in f["precision_lower"]:
        print(f"average precision lower than before: {name}, seed {seed}, {n} per class: {change:+.3f}")
    for r in failed:
        print("failed:", r["dataset"], r["seed"], r["per_class"], r["failure"])


if __name__ == "__main__":
    main()
