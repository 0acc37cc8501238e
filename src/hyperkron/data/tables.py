"""CSV, JSON lines and Parquet, as columns of values that are kept as they stand in the file."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperkron.data.files import decode, listing, need, read_bounded
from hyperkron.data.labelled import ReadOptions
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    from hyperkron.data.labelled import Array

_MAX_FIELD = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Frame:
    """Named columns of one length.

    Attributes:
        name: what messages call it.
        columns: the values, as they stand in the source.
        count: of rows.
        folder: that paths of images are relative to; None where there is none.
        messages: what was noticed.
    """

    name: str
    columns: Mapping[str, list[Any] | Array]
    count: int
    folder: Path | None = None
    messages: tuple[str, ...] = ()


def _frame(path: Path, columns: Mapping[str, list[Any] | Array], messages: tuple[str, ...] = ()) -> Frame:
    count = max((len(values) for values in columns.values()), default=0)
    if not count:
        raise HyperkronError(f"{str(path)!r} is empty: it has no rows. Check that it was written to its end.")
    return Frame(path.name, columns, count, path.parent, messages)


# --- CSV ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CsvFile:
    """A CSV file: every record as fields and as the very text it was read from.

    Attributes:
        header: the names of the columns.
        head: the text of the header.
        records: (fields, text) for every row.
        delimiter: between fields.
    """

    header: list[str]
    head: str
    records: list[tuple[list[str], str]]
    delimiter: str


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """Let a field be longer than the 128 KiB that the csv module allows by default."""
    before = csv.field_size_limit(_MAX_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _split(text: str, delimiter: str, path: Path) -> Iterator[tuple[list[str], str, int]]:
    """Yield (fields, text, line) of every record that is not a blank line."""
    consumed: list[str] = []

    def lines() -> Iterator[str]:
        for line in io.StringIO(text, newline=""):
            consumed.append(line)
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        start = 1
        for fields in reader:
            if fields:
                yield fields, "".join(consumed), start
            start = reader.line_num + 1
            consumed.clear()
    except csv.Error as error:
        raise HyperkronError(
            f"{str(path)!r} is no well-formed CSV at line {reader.line_num}: {error}. A quote inside a quoted field is "
            'doubled (""), and every quoted field ends with a quote.'
        ) from error


def _delimiter(text: str, path: Path) -> str:
    if path.name.lower().removesuffix(".gz").endswith((".tsv", ".tab")):
        return "\t"
    first = next((line for line in io.StringIO(text, newline="") if line.strip()), "")
    return max(",;\t|", key=lambda mark: (first.count(mark), mark == ","))


def read_csv_file(path: Path, options: ReadOptions) -> CsvFile:
    """The records of a CSV file, none of them interpreted."""
    text = decode(read_bounded(path, options.max_bytes), path, options.charset)
    delimiter = _delimiter(text, path)
    with _long_fields():
        records = _split(text, delimiter, path)
        header, head, _ = next(records, ([], "", 0))
        header = [name.strip() for name in header]
        if not any(header):
            raise HyperkronError(f"{str(path)!r} is empty: it has no header. Its first line must name the columns.")
        _refuse_bad_header(header, path)
        rows, ragged = [], []
        for fields, raw, line in records:
            rows.append((fields, raw))
            if len(fields) != len(header):
                ragged.append((line, len(fields)))
    if ragged:
        shown = listing(f"line {line} has {count}" for line, count in ragged)
        raise HyperkronError(
            f"{str(path)!r} has {len(header)} columns but {len(ragged)} rows have another number of fields: {shown}. "
            f"Put quotes around fields that contain {delimiter!r}, or complete the rows."
        )
    return CsvFile(header, head, rows, delimiter)


def _refuse_bad_header(header: list[str], path: Path) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise HyperkronError(f"{str(path)!r} names more than one column {listing(map(repr, twice))}; rename them.")
    if all(_is_number(name) for name in header):
        raise HyperkronError(
            f"{str(path)!r} has no header: its first line is {listing(header)}. Add a line that names the columns."
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_csv(path: Path, options: ReadOptions) -> Frame:
    """The columns of a CSV file, every value as its text."""
    file = read_csv_file(path, options)
    columns = {name: [fields[i] for fields, _ in file.records] for i, name in enumerate(file.header)}
    expected = "\t" if path.name.lower().removesuffix(".gz").endswith((".tsv", ".tab")) else ","
    notes = (f"{path.name}: fields are taken to be separated by {file.delimiter!r}.",)
    return _frame(path, columns, notes if file.delimiter != expected else ())


# --- JSON --------------------------------------------------------------------------------------------------


def parse_json(text: str, where: str) -> Any:
    """One JSON value; an error that says where it is broken."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HyperkronError(f"{where} is no JSON: {str(error)[:150]}.") from error


def read_json_lines(path: Path, options: ReadOptions) -> list[tuple[dict[str, Any], str]]:
    """(object, text) of every line that is not blank."""
    text = decode(read_bounded(path, options.max_bytes), path, options.charset)
    rows = []
    for number, line in enumerate(io.StringIO(text), start=1):
        if not line.strip():
            continue
        value = parse_json(line, f"{str(path)!r} line {number}")
        if not isinstance(value, dict):
            raise HyperkronError(
                f"{str(path)!r} line {number} is {line.strip()[:60]!r}, not a JSON object; every line must be "
                '{"name": value, ...}.'
            )
        rows.append((value, line))
    return rows


def read_jsonl(path: Path, options: ReadOptions) -> Frame:
    """The columns of a JSON-lines file; None where an object lacks a name."""
    return objects_frame(path, [value for value, _ in read_json_lines(path, options)])


def objects_frame(path: Path, objects: list[dict[str, Any]]) -> Frame:
    """A frame of objects with more or less the same names."""
    names = list(dict.fromkeys(name for value in objects for name in value))
    return _frame(path, {name: [value.get(name) for value in objects] for name in names})


def read_json(path: Path, options: ReadOptions) -> Any:
    """The value of a JSON file."""
    return parse_json(decode(read_bounded(path, options.max_bytes), path, options.charset), repr(str(path)))


# --- Parquet -----------------------------------------------------------------------------------------------


def parquet_table(path: Path, options: ReadOptions) -> Any:
    """The Arrow table of a Parquet file, refused if its columns exceed ``max_bytes``."""
    parquet = need("pyarrow.parquet")
    arrow = need("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            if size > options.max_bytes:
                raise HyperkronError(
                    f"{str(path)!r} holds {size} bytes once decompressed, more than max_bytes={options.max_bytes}; if "
                    "you trust the file, read it with ReadOptions(max_bytes=...)."
                )
            return file.read()
    except (arrow.ArrowException, OSError) as error:
        raise HyperkronError(f"{str(path)!r} is no readable Parquet file ({str(error)[:150]}).") from error


def arrow_columns(table: Any) -> dict[str, list[Any] | Array]:
    """The columns of an Arrow table: numbers without gaps as arrays, everything else as Python values."""
    types = need("pyarrow").types
    columns: dict[str, list[Any] | Array] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        numeric = types.is_floating(column.type) or (types.is_integer(column.type) and not column.null_count)
        columns[name] = column.to_numpy() if numeric else column.to_pylist()
    return columns


def read_parquet(path: Path, options: ReadOptions) -> Frame:
    """The columns of a Parquet file."""
    table = parquet_table(path, options)
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise HyperkronError(f"{str(path)!r} names more than one column {listing(map(repr, twice))}; rename them.")
    return _frame(path, arrow_columns(table))


# --- what is in memory already -----------------------------------------------------------------------------


def memory_frame(columns: Mapping[str, Any], name: str) -> Frame:
    """A frame of a dictionary of columns, or of a pandas DataFrame."""
    listed: dict[str, list[Any] | Array] = {}
    for key in columns:
        values = columns[key]
        as_array = need("numpy").asarray(values) if hasattr(values, "dtype") else None
        if as_array is not None and as_array.dtype.kind in "fiu":
            listed[str(key)] = as_array
        else:
            listed[str(key)] = values.tolist() if hasattr(values, "tolist") else list(values)
    lengths = {key: len(values) for key, values in listed.items()}
    if len(set(lengths.values())) > 1:
        raise HyperkronError(f"the columns of {name} have different lengths: {lengths}.")
    if not any(lengths.values()):
        raise HyperkronError(f"{name} is empty: it has no rows.")
    return Frame(name, listed, max(lengths.values()))
