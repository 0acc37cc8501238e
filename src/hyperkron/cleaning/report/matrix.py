"""The noise matrix as a table whose cells carry a shade: P(given label | true label)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_CLASSES = 20
"""Classes shown at most."""
SHADES = 9
"""Shades of a wrong label, from 0 (none) to this one; report.css has a class for each."""


@dataclass(frozen=True)
class Cell:
    """A number of the table, as a percentage, with the class that gives its shade and what it says in words."""

    text: str
    shade: str
    tip: str


@dataclass(frozen=True)
class NoiseTable:
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
    return Cell(text, shade, f"{words}: {percent:.1f} %")
