"""``hyperkron report`` and ``hyperkron export``: what is done with a finished run."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperkron.cli.cleaning import READING
from hyperkron.cli.output import UsageError, say, say_json


def report(options: Any, given: list[str]) -> int:
    """Write or refresh report.html."""
    from hyperkron.report import write_report

    page = write_report(options.run)
    if options.json:
        say_json({"report": str(page)})
    else:
        print(page)
    return 0


@dataclass(frozen=True)
class Row:
    """A line of rows.csv."""

    row: int
    given: str
    suggested: str
    suspect: bool


def export(options: Any, given: list[str]) -> int:
    """Write the training rows again, without the suspects or with the labels suggested for them."""
    if (options.drop is None) == (options.relabel is None):
        raise UsageError("export needs one of --drop suspects and --relabel suspects.")
    if options.threshold is not None and not 0 <= options.threshold <= 1:
        raise UsageError(f"--threshold={options.threshold!r} must lie between 0 and 1.")
    from hyperkron.data import export_rows

    folder = Path(options.run)
    train, reading = _source(folder)
    rows = _rows(folder, options.threshold)
    suspects = sum(row.suspect for row in rows)
    kept = [row for row in rows if options.drop is None or not row.suspect]
    keep = [row.row for row in kept]
    labels: list[str | None] = [row.suggested if options.relabel and row.suspect else None for row in kept]
    trusted = _flagged(train, reading)
    written = export_rows(
        train,
        keep + trusted,
        options.out,
        labels + [None] * len(trusted) if options.relabel else None,
        label=reading.get("label"),
        overwrite=options.overwrite,
    )
    done = "dropped" if options.drop else "relabelled"
    if options.json:
        say_json({"file": str(written), "rows": len(keep) + len(trusted), "trusted": len(trusted), done: suspects})
    elif not options.quiet:
        also = f", {len(trusted)} of them trusted" if trusted else ""
        say(f"{len(keep) + len(trusted)} rows written{also}; {suspects} suspects {done}.")
        say("Rows that were left out when the data was read are not among them.")
        print(written)
    return 0


def _source(folder: Path) -> tuple[str, dict[str, Any]]:
    """Where the training rows of a run came from, and how they were read."""
    from hyperkron.report.fields import parse, read_text
    from hyperkron.solution import HyperkronError

    file = folder / "config.json"
    text = read_text(file)
    if text is None:
        raise HyperkronError(f"run={str(folder)!r} holds no run (no config.json); name one of `hyperkron clean`.")
    source = parse(text, file).child("source")
    if not source.text("train"):
        raise HyperkronError(
            f"{file} does not say which file the training rows came from; data that was given in Python is exported "
            "with hyperkron.data.export_rows, or by taking the rows that rows.csv does not call suspect."
        )
    return source.text("train"), {k: v for k, v in source.child("reading").raw.items() if v is not None}


def _rows(folder: Path, threshold: float | None) -> list[Row]:
    from hyperkron.solution import HyperkronError

    file = folder / "rows.csv"
    if not file.is_file():
        raise HyperkronError(
            f"run={str(folder)!r} has no rows.csv: it has not finished; go on with `hyperkron resume {folder}`."
        )
    found: list[Row] = []
    with file.open(encoding="utf-8", newline="") as lines:
        for number, line in enumerate(csv.DictReader(lines), 2):
            try:
                probability = float(line["error_probability"])
                suspect = {"true": True, "false": False}[line["suspect"]]
                if threshold is not None:
                    suspect = probability >= threshold
                found.append(Row(int(line["row"]), line["given"], line["suggested"], suspect))
                if math.isnan(probability) or line["suggested"] is None:
                    raise ValueError
            except (KeyError, TypeError, ValueError) as error:
                raise HyperkronError(
                    f"{file}:{number} is no line of a run; restore the file or make the run again with "
                    "`hyperkron clean`."
                ) from error
    return found


def _flagged(train: str, reading: dict[str, Any]) -> list[int]:
    """The trusted rows that stand in the same file as the others: they belong to a clean dataset."""
    if "trusted_column" not in reading:
        return []
    from hyperkron.data import read_pair

    rows: list[int] = read_pair(train, **{name: reading[name] for name in READING if name in reading})[1].rows.tolist()
    return rows
