"""The figure of what ``published_hypercleaning.py`` and ``tuned.py`` have found.

python -m experiments.suite.figure
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from experiments import records
from experiments.suite import published_hypercleaning as published
from experiments.suite.tables import curve, last_values
from experiments.suite.tuned import NAMES, recorded

FIGURE = records.PAGES / "figures" / "suite.png"
Runs = dict[str, list[dict[str, str]]]
TITLES = {
    "50%": "MNIST at its published size, 50 % of the labels drawn anew",
    "70%": "the same, 70 %",
    "90%": "the same, 90 %",
    "covtype": "covtype, two classes, IJCNN1's numbers of examples",
    "sized": "synthetic data of IJCNN1's size",
    "long": "synthetic data of IJCNN1's size, fast loops",
    "logistic": "small synthetic data",
    "cleaning": "MNIST, 2048 examples, tuned here",
}
SHOWN = (
    ("50%", "test error", 0.13, 0.2),
    ("70%", "test error", 0.14, 0.22),
    ("90%", "test error", 0.16, 0.26),
    ("covtype", "suboptimality", 1e-4, 0.2),
    ("sized", "suboptimality", 1e-6, 0.6),
    ("long", "suboptimality", 3e-7, 0.6),
    ("logistic", "suboptimality", 1e-9, 0.3),
    ("cleaning", "validation loss", 0.72, 1.1),
)
"""A row of panels each: the problem, what is shown of it, and from where to where."""


def runs_of(record: dict[str, Any], cleaning: dict[str, Any]) -> dict[str, Runs]:
    """The runs of each problem and algorithm that went to their end; of the published settings those of the paper."""
    found: dict[str, Runs] = {}
    for problem, by_name in record["problems"].items():
        pairs = {name: zip(x["runs"], x["failed"], strict=True) for name, x in by_name.items()}
        found[problem] = {name: [run for run, failed in x if not failed] for name, x in pairs.items()}
    for problem in published.PROBLEMS:
        which = dict.fromkeys(published.names("paper", problem), "paper")
        which |= {"F2SA": "later"} if problem == "50%" else {}
        for name, source in which.items():
            runs = [cleaning["runs"][published.key((source, problem, name, seed))] for seed in published.SEEDS]
            found.setdefault(problem, {})[name] = [x for x in runs if not x["failed"]]
    return found


def draw_figure(found: dict[str, Runs], path: Path = FIGURE) -> None:
    """Median curves over time and over oracle calls, one row of panels for each problem."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(SHOWN), 2, figsize=(9, 3 * len(SHOWN)), constrained_layout=True)
    for row, (problem, label, low, high) in zip(panels, SHOWN, strict=True):
        for panel, axis in zip(row, ("seconds", "calls"), strict=True):
            for name, runs in found[problem].items():
                if runs:
                    _line(panel, name, runs, axis, label, logarithmic=problem in published.PROBLEMS)
            panel.set_xscale("log" if problem in published.PROBLEMS else "linear")
            panel.set_yscale("log" if label == "suboptimality" else "linear")
            panel.set_ylim(low, high)
            panel.set_xlabel("CPU seconds, one thread" if axis == "seconds" else "oracle calls on a batch of 64")
            panel.set_ylabel(r"$h(\lambda) - h^*$" if label == "suboptimality" else label)
            panel.set_title(TITLES[problem], fontsize=9)
    panels[0][0].legend(fontsize=7, ncol=2)
    panels[4][0].legend(fontsize=7, ncol=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _line(panel: Any, name: str, runs: list[dict[str, str]], axis: str, label: str, logarithmic: bool) -> None:
    last = statistics.median(last_values(runs, axis))
    grid = [last * 10 ** (-3 * (1 - k / 100)) if logarithmic else last * k / 100 for k in range(101)]
    plain = published.plain(name)
    style = {"SABA": "-", "SOBA": "-", "FSLA": "--", "MRBO": "--"}.get(plain, "-." if "F2SA" in plain else ":")
    width = 1.6 if name == plain else 0.8
    color = f"C{NAMES.index(plain)}"
    panel.plot(grid, curve(runs, axis, label, grid), style, color=color, label=name, lw=width)


if __name__ == "__main__":
    cleaning = json.loads((records.RESULTS / published.RESULT).read_text("utf-8"))
    draw_figure(runs_of(recorded(), cleaning))
