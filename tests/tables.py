"""A small table with wrong labels, for commands."""

from __future__ import annotations

from pathlib import Path


def write_table() -> list[str]:
    """Two classes on a line, a quarter of the labels checked, a fifth of the others wrong; the lines of the rows."""
    lines = []
    for i in range(120):
        right, checked = i // 2 % 2, i % 4 == 3
        given = right ^ (i % 5 == 0 and not checked)
        lines.append(
            f"{(2 * right - 1) * (1 + i % 7 / 7):.3f},{i},{('small', 'large')[given]},{'yes' if checked else 'no'}"
        )
    Path("train.csv").write_text("\n".join(["size,weight,kind,checked", *lines]) + "\n")
    return lines
