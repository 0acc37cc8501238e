"""The map on one page: by how much every method changes what the user wanted, and why.

python -m experiments.which_method.page             # the tables of pages/which-method.md
python -m experiments.which_method.page --figure    # its figure
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from experiments import records
from experiments.paper import plots
from experiments.paper.tuning import Difference, interval
from experiments.pieces import Lines
from experiments.which_method.compare import RATES, RESULT, Map
from experiments.which_method.methods import METHODS
from experiments.which_method.problems import PROBLEMS

FIGURE = records.PAGES / "figures" / "which-method.svg"


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _head(title: str) -> list[str]:
    return [_row(title, list(METHODS)), "| --- " * (len(METHODS) + 1) + "|"]


def differences(made: Map, figure: str, digits: int) -> list[str]:
    """A figure less that of the identity, seed by seed; bold where the 95 % interval does not contain zero."""
    lines = []
    for problem in PROBLEMS:
        cells = []
        base = made.figures(problem, "identity")
        for name in METHODS:
            x = made.figures(problem, name)
            if x is None or base is None:
                cells.append("–")
            elif None in x[figure]:
                cells.append("diverged")
            elif name == "identity":
                mean, half = interval(x[figure])
                cells.append(f"{mean:.{digits}f} ± {half:.{digits}f}")
            else:
                gap = Difference.of(base[figure], x[figure])
                assert gap is not None
                text = f"{gap.mean:+.{digits}f} ± {gap.half:.{digits}f}"
                cells.append(f"**{text}**" if gap.sign else text)
        lines.append(_row(problem, cells))
    return lines


def means(made: Map, figure: str, form: str, ratio: bool = False) -> list[str]:
    """The mean of a figure over seeds, perhaps as a ratio to the identity's."""
    lines = []
    for problem in PROBLEMS:
        base = made.figures(problem, "identity")
        cells = []
        for name in METHODS:
            x = made.figures(problem, name)
            if x is None or base is None:
                cells.append("–")
                continue
            value = sorted(x[figure])[len(x[figure]) // 2] if ratio else interval(x[figure])[0]
            cells.append(form.format(value / sorted(base[figure])[len(base[figure]) // 2] if ratio else value))
        lines.append(_row(problem, cells))
    return lines


def edges(made: Map) -> str:
    """Which winners lie at an edge of the step sizes."""
    found = [
        f"{name} on {problem}"
        for problem in PROBLEMS
        for name in METHODS
        if (x := made.figures(problem, name)) is not None and x["rate"] in (RATES[0], RATES[-1])
    ]
    return f"Step sizes at an edge of the grid ({RATES[0]:g} or {RATES[-1]:g}): {'; '.join(found) or 'none'}."


def tables(made: Map) -> str:
    """All tables of the page."""
    parts = [
        [*_head("what was wanted, in % (more is better)"), *differences(made, "wanted", 1)],
        [*_head("J_out on held-out rows (less is better)"), *differences(made, "held", 3)],
        [*_head("cosine with the converged hypergradient"), *means(made, "cosine", "{:.2f}")],
        [*_head("time of an outer iteration"), *means(made, "milliseconds", "{:.1f}×", ratio=True)],
        [*_head("memory"), *means(made, "bytes", "{:.1f}×", ratio=True)],
    ]
    return "\n\n".join(["\n".join(lines) for lines in parts] + [edges(made)])


def figure(made: Map, path: Path) -> Path:
    """Cosine against what was gained, one point for each method and problem; and the cosines of every problem."""

    def fill(axes: Any) -> None:
        shown = [problem for problem in PROBLEMS if made.figures(problem, "identity") is not None]
        for i, name in enumerate(METHODS):
            cells = {problem: made.figures(problem, name) for problem in shown}
            known = [(k, x) for k, problem in enumerate(shown) if (x := cells[problem]) is not None]
            axes[0].plot(
                [interval(x["cosine"])[0] for _, x in known],
                [k for k, _ in known],
                "o",
                color=f"C{i % 10}",
                label=name,
                ms=5,
            )
            gains = []
            for k, x in known:
                base = made.figures(shown[k], "identity")
                gap = Difference.of(base["wanted"], x["wanted"]) if base is not None else None
                if gap is not None and name != "identity":
                    gains.append((gap.mean, k))
            axes[1].plot([x for x, _ in gains], [k for _, k in gains], "o", color=f"C{i % 10}", ms=5)
        for axis, label in zip(
            axes, ("cosine with the converged hypergradient", "points gained over identity"), strict=True
        ):
            axis.set_yticks(range(len(shown)), shown)
            axis.invert_yaxis()
            axis.set_xlabel(label)
            axis.grid(True, lw=0.3)
        axes[1].axvline(0, color="black", lw=0.8)
        axes[0].legend(fontsize=6, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return plots.draw(path, 2, fill, height=4.0)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, or draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", action="store_true", help=f"draw {FIGURE.name}")
    options = parser.parse_args(arguments)
    made = Map(Lines(RESULT).rows, list(PROBLEMS))
    print(figure(made, FIGURE) if options.figure else tables(made))


if __name__ == "__main__":
    main()
