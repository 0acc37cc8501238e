"""The table and the figure of a result of :mod:`experiments.paper.compare`: methods and reference lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.paper import plots
from experiments.paper.compare import chosen_text, known, mean
from experiments.paper.recipe import Result, Table
from experiments.paper.tuning import shown

Figures = Mapping[str, Any]
"""Of a method (:func:`experiments.paper.compare.summary`) or of a reference line."""

TITLE = "Ours (the paper prints no numbers); all runs have the same time"
CELLS: dict[str, Callable[[Figures], str]] = {
    "test loss": lambda x: shown(known(x["test_loss"])),
    "error in %": lambda x: shown([100 * y for y in known(x["test_error"])], 1),
    "lowest test loss": lambda x: shown(known(x["lowest_test_loss"])),
    "s to it": lambda x: shown(x["seconds_to_best"], 1),
    "steps": lambda x: f"{mean(x['steps']):.0f}",
    "ms a step": lambda x: f"{1e3 * mean(x['step_seconds']):.1f}",
    "F1 of kept rows": lambda x: f"{mean(x['f1']):.3f}",
    "seeds": lambda x: str(len(x["test_loss"])),
}
"""What a column says of a method, beside its name and ``setting``."""
OF_REFERENCES = ("test loss", "error in %", "seeds")
COLUMNS = ("test loss", "error in %", "lowest test loss", "steps", "ms a step", "F1 of kept rows", "seeds", "setting")


def cells(result: Result, x: Figures, columns: Sequence[str]) -> list[str]:
    """The cells of a method."""
    return [chosen_text(result, x) if name == "setting" else CELLS[name](x) for name in columns]


def tables(result: Result | None, columns: Sequence[str] = COLUMNS) -> list[Table]:
    """All methods, best first, then the reference lines; the paper shows figures without numbers."""
    if result is None:
        return []
    order = sorted(result.figures["found"].items(), key=lambda pair: mean(pair[1]["test_loss"]))
    rows = [[name, *cells(result, x, columns)] for name, x in order]
    for kind, x in result.figures.get("references", {}).items():
        rows.append([kind, *(CELLS[name](x) if name in OF_REFERENCES else "–" for name in columns)])
    return [Table(TITLE, ["method", *columns], rows)]


def plot(result: Result, folder: Path, height: float = 4.0) -> list[Path]:
    """Test loss of the first seed by time and by iteration, with the reference lines."""
    found = result.figures["found"]
    level = {kind: mean(x["test_loss"]) for kind, x in result.figures["references"].items()}

    def fill(axes: Any) -> None:
        for axis, key, label in zip(axes, ("seconds", "step"), ("seconds", "outer steps"), strict=True):
            lines = {name: (x["curve"][key], plots.numbers(x["curve"]["test_loss"])) for name, x in found.items()}
            plots.curves(axis, lines, label, "test loss", level=level)

    return [plots.draw(folder / f"{result.name}.svg", 2, fill, height=height)]
