"""The source again with only the rows to keep: the very text of each where the format has one."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hyperkron.cleaning.data import arrays, images, wrench
from hyperkron.cleaning.data.files import existing, listing, need, read_bounded
from hyperkron.cleaning.data.formulas import FormulaCells, Formulas
from hyperkron.cleaning.data.hub import PREFIX, load_hub
from hyperkron.cleaning.data.labelled import Raw, ReadOptions
from hyperkron.cleaning.data.roles import Roles, label_column
from hyperkron.cleaning.data.sources import form_of, split_source
from hyperkron.cleaning.data.tables import parquet_table, read_csv_file, read_json, read_json_lines
from hyperkron.cleaning.data.values import is_missing
from hyperkron.solution import HyperkronError, HyperkronWarning
from hyperkron.training.writing import in_words, whole_file
from hyperkron.validation import check_one_of

if TYPE_CHECKING:
    from hyperkron.cleaning.data.labelled import Array

Changes = dict[int, str]  # row -> the name of its new class


def export_rows(
    source: str | os.PathLike[str],
    keep: Sequence[int] | Array,
    out: str | os.PathLike[str],
    labels: Sequence[str | None] | None = None,
    *,
    label: str | None = None,
    overwrite: bool = False,
    formulas: Formulas = "keep",
    options: ReadOptions | None = None,
) -> Path:
    """Write the kept rows of a source, in the order of the source and in its format.

    CSV and JSON lines keep the text of every row that gets no other label, byte for byte; Parquet keeps types and
    metadata. A folder of images becomes a CSV list of files or an ``.npz``; idx, CIFAR and sheets become an ``.npz``;
    a dataset of the Hub becomes Parquet. The file appears whole or not at all.

    Args:
        source: as it was given to ``read`` or ``read_pair``.
        keep: positions of rows, as in ``Labelled.rows``.
        out: the file to write.
        labels: class names for the rows of ``keep``, None where a row keeps its own; None to keep all.
        label: the column of the labels; inferred as by ``read`` when None.
        overwrite: replace ``out`` if it is there.
        formulas: what becomes of CSV cells that a spreadsheet would run, such as ``=1+1``: ``keep`` them with a
            warning, ``escape`` them by an apostrophe, or ``refuse`` to write. Other formats have no such cells.
        options: how to read the source.

    Returns:
        The path written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.csv").write_text("text,label\\n007,x\\n1.50,y\\n")
        >>> export_rows(folder / "a.csv", [1], folder / "b.csv", ["x"]).read_text()
        'text,label\\n1.50,x\\n'
    """
    options, out = options or ReadOptions(), Path(out)
    text = os.fspath(source)
    rows, changes = _wanted(keep, labels)
    check_one_of("formulas", formulas, get_args(Formulas))
    if text.startswith(PREFIX):
        dataset = load_hub(text)
        table = dataset.with_format("arrow")[:]
        _require_suffix(out, (".parquet",), text)
        column = label_column(Path(text).name, table.column_names, Roles(label=label))
        names = tuple(getattr(dataset.features[column], "names", None) or ())
        _write(out, overwrite, lambda path: _write_parquet(table, rows, _numbers(changes, names), column, path, text))
        return out
    path, part = (Path(text), None) if isinstance(source, Path) else split_source(text)
    existing(path, "source")
    if out.exists() and out.resolve() == path.resolve():
        raise HyperkronError(f"out={str(out)!r} is the source itself; choose another name.")
    writer = _writer(path, part, rows, changes, out, label, options, formulas)
    _write(out, overwrite, writer)
    return out


def _write(out: Path, overwrite: bool, writer: Callable[[Path], None]) -> None:
    if out.is_dir():
        raise HyperkronError(f"out={str(out)!r} is a folder; name a file.")
    if out.exists() and not overwrite:
        raise HyperkronError(f"out={str(out)!r} exists already; choose another name, or pass overwrite=True.")
    with in_words(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as temporary:
            writer(temporary)


def _writer(
    path: Path,
    part: str | None,
    rows: list[int],
    changes: Changes,
    out: Path,
    label: str | None,
    options: ReadOptions,
    formulas: Formulas,
) -> Callable[[Path], None]:
    form = form_of(path)
    if form == "csv":
        _require_suffix(out, (".csv", ".tsv", ".tab", ".csv.gz", ".tsv.gz"), path.name)
        charset = _charset(path, options)
        return lambda to: _bytes(to, out, _csv(path, rows, changes, label, options, formulas).encode(charset))
    if form == "jsonl":
        _require_suffix(out, (".jsonl", ".ndjson", ".jsonl.gz"), path.name)
        return lambda to: _bytes(to, out, _jsonl(path, rows, changes, label, options))
    if form == "json":
        _require_suffix(out, (".json",), path.name)
        return lambda to: _bytes(to, out, _json(path, rows, changes, label, options))
    if form == "parquet":
        _require_suffix(out, (".parquet", ".pq"), path.name)
        table = parquet_table(path, options)
        column = label_column(path.name, table.column_names, Roles(label=label)) if changes else ""
        return lambda to: _write_parquet(table, rows, changes, column, to, path.name)
    if form == "wrench":
        return _wrench(path, part, rows, changes, out, options)
    if form == "folder" and out.suffix.lower() == ".csv":
        return lambda to: _bytes(to, out, _list(path, part, rows, changes, formulas).encode())
    _require_suffix(out, (".csv", ".npz") if form == "folder" else (".npz",), path.name)
    if form == "npz":
        return lambda to: _npz(path, part, rows, changes, to, options)
    readers = {"folder": images.read_class_folder, "idx": arrays.read_idx_rows, "cifar": arrays.read_cifar}
    return lambda to: _pictures(readers.get(form, images.read_sheets)(path, part, options), rows, changes, to)


# --- what is asked for -------------------------------------------------------------------------------------


def _wanted(keep: Sequence[int] | Array, labels: Sequence[str | None] | None) -> tuple[list[int], Changes]:
    """The rows in order, and the new labels of some."""
    np = need("numpy")
    positions = np.asarray(keep)
    if positions.size == 0:
        positions = positions.astype(np.int64)
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        raise HyperkronError(
            f"keep must be a list of row numbers, not {positions.dtype} of shape {positions.shape}; for a mask pass "
            "np.flatnonzero(mask)."
        )
    rows = positions.tolist()
    if len(set(rows)) != len(rows):
        raise HyperkronError("keep names a row more than once; every row is written once.")
    if labels is not None and len(labels) != len(rows):
        raise HyperkronError(f"labels has {len(labels)} entries but keep has {len(rows)}; give one for each kept row.")
    changes = {} if labels is None else {row: name for row, name in zip(rows, labels, strict=True) if name is not None}
    return sorted(rows), changes


def _refuse_outside(rows: list[int], count: int, name: str) -> None:
    outside = [row for row in rows if not 0 <= row < count]
    if outside:
        raise HyperkronError(f"keep names rows {listing(outside)}, but {name} has the rows 0 to {count - 1}.")


def _require_suffix(out: Path, suffixes: tuple[str, ...], source: str) -> None:
    if not out.name.lower().endswith(suffixes):
        raise HyperkronError(f"out={str(out)!r}: rows of {source} are written as {' or '.join(suffixes)}; name it so.")


def _numbers(changes: Changes, classes: tuple[str, ...]) -> Changes:
    """New labels as the numbers of their classes, where the source stores numbers."""
    unknown = sorted(set(changes.values()) - set(classes))
    if classes and unknown:
        raise HyperkronError(f"labels holds {listing(map(repr, unknown))}; the classes are {listing(classes, 20)}.")
    return {row: str(classes.index(name)) for row, name in changes.items()} if classes else changes


def _like(old: Any, name: str) -> Any:
    """A new label of the type of the old one: a number stays a number."""
    if isinstance(old, bool):
        return name == "true"
    if isinstance(old, (int, float)) and not is_missing(old):
        try:
            return type(old)(name)
        except ValueError:
            return name
    return name


# --- tables ------------------------------------------------------------------------------------------------


def _charset(path: Path, options: ReadOptions) -> str:
    """The charset to write, with the mark at its beginning where the source has one."""
    marked = read_bounded(path, options.max_bytes).startswith(b"\xef\xbb\xbf")
    return "utf-8-sig" if marked and options.charset.lower() in ("utf-8", "utf8") else options.charset


def _bytes(path: Path, out: Path, content: bytes) -> None:
    content = gzip.compress(content, mtime=0) if out.name.lower().endswith(".gz") else content
    with in_words(out, len(content)):
        path.write_bytes(content)


def _csv(
    path: Path, rows: list[int], changes: Changes, label: str | None, options: ReadOptions, formulas: Formulas
) -> str:
    file = read_csv_file(path, options)
    _refuse_outside(rows, len(file.records), path.name)
    end = "\r\n" if file.head.endswith("\r\n") else "\n"
    at = file.header.index(label_column(path.name, file.header, Roles(label=label))) if changes else -1
    cells = FormulaCells(formulas, file.header)

    def written(fields: list[str]) -> str:
        line = io.StringIO(newline="")
        csv.writer(line, delimiter=file.delimiter, lineterminator=end).writerow(fields)
        return line.getvalue()

    escaped = cells.row(file.header)
    parts = [file.head if escaped is None else written(escaped)]
    for row in rows:
        fields, text = file.records[row]
        if row in changes and fields[at] != changes[row]:
            fields = [*fields[:at], changes[row], *fields[at + 1 :]]
            text = written(fields)
        escaped = cells.row(fields, row)
        parts.append(text if escaped is None else written(escaped))
    _tell(cells.message(path.name))
    return "".join(part if part.endswith(("\n", "\r")) else part + end for part in parts)


def _tell(message: str | None) -> None:
    if message is not None:
        warnings.warn(message, HyperkronWarning, stacklevel=2)


def _jsonl(path: Path, rows: list[int], changes: Changes, label: str | None, options: ReadOptions) -> bytes:
    records = read_json_lines(path, options)
    _refuse_outside(rows, len(records), path.name)
    names = list(dict.fromkeys(name for value, _ in records for name in value))
    column = label_column(path.name, names, Roles(label=label)) if changes else ""
    return _lines(records, rows, changes, column).encode(options.charset)


def _lines(records: list[tuple[dict[str, Any], str]], rows: list[int], changes: Changes, column: str) -> str:
    parts = []
    for row in rows:
        value, text = records[row]
        if row in changes and value.get(column) != (new := _like(value.get(column), changes[row])):
            text = json.dumps({**value, column: new}, ensure_ascii=False)
        parts.append(text.rstrip("\r\n") + "\n")
    return "".join(parts)


def _json(path: Path, rows: list[int], changes: Changes, label: str | None, options: ReadOptions) -> bytes:
    content = read_json(path, options)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise HyperkronError(f"source={str(path)!r} is not a list of JSON objects.")
    _refuse_outside(rows, len(content), path.name)
    names = list(dict.fromkeys(name for entry in content for name in entry))
    column = label_column(path.name, names, Roles(label=label)) if changes else ""
    kept = []
    for row in rows:
        entry = content[row]
        kept.append({**entry, column: _like(entry.get(column), changes[row])} if row in changes else entry)
    return (json.dumps(kept, ensure_ascii=False, indent=1) + "\n").encode(options.charset)


def _write_parquet(table: Any, rows: list[int], changes: Changes, column: str, path: Path, name: str) -> None:
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    _refuse_outside(rows, table.num_rows, name)
    kept = table.take(arrow.array(rows, type=arrow.int64()))
    if changes:
        at = table.column_names.index(column)
        field = table.schema.field(at)
        plain = field.type.value_type if arrow.types.is_dictionary(field.type) else field.type
        old = kept.column(at).to_pylist()
        new = [_like(value, changes[row]) if row in changes else value for row, value in zip(rows, old, strict=True)]
        try:
            values = arrow.array(new, type=plain).cast(field.type)
        except (arrow.ArrowException, TypeError, ValueError) as error:
            raise HyperkronError(
                f"labels cannot be written into the column {column!r} of {name}, which holds {field.type} ({error})."
            ) from error
        kept = kept.set_column(at, field, values)
    parquet.write_table(kept, path)


# --- WRENCH ------------------------------------------------------------------------------------------------


def _wrench(
    folder: Path, part: str | None, rows: list[int], changes: Changes, out: Path, options: ReadOptions
) -> Callable[[Path], None]:
    path = wrench.part_file(folder, part or "train")
    changes = _numbers(changes, wrench.class_names(folder, options))
    if path.suffix == ".json":
        _require_suffix(out, (".json",), path.name)
        entries = list(read_json(path, options).items())
        _refuse_outside(rows, len(entries), path.name)
        kept = {
            entries[row][0]: {**entries[row][1], "label": int(changes[row])} if row in changes else entries[row][1]
            for row in rows
        }
        return lambda to: _bytes(to, out, json.dumps(kept, ensure_ascii=False, indent=1).encode(options.charset))
    _require_suffix(out, (".jsonl", ".jsonl.gz"), path.name)
    records = read_json_lines(path, options)
    _refuse_outside(rows, len(records), path.name)
    return lambda to: _bytes(to, out, _lines(records, rows, changes, "label").encode(options.charset))


# --- arrays and images -------------------------------------------------------------------------------------


def _list(folder: Path, part: str | None, rows: list[int], changes: Changes, formulas: Formulas) -> str:
    files = images.class_files(folder, part)
    _refuse_outside(rows, len(files), folder.name)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    header = ["image", "label"]
    writer.writerow(header)
    cells = FormulaCells(formulas, header)
    for row in rows:
        fields = [files[row][0], changes.get(row, files[row][1])]
        writer.writerow(cells.row(fields, row) or fields)
    _tell(cells.message(folder.name))
    return text.getvalue()


def _save(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        need("numpy").savez_compressed(file, **content)


def _npz(path: Path, part: str | None, rows: list[int], changes: Changes, to: Path, options: ReadOptions) -> None:
    """Every array with as many rows as the inputs is cut to the kept ones; the others stay as they are."""
    np = need("numpy")
    content = arrays.read_npz(path, options)
    x, y = arrays.npz_keys(content, part, path.name)
    count = len(content[y])
    _refuse_outside(rows, count, path.name)
    suffix = x[len(x) - len(f"_{part}") :] if part else ("_train" if x.lower().endswith("_train") else "")
    cut = {
        name: value[rows] if name in (x, y) or _belongs(name, value, count, suffix.lower()) else value
        for name, value in content.items()
    }
    if changes:
        old = cut[y]
        names = content["classes"].tolist() if "classes" in content and old.dtype.kind in "iu" else []
        changes = _numbers(changes, tuple(map(str, names)))
        new = [changes.get(row, value) for row, value in zip(rows, old.tolist(), strict=True)]
        try:
            cut[y] = np.asarray(new, dtype=None if old.dtype.kind == "U" else old.dtype)
        except ValueError as error:
            raise HyperkronError(
                f"labels cannot be written into {y!r} of {path.name}, which is {old.dtype}."
            ) from error
    _save(to, cut)


def _belongs(name: str, value: Array, count: int, suffix: str) -> bool:
    """Whether an array has a value for every row of the part."""
    return value.ndim > 0 and len(value) == count and name.lower().endswith(suffix) and name != "classes"


def _pictures(raw: Raw, rows: list[int], changes: Changes, to: Path) -> None:
    np = need("numpy")
    place = {row: i for i, row in enumerate(raw.rows.tolist())}
    lost = [row for row in rows if row not in place]
    if lost:
        raise HyperkronError(
            f"keep names rows {listing(lost)} that {raw.name} does not have, or whose image is broken."
        )
    picked = raw.take(np.array([place[row] for row in rows], dtype=np.int64))
    names = [changes.get(row, str(name)) for row, name in zip(rows, picked.labels, strict=True)]
    _save(to, {"x": picked.inputs, "y": np.array(names, dtype=str)})
