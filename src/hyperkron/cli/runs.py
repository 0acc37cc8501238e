"""``hyperkron report`` and ``hyperkron export``: what is done with a finished run."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from hyperkron.cli.cleaning import HASHES, READING
from hyperkron.cli.options import as_options
from hyperkron.cli.output import UsageError, say, say_json


def report(options: Any, given: list[str]) -> int:
    """Write or refresh report.html."""
    from hyperkron.cleaning.report import write_report

    page = write_report(options.run)
    if options.json:
        say_json({"report": str(page)})
    else:
        print(page)
    return 0


class CsvRow(NamedTuple):
    """A line of rows.csv."""

    row: int
    suggested: str
    suspect: bool


def export(options: Any, given: list[str]) -> int:
    """Write the training rows again, without the suspects or with the labels suggested for them."""
    if (options.drop is None) == (options.relabel is None):
        raise UsageError("export needs one of --drop suspects and --relabel suspects.")
    if options.threshold is not None and not 0 <= options.threshold <= 1:
        raise UsageError(f"--threshold={options.threshold!r} must lie between 0 and 1.")
    from hyperkron.cleaning.data import export_rows
    from hyperkron.solution import HyperkronWarning

    folder = Path(options.run)
    train, reading = _source(folder)
    rows = _rows(folder, options.threshold)
    notes = [note for note in [_check_rows(folder, train)] if note]
    suspects = sum(row.suspect for row in rows)
    kept = [row for row in rows if options.drop is None or not row.suspect]
    keep = [row.row for row in kept]
    labels: list[str | None] = [row.suggested if options.relabel and row.suspect else None for row in kept]
    trusted = _flagged(train, reading)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HyperkronWarning)
        written = export_rows(
            train,
            keep + trusted,
            options.out,
            labels + [None] * len(trusted) if options.relabel else None,
            label=reading.get("label"),
            overwrite=options.overwrite,
            formulas=options.formulas,
        )
    notes += [as_options(str(warning.message)) for warning in caught]
    for note in notes:
        say(f"warning: {note}")
    count, done = len(keep) + len(trusted), "dropped" if options.drop else "relabelled"
    if options.json:
        found = {"file": str(written), "rows": count, "trusted": len(trusted), done: suspects, "warnings": notes}
        say_json(found)
    elif not options.quiet:
        also = f", {len(trusted)} of them trusted" if trusted else ""
        say(f"{count} rows written{also}; {suspects} suspects {done}.")
        say("Rows that were left out when the data was read are not included.")
        print(written)
    return 0


def _check_rows(folder: Path, train: str) -> str | None:
    """Refuse a source that does not hold the rows of the run any more; what to say where that is not known."""
    from hyperkron.cleaning.data import RowHashes, row_hashes
    from hyperkron.cleaning.report.fields import parse, read_text
    from hyperkron.solution import HyperkronError
    from hyperkron.training.writing import read_plain

    record = parse(read_text(folder / "config.json") or "{}", folder / "config.json").child("rows")
    if record.count("version") != RowHashes.VERSION:
        return (
            f"the run in {folder} was made by another version of hyperkron, so it is not known whether {train} still "
            "holds its rows. If the file was changed or sorted since, the wrong rows are exported: "
            "run `hyperkron clean` again."
        )
    now = row_hashes(train)
    if now.sha256 == record.text("sha256"):
        return None
    what = f"there were {record.count('count')} rows and are {len(now)} now"
    with contextlib.suppress(OSError):
        before = RowHashes(record.text("sha256"), read_plain(folder / HASHES))
        what = before.difference(now) if len(before) == record.count("count") else what
    raise HyperkronError(
        f"{train!r} no longer holds the rows of the run in {str(folder)!r}: {what}. Nothing was written. "
        "Restore the file, or run `hyperkron clean` again."
    )


def _source(folder: Path) -> tuple[str, dict[str, Any]]:
    """Where the training rows of a run came from, and how they were read."""
    from hyperkron.cleaning.report.fields import parse, read_text
    from hyperkron.solution import HyperkronError

    file = folder / "config.json"
    text = read_text(file)
    if text is None:
        raise HyperkronError(f"run={str(folder)!r} holds no run (no config.json); name one of `hyperkron clean`.")
    source = parse(text, file).child("source")
    if not source.text("train"):
        raise HyperkronError(
            f"{file} does not say which file the training rows came from; data that was given in Python is exported "
            "with hyperkron.cleaning.data.export_rows, or by taking the rows that rows.csv does not call suspect."
        )
    return source.text("train"), {k: v for k, v in source.child("reading").raw.items() if v is not None}


def _rows(folder: Path, threshold: float | None) -> list[CsvRow]:
    from hyperkron.cleaning.report.fields import REMEDY, read_text
    from hyperkron.solution import HyperkronError

    file = folder / "rows.csv"
    if not file.exists():
        raise HyperkronError(
            f"run={str(folder)!r} has no rows.csv: it has not finished; continue with `hyperkron resume {folder}`."
        )
    found: list[CsvRow] = []
    text = read_text(file) or ""
    lines = csv.DictReader(io.StringIO(text, newline=""))
    try:
        found += (_row(line, threshold) for line in lines)
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise HyperkronError(f"{file}:{lines.line_num} is not a line of a run; {REMEDY}.") from error
    return found


def _row(line: dict[str, Any], threshold: float | None) -> CsvRow:
    probability = float(line["error_probability"])
    suspect = {"true": True, "false": False}[line["suspect"]]
    if threshold is not None:
        suspect = probability >= threshold
    if math.isnan(probability) or line["suggested"] is None or not 0 <= int(line["row"]) < 2**62:
        raise ValueError
    return CsvRow(int(line["row"]), line["suggested"], suspect)


def _flagged(train: str, reading: dict[str, Any]) -> list[int]:
    """The trusted rows that stand in the same file as the others: they belong to a clean dataset."""
    if "trusted_column" not in reading:
        return []
    from hyperkron.cleaning.data import read_pair

    rows: list[int] = read_pair(train, **{name: reading[name] for name in READING if name in reading})[1].rows.tolist()
    return rows
