"""Excel sheets, read by pandas; the rows to keep are written as CSV."""

from __future__ import annotations

import zipfile
from typing import Any

from hyperkron.cleaning.data.csv_files import refuse_repeated
from hyperkron.cleaning.data.files import listing, need
from hyperkron.cleaning.data.kept import Kept
from hyperkron.cleaning.data.labelled import Frame, Place
from hyperkron.cleaning.data.limits import Bounds
from hyperkron.solution import HyperkronError


def _sheet(place: Place) -> Any:
    """The sheet of a source as a DataFrame of Python values: ``PATH:SHEET``, or the first one."""
    path, bounds = place.path, Bounds(place.path, place.options)
    pandas = need("pandas")
    need("xlrd" if path.suffix.lower() == ".xls" else "openpyxl", "excel")
    try:
        if path.suffix.lower() != ".xls":
            with zipfile.ZipFile(path) as archive:
                bounds.check("max_bytes", sum(entry.file_size for entry in archive.infolist()))
        found = pandas.read_excel(path, sheet_name=place.part or 0, dtype=object)
    except HyperkronError:
        raise
    except Exception as error:  # the readers raise errors of several libraries
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
    notes = (f"{place.name}: columns without a name: {listing(unnamed)}.",) if unnamed else ()
    columns = {name: found.iloc[:, i].tolist() for i, name in enumerate(names)}
    return Frame(place.name, columns, place.path.parent, notes)


def write_excel(place: Place, kept: Kept) -> bytes:
    """The rows as CSV."""
    kept.require_suffix(place.path.name, ".csv")
    frame = read_excel(place)
    header = list(frame.columns)
    column = kept.label_column(place.name, header)

    def fields(row: int) -> list[str]:
        record = kept.relabelled(row, {name: frame.columns[name][row] for name in header}, column)
        return ["" if value is None or value != value else str(value) for value in record.values()]

    return kept.csv_table(header, ((row, fields(row)) for row in kept.within(len(frame), place.name)), place.name)
