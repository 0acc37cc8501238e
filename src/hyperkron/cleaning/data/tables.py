"""CSV, JSON lines and Parquet, as columns of values that are kept as they stand in the file."""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperkron.cleaning.data.files import (
    decode,
    listing,
    need,
    read_bounded,
    refuse_cells,
    refuse_growth,
    refuse_wide,
    stored_bytes,
)
from hyperkron.cleaning.data.labelled import ReadOptions
from hyperkron.cleaning.data.values import Cells
from hyperkron.solution import HyperkronError
from hyperkron.training.writing import open_plain

if TYPE_CHECKING:
    from hyperkron.cleaning.data.labelled import Array

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_CROWDED = 10  # times max_columns: marks in a line that is refused before it is split


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
def _field_limit(limit: int) -> Iterator[None]:
    """Let a field have this many characters, in place of the 128 KiB that the csv module allows by default."""
    before = csv.field_size_limit(min(limit, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _lines(text: str) -> Iterator[str]:
    """The lines of a text with their ends, as the csv module wants them."""
    return (found[0] for found in _LINE.finditer(text))


def _split(text: str, delimiter: str, path: Path, options: ReadOptions) -> Iterator[tuple[list[str], str, int]]:
    """Yield (fields, text, line) of every record that is not a blank line."""
    consumed: list[str] = []

    def lines() -> Iterator[str]:
        for line in _lines(text):
            marks = line.count(delimiter)
            if marks > _CROWDED * options.max_columns:
                refuse_wide(repr(str(path)), marks, options.max_columns)
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
        if "field limit" in str(error):
            raise HyperkronError(_long_field(f"{str(path)!r} line {reader.line_num}", options)) from error
        raise HyperkronError(
            f"{str(path)!r} is not valid CSV at line {reader.line_num}: {error}. A quote inside a quoted field is "
            'doubled (""), and every quoted field ends with a quote.'
        ) from error


def _long_field(where: str, options: ReadOptions) -> str:
    return (
        f"{where} has a field of more than max_field={options.max_field} characters; is a quote missing that ends it? "
        "Shorten it, or read it with ReadOptions(max_field=...)."
    )


def _delimiter(text: str, path: Path) -> str:
    if path.name.lower().removesuffix(".gz").endswith((".tsv", ".tab")):
        return "\t"
    first = next((line for line in _lines(text) if line.strip()), "")
    return max(",;\t|", key=lambda mark: (first.count(mark), mark == ","))


def read_csv_file(path: Path, options: ReadOptions, *, texts: bool = True) -> CsvFile:
    """The records of a CSV file, none of them interpreted.

    Args:
        path: of the file.
        options: how to read.
        texts: False to leave the text of every record empty, which saves memory.
    """
    text, stored = decode(read_bounded(path, options.max_bytes), path, options.charset), stored_bytes(path)
    delimiter = _delimiter(text, path)
    with _field_limit(options.max_field):
        records = _split(text, delimiter, path, options)
        header, head, _ = next(records, ([], "", 0))
        header = [name.strip() for name in header]
        if not any(header):
            raise HyperkronError(f"{str(path)!r} is empty: it has no header. Its first line must name the columns.")
        refuse_wide(repr(str(path)), len(header), options.max_columns)
        _refuse_bad_header(header, path)
        rows, ragged, cells = [], [], 0
        for fields, raw, line in records:
            cells += len(fields)
            refuse_cells(repr(str(path)), cells, options.max_cells, stored)
            rows.append((fields, raw if texts else ""))
            if len(fields) != len(header):
                ragged.append((line, len(fields)))
    if ragged:
        shown = listing(f"line {line} has {count}" for line, count in ragged)
        raise HyperkronError(
            f"{str(path)!r} has {len(header)} columns but {len(ragged)} rows have another number of fields: {shown}. "
            f"Put quotes around fields that contain {delimiter!r}, or complete the rows."
        )
    return CsvFile(header, head, rows, delimiter)


def _refuse_repeated(names: Iterable[str], path: Path) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise HyperkronError(f"{str(path)!r} names more than one column {listing(map(repr, twice))}; rename them.")


def _refuse_bad_header(header: list[str], path: Path) -> None:
    _refuse_repeated(header, path)
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
    file = read_csv_file(path, options, texts=False)
    columns: dict[str, list[Any] | Array] = {
        name: Cells(values)
        for name, values in zip(file.header, zip(*(fields for fields, _ in file.records), strict=True), strict=False)
    }
    expected = "\t" if path.name.lower().removesuffix(".gz").endswith((".tsv", ".tab")) else ","
    notes = (f"{path.name}: fields are taken to be separated by {file.delimiter!r}.",)
    return _frame(path, columns, notes if file.delimiter != expected else ())


# --- JSON --------------------------------------------------------------------------------------------------


def parse_json(text: str, where: str) -> Any:
    """One JSON value; an error that says where it is broken."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HyperkronError(f"{where} is not JSON: {str(error)[:150]}.") from error


def read_json_lines(path: Path, options: ReadOptions) -> list[tuple[dict[str, Any], str]]:
    """(object, text) of every line that is not blank."""
    text = decode(read_bounded(path, options.max_bytes), path, options.charset)
    rows: list[tuple[dict[str, Any], str]] = []
    names: set[str] = set()
    stored = stored_bytes(path)
    for number, line in enumerate(_lines(text), start=1):
        if not line.strip():
            continue
        value = parse_json(line, f"{str(path)!r} line {number}")
        if not isinstance(value, dict):
            raise HyperkronError(
                f"{str(path)!r} line {number} is {line.strip()[:60]!r}, not a JSON object; every line must be "
                '{"name": value, ...}.'
            )
        if len(line) > options.max_field and any(len(x) > options.max_field for x in value.values() if type(x) is str):
            raise HyperkronError(_long_field(f"{str(path)!r} line {number}", options))
        rows.append((value, line))
        names.update(value)
        refuse_wide(repr(str(path)), len(names), options.max_columns)
        refuse_cells(repr(str(path)), len(rows) * len(names), options.max_cells, stored)
    return rows


def read_jsonl(path: Path, options: ReadOptions) -> Frame:
    """The columns of a JSON-lines file; None where an object lacks a name."""
    return objects_frame(path, [value for value, _ in read_json_lines(path, options)], options)


def objects_frame(path: Path, objects: list[dict[str, Any]], options: ReadOptions) -> Frame:
    """A frame of objects with more or less the same names."""
    names = list(dict.fromkeys(name for value in objects for name in value))
    refuse_wide(repr(str(path)), len(names), options.max_columns)
    refuse_cells(repr(str(path)), len(objects) * len(names), options.max_cells, stored_bytes(path))
    if any(type(x) is str and len(x) > options.max_field for value in objects for x in value.values()):
        raise HyperkronError(_long_field(repr(str(path)), options))
    return _frame(path, {name: [value.get(name) for value in objects] for name in names})


def read_json(path: Path, options: ReadOptions) -> Any:
    """The value of a JSON file."""
    return parse_json(decode(read_bounded(path, options.max_bytes), path, options.charset), repr(str(path)))


# --- Parquet -----------------------------------------------------------------------------------------------


def parquet_table(path: Path, options: ReadOptions) -> Any:
    """The Arrow table of a Parquet file, refused before it is decoded if it holds too much."""
    parquet, arrow = need("pyarrow.parquet"), need("pyarrow")
    try:
        with open_plain(path):  # a pipe would be waited for
            pass
        with parquet.ParquetFile(path, memory_map=False) as file:
            texts = _refuse_large_parquet(path, file.metadata, options)
            schema = file.schema_arrow
        texts = [name for name in texts if _is_flat_text(schema, name)]
        if texts:
            with parquet.ParquetFile(path, memory_map=False, read_dictionary=texts) as file:
                _refuse_long_texts(path, file, texts, options)
        with parquet.ParquetFile(path, memory_map=False) as file:
            return file.read()
    except (arrow.ArrowException, OSError) as error:
        raise HyperkronError(f"{str(path)!r} is not a readable Parquet file ({str(error)[:150]}).") from error


def _refuse_large_parquet(path: Path, metadata: Any, options: ReadOptions) -> list[str]:
    """Refuse what the metadata says is too large; the columns of texts, by name."""
    refuse_wide(repr(str(path)), metadata.num_columns, options.max_columns)
    stored = stored_bytes(path)
    refuse_cells(repr(str(path)), metadata.num_rows * metadata.num_columns, options.max_cells, stored)
    size, cells, texts = 0, 0, set()
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        size += group.total_byte_size
        for j in range(group.num_columns):
            column = group.column(j)
            cells += column.num_values  # of all the values within lists, too
            if column.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"):
                texts.add(column.path_in_schema)
        refuse_cells(repr(str(path)), cells, options.max_cells, stored)
    refuse_growth(path, stored, size, options.max_bytes)
    return sorted(texts)


def _is_flat_text(schema: Any, name: str) -> bool:
    """Whether a column holds texts or bytes and can be read as a list of different values and their places."""
    types = need("pyarrow").types
    at = schema.get_field_index(name)
    kind = schema.field(at).type if at >= 0 else None
    if kind is not None and types.is_dictionary(kind):
        kind = kind.value_type
    return kind is not None and any(
        is_kind(kind) for is_kind in (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    )


def _refuse_long_texts(path: Path, file: Any, texts: list[str], options: ReadOptions) -> None:
    """Refuse texts that are stored once and repeated to more than there is room for."""
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    total = 0
    for column in file.read(columns=texts).columns:
        for chunk in column.chunks:
            if not arrow.types.is_dictionary(chunk.type):
                continue
            lengths = compute.binary_length(chunk.dictionary)
            if (compute.max(lengths).as_py() or 0) > options.max_field:
                raise HyperkronError(_long_field(repr(str(path)), options))
            total += compute.sum(compute.cast(lengths.take(chunk.indices), arrow.int64())).as_py() or 0
            refuse_growth(path, stored_bytes(path), total, options.max_bytes)


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
    _refuse_repeated(table.column_names, path)
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
