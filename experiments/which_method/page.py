"""The map on one page: by how much every method changes what the user wanted, and why.

python -m experiments.which_method.page             # the tables of pages/which-method.md
python -m experiments.which_method.page --summary   # the table of docs/which-method.md
python -m experiments.which_method.page --figure    # its figure
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from experiments import records
from experiments.paper import plots
from experiments.pieces import Lines
from experiments.seeds import Difference, interval
from experiments.which_method.compare import RATES, RESULT, Map
from experiments.which_method.methods import METHODS
from experiments.which_method.problems import PROBLEMS

FIGURE = Path(__file__).parents[2] / "docs" / "images" / "which-method.svg"
TAKE = {
    "example weights": "`hk.kfac()`: J_out is clearly lower, accuracy is not clearly higher",
    "weight network": "`hk.identity()`: nothing is clear",
    "label correction": "`hk.kfac()`",
    "penalty per tensor": "`hk.identity()`",
    "penalty per weight": "`hk.cg(20)`",
    "augmentation": "`hk.pcg(3)`",
    "domain weights": "`hk.identity()`: nothing is clear",
    "poisoning": "`hk.pcg(3)`",
    "generator noise": "`hk.cg(20)`",
    "distilled images": "`hk.pcg(3)`",
}
"""The best method that is clearly better than identity on record, or else identity."""


def differences(made: Map, figure: str, digits: int) -> list[list[str]]:
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
        lines.append([problem, *cells])
    return lines


def means(made: Map, figure: str, form: str, ratio: bool = False) -> list[list[str]]:
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
        lines.append([problem, *cells])
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
    parts = {
        "what was wanted, in % (more is better)": differences(made, "wanted", 1),
        "J_out on held-out rows (less is better)": differences(made, "held", 3),
        "cosine with the converged hypergradient": means(made, "cosine", "{:.2f}"),
        "time of an outer iteration": means(made, "milliseconds", "{:.1f}×", ratio=True),
        "memory": means(made, "bytes", "{:.1f}×", ratio=True),
    }
    return "\n\n".join([*(records.markdown([title, *METHODS], rows) for title, rows in parts.items()), edges(made)])


def summary(made: Map) -> str:
    """The short table of docs/which-method.md: what the identity reaches, what others add, and what to take."""
    shown = ("KFAC", "PCG-3", "CG-20")
    lines = []
    for problem in PROBLEMS:
        base = made.figures(problem, "identity")
        assert base is not None
        mean, half = interval(base["wanted"])
        cells = [f"{mean:.1f} ± {half:.1f}", *(_gain(made, problem, name)[0] for name in shown)]
        lines.append([problem, *cells, f"{interval(base['cosine'])[0]:.2f}", TAKE[problem]])
    return records.markdown(["λ", "identity", *shown, "cosine of identity", "take"], lines)


def _gain(made: Map, problem: str, name: str) -> tuple[str, int]:
    """What a method adds to the identity's result, as text, and its sign where it is clear."""
    base, x = made.figures(problem, "identity"), made.figures(problem, name)
    if base is None or x is None or None in x["wanted"]:
        return "–", 0
    gap = Difference.of(base["wanted"], x["wanted"])
    assert gap is not None
    text = f"{gap.mean:+.1f} ± {gap.half:.1f}"
    return (f"**{text}**" if gap.sign else text), gap.sign


def figure(made: Map, path: Path) -> Path:
    """Two maps of problems and methods: cosines, and what was gained, coloured where it is clear."""
    problems, methods = list(PROBLEMS), list(METHODS)

    def fill(axes: Any) -> None:
        for axis, title in zip(
            axes, ("cosine with the converged hypergradient", "points gained over identity"), strict=True
        ):
            axis.set_xticks(range(len(methods)), methods, rotation=45, ha="right")
            axis.set_yticks(range(len(problems)), problems)
            axis.set_title(title, fontsize=9)
        cosines: list[list[float]] = [[math.nan] * len(methods) for _ in problems]
        signs = [[0] * len(methods) for _ in problems]
        for i, problem in enumerate(problems):
            for j, name in enumerate(methods):
                x = made.figures(problem, name)
                if x is None:
                    continue
                cosines[i][j] = interval(x["cosine"])[0]
                axes[0].text(j, i, f"{cosines[i][j]:.2f}", ha="center", va="center", fontsize=6)
                text, signs[i][j] = _gain(made, problem, name)
                told = text.strip("*").split(" ")[0] if name != "identity" else ""
                weight = "bold" if signs[i][j] else "normal"
                axes[1].text(j, i, told, ha="center", va="center", fontsize=6, weight=weight)
        axes[0].imshow(cosines, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
        axes[1].imshow(signs, cmap="PiYG", vmin=-2, vmax=2, aspect="auto")

    return plots.draw(path, 2, fill, height=4.0)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, or draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", action="store_true", help=f"draw {FIGURE.name}")
    parser.add_argument("--summary", action="store_true", help="print the short table")
    options = parser.parse_args(arguments)
    made = Map(Lines(RESULT).rows, list(PROBLEMS))
    print(figure(made, FIGURE) if options.figure else summary(made) if options.summary else tables(made))


if __name__ == "__main__":
    main()
