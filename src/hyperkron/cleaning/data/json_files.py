"""JSON: lines of objects, or a file with one list of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data.kept import Kept
from hyperkron.cleaning.data.labelled import Frame, Place
from hyperkron.cleaning.data.limits import Bounds, ReadOptions, encoded, read_text
from hyperkron.cleaning.data.spreadsheets import lines
from hyperkron.solution import HyperkronError

Record = tuple[dict[str, Any], str]
"""An object, and the text of its line."""


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HyperkronError(f"{where} is not JSON: {str(error)[:150]}.") from error


def read_json(path: Path, options: ReadOptions) -> Any:
    """The value of a JSON file."""
    return _parse(read_text(path, options), repr(str(path)))


def read_json_lines(path: Path, options: ReadOptions) -> list[Record]:
    """The objects of all lines that are not blank."""
    rows: list[Record] = []
    names: set[str] = set()
    bounds = Bounds(path, options)
    for number, line in enumerate(lines(read_text(path, options)), start=1):
        if not line.strip():
            continue
        value = _parse(line, f"{bounds.name} line {number}")
        if not isinstance(value, dict):
            raise HyperkronError(
                f"{bounds.name} line {number} is {line.strip()[:60]!r}, not a JSON object; every line must be "
                '{"name": value, ...}.'
            )
        if len(line) > options.max_field:
            bounds.check("max_field", _longest(value), f" line {number}")
        rows.append((value, line))
        names.update(value)
        bounds.check("max_columns", len(names))
        bounds.check("max_cells", len(rows) * len(names))
    return rows


def _longest(value: dict[str, Any]) -> int:
    """The length of the longest text of an object."""
    return max((len(entry) for entry in value.values() if type(entry) is str), default=0)


def _records(place: Place) -> list[Record]:
    """The objects of either form; those of a list have no text of their own."""
    path, options = place.path, place.options
    if not _is_list(path):
        return read_json_lines(path, options)
    content = read_json(path, options)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise HyperkronError(
            f"{place.argument}={place.source!r} is not a list of JSON objects, one for each row (of pandas: "
            f"orient='records'). For WRENCH, name the folder with train.json and label.json ({str(path.parent)!r})."
        )
    return [(entry, "") for entry in content]


def _is_list(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(".json")


def _names(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(name for value, _ in records for name in value))


def read_json_rows(place: Place) -> Frame:
    """The columns of the objects; None where one lacks a name."""
    records = _records(place)
    names, bounds = _names(records), Bounds(place.path, place.options)
    bounds.check("max_columns", len(names))
    bounds.check("max_cells", len(records) * len(names))
    bounds.check("max_field", max((_longest(value) for value, _ in records), default=0))
    columns = {name: [value.get(name) for value, _ in records] for name in names}
    return Frame(place.path.name, columns, place.path.parent)


def write_json(place: Place, kept: Kept) -> bytes:
    """Lines keep the very text of every row whose label stays."""
    name, records = place.path.name, _records(place)
    column = kept.label_column(name, _names(records))
    kept = kept.like([value.get(column) for value, _ in records]) if column else kept
    if not _is_list(place.path):
        return encoded(lines_of(records, kept, column, name), place.path, place.options)
    values = [kept.relabelled(row, records[row][0], column) for row in kept.within(len(records), name)]
    return encoded(json.dumps(values, ensure_ascii=False, indent=1) + "\n", place.path, place.options)


def lines_of(records: list[Record], kept: Kept, column: str, name: str) -> str:
    """The lines to write."""
    parts = []
    for row in kept.within(len(records), name):
        value, text = records[row]
        new = kept.relabelled(row, value, column)
        line = text.rstrip("\r\n")
        end = text[len(line) :] or "\n"
        parts.append((line if new is value else json.dumps(new, ensure_ascii=False)) + end)
    return "".join(parts)
