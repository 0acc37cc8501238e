"""The figure of what ``bilevel_suite.py`` has found.

python benchmarks/bilevel_figure.py
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import common
from bilevel_suite import NAMES, curve, last_values, recorded

FIGURE = common.RESULTS.parent.parent / "docs" / "figures" / "bilevel_suite.png"


def draw_figure(record: dict[str, Any], path: Path = FIGURE) -> None:
    """Median curves over time and over oracle calls, one row of panels for each figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {"sized": "synthetic data of IJCNN1's size", "long": "synthetic data of IJCNN1's size, fast loops"}
    titles |= {"logistic": "small synthetic data", "cleaning": "hypercleaning of MNIST"}
    shown = [("sized", "suboptimality", 1e-6, 0.6), ("long", "suboptimality", 3e-7, 0.6)]
    shown += [("logistic", "suboptimality", 1e-9, 0.3)]
    shown += [("cleaning", "validation loss", 0.72, 1.1), ("cleaning", "test error", 0.14, 0.22)]
    figure, panels = plt.subplots(5, 2, figsize=(9, 15), constrained_layout=True)
    for row, (problem, label, low, high) in zip(panels, shown, strict=True):
        for panel, axis in zip(row, ("seconds", "calls"), strict=True):
            for i, name in enumerate(NAMES):
                if name not in record["problems"][problem]:
                    continue
                runs = record["problems"][problem][name]["runs"]
                last = statistics.median(last_values(runs, axis))
                grid = [last * k / 100 for k in range(101)]
                style = "-" if name in ("SABA", "SOBA") else "--" if name in ("FSLA", "MRBO") else ":"
                style = "-." if name.startswith("F2SA") else style
                panel.plot(grid, curve(runs, axis, label, grid), style, color=f"C{i}", label=name, lw=1.6)
            panel.set_yscale("log" if label == "suboptimality" else "linear")
            panel.set_ylim(low, high)
            panel.set_xlabel("CPU seconds, one thread" if axis == "seconds" else "oracle calls on a batch of 64")
            panel.set_ylabel(r"$h(\lambda) - h^*$" if label == "suboptimality" else label)
            panel.set_title(titles[problem], fontsize=10)
    panels[0][0].legend(fontsize=8, ncol=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    draw_figure(recorded())
