"""Arrays: ``.npz``, idx pairs and the binary batches of CIFAR, none of them able to run anything."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperkron.cleaning.data.files import listing, np
from hyperkron.cleaning.data.kept import Kept
from hyperkron.cleaning.data.labelled import Place, Raw
from hyperkron.cleaning.data.limits import Bounds, ReadOptions, read_bounded
from hyperkron.cleaning.data.roles import NoLabelColumn
from hyperkron.cleaning.data.values import Array, is_missing, label_names
from hyperkron.cleaning.data.votes import Ballot
from hyperkron.solution import HyperkronError
from hyperkron.training.writing import open_plain
from hyperkron.validation import need

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path, max_bytes: int = ReadOptions.max_bytes) -> Tensor:
    """The array of an IDX file, gzip-compressed or not.

    The file holds two zero bytes, a code of the element type, the number of dimensions, the dimensions as big-endian
    32-bit integers, and the elements, big-endian, in row-major order. ``max_bytes`` is what it may hold once
    decompressed.

    Reference: LeCun, Cortes & Burges, "The MNIST database of handwritten digits" (1998).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "labels"
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
        >>> read_idx(path)
        tensor([7, 2, 1], dtype=torch.uint8)
    """
    content = read_bounded(Path(path), ReadOptions(max_bytes=max_bytes))
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES:
        first = content[:4].hex() or "nothing"
        raise HyperkronError(
            f"path={str(path)!r} is not an IDX file: it starts with {first}; name one, or fetch it again."
        )
    dtype, start = np.dtype(_DTYPES[content[2]]), 4 + 4 * content[3]
    if len(content) < start:
        raise HyperkronError(f"path={str(path)!r} ends within its header; fetch it again.")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) != start + dtype.itemsize * prod(shape):
        raise HyperkronError(
            f"path={str(path)!r} holds {len(content) - start} bytes of elements but its shape {shape} needs "
            f"{dtype.itemsize * prod(shape)}; fetch it again."
        )
    return torch.from_numpy(np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("=")))


def find_idx(folder: Path, name: str) -> Path:
    """A file of MNIST, compressed or not."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise HyperkronError(f"folder={str(folder)!r} has neither {name} nor {name}.gz; put MNIST's four files there.")


def read_npz(path: Path, options: ReadOptions) -> dict[str, Array]:
    """Every array of a ``.npz`` file; pickled ones, and sizes that do not add up, are refused."""
    try:
        with open_plain(path) as stored, zipfile.ZipFile(stored) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
            Bounds(path, options).check("max_bytes", sum(entry.file_size for entry in entries))
            if not entries:
                raise HyperkronError(f"{str(path)!r} is empty: it holds no array.")
            return {entry.filename.removesuffix(".npy"): _member(archive, entry, path) for entry in entries}
    except HyperkronError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise HyperkronError(
            f"{str(path)!r} is not a readable .npz file ({str(error)[:150]}); save it again."
        ) from error


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> Array:
    """One array, whose header is checked against the bytes that are there before any memory is taken."""
    npy = need("numpy.lib.format")
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(file)
        start = file.tell()
    if dtype.hasobject:
        raise HyperkronError(
            f"{str(path)!r} holds Python objects under {entry.filename!r}, which could run code when read; save texts "
            "with np.asarray(texts, dtype=str), and numbers as numbers."
        )
    if prod(shape) * dtype.itemsize != entry.file_size - start:
        raise HyperkronError(
            f"{str(path)!r}: {entry.filename!r} claims shape {shape} of {dtype} but holds {entry.file_size - start} "
            "bytes; save it again."
        )
    with archive.open(entry) as file:
        return npy.read_array(file)  # objects were refused above, and numpy refuses them too


def _keys(arrays: Mapping[str, Any], place: Place) -> tuple[str, str, str]:
    """The names of the inputs and the labels, ``x`` and ``y``, or ``x_train`` and ``y_train`` and so on; their end."""
    by_lower = {key.lower(): key for key in arrays}
    for suffix in [f"_{place.part}"] if place.part else ["", "_train"]:
        for x in ("x", "inputs", "images", "data", "texts"):
            for y in ("y", "labels", "targets"):
                if x + suffix in by_lower and y + suffix in by_lower:
                    return by_lower[x + suffix], by_lower[y + suffix], suffix
            if not place.labelled and x + suffix in by_lower:
                return by_lower[x + suffix], by_lower[x + suffix], suffix
    needed = f"x_{place.part} and y_{place.part}" if place.part else "x and y, or x_train and y_train"
    held = listing(map(repr, sorted(arrays)), 12)
    raise HyperkronError(f"{place.path.name} must hold {needed}; it holds {held}.")


def read_npz_rows(place: Place) -> Raw:
    """The inputs and labels of a ``.npz`` file."""
    arrays = read_npz(place.path, place.options)
    inputs, labels, _ = _keys(arrays, place)
    x, y = arrays[inputs], arrays[labels] if labels != inputs else np.zeros(len(arrays[inputs]), dtype=np.int64)
    names = arrays.get("classes")
    classes = tuple(str(name) for name in names.tolist()) if names is not None and names.ndim == 1 else ()
    if x.ndim <= 2:
        width = x.shape[1] if x.ndim == 2 else 1
        bounds = Bounds(place.path, place.options)
        bounds.check("max_columns", width)
        bounds.check("max_cells", y.size * (width + 1))
    return array_rows(x, y, place.name, classes)


def write_npz(place: Place, kept: Kept) -> bytes:
    """Every array with as many rows as the inputs is cut to the kept ones; the others stay as they are."""
    content = read_npz(place.path, place.options)
    x, y, suffix = _keys(content, place)
    count = len(content[y])
    rows = kept.within(count, place.path.name)
    alike = {name for name, value in content.items() if value.shape[:1] == (count,) and name.lower().endswith(suffix)}
    per_row = {x, y} | (alike - {"classes"})
    cut = {name: value[rows] if name in per_row else value for name, value in content.items()}
    if kept.labels:
        old = cut[y]
        if old.ndim > 1:
            raise NoLabelColumn(f"{y!r} of {place.path.name} holds the votes of several annotators, not one label.")
        if "classes" in content and old.dtype.kind in "iu":
            kept = kept.numbered([str(name) for name in content["classes"].tolist()])
        kept = kept.like(content[y])
        labels = [kept.label(row, value) for row, value in zip(rows, old.tolist(), strict=True)]
        try:
            cut[y] = np.asarray(labels, dtype=None if old.dtype.kind == "U" else old.dtype)
        except ValueError as error:
            raise HyperkronError(
                f"labels cannot be written into {y!r} of {place.path.name}, which is {old.dtype}."
            ) from error
    return _npz(cut)


def pictures_npz(raw: Raw, kept: Kept) -> bytes:
    """Pictures of any source, with the names of their classes."""
    if lost := sorted({*kept.rows}.difference(raw.rows.tolist())):
        raise HyperkronError(
            f"keep names rows {listing(lost)} that {raw.source} does not have, or whose image is broken."
        )
    picked = raw.take(np.flatnonzero(np.isin(raw.rows, kept.rows)))
    names = [kept.label(row, str(name)) for row, name in zip(kept.rows, picked.labels, strict=True)]
    return _npz({"x": picked.inputs, "y": np.array(names, dtype=str)})


def _npz(content: Mapping[str, Any]) -> bytes:
    np.savez_compressed(file := io.BytesIO(), **content)
    return file.getvalue()


def tensor_array(values: Any) -> Any:
    """The numbers of a tensor as an array, anything else as it is; numpy has no bfloat16, which becomes float32."""
    if not isinstance(values, Tensor):
        return values
    if values.layout != torch.strided:
        raise HyperkronError(f"x is a tensor of layout {values.layout}; pass x.to_dense(), or a scipy sparse matrix.")
    found = values.detach().cpu()
    return np.asarray(found.float() if found.dtype == torch.bfloat16 else found)


def as_array(values: Any, where: str, missing: float | None = float("nan")) -> Array:
    """An array of what was given: a sparse matrix filled up, if it is not too large for that, and ``missing`` in place
    of what a masked array hides.
    """
    values = tensor_array(values)
    if hasattr(values, "toarray"):
        if prod(values.shape) > ReadOptions.max_cells:
            raise HyperkronError(
                f"{where} is a sparse matrix of {values.shape[0]} × {values.shape[1]}; more than "
                f"{ReadOptions.max_cells} cells are not filled up. Reduce it first, for example with "
                "sklearn.decomposition.TruncatedSVD(256).fit_transform(x)."
            )
        values = values.toarray()
    if np.ma.isMaskedArray(values):
        return np.where(np.ma.getmaskarray(values), missing, values.data)
    try:
        return np.asarray(values)
    except ValueError as error:
        raise HyperkronError(f"{where} has rows of different lengths, which make no array ({error}).") from error


def array_rows(x: Any, y: Any, name: str, classes: tuple[str, ...] = ()) -> Raw:
    """Rows of arrays: texts (N,), a table (N, d), or images (N, H, W), (N, H, W, C) or (N, C, H, W), and labels."""
    inputs, targets = as_array(x, f"{name}: x"), as_array(y, f"{name}: y", None)
    if targets.ndim == 2 and 1 in targets.shape:
        targets = targets.reshape(-1)
    if targets.ndim not in (1, 2):
        raise HyperkronError(
            f"{name}: y has shape {targets.shape}; labels are one number or name a row, or (rows, annotators)."
        )
    if inputs.ndim == 0 or len(inputs) != len(targets):
        raise HyperkronError(f"{name}: x has {len(inputs) if inputs.ndim else 0} rows but y has {len(targets)}.")
    if not len(targets):
        raise HyperkronError(f"{name} is empty: it has no rows.")
    if targets.ndim == 2:
        refuse_one_hot(targets, name)
        columns = [label_names(column, f"{name}: y") for column in targets.T]
        ballot = Ballot.of(columns, [f"annotator {s}" for s in range(len(columns))])
        if classes and all(answer.isdecimal() for answer in ballot.answers):
            ballot = replace(ballot, answers=tuple(_class_names(map(int, ballot.answers), classes, name)))
        return ballot.given_to(array_rows(inputs, np.zeros(len(targets), dtype=np.int64), name, classes))
    labels = label_names(targets, f"{name}: y")
    if classes and targets.dtype.kind in "iu":
        labels = [*_class_names(targets.tolist(), classes, name)]
    rows = np.arange(len(targets))
    texts_only = inputs.dtype.kind == "O" and all(isinstance(v, str) or is_missing(v) for v in inputs.flat)
    if inputs.ndim == 1 and (inputs.dtype.kind == "U" or texts_only):
        texts = ["" if value is None or value != value else str(value) for value in inputs.tolist()]
        return Raw(name, "text", texts, labels, rows, classes=classes)
    if inputs.dtype.kind not in "fiub":
        raise HyperkronError(f"{name}: x is of type {inputs.dtype}; it must hold numbers, or texts in one dimension.")
    if inputs.ndim <= 2:
        flat = inputs.reshape(len(inputs), -1)
        return Raw(name, "table", {f"x{i}": flat[:, i] for i in range(flat.shape[1])}, labels, rows, classes=classes)
    pictures, notes = _as_pictures(inputs, name)
    return Raw(name, "image", pictures, labels, rows, notes, classes=classes)


def refuse_one_hot(y: Array, name: str) -> None:
    """Refuse what is not the votes (rows, annotators) that it would be taken for."""
    numeric = y.dtype.kind in "fiub" and len(y) > 2
    if numeric and ((y != 0).sum(1) == 1).all() and y.max() == 1:
        raise HyperkronError(
            f"{name}: y has a single 1 in each of its {len(y)} rows, as one-hot labels have; pass y.argmax(1). The "
            "columns of y are labels by different annotators."
        )


def _class_names(numbers: Iterable[int], classes: tuple[str, ...], name: str) -> list[str]:
    """What the classes of these numbers are called."""
    found = list(numbers)
    outside = sorted({number for number in found if not 0 <= number < len(classes)})
    if outside:
        raise HyperkronError(f"{name}: y holds {listing(outside)}, but there are {len(classes)} classes.")
    return [classes[number] for number in found]


def _as_pictures(x: Array, name: str) -> tuple[Array, tuple[str, ...]]:
    """uint8 (N, C, H, W) of an array of images, channels first, last or absent."""
    if x.ndim not in (3, 4):
        raise HyperkronError(f"{name}: x has shape {x.shape}; images are (N, H, W), (N, H, W, C) or (N, C, H, W).")
    last = x.ndim == 4 and x.shape[1] not in (1, 3)
    planes = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2) if last else x
    if planes.shape[1] not in (1, 3, 4) or 0 in x.shape:
        raise HyperkronError(f"{name}: x has shape {x.shape}; images have 1 or 3 channels, first or last.")
    pixels, notes = _as_bytes(planes, name)
    if pixels.shape[1] == 4:  # colours and opacity: what is seen on white
        colours, opacity = np.split(pixels.astype(np.uint16), [3], axis=1)
        pixels = (255 - ((255 - colours) * opacity + 127) // 255).astype(np.uint8)
    return pixels, notes


def _as_bytes(x: Array, name: str) -> tuple[Array, tuple[str, ...]]:
    """Pixels from 0 to 1 or to 255 as uint8."""
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x), ()
    if not np.isfinite(x).all():
        raise HyperkronError(f"{name}: x holds images with missing or infinite pixels; repair or remove them.")
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 255 or (x.dtype.kind == "f" and high > 1 and bool((x != np.round(x)).any())):
        raise HyperkronError(
            f"{name}: pixels of x run from {low:g} to {high:g}; images are 0 to 255, or 0 to 1. Undo the "
            "standardisation."
        )
    if x.dtype.kind == "f" and high <= 1:
        return np.round(x * 255).astype(np.uint8), (f"{name}: pixels from 0 to 1 are kept to 8 bits.",)
    return x.astype(np.uint8), ()


def read_idx_rows(place: Place) -> Raw:
    """MNIST and its relatives: ``train-images-idx3-ubyte`` with labels, or ``t10k-…`` for the part ``test``."""
    folder, part = place.path, place.part or "train"
    prefix = {"train": "train", "test": "t10k"}.get(part)
    if prefix is None:
        raise HyperkronError(f"part={part!r} is not in {str(folder)!r}; there is train and test.")
    files = (find_idx(folder, f"{prefix}-{what}-ubyte") for what in ("images-idx3", "labels-idx1"))
    images, labels = (read_idx(file, place.options.max_bytes).numpy() for file in files)
    return array_rows(images, labels, f"{folder.name}:{part}")


def read_cifar(place: Place) -> Raw:
    """The binary version of CIFAR-10 (``data_batch_1.bin`` …) or CIFAR-100 (``train.bin``).

    A record is one label byte (two for CIFAR-100: coarse and fine) and 3 × 32 × 32 pixels.

    Reference: Krizhevsky, "Learning multiple layers of features from tiny images" (2009).
    """
    folder, part = place.path, place.part or "train"
    ten = not (folder / "train.bin").is_file()
    ten_parts = {"train": "data_batch_*.bin", "test": "test_batch.bin"}
    pattern = (ten_parts if ten else {"train": "train.bin", "test": "test.bin"}).get(part)
    files = sorted(folder.glob(pattern)) if pattern else []
    if not files:
        raise HyperkronError(f"part={part!r} is not in {str(folder)!r}; there is train and test.")
    ahead = 1 if ten else 2
    size = ahead + 32 * 32 * 3
    records = []
    for file in files:
        content = np.frombuffer(read_bounded(file, place.options), dtype=np.uint8)
        if not len(content) or len(content) % size:
            raise HyperkronError(
                f"{str(file)!r} has {len(content)} bytes, not a multiple of the {size} of a CIFAR record; "
                "fetch it again."
            )
        records.append(content.reshape(-1, size))
    joined = np.concatenate(records)
    names = folder / ("batches.meta.txt" if ten else "fine_label_names.txt")
    lines = re.split(r"[\r\n]+", names.read_text("utf-8")) if names.is_file() else []
    classes = tuple(line.strip() for line in lines if line.strip())
    labels = joined[:, ahead - 1].astype(np.int64)
    return array_rows(joined[:, ahead:].reshape(-1, 3, 32, 32), labels, f"{folder.name}:{part}", classes)
