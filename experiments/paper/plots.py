"""Small SVG figures; matplotlib is imported only when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperkron.solution import HyperkronError

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Curves by label: their x and y."""

STYLES = ("-", "--", "-.", ":")


def draw(path: Path, panels: int, fill: Callable[[Any], None], height: float = 3.0) -> Path:
    """Make a figure with panels side by side, let ``fill(axes)`` draw into them, and save it as SVG."""
    try:
        import matplotlib
    except ImportError as error:
        raise HyperkronError("figures need matplotlib; pip install 'hyperkron[report]'.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": "hyperkron", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = plt.subplots(1, panels, figsize=(4.2 * panels, height), constrained_layout=True, squeeze=False)
        fill(axes[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return path


def numbers(values: Sequence[float | None]) -> list[float]:
    """Values for an axis; those of failed runs leave a gap.

    Example:
        >>> numbers([1.0, None])
        [1.0, nan]
    """
    return [math.nan if value is None else value for value in values]


def curves(
    axis: Any,
    lines: Lines,
    x: str,
    y: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    level: Mapping[str, float] | None = None,
) -> None:
    """Curves with markers where they are short, and horizontal lines for references."""
    for i, (label, (xs, ys)) in enumerate(lines.items()):
        marker = "o" if len(xs) <= 8 else None
        axis.plot(xs, ys, STYLES[i // 10 % 4], color=f"C{i % 10}", label=label, lw=1.5, marker=marker, ms=3)
    for i, (label, value) in enumerate((level or {}).items()):
        axis.axhline(value, color="black", lw=1, ls=STYLES[i % 4], label=label)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if log_x:
        axis.set_xscale("log")
    if log_y:
        axis.set_yscale("log")
    axis.grid(True, lw=0.3)
    if len(lines) > 6:  # too many to lie over the curves
        axis.legend(fontsize=6, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    elif lines:
        axis.legend(fontsize=7)
