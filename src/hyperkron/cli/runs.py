"""``hyperkron report``, ``export``, ``predict`` and ``attribute``: what is done with a finished run."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data import NoLabelColumn, ReadOptions, RowHashes, export_rows, read_pair, row_hashes
from hyperkron.cleaning.data.arrow import PREFIX
from hyperkron.cleaning.data.files import several
from hyperkron.cleaning.data.kept import csv_table
from hyperkron.cleaning.data.sources import split_source
from hyperkron.cleaning.data.votes import FURTHER
from hyperkron.cleaning.fields import Fields, read_object, read_result
from hyperkron.cleaning.folder import HASHES
from hyperkron.cleaning.loading import CsvRow, finished_rows, left_out, load, read_decisions
from hyperkron.cleaning.report import write_explanation, write_report
from hyperkron.cli.cleaning import READING, load_model, showing
from hyperkron.cli.options import as_options
from hyperkron.cli.output import UsageError, say, say_json
from hyperkron.solution import HyperkronError, HyperkronWarning
from hyperkron.training.writing import put, read_plain

MAJORITY = "the labels written are the majority of the votes on each row, apart from those that were changed."
"""What is said where a file of several labels per row gets one."""
FORMATS = (".csv", ".jsonl")
"""What predictions are written as."""


def report(options: Any) -> int:
    """Write or refresh report.html."""
    page = write_report(options.run)
    if options.json:
        say_json({"report": str(page)})
    else:
        print(page)
    return 0


def export(options: Any) -> int:
    """Write the training rows again, without the suspects or with the labels suggested for them."""
    folder = Path(options.run)
    config = _config(folder)
    train, reading = config.child("source").text("train"), config.child("source").child("reading").raw
    rows = finished_rows(folder)
    # trusted rows are written, too, and further votes are lines of rows that are
    gone = sum(len(at) for why, at in left_out(folder).items() if why not in ("trusted", FURTHER))
    if (least := options.threshold) is not None:
        rows = [row._replace(suspect=row.error_probability >= least) for row in rows]
    if not train.startswith(PREFIX) and not split_source(train)[0].exists():
        raise HyperkronError(
            f"{train!r}, where the training rows of the run in {options.run!r} came from, is not there any more; put "
            "the file back, then export again."
        )
    how = ReadOptions(charset=reading.get("charset") or ReadOptions.charset)
    notes = [note for note in [_check_rows(folder, train, config.child("rows"), how)] if note]
    decided = {} if options.decisions is None else read_decisions(options.decisions, folder)
    dropped, new = _changes(rows, decided, options, notes)
    keep = [row.row for row in rows if row.row not in dropped]
    voted = _voted(rows, reading, relabel=bool(options.relabel or options.decisions))
    notes += [MAJORITY] if voted else []
    labels: list[str | None] = [new.get(row, voted.get(row)) for row in keep]
    trusted = _flagged(train, reading)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HyperkronWarning)
        try:
            written = export_rows(
                train,
                keep + trusted,
                options.out,
                labels + [None] * len(trusted) if new or voted else None,
                label=reading.get("label"),
                classes=read_result(folder).child("data").texts("classes") if new or voted else (),
                overwrite=options.overwrite,
                formulas=options.formulas,
                options=how,
            )
        except NoLabelColumn as error:
            raise _without_labels(train, folder, error) from error
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
        if gone:
            which, are = ("1 row that was", "is") if gone == 1 else (f"{gone} rows that were", "are")
            say(f"{which} left out when the data was read {are} not included.")
        print(written)
    return 0


def _changes(
    rows: list[CsvRow], decided: dict[int, str], options: Any, notes: list[str]
) -> tuple[set[int], dict[int, str]]:
    """The rows to drop, and new labels by row: of the suspects that are open, and of the rows that were decided."""
    if unknown := sorted(set(decided) - {row.row for row in rows}):
        raise HyperkronError(
            f"decisions={options.decisions!r} decide about row {unknown[0]}, which is not a row of the run; save the "
            "file again in the report of this run."
        )
    open_suspects = [row for row in rows if row.suspect and row.row not in decided]
    dropped = {row.row for row in open_suspects} if options.drop else set()
    new = {row.row: row.suggested for row in open_suspects if row.suggested != row.given} if options.relabel else {}
    if options.relabel and (same := len(open_suspects) - len(new)):
        kept = "suspect keeps its label" if same == 1 else "suspects keep their labels"
        notes.append(f"{same} {kept}: in doubt, but no other label is more likely.")
    return dropped, new | {row.row: decided[row.row] for row in rows if decided.get(row.row, row.given) != row.given}


def _voted(rows: list[CsvRow], reading: dict[str, Any], *, relabel: bool) -> dict[int, str]:
    """The majority of the votes on each row, where the file has several labels per row and one is to be written.

    Of lines by several annotators only the first of each row is written, whose own label is one vote. With a column
    for each annotator the votes stay, and a column of labels is filled in if there are new ones.
    """
    needed = reading.get("annotator") is not None or (relabel and reading.get("annotators") is not None)
    return {row.row: row.given for row in rows if row.given} if needed else {}


def _without_labels(train: str, folder: Path, error: NoLabelColumn) -> HyperkronError:
    """The same error, or for rows with votes one that says what can be done instead."""
    if not read_result(folder).raw.get("sources"):
        return error
    return HyperkronError(
        f"{Path(train).name} holds the votes of several annotators and no column with one label for each row, so no "
        f"row can be relabelled. Use --drop suspects alone, or take the labels from {folder / 'rows.csv'} (columns "
        "row, given and suggested)."
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
    missing = f"run={str(folder)!r} holds no run (no config.json); name one of `hyperkron clean`."
    config = read_object(folder / "config.json", missing)
    if not config.child("source").text("train"):
        raise HyperkronError(
            f"{config.file} does not say which file the training rows came from; data that was given in Python is "
            "exported with hyperkron.cleaning.data.export_rows, or by taking the rows that rows.csv does not call "
            "suspect."
        )
    return config


def _flagged(train: str, reading: dict[str, Any]) -> list[int]:
    """The trusted rows that stand in the same file as the others: they belong to a clean dataset."""
    if reading.get("trusted_column") is None:
        return []
    rows: list[int] = read_pair(train, **{name: reading[name] for name in READING if name in reading})[1].rows.tolist()
    return rows


def predict(options: Any) -> int:
    """Write a line for each new row: where it stands, its ids, the label, and the probability of every class."""
    out = None if options.out is None else Path(options.out)
    if out is not None and out.suffix.lower() not in FORMATS:
        raise UsageError(f"--out={options.out!r} must end in {' or '.join(FORMATS)}.")
    if out is not None and out.exists() and not options.overwrite:
        raise FileExistsError(f"--out={options.out!r} exists already; choose another name, or add --overwrite.")
    if out is not None and out.exists() and Path(options.rows).exists() and out.samefile(options.rows):
        raise FileExistsError(f"--out={options.out!r} is NEW itself; choose another name.")
    result = load(options.run, model=load_model(options.model), encoder=options.encoder, device=options.device)
    reading = ReadOptions() if options.charset is None else ReadOptions(charset=options.charset)
    found, probabilities = result.predicted(options.rows, id=options.id, options=reading)
    lines = [
        _line(i, {name: values[i] for name, values in found.ids.items()}, result.classes, row)
        for i, row in enumerate(probabilities.tolist())
    ]
    as_lines = out is not None and out.suffix.lower() == ".jsonl"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HyperkronWarning)
        if as_lines:
            text = "".join(json.dumps(line) + "\n" for line in lines)
        else:
            own = ["label", "probability", *(f"p({name})" for name in result.classes)]
            ids = [f"id {name}" if name in ("row", *own) else name for name in found.ids]  # as in rows.csv
            text = csv_table(["row", *ids, *own], map(_fields, lines), options.formulas, "the file of predictions")
    notes = [as_options(message) for message in (*found.messages, *(str(w.message) for w in caught))]
    for note in notes:
        say(f"warning: {note}")
    if out is None and not options.json:
        print(text, end="")
        return 0
    about = {"rows": found.count, "classes": list(result.classes), "warnings": notes}
    if out is None:
        say_json({"predictions": lines, **about})
        return 0
    put(out, text.encode("utf-8", "replace"), parents=True)
    if options.json:
        say_json({"file": str(out), **about})
    elif not options.quiet:
        without = sum(line["label"] is None for line in lines)
        said = f"; {without} without an answer" if without else ""
        say(f"{several(found.count - without, 'row')} predicted{said}.")
        print(out)
    return 0


def _line(row: int, ids: dict[str, Any], classes: tuple[str, ...], probabilities: list[float]) -> dict[str, Any]:
    known = not math.isnan(probabilities[0])
    best = max(range(len(classes)), key=probabilities.__getitem__) if known else 0
    each = {name: round(p, 6) if known else None for name, p in zip(classes, probabilities, strict=True)}
    return {
        "row": row,
        "id": {
            name: value if value is None or isinstance(value, (int, float)) else str(value)
            for name, value in ids.items()
        },
        "label": classes[best] if known else None,
        "probability": round(probabilities[best], 6) if known else None,
        "probabilities": each,
    }


def _fields(line: dict[str, Any]) -> tuple[int, list[str]]:
    """A line as the cells of a table."""
    cells = (line["row"], *line["id"].values(), line["label"], line["probability"], *line["probabilities"].values())
    return line["row"], ["" if cell is None else str(cell) for cell in cells]


def attribute(options: Any) -> int:
    """Write a page with the training rows behind each prediction."""
    if options.count < 1:
        raise UsageError(f"--count={options.count} must be at least 1.")
    if options.out is not None and Path(options.out).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out={options.out!r} must end in .html: a page is written there.")
    from hyperkron.cleaning import explain

    with showing(options) as shown:
        found = explain(
            options.run, options.query, count=options.count, model=load_model(options.model), progress=shown
        )
    page = write_explanation(found, options.out or Path(options.run) / "attribution.html")
    if options.json:
        queries = [asdict(query) for query in found.queries]
        say_json({"page": str(page), "messages": found.messages, "queries": queries})
    else:
        for message in found.messages if not options.quiet else ():
            say(message)
        print(page)
    return 0
