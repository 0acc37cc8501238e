"""``hyperkron report`` and ``hyperkron export``: what is done with a finished run."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data import ReadOptions, RowHashes, export_rows, read_pair, row_hashes
from hyperkron.cleaning.decisions import read_decisions
from hyperkron.cleaning.fields import Fields, parse, read_text
from hyperkron.cleaning.loading import CsvRow, read_rows
from hyperkron.cleaning.replacing import HASHES
from hyperkron.cleaning.report import write_report
from hyperkron.cli.cleaning import READING
from hyperkron.cli.options import as_options
from hyperkron.cli.output import say, say_json
from hyperkron.solution import HyperkronError, HyperkronWarning
from hyperkron.training.writing import read_plain


def report(options: Any, given: list[str]) -> int:
    """Write or refresh report.html."""
    page = write_report(options.run)
    if options.json:
        say_json({"report": str(page)})
    else:
        print(page)
    return 0


def export(options: Any, given: list[str]) -> int:
    """Write the training rows again, without the suspects or with the labels suggested for them."""
    folder = Path(options.run)
    config = _config(folder)
    train, reading = config.child("source").text("train"), config.child("source").child("reading").raw
    rows = _rows(folder, options.threshold)
    how = ReadOptions(charset=reading.get("charset") or ReadOptions.charset)
    notes = [note for note in [_check_rows(folder, train, config.child("rows"), how)] if note]
    decided = {} if options.decisions is None else read_decisions(options.decisions, folder)
    _refuse_strange(decided, rows, options.decisions)
    open_suspects = [row for row in rows if row.suspect and row.row not in decided]
    dropped = {row.row for row in open_suspects} if options.drop else set()
    new = {row.row: row.suggested for row in open_suspects} if options.relabel else {}
    new |= {row.row: decided[row.row] for row in rows if decided.get(row.row, row.given) != row.given}
    keep = [row.row for row in rows if row.row not in dropped]
    labels: list[str | None] = [new.get(row) for row in keep]
    trusted = _flagged(train, reading)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HyperkronWarning)
        written = export_rows(
            train,
            keep + trusted,
            options.out,
            labels + [None] * len(trusted) if new else None,
            label=reading.get("label"),
            overwrite=options.overwrite,
            formulas=options.formulas,
            options=how,
        )
    notes += [as_options(str(warning.message)) for warning in caught]
    for note in notes:
        say(f"warning: {note}")
    count = len(keep) + len(trusted)
    done = {"dropped": len(dropped)} if options.drop else {"relabelled": len(new)}
    if options.decisions:
        done = {"decided": len(decided), "relabelled": len(new), "dropped": len(dropped)}
    if options.json:
        say_json({"file": str(written), "rows": count, "trusted": len(trusted), **done, "warnings": notes})
    elif not options.quiet:
        also = f", {len(trusted)} of them trusted" if trusted else ""
        said = ", ".join(f"{n} {'suspects ' if name == 'dropped' else ''}{name}" for name, n in done.items())
        say(f"{count} rows written{also}; {said}.")
        say("Rows that were left out when the data was read are not included.")
        print(written)
    return 0


def _refuse_strange(decided: dict[int, str], rows: list[CsvRow], file: str | None) -> None:
    unknown = sorted(set(decided) - {row.row for row in rows})
    if unknown:
        raise HyperkronError(
            f"decisions={file!r} decide about row {unknown[0]}, which is not a row of the run; save the file again in "
            "the report of this run."
        )


def _check_rows(folder: Path, train: str, record: Fields, how: ReadOptions) -> str | None:
    """Refuse a source that does not hold the rows of the run any more; what to say where that is not known."""
    if record.count("version") != RowHashes.VERSION:
        return (
            f"the run in {folder} was made by another version of hyperkron, so it is not known whether {train} still "
            "holds its rows. If the file was changed or sorted since, the wrong rows are exported: "
            "run `hyperkron clean` again."
        )
    now = row_hashes(train, how)
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


def _config(folder: Path) -> Fields:
    """The configuration of a run, which says where its training rows came from."""
    file = folder / "config.json"
    text = read_text(file)
    if text is None:
        raise HyperkronError(f"run={str(folder)!r} holds no run (no config.json); name one of `hyperkron clean`.")
    config = parse(text, file)
    if not config.child("source").text("train"):
        raise HyperkronError(
            f"{file} does not say which file the training rows came from; data that was given in Python is exported "
            "with hyperkron.cleaning.data.export_rows, or by taking the rows that rows.csv does not call suspect."
        )
    return config


def _rows(folder: Path, threshold: float | None) -> list[CsvRow]:
    rows = read_rows(folder)
    if threshold is None:
        return rows
    return [row._replace(suspect=row.error_probability >= threshold) for row in rows]


def _flagged(train: str, reading: dict[str, Any]) -> list[int]:
    """The trusted rows that stand in the same file as the others: they belong to a clean dataset."""
    if reading.get("trusted_column") is None:
        return []
    rows: list[int] = read_pair(train, **{name: reading[name] for name in READING if name in reading})[1].rows.tolist()
    return rows
