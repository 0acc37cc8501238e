"""What a source is, and the functions that read, hash and write each form of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from hyperkron.cleaning.data import arrays, arrow, image_folders, json_files, spreadsheets, wrench
from hyperkron.cleaning.data.files import existing, listing, np
from hyperkron.cleaning.data.kept import Kept
from hyperkron.cleaning.data.labelled import Frame, Place, Raw
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.provenance import RowHashes
from hyperkron.cleaning.data.values import Values
from hyperkron.solution import HyperkronError

Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"
"""A path, a path with a part (``folder:test``), ``hf:NAME``, a dictionary of arrays or columns, or a DataFrame."""


class Form(NamedTuple):
    """How a source of one form is read (as rows or as columns), written with some of its rows, and hashed.

    The name of a file that it is written to ends in one of ``suffixes``.
    """

    read: Callable[[Place], Raw | Frame]
    write: Callable[[Place, Kept], bytes]
    suffixes: tuple[str, ...]
    hashes: Callable[[Place], RowHashes] | None = None


def _pictures(read: Callable[[Place], Raw]) -> Form:
    """Pictures that are written as ``.npz``."""
    return Form(read, lambda place, kept: arrays.pictures_npz(read(place), kept), (".npz",))


_CSV = Form(spreadsheets.read_csv, spreadsheets.write_csv, (".csv", ".tsv", ".tab", ".csv.gz", ".tsv.gz"))
_JSON = Form(json_files.read_json_rows, json_files.write_json, (".json",))
_LINES = Form(json_files.read_json_rows, json_files.write_json, (".jsonl", ".ndjson", ".jsonl.gz"))
_EXCEL = Form(spreadsheets.read_excel, spreadsheets.write_excel, (".csv",))
_PARQUET = Form(arrow.read_parquet, arrow.write_parquet, (".parquet", ".pq"))
_HUB = Form(arrow.read_hub, arrow.write_hub, (".parquet",))
_NPZ = Form(arrays.read_npz_rows, arrays.write_npz, (".npz",))
_WRENCH = Form(wrench.read_wrench, wrench.write_wrench, (".json",))
_WRENCH_LINES = Form(wrench.read_wrench, wrench.write_wrench, (".jsonl", ".jsonl.gz"))
_FOLDER = Form(
    image_folders.read_class_folder, image_folders.write_class_folder, (".npz", ".csv"), image_folders.folder_hashes
)
_IDX, _CIFAR, _SHEETS = map(_pictures, (arrays.read_idx_rows, arrays.read_cifar, image_folders.read_sheets))

_PART = re.compile(r"(?P<path>.+):(?P<part>[A-Za-z]\w*)")
_SHEET = re.compile(r"(?P<path>.+\.xls[xm]?):(?P<part>.+)", re.IGNORECASE)
_SUFFIXES = (
    (_CSV, ".csv .tsv .tab"),
    (_JSON, ".json"),
    (_LINES, ".jsonl .ndjson"),
    (_PARQUET, ".parquet .pq"),
    (_EXCEL, ".xlsx .xlsm .xls"),
    (_NPZ, ".npz"),
)
_FORMS = {suffix: form for form, suffixes in _SUFFIXES for suffix in suffixes.split()}
_PICKLES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".joblib"})
_KNOWN = (
    ".csv, .tsv, .jsonl, .json, .parquet, .xlsx, .npz, a folder of images by class, a folder of idx files, of CIFAR's "
    "binary batches or of WRENCH parts, or hf:NAME"
)


def split_source(source: str) -> tuple[Path, str | None]:
    """The path of a source and the part it names, as in ``folder:test``."""
    match = _SHEET.fullmatch(source) or _PART.fullmatch(source)
    if match is None or Path(source).exists():
        return Path(source), None
    return Path(match["path"]), match["part"]


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def suffix_written(source: str) -> str:
    """What the name of a file with rows of a source may end in: as its own name does, where that is possible."""
    path, part = split_source(source)
    form = _HUB if source.startswith(arrow.PREFIX) else _FORMS.get(_suffix(path), _NPZ)
    with suppress(HyperkronError, OSError):
        form = _form_of_folder(path, part) if path.is_dir() else form
    return _suffix(path) if _suffix(path) in form.suffixes else form.suffixes[0]


def _form_of(path: Path, part: str | None = None) -> Form:
    """The form of what lies at a path, or of a part of it."""
    if path.is_dir():
        return _form_of_folder(path, part)
    suffix = _suffix(path)
    if suffix in _FORMS:
        return _FORMS[suffix]
    if suffix == ".npy":
        raise HyperkronError(
            f"{str(path)!r} is one array without labels; save both with np.savez(path, x=..., y=...), or x alone for "
            "new rows."
        )
    if suffix in _PICKLES:
        raise HyperkronError(
            f"{str(path)!r} may be a pickle, which can run any code when it is read, so it is not. Save the arrays "
            "with np.savez(path, x=..., y=...), or the table as CSV or Parquet."
        )
    raise HyperkronError(
        f"{str(path)!r} has a suffix that says nothing about its format; unpack it, or save it as CSV or Parquet. "
        f"Known: {_KNOWN}."
    )


def _form_of_folder(path: Path, part: str | None = None) -> Form:
    def any_file(*patterns: str) -> bool:
        return any(next(path.glob(pattern), None) is not None for pattern in patterns)

    if any_file("*-images-idx3-ubyte*"):
        return _IDX
    if any_file("data_batch_*.bin", "test_batch.bin", "train.bin"):
        return _CIFAR
    if any_file("data_batch_1", "batches.meta") or ((path / "meta").is_file() and (path / "train").is_file()):
        raise HyperkronError(
            f"{str(path)!r} is the pickled version of CIFAR; reading a pickle can run any code, so it is not read. "
            "Fetch the binary version (cifar-10-binary.tar.gz or cifar-100-binary.tar.gz), unpack it and name its "
            "folder cifar-10-batches-bin or cifar-100-binary instead."
        )
    if (path / "labels.npz").is_file() and any_file("train_*.webp", "test.webp"):
        return _SHEETS
    if any_file("train.json", "train.jsonl", "train.jsonl.gz"):
        return _WRENCH if (path / f"{part or 'train'}.json").is_file() else _WRENCH_LINES
    if any(entry.is_dir() for entry in path.iterdir()):
        return _FOLDER
    there = listing(sorted(entry.name for entry in path.iterdir())) or "nothing"
    raise HyperkronError(f"{str(path)!r} is a folder in no known form: it holds {there}. Known: {_KNOWN}.")


def locate(
    source: str | os.PathLike[str], argument: str, options: ReadOptions, part: str | None = None, **more: Any
) -> tuple[Form, Place]:
    """The form of a source (a path, ``folder:part`` or ``hf:NAME:SPLIT``) and where it lies."""
    text = os.fspath(source)
    if text.startswith(arrow.PREFIX):
        text = text if part is None else f"{text}:{part}"
        return _HUB, Place(argument, text, Path(text), None, options, **more)
    path, named = (Path(text), None) if isinstance(source, Path) else split_source(text)
    if part is not None and named is not None:
        raise HyperkronError(f"part={part!r} is given, and {argument}={text!r} names the part {named!r} too.")
    part = part or named
    form = _form_of(existing(path, argument), part)
    if part is not None and form in (_CSV, _JSON, _LINES, _PARQUET):
        raise HyperkronError(f"{argument}={text!r} names the part {part!r}, but {path.name} has no parts.")
    return form, Place(argument, text, path, part, options, **more)


def own_trusted(train: Any) -> str | None:
    """The part of a folder that holds its trusted rows, if it has one."""
    if not isinstance(train, (str, os.PathLike)) or os.fspath(train).startswith(arrow.PREFIX):
        return None
    path, part = split_source(os.fspath(train))
    if part not in (None, "train") or not existing(path, "train").is_dir():
        return None
    form = _form_of(path)
    if form in (_WRENCH, _WRENCH_LINES):
        return f"{path}:valid"
    inner = [name for name in ("trusted", "valid", "val") if (path / name).is_dir()]
    return f"{path}:{inner[0]}" if form is _FOLDER and inner and (path / "train").is_dir() else None


def without_columns(source: Any) -> bool:
    """Whether a source is arrays rather than columns."""
    if isinstance(source, (str, os.PathLike)):
        path = split_source(os.fspath(source))[0]
        return path.is_dir() or path.suffix.lower() == ".npz"
    names = {str(name) for name in source}
    return isinstance(source, Mapping) and {"x", "y"} <= names <= {"x", "y", "classes"}


def in_memory(source: Any, argument: str, columns: bool = False) -> Raw | Frame:
    """The rows of a dictionary of arrays, or the ``columns`` (of any names) of a dictionary or a DataFrame."""
    if isinstance(source, Mapping) and set(source) == {"x", "y"} and hasattr(source["x"], "column_names"):
        raise HyperkronError(
            f"{argument} is a Dataset and labels apart from it; put them in: dataset.add_column('label', labels)."
        )
    if isinstance(source, Mapping) and any(hasattr(part, "column_names") for part in source.values()):
        raise HyperkronError(
            f"{argument} has several splits ({listing(source)}); give one of them, such as "
            f"dataset[{next(iter(source))!r}]."
        )
    if hasattr(source, "column_names") and not hasattr(source, "__len__"):
        raise HyperkronError(f"{argument} is an {type(source).__name__}; give datasets.Dataset.from_list(list(it)).")
    if hasattr(source, "column_names") and hasattr(source, "with_format"):
        return arrow.dataset_frame(source, argument)
    if not isinstance(source, Mapping) and not hasattr(source, "iloc"):
        remedy = next((f" Pass {argument}.{name}()." for name in ("to_pandas", "collect") if hasattr(source, name)), "")
        raise HyperkronError(
            f"{argument} is a {type(source).__name__}; it must be a path, a dictionary of arrays or columns, or a "
            f"pandas DataFrame.{remedy}"
        )
    if not columns and without_columns(source):
        classes = tuple(str(name) for name in source.get("classes", ()))
        return arrays.array_rows(source["x"], source["y"], argument, classes)
    spreadsheets.refuse_repeated(map(str, source), argument)
    found = {str(name): _column(source[name], f"column {str(name)!r} of {argument}") for name in source}
    lengths = {name: len(values) for name, values in found.items()}
    if len(set(lengths.values())) > 1:
        raise HyperkronError(f"the columns of {argument} have different lengths: {lengths}.")
    return Frame(argument, found)


def _column(values: Any, where: str) -> Values:
    """The cells of a column; what has no order, or is one value and not one for each row, is refused."""
    dims = getattr(values, "ndim", 1 if hasattr(values, "__iter__") else 0)
    if dims != 1 or isinstance(values, (str, bytes, Mapping, set, frozenset)):
        shape = f" of shape {tuple(values.shape)}" if dims > 1 else ""
        raise HyperkronError(
            f"{where} is a {type(values).__name__}{shape}; give a list with one value for each row, such as [value]."
        )
    if (
        hasattr(values, "dtype")
        and not np.ma.isMaskedArray(values)
        and (found := np.asarray(values)).dtype.kind in "fiuM"
    ):
        if found.dtype.kind == "M":
            return found.astype("datetime64[us]").tolist()
        if found.dtype.kind != "f" or getattr(values.dtype, "kind", None) not in ("i", "u"):
            return found  # whole numbers with gaps, which would become floats, stay a list
    return values.tolist() if hasattr(values, "tolist") else list(values)


def row_hashes(
    source: str | os.PathLike[str], options: ReadOptions | None = None, argument: str = "source"
) -> RowHashes:
    """The hashes of all rows of a source, whether they can be used or not.

    A row of a table is its fields as they stand in the file, all columns of it; a picture in a folder is the bytes of
    its file; where a table names files of pictures, the names count and not the pictures. ``argument`` is what messages
    call the source.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.csv"
        >>> _ = path.write_text("text,label\\na,x\\nb,y\\n")
        >>> before = row_hashes(path)
        >>> _ = path.write_text("text,label\\na,x\\nc,y\\n")
        >>> before.difference(row_hashes(path))
        '1 row of 2 differs: row 1'
    """
    form, place = locate(source, argument, options or ReadOptions())
    return form.hashes(place) if form.hashes is not None else RowHashes.of(form.read(place))
