"""CSV, where every value is kept as its text and every record as the very text it was read from; and Excel sheets."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hyperkron.cleaning.data.checks import header_note
from hyperkron.cleaning.data.files import listing, nearest, several
from hyperkron.cleaning.data.kept import FormulaCells, Kept, csv_line, csv_table
from hyperkron.cleaning.data.labelled import Frame, Place
from hyperkron.cleaning.data.limits import Bounds, ReadOptions, encoded, read_text
from hyperkron.cleaning.data.values import Cells, all_floats
from hyperkron.solution import HyperkronError
from hyperkron.validation import need

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_SEPARATOR = re.compile(r'\s*"?sep=([,;|\t])"?[ \t]*(?:\r\n|\r|\n)', re.IGNORECASE)
"""The line by which Excel is told the separator of a file, before its header."""
_AS_THEY_ARE: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
"""For pandas: only an empty cell of a sheet is missing; what other texts mean is decided as for all tables."""
_CROWDED = 10  # times max_columns: marks in a line that is refused before it is split


class _File(NamedTuple):
    """A CSV file: what stands before its header, the names and the text of that, and (fields, text) for every row."""

    before: str
    header: list[str]
    head: str
    records: list[tuple[list[str], str]]
    delimiter: str


def lines(text: str) -> Iterator[str]:
    """The lines of a text with their ends."""
    return (found[0] for found in _LINE.finditer(text))


@contextlib.contextmanager
def _field_limit(limit: int) -> Iterator[None]:
    """Let a field have this many characters, in place of the 128 KiB that the csv module allows by default."""
    before = csv.field_size_limit(min(limit, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _split(text: str, delimiter: str, bounds: Bounds, first: int) -> Iterator[tuple[list[str], str, int]]:
    """Yield (fields, text, line) of every record that is not a blank line; the text begins at line ``first``."""
    consumed: list[str] = []

    def watched() -> Iterator[str]:
        for line in lines(text):
            marks = line.count(delimiter)
            if marks > _CROWDED * bounds.options.max_columns:
                bounds.check("max_columns", marks)
            consumed.append(line)
            yield line

    reader = csv.reader(watched(), delimiter=delimiter, strict=True)
    try:
        start = first
        for fields in reader:
            if fields:
                yield fields, "".join(consumed), start
            start = reader.line_num + first
            consumed.clear()
    except csv.Error as error:
        where = f" line {reader.line_num + first - 1}"
        if "field limit" in str(error):
            bounds.check("max_field", bounds.options.max_field + 1, where)
        raise HyperkronError(
            f"{bounds.name} is not valid CSV at{where}: {error}. A quote inside a quoted field is "
            'doubled (""), and every quoted field ends with a quote.'
        ) from error


def _is_tabbed(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith((".tsv", ".tab"))


def _open(path: Path, options: ReadOptions, *, texts: bool = False) -> _File:
    """The records of a file; without ``texts`` the text of each is left empty, which saves memory."""
    text, bounds = read_text(path, options), Bounds(path, options)
    separator = _SEPARATOR.match(text)
    before, text = ("", text) if separator is None else (separator[0], text[separator.end() :])
    first = next((line for line in lines(text) if line.strip()), "")
    likely = "\t" if _is_tabbed(path) else max(",;\t|", key=lambda mark: (first.count(mark), mark == ","))
    delimiter = likely if separator is None else separator[1]
    with _field_limit(options.max_field):
        records = _split(text, delimiter, bounds, 1 + len(list(lines(before))))
        header, head, _ = next(records, ([], "", 0))
        header = [name.strip() for name in header]
        _check_header(header, bounds)
        rows, ragged, widths, cells = [], [], set(), 0
        for fields, raw, line in records:
            cells += len(fields)
            bounds.check("max_cells", cells)
            rows.append((fields, raw if texts else ""))
            widths.add(len(fields))
            if len(fields) != len(header):
                ragged.append(f"line {line} has {len(fields)}")
    if ragged:
        rows_have = "1 row has" if len(ragged) == 1 else f"{len(ragged)} rows have"
        remedy = f"Put quotes around fields that contain {delimiter!r}, or complete the rows."
        if len(ragged) == len(rows) and len(widths) == 1:  # it is the header that differs
            remedy = (
                f"Its first line is {listing(map(repr, header))}: remove lines before the header, or name all columns."
            )
        raise HyperkronError(
            f"{bounds.name} has {several(len(header), 'column')} but {rows_have} another number of fields: "
            f"{listing(ragged)}. {remedy}"
        )
    return _File(before, header, head, rows, delimiter)


def _check_header(header: list[str], bounds: Bounds) -> None:
    if not any(header):
        raise HyperkronError(f"{bounds.name} is empty: it has no header. Its first line must name the columns.")
    bounds.check("max_columns", len(header))
    refuse_repeated(header, bounds.name)
    if all_floats(header) is not None:
        raise HyperkronError(
            f"{bounds.name} has no header: its first line is {listing(header)}. Add a line that names the columns."
        )


def refuse_repeated(names: Iterable[str], where: str) -> None:
    """Refuse columns of the same name."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise HyperkronError(f"{where} names more than one column {listing(map(repr, twice))}; rename them.")


def read_csv(place: Place) -> Frame:
    """The columns of a CSV file."""
    path, file = place.path, _open(place.path, place.options)
    values = zip(*(fields for fields, _ in file.records), strict=True)
    columns = {name: Cells(column) for name, column in zip(file.header, values, strict=False)}
    expected = "\t" if _is_tabbed(path) else ","
    notes = [f"{path.name}: fields are taken to be separated by {file.delimiter!r}."] * (file.delimiter != expected)
    notes += [f"{path.name}: {note}" for note in [header_note(columns)] if note]
    return Frame(path.name, columns, path.parent, tuple(notes))


def write_csv(place: Place, kept: Kept) -> bytes:
    """The very text of every row whose label stays."""
    path, options = place.path, place.options
    file = _open(path, options, texts=True)
    end = next((end for end in ("\r\n", "\r") if file.head.endswith(end)), "\n")
    at = file.header.index(kept.label_column(path.name, file.header)) if kept.labels else -1
    kept = kept.like([fields[at] for fields, _ in file.records]) if kept.labels else kept
    cells = FormulaCells(kept.formulas, file.header)

    def written(fields: list[str], text: str, row: int | None = None) -> str:
        new = fields[at] if row is None else kept.label(row, fields[at])
        if new != fields[at]:
            fields = [*fields[:at], new, *fields[at + 1 :]]
            text = csv_line(fields, file.delimiter, end)
        escaped = cells.row(fields, row)
        text = text if escaped is None else csv_line(escaped, file.delimiter, end)
        return text if text.endswith(("\n", "\r")) else text + end

    parts = [file.before, written(file.header, file.head)]
    parts += [written(*file.records[row], row) for row in kept.within(len(file.records), path.name)]
    cells.tell(path.name)
    return encoded("".join(parts), path, options)


def _sheet(place: Place, **how: Any) -> Any:
    """The sheet of a source (``PATH:SHEET``, or the first one) as a DataFrame of Python values."""
    path, bounds = place.path, Bounds(place.path, place.options)
    pandas = need("pandas")
    old = path.suffix.lower() == ".xls"
    if old and importlib.util.find_spec("xlrd") is None:
        raise HyperkronError(f"{str(path)!r} is of an old form of Excel; save it as .xlsx, or pip install xlrd.")
    if not old:
        need("openpyxl", "excel")
    try:
        if not old:
            with zipfile.ZipFile(path) as archive:
                bounds.check("max_bytes", sum(entry.file_size for entry in archive.infolist()))
        found = pandas.read_excel(path, sheet_name=place.part or 0, dtype=object, **_AS_THEY_ARE, **how)
    except HyperkronError:
        raise
    except Exception as error:  # the readers raise errors of several libraries
        if place.part and str(error).startswith("Worksheet named"):
            with pandas.ExcelFile(path) as book:
                names = book.sheet_names
            raise HyperkronError(
                f"{str(path)!r} has no sheet {place.part!r}.{nearest(place.part, names)} Its sheets are "
                f"{listing(map(repr, names))}."
            ) from error
        raise HyperkronError(
            f"{str(path)!r} cannot be read as an Excel sheet ({str(error)[:150]}); save it as CSV and read that."
        ) from error
    bounds.check("max_columns", len(found.columns))
    bounds.check("max_cells", found.size)
    return found


def read_excel(place: Place) -> Frame:
    """The columns of a sheet, whose first row names them."""
    found = _sheet(place)
    names = [str(name).strip() for name in found.columns]
    refuse_repeated(names, repr(str(place.path)))
    unnamed = [name for name in names if name.startswith("Unnamed:")]
    if unnamed and len(unnamed) == len(names):
        raise HyperkronError(f"{place.name} has no header: its first row is empty. Add a row that names the columns.")
    remedy = "if its first line is a title, remove it, so that the names of the columns come first"
    notes = (f"{place.name}: columns without a name: {listing(unnamed)}; {remedy}.",) if unnamed else ()
    columns = {name: found.iloc[:, i].tolist() for i, name in enumerate(names)}
    return Frame(place.name, columns, place.path.parent, (*notes, *_formula_notes(place, found)))


def _formula_notes(place: Place, found: Any) -> list[str]:
    """What to say about empty cells of a sheet that are formulas whose values no program has stored."""
    if place.path.suffix.lower() == ".xls" or not found.isna().to_numpy().any():
        return []
    with zipfile.ZipFile(place.path) as archive:
        sheets = (archive.read(name) for name in archive.namelist() if name.startswith("xl/worksheets/"))
        if not any(b"<f" in sheet for sheet in sheets):  # where no cell is one, nothing is read again
            return []
    written = _sheet(place, engine_kwargs={"data_only": False})
    if written.shape != found.shape:
        return []
    empty = ((str(name), cell) for name in found for cell in written[name][found[name].isna()])
    formulas = [(name, cell) for name, cell in empty if isinstance(cell, str) and cell.startswith("=")]
    told = listing(dict.fromkeys(f"{cell!r} in column {name!r}" for name, cell in formulas), 3)
    return [
        f"{place.name}: {several(len(formulas), 'cell')} with a formula whose value the file does not hold, taken as "
        f"empty: {told}. Open the file in a spreadsheet program and save it, or write values in their place."
    ] * bool(formulas)


def write_excel(place: Place, kept: Kept) -> bytes:
    """The rows as CSV."""
    frame = read_excel(place)
    header = list(frame.columns)
    column = kept.label_column(place.name, header)
    kept = kept.like(frame.columns[column]) if column else kept

    def fields(row: int) -> list[str]:
        record = kept.relabelled(row, {name: frame.columns[name][row] for name in header}, column)
        return ["" if value is None or value != value else str(value) for value in record.values()]

    rows = ((row, fields(row)) for row in kept.within(len(frame), place.name))
    return csv_table(header, rows, kept.formulas, place.name).encode()
