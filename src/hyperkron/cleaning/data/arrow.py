"""Tables of Arrow: Parquet files and datasets of the Hub."""

from __future__ import annotations

import inspect
import io
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data.kept import Kept
from hyperkron.cleaning.data.labelled import Frame, Place
from hyperkron.cleaning.data.limits import Bounds, ReadOptions
from hyperkron.cleaning.data.spreadsheets import refuse_repeated
from hyperkron.cleaning.data.values import Values
from hyperkron.solution import HyperkronError
from hyperkron.training.writing import open_plain
from hyperkron.validation import need


def _table(path: Path, options: ReadOptions) -> Any:
    """The Arrow table of a Parquet file, refused before it is decoded if it holds too much."""
    parquet, arrow = need("pyarrow.parquet"), need("pyarrow")
    bounds = Bounds(path, options)
    try:
        with open_plain(path):  # a pipe would be waited for
            pass
        with parquet.ParquetFile(path, memory_map=False) as file:
            texts = [name for name in _refuse_large(file.metadata, bounds) if _is_flat_text(file.schema_arrow, name)]
            if texts:
                with parquet.ParquetFile(path, memory_map=False, read_dictionary=texts) as encoded:
                    _refuse_long_texts(encoded, texts, bounds)
            return file.read()
    except (arrow.ArrowException, OSError) as error:
        raise HyperkronError(f"{str(path)!r} is not a readable Parquet file ({str(error)[:150]}).") from error


def _refuse_large(metadata: Any, bounds: Bounds) -> list[str]:
    """Refuse what the metadata says is too large; the columns of texts, by name."""
    bounds.check("max_columns", metadata.num_columns)
    bounds.check("max_cells", metadata.num_rows * metadata.num_columns)
    size, cells, texts = 0, 0, set()
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        size += group.total_byte_size
        for j in range(group.num_columns):
            column = group.column(j)
            cells += column.num_values  # of all the values within lists, too
            if column.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"):
                texts.add(column.path_in_schema)
        bounds.check("max_cells", cells)
    bounds.check("max_bytes", size)
    return sorted(texts)


def _is_flat_text(schema: Any, name: str) -> bool:
    """Whether a column holds texts or bytes and can be read as a list of different values and their places."""
    types = need("pyarrow").types
    at = schema.get_field_index(name)
    kind = schema.field(at).type if at >= 0 else None
    if kind is not None and types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    return kind is not None and any(is_kind(kind) for is_kind in tests)


def _refuse_long_texts(file: Any, texts: list[str], bounds: Bounds) -> None:
    """Refuse texts that are stored once and repeated to more than there is room for."""
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    total = 0
    for column in file.read(columns=texts).columns:
        for chunk in column.chunks:
            if not arrow.types.is_dictionary(chunk.type):
                continue
            lengths = compute.binary_length(chunk.dictionary)
            bounds.check("max_field", compute.max(lengths).as_py() or 0)
            total += compute.sum(compute.cast(lengths.take(chunk.indices), arrow.int64())).as_py() or 0
            bounds.check("max_bytes", total)


def arrow_columns(table: Any) -> dict[str, Values]:
    """The columns of an Arrow table: numbers without gaps as arrays, everything else as Python values."""
    types = need("pyarrow").types
    columns: dict[str, Values] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        numeric = types.is_floating(column.type) or (types.is_integer(column.type) and not column.null_count)
        columns[name] = column.to_numpy() if numeric else column.to_pylist()
    return columns


def arrow_bytes(table: Any, kept: Kept, column: str, name: str) -> bytes:
    """The rows to keep as a Parquet file, with the types and metadata of the table."""
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    rows = kept.within(table.num_rows, name)
    found = table.take(arrow.array(rows, type=arrow.int64()))
    if kept.labels:
        at = table.column_names.index(column)
        field = table.schema.field(at)
        plain = field.type.value_type if arrow.types.is_dictionary(field.type) else field.type
        kept = kept.like(table.column(at).to_pylist())
        labels = [kept.label(row, old) for row, old in zip(rows, found.column(at).to_pylist(), strict=True)]
        try:
            values = arrow.array(labels, type=plain).cast(field.type)
        except (arrow.ArrowException, TypeError, ValueError) as error:
            raise HyperkronError(
                f"labels cannot be written into the column {column!r} of {name}, which holds {field.type} ({error})."
            ) from error
        found = found.set_column(at, field, values)
    parquet.write_table(found, file := io.BytesIO())
    return file.getvalue()


def _class_names(table: Any) -> dict[str, tuple[str, ...]]:
    """The names of classes that Hugging Face writes into a Parquet file beside columns of their numbers."""
    with suppress(TypeError, ValueError, KeyError, AttributeError, RecursionError):  # not there, or not its own
        features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
        labels = {name: x["names"] for name, x in features.items() if isinstance(x, dict) and "names" in x}
        return {name: tuple(map(str, names)) for name, names in labels.items() if isinstance(names, list)}
    return {}


def read_parquet(place: Place) -> Frame:
    """The columns of a Parquet file."""
    table = _table(place.path, place.options)
    refuse_repeated(table.column_names, repr(str(place.path)))
    return Frame(place.path.name, arrow_columns(table), place.path.parent, class_names=_class_names(table))


def write_parquet(place: Place, kept: Kept) -> bytes:
    """Types and metadata stay."""
    table = _table(place.path, place.options)
    column = kept.label_column(place.path.name, table.column_names)
    return arrow_bytes(table, kept.numbered(_class_names(table).get(column, ())), column, place.path.name)


PREFIX = "hf:"
_SOURCE = re.compile(r"hf:(?P<name>[\w./-]+?)(@(?P<config>[\w.-]+))?(:(?P<split>.+))?\Z")


def _load(source: str) -> Any:
    """The dataset a source names; the split ``train`` when it names none.

    Nothing of the dataset's own code is run: versions of ``datasets`` that could are told not to.
    """
    match = _SOURCE.match(source)
    if match is None:
        raise HyperkronError(f"source={source!r} must be hf:NAME, hf:NAME:SPLIT or hf:NAME@CONFIGURATION:SPLIT.")
    datasets = need("datasets")
    split = match["split"] or "train"
    options = {}
    if "trust_remote_code" in inspect.signature(datasets.load_dataset).parameters:
        options["trust_remote_code"] = False
    try:
        return datasets.load_dataset(match["name"], match["config"], split=split, **options)
    except Exception as error:  # the client raises errors of several libraries
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise HyperkronError(
            f"source={source!r} could not be loaded ({type(error).__name__}: {reason}). {_remedy(error, split)}"
        ) from error


def _remedy(error: Exception, split: str) -> str:
    told = f"{type(error).__name__} {error}".lower()
    if "config name is missing" in told or "builderconfig" in told:
        return "Name a configuration: hf:NAME@CONFIGURATION:SPLIT."
    if "split" in told:
        return f"Name a split that it has instead of {split!r}: hf:NAME:SPLIT."
    signs = ("connect", "offline", "resolve", "timeout", "hub", "reach")
    if isinstance(error, OSError) or any(sign in told for sign in signs):
        return (
            "If this machine has no way to huggingface.co, save the dataset as Parquet where it has "
            "(datasets.load_dataset(...).to_parquet('train.parquet')) and read that file; a private dataset needs "
            "`hf auth login`."
        )
    return "Check the name on huggingface.co/datasets."


def _arrow(dataset: Any) -> Any:
    """The table of a dataset, with pictures as bytes: they are decoded later, within our limits."""
    return dataset.with_format("arrow")[:]


def read_hub(place: Place) -> Frame:
    """The columns of a dataset of the Hub."""
    return dataset_frame(_load(place.source), place.source, _own_folder(place.source))


def dataset_frame(dataset: Any, name: str, folder: Path | None = None) -> Frame:
    """The columns of a ``datasets.Dataset``, and the class names of each column that has them."""
    names = {
        column: tuple(feature.names)
        for column, feature in dataset.features.items()
        if type(feature).__name__ == "ClassLabel" and feature.names
    }
    return Frame(name, arrow_columns(_arrow(dataset)), folder, class_names=names)


def write_hub(place: Place, kept: Kept) -> bytes:
    """The rows as Parquet."""
    dataset = _load(place.source)
    column = kept.label_column(place.path.name, dataset.column_names)
    names = (getattr(dataset.features[column], "names", None) or ()) if column else ()
    return arrow_bytes(_arrow(dataset), kept.numbered(names), column, place.source)


def _own_folder(source: str) -> Path:
    """Where the files of a dataset lie: its folder, or what the client keeps of it."""
    match = _SOURCE.match(source)
    assert match is not None
    folder = Path(match["name"])
    if folder.is_dir():  # as the client does, before it asks the Hub
        return folder
    cache: str = need("huggingface_hub.constants").HF_HUB_CACHE
    return Path(cache) / f"datasets--{match['name'].replace('/', '--')}"
