"""Where the marks of the plots stand, which plots.html.j2 draws; and the noise matrix with shades."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from hyperkron.cleaning.report.folder import Candidate

EDGES = torch.arange(21, dtype=torch.float64) / 20
"""Between the bars of the histogram of weights."""
SPARK_SIZE = (96, 24)
"""Width and height of a sparkline."""
MAX_CLASSES = 20
"""Classes shown at most."""
SHADES = 9
"""Shades of a wrong label, from 0 (none) to this one; report.css has a class for each."""
TOP, HEIGHT = 12, 170
"""Pixels above the bars of a histogram, and of the highest one."""


def plain(value: float) -> str:
    """A number for an attribute: two decimals at most.

    Example:
        >>> plain(0.5), plain(12.004), plain(7)
        ('0.5', '12', '7')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high], roughly ``about`` of them.

    Example:
        >>> ticks(0.0, 1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw * 0.999), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


# --- accuracies --------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """A horizontal axis from ``low`` to ``high``, which stand at these shares of the width of a plot."""

    low: float
    high: float
    left: float
    right: float

    def share(self, x: float) -> float:
        """Where x stands, as a share of the width."""
        return self.left + (self.right - self.left) * (x - self.low) / (self.high - self.low)

    def at(self, x: float) -> str:
        """The same as a percentage."""
        return f"{plain(100.0 * self.share(x))}%"

    def ticks(self) -> list[float]:
        """Round numbers along it."""
        return ticks(self.low, self.high)


def accuracy_axis(candidates: Sequence[Candidate]) -> Axis:
    """The axis of the dot plot: the part of [0, 1] that holds every accuracy and interval, out to round numbers."""
    found = [x for c in candidates for x in (c.accuracy, c.low, c.high, c.test_accuracy) if x is not None] or [0.0, 1.0]
    wide = max(max(found) - min(found), 0.02)
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 1.0) if wide / s <= 6)
    low, high = math.floor(min(found) / step + 1e-9) * step, math.ceil(max(found) / step - 1e-9) * step
    return Axis(low, max(high, low + step), 0.02, 0.98)


# --- weights -----------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """Numbers of rows with weights from ``low`` to ``high``, and the two parts of the bar: percentages and pixels."""

    low: float
    high: float
    kept: int
    suspect: int
    x: str
    width: str
    tall: float
    tall_top: float


class Histogram(NamedTuple):
    """Numbers of rows by weight, the suspects on top; levels are numbers with heights."""

    axis: Axis
    bars: list[Bar]
    levels: list[tuple[float, float]]


def histogram(kept: Iterable[float], suspect: Iterable[float]) -> Histogram:
    """The bars of the weights of suspects and of the other rows."""
    weights = (torch.tensor([x for x in part if math.isfinite(x)], dtype=torch.float64) for part in (kept, suspect))
    below, above = (torch.histogram(part.clamp(0, 1), EDGES).hist.long().tolist() for part in weights)
    edges = EDGES.tolist()
    axis, most = Axis(0.0, 1.0, 0.09, 0.99), max(1, *map(sum, zip(below, above, strict=True)))
    bars = []
    for low, high, n, on_top in zip(edges, edges[1:], below, above, strict=False):
        wide = axis.share(high) - axis.share(low)
        x, width = (f"{plain(100.0 * share)}%" for share in (axis.share(low) + 0.04 * wide, 0.92 * wide))
        bars.append(Bar(low, high, n, on_top, x, width, HEIGHT * n / most, HEIGHT * on_top / most))
    levels = [(y, TOP + HEIGHT * (1 - y / most)) for y in ticks(0, most, 4) if y == int(y)]
    return Histogram(axis, bars, levels)


# --- histories --------------------------------------------------------------------------------------------


def sparkline(history: Sequence[float], top: float) -> str:
    """The points of a polyline that shows a history of weights on the scale from 0 to ``top``."""
    width, height = SPARK_SIZE
    wide, tall = (width - 6) / max(1, len(history) - 1), (height - 6) / top
    points = ((3 + i * wide, height - 3 - tall * min(max(y, 0.0), top)) for i, y in enumerate(history))
    return " ".join(f"{plain(x)},{plain(y)}" for x, y in points)


# --- the noise matrix --------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A number of the table, as a percentage, with the class that gives its shade and what it says in words."""

    text: str
    shade: str
    tip: str


class NoiseTable(NamedTuple):
    """The heat map: one line per true class, one column per given label, and ``rest`` if there are more classes."""

    classes: list[str]
    lines: list[list[Cell]]
    left_out: int


def noise_table(classes: Sequence[str], matrix: Sequence[Sequence[float]]) -> NoiseTable:
    """The classes with most noise (at most 20), and the probabilities among them.

    The noise of a class i is 1 − P(given i | true i). What goes to classes that are not shown stands in a last column.

    Example:
        >>> table = noise_table(["cat", "dog"], [[0.9, 0.1], [0.4, 0.6]])
        >>> [[cell.text for cell in line] for line in table.lines]
        [['90', '10'], ['40', '60']]
    """
    by_noise = sorted(range(len(classes)), key=lambda i: matrix[i][i])
    shown = sorted(by_noise[:MAX_CLASSES])
    hidden = set(by_noise[MAX_CLASSES:])
    rest = [sum(matrix[i][j] for j in hidden) for i in shown]
    most = max([matrix[i][j] for i in shown for j in shown if i != j] + (rest if hidden else []), default=0.0)
    lines = []
    for i, other in zip(shown, rest, strict=True):
        line = [_cell(matrix[i][j], i == j, most, f"true {classes[i]}, given {classes[j]}") for j in shown]
        if hidden:
            line.append(_cell(other, False, most, f"true {classes[i]}, given a class that is not shown"))
        lines.append(line)
    return NoiseTable([classes[i] for i in shown], lines, len(hidden))


def _cell(p: float, right: bool, most: float, words: str) -> Cell:
    percent = 100 * p
    text = "0" if percent < 0.05 else f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"
    shade = "right" if right else f"heat{min(SHADES, round(SHADES * p / most)) if most > 0 else 0}"
    return Cell(text, shade, f"{words}: {percent:.1f}%")
