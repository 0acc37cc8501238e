"""Plots as SVG, drawn by hand: no script, no style attribute, every text escaped; and the noise matrix with shades.

Horizontal positions are percentages and vertical ones pixels, so that a plot fills whatever width it is given while its
texts keep their size. Colours come from the classes in report.css.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from hyperkron.cleaning.report.folder import Candidate

SPARK_POINTS = 60
"""Points of a sparkline; longer histories are thinned out."""
SPARK_SIZE = (96, 24)
"""Width and height of a sparkline."""

Place = Callable[[float], str]


class Svg(str):
    """Markup whose texts are escaped already; jinja2 takes it as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)


def svg(name: str, *children: str, **attributes: object) -> Svg:
    """An element. Children that are not Svg are text and are escaped; ``a_b`` is the attribute ``a-b``.

    Example:
        >>> svg("text", "a < b", x="50%", text_anchor="end")
        '<text x="50%" text-anchor="end">a &lt; b</text>'
    """
    parts = [f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"' for key, value in attributes.items()]
    inside = "".join(child if isinstance(child, Svg) else escape(child) for child in children)
    return Svg(f"<{name}{''.join(parts)}>{inside}</{name}>")


def _plain(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _at(x: float) -> str:
    """A horizontal position as a percentage."""
    return f"{_plain(100.0 * x)}%"


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


def number(x: float) -> str:
    """A number for an axis, short."""
    if x and (abs(x) >= 1e5 or abs(x) < 1e-3):
        return f"{x:.3g}"
    return f"{x:,.4g}" if abs(x) < 1e4 else f"{x:,.0f}"


def shorten(text: str, length: int) -> str:
    """A text of at most ``length`` characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _finite(values: Iterable[float | None]) -> list[float]:
    return [x for x in values if x is not None]


def _title(text: str) -> Svg:
    return svg("title", text)


# --- accuracies --------------------------------------------------------------------------------------------


def accuracy_range(candidates: Sequence[Candidate]) -> tuple[float, float]:
    """The part of [0, 1] that holds every accuracy and interval, out to round numbers."""
    values = [x for c in candidates for x in _finite((c.accuracy, c.low, c.high, c.test_accuracy))]
    if not values:
        return 0.0, 1.0
    wide = max(max(values) - min(values), 0.02)
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 1.0) if wide / s <= 6)
    low, high = math.floor(min(values) / step + 1e-9) * step, math.ceil(max(values) / step - 1e-9) * step
    return (low, high) if high > low else (low, low + step)


def dot_plot(candidates: Sequence[Candidate]) -> Svg:
    """Accuracy of each candidate as a dot with its interval, and its test accuracy as an upright bar."""
    low, high = accuracy_range(candidates)
    row, inset = 46, 0.02

    def place(x: float) -> str:
        return _at(inset + (1 - 2 * inset) * (x - low) / (high - low))

    marks = [_candidate_row(c, i * row, place) for i, c in enumerate(candidates)]
    bottom = row * len(candidates)
    for x in ticks(low, high):
        marks.append(svg("line", x1=place(x), x2=place(x), y1=bottom - 2, y2=bottom + 4, class_="axis"))
        marks.append(svg("text", f"{100 * x:.4g} %", x=place(x), y=bottom + 19, class_="tick", text_anchor="middle"))
    label = "Accuracy of each candidate with its interval; the table below has the same numbers"
    return svg("svg", *marks, class_="plot", width="100%", height=bottom + 26, role="img", aria_label=label)


def _candidate_row(candidate: Candidate, top: int, place: Place) -> Svg:
    c, y = candidate, top + 30
    name = shorten(c.name, 44) + (" ✓" if c.chosen else "")
    value = "–" if c.accuracy is None else f"{100 * c.accuracy:.1f} %"
    between = "" if c.low is None or c.high is None else f" ({100 * c.low:.1f} – {100 * c.high:.1f} %)"
    marks = [
        svg("text", _title(c.name), name, x="0", y=top + 16, class_="name"),
        svg("text", value + between, x="100%", y=top + 16, class_="value", text_anchor="end"),
        svg("line", x1="0", x2="100%", y1=y, y2=y, class_="track"),
    ]
    if c.low is not None and c.high is not None:
        marks.append(svg("line", x1=place(c.low), x2=place(c.high), y1=y, y2=y, class_="interval"))
    if c.test_accuracy is not None:
        at = place(c.test_accuracy)
        tip = _title(f"test accuracy {100 * c.test_accuracy:.1f} %")
        marks.append(svg("line", tip, x1=at, x2=at, y1=y - 8, y2=y + 8, class_="test"))
    if c.accuracy is not None:
        marks.append(svg("circle", _title(f"accuracy {value}"), cx=place(c.accuracy), cy=y, r=6, class_="dot"))
    return svg("g", *marks, class_="candidate chosen" if c.chosen else "candidate")


# --- weights -----------------------------------------------------------------------------------------------


def bin_counts(edges: Sequence[float], values: Iterable[float]) -> list[int]:
    """How many values lie in each bin [edge, next edge); the last bin holds its upper edge too, and what is beyond.

    Example:
        >>> bin_counts([0.0, 0.5, 1.0], [0.1, 0.5, 1.0])
        [1, 2]
    """
    counts = [0] * (len(edges) - 1)
    for x in values:
        if math.isfinite(x):
            counts[min(max(bisect_right(edges, x) - 1, 0), len(counts) - 1)] += 1
    return counts


def histogram(edges: Sequence[float], kept: Sequence[int], suspect: Sequence[int] | None) -> Svg:
    """Numbers of rows by weight, the suspects on top of the others."""
    above = suspect or [0] * len(kept)
    left, right, height, top = 0.09, 0.99, 170, 12
    most = max(1, *(a + b for a, b in zip(kept, above, strict=True)))
    span = edges[-1] - edges[0]

    def place(x: float) -> float:
        return left + (right - left) * (x - edges[0]) / span

    marks = [_level(top + height * (1 - y / most), f"{y:,.0f}", left, right) for y in ticks(0, most, 4) if y == int(y)]
    for i, (below, on_top) in enumerate(zip(kept, above, strict=True)):
        x, width = place(edges[i]), place(edges[i + 1]) - place(edges[i])
        tall, tall_top = height * below / most, height * on_top / most
        tip = f"weight {number(edges[i])} to {number(edges[i + 1])}: {below + on_top:,} rows"
        tip += f", {on_top:,} of them suspects" if suspect else ""
        place_x, place_width = _at(x + 0.04 * width), _at(0.92 * width)
        bars = [svg("rect", x=place_x, width=place_width, y=top + height - tall, height=tall, class_="bar kept")]
        y = top + height - tall - tall_top
        bars.append(svg("rect", x=place_x, width=place_width, y=y, height=tall_top, class_="bar suspect"))
        marks.append(svg("g", _title(tip), *bars))
    for tick in ticks(edges[0], edges[-1]):
        at = _at(place(tick))
        marks.append(svg("text", number(tick), x=at, y=top + height + 18, class_="tick", text_anchor="middle"))
    marks.append(
        svg("text", "weight", x=_at((left + right) / 2), y=top + height + 38, class_="tick", text_anchor="middle")
    )
    label = "Numbers of training rows by weight"
    return svg("svg", *marks, class_="plot", width="100%", height=top + height + 44, role="img", aria_label=label)


def _level(y: float, text: str, left: float, right: float) -> Svg:
    """A horizontal line with its number at the left."""
    line = svg("line", x1=_at(left), x2=_at(right), y1=y, y2=y, class_="level")
    return svg("g", line, svg("text", text, x=_at(left - 0.015), y=y + 4, class_="tick", text_anchor="end"))


# --- histories --------------------------------------------------------------------------------------------


def thin(values: list[float], most: int) -> list[float]:
    """At most ``most`` of the values, evenly spaced, with the first and the last.

    Example:
        >>> thin([float(i) for i in range(9)], 3)
        [0.0, 4.0, 8.0]
    """
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{_plain(x)},{_plain(y)}" for x, y in points)


def sparkline(history: Sequence[float | None], top: float) -> str:
    """The points of a polyline that shows a history of weights on the scale from 0 to ``top``."""
    values = thin(_finite(history), SPARK_POINTS)
    width, height = SPARK_SIZE
    wide = (width - 6) / max(1, len(values) - 1)
    tall = (height - 6) / (top if top > 0 else 1.0)
    return _points((3 + i * wide, height - 3 - tall * min(max(y, 0.0), top)) for i, y in enumerate(values))


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
