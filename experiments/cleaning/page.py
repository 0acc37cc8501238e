"""Writes pages/cleaning.md and prints the tables of docs/cleaning-results.md.

python -m experiments.cleaning.page
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import stdev
from typing import Any

from experiments.cleaning import development
from experiments.cleaning import trust_summary as summary
from experiments.cleaning.trust_data import SOURCES, TOUCHED
from experiments.cleaning.trust_summary import Run, against_best, candidate, mean, settings
from experiments.pieces import Lines
from experiments.records import PAGES, RESULTS
from hyperkron.cleaning import OURS

RUNS = RESULTS / "cleaning" / "trust.jsonl"
BEFORE = RUNS.with_name("trust-before.jsonl")
PREVIOUS = RUNS.with_name("trust-previous.jsonl")
"""The table before, under the same splits."""
DEVELOPMENT = RUNS.with_name("development.jsonl")
"""What the learner was decided on, and settings that were run after that; ``experiments.cleaning.development``."""
PAGE = PAGES / "cleaning.md"

HEAD = """# Can the numbers of `hyperkron clean` be trusted? The record

**Question.** What lies behind [the tables of the results page](../../docs/cleaning-results.md): how do the candidates
compare, which learner comes out, did the last change help, and what was decided after which figures had been seen?

**Answer.** Our own model is the best candidate in {best} of {runs} runs and was delivered in {chosen}. Below the best
rival by more than the interval: {below}.

Measured by `python -m experiments.cleaning.trust` ({runs} runs, {sets} data sets, seeds {seeds}, {sizes} trusted rows
per class, source {commits}, one CPU core a run); this page is made by `python -m experiments.cleaning.page`. Every run
is a line of [trust.jsonl](../results/cleaning/trust.jsonl);
[another file](../results/cleaning/trust-decided.md) says what was decided when, and what had been seen before.

"""
SET_UP = {
    "tables": "of R's mlbench and kernlab, columns as they are",
    "texts": (
        "frozen MiniLM embeddings; WRENCH sets with the majority vote of their labelling functions (`weak`), four "
        "sets of scientific text and news with made-up noise"
    ),
    "images": "digits and the test parts of MNIST, Fashion-MNIST and CIFAR-10, with half as many pixels a side",
    "network": "the tool's default; for CIFAR-10 a convolutional one of width 8",
    "rows": (
        "at most 1,500 noisy ones (MNIST and Fashion-MNIST 1,000, CIFAR-10 500), 2,000 test rows, a third of a "
        "class trusted"
    ),
    "noise": (
        "`uniform-20` redraws 20 % of the labels among all classes; `class-40` moves 40 % to the next class; each "
        "seed has its own noise, split and trusted rows"
    ),
    "unseen": (
        "{unseen}; kept out of development, but see step 15 of what was decided. Fashion-MNIST is not counted: "
        "other rows of it were used"
    ),
    "held-out, test": "what the tool prints; what is measured on rows it did not use",
    "outside": (
        "scikit-learn with cleanlab as its tutorials use it: forest (tables) or logistic regression, wrong labels "
        "pruned, trusted rows added"
    ),
    "best rival": ("picked with hindsight by test accuracy among all others and *outside*; ± half its 95 % interval"),
    "±": "of candidates a standard error over data sets, against the table before one over runs",
}


def percent(value: float) -> str:
    """With one digit, without the sign."""
    return f"{100 * value:.1f}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """In Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def measured() -> tuple[list[Run], list[Run], list[Run]]:
    """Runs in the order of the tables, those of the version before, and failed ones."""
    runs, failed = summary.load(RUNS)
    runs.sort(key=lambda r: (list(SOURCES).index(r["dataset"]), r["per_class"], r["seed"]))
    return runs, summary.load(BEFORE)[0], failed


def promises(runs: list[Run], before: list[Run]) -> list[str]:
    """Every promise: all sets and the unseen ones."""
    unseen = [r for r in runs if r["unseen"] and r["dataset"] not in TOUCHED]
    lines = zip(summary.verdicts(runs, before), summary.verdicts(unseen, before), strict=True)
    rows = [
        [name, asked, f"{found}: {said}", f"{alone}: {also}"] for (name, asked, found, said), (*_, alone, also) in lines
    ]
    return table(["promise", "asked", f"all {len(runs)} runs", f"the {len(unseen)} runs of unseen sets"], rows)


def short(runs: list[Run]) -> list[str]:
    """One line for each data set, mean over its runs."""
    rows = []
    for name in dict.fromkeys(r["dataset"] for r in runs):
        own = [r for r in runs if r["dataset"] == name]
        best = against_best(own)
        inside = sum(summary.covered(candidate(r, r["chosen"]), r["test_rows"]) for r in own)
        chosen = ", ".join(f"{n} {k}" if len(Counter(r["chosen"] for r in own)) > 1 else n for n, k in _chosen(own))
        rows.append(
            [
                name + (" (unseen)" if own[0]["unseen"] and name not in TOUCHED else ""),
                f"**{percent(best['out'])}**",
                chosen,
                f"{percent(best['score'])} ± {percent(best['margin'])} ({best['best']})",
                percent(mean(r["outside"]["test"] for r in own)),
                f"{inside} of {len(own)}",
                f"{percent(mean(r['estimated']['rate'] for r in own))} / {percent(mean(r['wrong'] for r in own))}",
                f"{mean(r['average_precision'] for r in own):.3f}",
                f"{mean(r['outside']['average_precision'] for r in own):.3f}",
            ]
        )
    header = ["data set", "delivered", "chosen", "best rival", "outside", "interval holds", "noise said / true"]
    return table([*header, "AP hyperkron", "AP cleanlab"], rows)


def _chosen(runs: list[Run]) -> list[tuple[str, int]]:
    return Counter(r["chosen"] for r in runs).most_common()


def candidates(runs: list[Run]) -> list[str]:
    """Each candidate over all runs that have it."""
    names = Counter(c["name"] for r in runs for c in r["candidates"])
    rows = []
    for name, count in names.most_common():
        own = [r for r in runs if any(c["name"] == name for c in r["candidates"])]
        gap, error = summary.by_dataset(own, lambda r, n=name: summary.optimism(r, n))  # type: ignore[misc]
        more = summary.by_dataset(own, lambda r, n=name: summary.optimism(r, OURS) - summary.optimism(r, n))  # type: ignore[misc]
        inside = mean(float(summary.covered(candidate(r, name), r["test_rows"], widened=True)) for r in own)
        gain = mean(candidate(r, name)["test_accuracy"] - candidate(r, OURS)["test_accuracy"] for r in own)
        wins = sum(max(r["candidates"], key=lambda c: c["test_accuracy"])["name"] == name for r in own)
        chosen = sum(r["chosen"] == name for r in own)
        rows.append(
            [
                name,
                str(count),
                percent(mean(candidate(r, name)["test_accuracy"] for r in own)),
                f"{100 * gain:+.1f}",
                f"{gap:+.1f} ± {error:.1f}",
                "–" if name == OURS else f"{more[0]:+.1f} ± {more[1]:.1f}",
                f"{inside:.0%}",
                str(wins),
                str(chosen),
            ]
        )
    header = ["candidate", "runs", "test", "minus ours", "held-out minus test", "ours minus that"]
    return table([*header, "interval holds, widened", "best in", "chosen in"], rows)


def below(runs: list[Run]) -> str:
    """The settings in which the delivered model is below the best rival by more than the interval."""
    found = {key: c for key, group in settings(runs).items() if (c := against_best(group))["below"]}
    named = [
        f"{d} {n}/class ({percent(c['out'])} against {percent(c['score'])}, {c['best']})" for (d, n), c in found.items()
    ]
    return "; ".join(named) if named else "none"


def paired(runs: list[Run], previous: list[Run]) -> list[str]:
    """The runs against those of the table before of the same set, seed and trusted rows."""
    old = {(r["dataset"], r["seed"], r["per_class"]): r for r in previous}
    pairs = [(old[key], r) for r in runs if (key := (r["dataset"], r["seed"], r["per_class"])) in old]
    parts = {
        "all": pairs,
        "unseen sets": [(a, b) for a, b in pairs if b["unseen"] and b["dataset"] not in TOUCHED],
        "weak labels": [(a, b) for a, b in pairs if b["noise"] == "weak"],
    }
    figures: dict[str, Callable[[Run], float]] = {
        "average precision": lambda r: r["average_precision"],
        "calibration error": lambda r: r["reliability"]["error"],
        "rate off, points": lambda r: 100 * abs(r["estimated"]["rate"] - r["wrong"]),
        "rate in its interval, %": lambda r: 100 * (r["estimated"]["low"] <= r["wrong"] <= r["estimated"]["high"]),
        "delivered model, test %": lambda r: 100 * summary.delivered(r),
        "in the 95 % interval, %": lambda r: 100 * summary.covered(candidate(r, OURS), r["test_rows"]),
    }
    rows = []
    for name, own in ((name, own) for name, own in parts.items() if len(own) > 1):
        for figure, value in figures.items():
            change = [value(b) - value(a) for a, b in own]
            error = stdev(change) / len(change) ** 0.5
            digits = 3 if figure in ("average precision", "calibration error") else 1
            was, now = (mean(value(pair[i]) for pair in own) for i in (0, 1))
            cells = f"{was:.{digits}f}", f"{now:.{digits}f}", f"{mean(change):+.{digits}f} ± {error:.{digits}f}"
            rows.append([f"{name} ({len(own)})", figure, *cells])
    return table(["runs", "figure", "before", "now", "change"], rows)


def learners(runs: list[Run]) -> list[str]:
    """What our model of tables is, and how it does against the best rival that is no forest and no boosted trees."""
    own = [r for r in runs if r["kind"] == "table"]
    kind_of = lambda r: candidate(r, OURS)["learner"]  # noqa: E731
    rows = []
    for kind in sorted({kind_of(r) for r in own}):
        some = [r for r in own if kind_of(r) == kind]
        ours = [candidate(r, OURS)["test_accuracy"] for r in some]
        network, trees = (
            [
                max(
                    c["test_accuracy"]
                    for c in r["candidates"]
                    if c["name"] != OURS and (c["name"] in summary.TREES) is t
                )
                for r in some
            ]
            for t in (False, True)
        )
        better = sum(a > b for a, b in zip(ours, network, strict=True))
        figures = [percent(mean(x)) for x in (ours, network, trees)]
        rows.append([kind, str(len(some)), *figures, f"{better} of {len(some)}"])
    header = ["our model", "runs", "test", "best network among the rivals", "better of forest and boosted trees"]
    return table([*header, "better than that network"], rows)


def page() -> str:
    """The whole page."""
    runs, _, failed = measured()
    facts: dict[str, Any] = {
        "runs": len(runs),
        "sets": len({r["dataset"] for r in runs}),
        "seeds": ", ".join(str(s) for s in sorted({r["seed"] for r in runs})),
        "sizes": " and ".join(str(n) for n in sorted({r["per_class"] for r in runs})),
        "commits": ", ".join(sorted({r["commit"] for r in runs})),
        "unseen": ", ".join(dict.fromkeys(r["dataset"] for r in runs if r["unseen"] and r["dataset"] not in TOUCHED)),
    }
    facts["best"] = sum(max(r["candidates"], key=lambda c: c["test_accuracy"])["name"] == OURS for r in runs)
    facts |= {"chosen": sum(r["chosen"] == OURS for r in runs), "below": below(runs)}
    set_up = [[what, how.format(**facts)] for what, how in SET_UP.items()]
    lines = [*table(["what", "how"], set_up), "", "## Candidates", "", *candidates(runs), ""]
    if failed:
        lines += ["Failed: " + "; ".join(f"{r['dataset']} {r['seed']}: {r['failure']}" for r in failed) + ".", ""]
    lines += ["## Network, forest or boosted trees: the table's runs", "", *learners(runs), ""]
    lines += ["## The same on development tables", "", development.summary(Lines(DEVELOPMENT).rows), ""]
    previous = summary.load(PREVIOUS)[0]
    commits = ", ".join(sorted({r["commit"] for r in previous}))
    lines += [f"## Against the table before ({commits}), under the same splits", "", *paired(runs, previous), ""]
    return HEAD.format(**facts) + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print("\n".join(short(measured()[0])))
    print("\n".join(promises(*measured()[:2])))
