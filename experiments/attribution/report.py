"""Tables and the figure of ``experiments/pages/attribution.md``, from the record.

python -m experiments.attribution.report
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from experiments import records
from experiments.attribution import early
from experiments.attribution.peers import methods
from experiments.attribution.settings import SETTINGS
from experiments.attribution.study import REMOVERS, REPEATS, SUBSETS
from experiments.paper import plots
from experiments.pieces import Cells, Lines

RESULTS = Path(__file__).parents[1] / "results" / "attribution"
FIGURE = Path(__file__).parents[1] / "pages" / "figures" / "attribution-removal.svg"
VERSION = {"subsets": SUBSETS, "repeats": REPEATS, "version": 2}


def values(cells: Cells, kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The finished pieces of a kind, by setting and method."""
    rows = (row for row in cells.found.values() if row["key"][0] == kind)
    return {(row["key"][1], row["key"][2]): row["value"] for row in rows}


def score_table(cells: Cells) -> str:
    """LDS of every method in every setting; a star marks cells of the earlier run (``lds.jsonl``)."""
    found = {key: (value, "") for key, value in values(cells, "score").items()}
    for row in Lines(RESULTS / "lds.jsonl").rows:
        found.setdefault((row["setting"], row["method"]), (row, "\\*"))
    lines = []
    for method in methods("all"):
        cells_of = [
            ""
            if (cell := found.get((name, method))) is None
            else "{lds:.3f} ± {interval:.3f}".format(**cell[0]) + cell[1]
            for name in SETTINGS
        ]
        lines.append([method, *cells_of])
    return records.markdown(["method", *SETTINGS], lines)


def rises(cells: Cells) -> dict[str, dict[str, list[float]]]:
    """Of the settings that have all choices of rows: by setting and method, the rise of the loss of each query."""
    found = values(cells, "removal")
    whole = [name for name in SETTINGS if all((name, method) in found for method in REMOVERS)]
    return {name: {method: found[name, method]["rise"] for method in REMOVERS} for name in whole}


def removal_table(cells: Cells) -> str:
    """The mean rise of the loss, and for how many queries it is larger than with rows by gradient products."""
    shown = rises(cells)
    lines = []
    for method in REMOVERS:
        texts = []
        for setting in shown.values():
            pairs = list(zip(setting[method], setting[REMOVERS[0]], strict=True))
            more = f", larger for {sum(a > b for a, b in pairs)} of {len(pairs)}" if method != REMOVERS[0] else ""
            texts.append(f"{statistics.fmean(setting[method]):+.3f}{more}")
        lines.append([method, *texts])
    return records.markdown(["rows by", *shown], lines)


def speed_table(cells: Cells) -> str:
    """Seconds and memory on the device, ours and kronfluence's."""
    lines = ["| | 100 queries | | one aggregated query | |", "| --- | --- | --- | --- | --- |"]
    lines.append("| | seconds | MB | seconds | MB |")
    found = values(cells, "speed")
    for name in SETTINGS:
        texts = []
        for what in ("100 queries, cuda", "aggregate, cuda"):
            x = found[name, what]
            texts.append(f"{x['hyperkron']:.2f} against {x['kronfluence']:.2f} ({x['ratio']:.1f}×)")
            texts.append(f"{x['hyperkron MB']:.0f} against {x['kronfluence MB']:.0f}")
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def early_table() -> str:
    """LDS of networks that are not trained to the end, with the difference to EKFAC at their last point."""
    rows = Lines(early.RESULT).rows
    lines = [["loss of the queries", *(f"{row['loss']:.2f}" for row in rows)]]
    for method in rows[0]["methods"]:
        texts = []
        for row in rows:
            (told, half), (gain, about) = row["methods"][method]["lds"], row["methods"][method]["gain"]
            more = f"{told:.3f} ± {half:.3f}" if method == early.BASE else f"{told:.3f} ({gain:+.3f} ± {about:.3f})"
            texts.append(f"**{more}**" if gain - about > 0 else more)
        lines.append([method, *texts])
    return records.markdown(["epochs", *(str(row["epochs"]) for row in rows)], lines)


def figure(cells: Cells) -> Path:
    """The sorted rises of the queries, one panel for each setting."""
    shown = rises(cells)

    def fill(axes: Any) -> None:
        for panel, (name, choices) in zip(axes, shown.items(), strict=True):
            for method, rise in choices.items():
                panel.plot(range(1, len(rise) + 1), sorted(rise, reverse=True), marker=".", label=method)
            panel.set_title(name)
            panel.set_xlabel("query, the most affected first")
            panel.set_ylabel("rise of its loss")
        axes[0].legend(fontsize="small")

    return plots.draw(FIGURE, len(shown), fill)


def main() -> None:
    """Print the tables and draw the figure."""
    cells = Cells(RESULTS / "pieces.jsonl", VERSION)
    tables = score_table(cells), removal_table(cells), early_table(), speed_table(cells)
    print(*tables, figure(cells), sep="\n\n")


if __name__ == "__main__":
    main()
