"""Pictures: from files, from bytes, from folders by class and from sheets of tiles."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperkron.cleaning.data.arrays import read_npz
from hyperkron.cleaning.data.files import inside, listing, need, several
from hyperkron.cleaning.data.labelled import Raw, ReadOptions
from hyperkron.cleaning.data.values import is_missing
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    from hyperkron.cleaning.data.labelled import Array

FORMATS = {
    "png": "PNG",
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "webp": "WEBP",
    "bmp": "BMP",
    "gif": "GIF",
    "tif": "TIFF",
    "tiff": "TIFF",
    "ppm": "PPM",
    "pgm": "PPM",
}
"""Suffixes of image files and the decoders they may use; no decoder that starts another program is among them."""
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TILES = 100  # in each direction of a sheet
_GREY = frozenset({"1", "L", "LA", "I;16", "I;16B"})
_SIDE = 64  # pictures of different sizes are scaled to at most this
_PARTS = ("train", "trusted", "valid", "validation", "val", "test")


class _Unreadable(Exception):
    """Why one picture cannot be used."""


def _open(value: Any, folder: Path | None, where: str, max_pixels: int) -> Any:
    """A picture whose header is read and whose pixels are not."""
    image = need("PIL.Image")
    if isinstance(value, dict):  # how Hugging Face stores a picture
        value = value.get("bytes") or value.get("path")
    if is_missing(value):
        raise _Unreadable("no image is named")
    if isinstance(value, bytes):
        source: Any = io.BytesIO(value)
    elif isinstance(value, str):
        source = Path(value) if folder is None else inside(folder, value, where)
        try:
            there = source.is_file()  # a pipe or a device is none, and would never end
        except (OSError, ValueError) as error:  # a name too long, or with a zero byte in it
            raise _Unreadable(str(error)[:80]) from error
        if not there:
            raise _Unreadable("there is no such file")
    else:
        raise _Unreadable(f"it is a {type(value).__name__}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", image.DecompressionBombWarning)  # the limit below is the one that counts
        try:
            opened = image.open(source, formats=sorted(set(FORMATS.values())))
        except image.DecompressionBombError as error:
            raise HyperkronError(_bomb(value, where, str(error), max_pixels)) from error
        except Exception as error:  # decoders of hostile bytes raise nearly anything
            raise _Unreadable(str(error)[:80]) from error
    if opened.size[0] * opened.size[1] > max_pixels:
        raise HyperkronError(_bomb(value, where, f"{opened.size[0]} × {opened.size[1]} pixels", max_pixels))
    return opened


def _bomb(value: Any, where: str, size: str, limit: int) -> str:
    name = repr(value[:200]) if isinstance(value, str) else "an embedded image"
    return (
        f"{where}: {name} is too large to be decoded safely ({size}; max_pixels={limit}). Remove it, or pass "
        "ReadOptions(max_pixels=...) if you trust it."
    )


def _pixels(opened: Any, shape: tuple[int, ...]) -> Array:
    """The picture as uint8 (C, H, W)."""
    np, image = need("numpy"), need("PIL.Image")
    if opened.mode.startswith("I;16"):
        opened = image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
    elif opened.mode in ("I", "F"):
        raise _Unreadable("its pixels have 32 bits")
    picture = opened.convert("L" if shape[0] == 1 else "RGB")
    if picture.size != (shape[2], shape[1]):
        picture = picture.resize((shape[2], shape[1]), image.Resampling.BILINEAR)
    found = np.asarray(picture, dtype=np.uint8)
    return found[None] if shape[0] == 1 else found.transpose(2, 0, 1)


def load_images(
    values: Sequence[Any],
    folder: Path | None,
    where: str,
    options: ReadOptions,
    shape: tuple[int, ...] | None = None,
) -> tuple[Array, Array, list[str]]:
    """Pictures of one shape.

    Args:
        values: paths relative to ``folder``, or bytes.
        folder: that no path may leave; None for paths of the caller's own, which may lead anywhere.
        where: what messages call the source.
        options: size and limits.
        shape: (C, H, W) to come to; None to choose by what is there.

    Returns:
        uint8 (N, C, H, W), the positions of those that could be read, and messages.
    """
    np = need("numpy")
    sizes: Counter[tuple[int, int]] = Counter()
    grey = True
    broken: dict[int, str] = {}
    for i, value in enumerate(values):
        try:
            with _open(value, folder, where, options.max_pixels) as opened:
                sizes[opened.size] += 1
                grey &= opened.mode in _GREY
        except _Unreadable as reason:
            broken[i] = str(reason)
    notes: list[str] = []
    if sizes and shape is None:
        shape, notes = _choose_shape(sizes, grey, where, options)
    if shape is None:
        raise HyperkronError(f"{where}: none of the {len(values)} images can be read: {_reasons(values, broken)}.")
    if len(values) * int(np.prod(shape)) > options.max_bytes:
        raise HyperkronError(
            f"{where}: {len(values)} images of shape {shape} need more than max_bytes={options.max_bytes}; pass a "
            "smaller ReadOptions(image_size=...), or a larger max_bytes."
        )
    pictures = np.empty((len(values), *shape), dtype=np.uint8)
    for i, value in enumerate(values):
        if i in broken:
            continue
        try:
            with _open(value, folder, where, options.max_pixels) as opened:
                pictures[i] = _pixels(opened, shape)
        except _Unreadable as reason:
            broken[i] = str(reason)
        except HyperkronError:
            raise
        except Exception as error:  # decoders of hostile bytes raise nearly anything
            broken[i] = str(error)[:80]
    kept = np.array([i for i in range(len(values)) if i not in broken], dtype=np.int64)
    if not len(kept):
        raise HyperkronError(f"{where}: none of the {len(values)} images can be read: {_reasons(values, broken)}.")
    if broken:
        notes.append(
            f"{where}: {several(len(broken), 'image')} cannot be read, so the rows are left out: "
            f"{_reasons(values, broken)}."
        )
    return pictures[kept] if broken else pictures, kept, notes


def _reasons(values: Sequence[Any], broken: dict[int, str]) -> str:
    def name(i: int) -> str:
        return repr(values[i][:80]) if isinstance(values[i], str) else f"row {i}"

    return listing(f"{name(i)} ({reason})" for i, reason in sorted(broken.items()))


def _choose_shape(
    sizes: Counter[tuple[int, int]], grey: bool, where: str, options: ReadOptions
) -> tuple[tuple[int, ...], list[str]]:
    channels = 1 if grey else 3
    if options.image_size is not None:
        return (channels, options.image_size, options.image_size), []
    if len(sizes) == 1:
        ((width, height),) = sizes
        return (channels, height, width), []
    shorter = sorted(min(size) for size in sizes.elements())
    side = min(_SIDE, shorter[len(shorter) // 2])
    shown = listing(f"{width}×{height}" for (width, height), _ in sizes.most_common())
    note = f"{where}: images of {len(sizes)} sizes ({shown}) are scaled to {side}×{side}; image_size sets another side."
    return (channels, side, side), [note]


# --- folders by class --------------------------------------------------------------------------------------


def class_files(folder: Path, part: str | None = None) -> list[tuple[str, str]]:
    """(path relative to the folder, class) of the images of ``folder/class/…`` or ``folder/part/class/…``, in order."""
    root = folder
    inner = [name for name in _PARTS if (folder / name).is_dir()]
    if part is not None:
        if not (folder / part).is_dir():
            raise HyperkronError(
                f"part={part!r} is not a folder of {str(folder)!r}; there is {listing(inner) or 'none'}."
            )
        root = folder / part
    elif inner:
        direct = [p for p in folder.iterdir() if p.is_dir() and p.name not in _PARTS and not p.name.startswith(".")]
        root = folder if direct else folder / inner[0]
    found = []
    for entry in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")):
        files = (p for p in sorted(entry.rglob("*")) if p.suffix.lower()[1:] in FORMATS and not p.name.startswith("."))
        found += [(p.relative_to(folder).as_posix(), entry.name) for p in files]
    return found


def read_class_folder(
    folder: Path, part: str | None, options: ReadOptions, shape: tuple[int, ...] | None = None
) -> Raw:
    """Images in one folder per class; the name of a folder is the name of its class."""
    np = need("numpy")
    files = class_files(folder, part)
    if not files:
        raise HyperkronError(
            f"{str(folder)!r} is empty: no image in it. It must hold one folder per class with files of the types "
            f"{listing(FORMATS, 20)}."
        )
    name = f"{folder.name}:{part}" if part else folder.name
    pictures, kept, notes = load_images([path for path, _ in files], folder, name, options, shape)
    labels: list[str | None] = [files[i][1] for i in kept]
    broken = np.setdiff1d(np.arange(len(files)), kept)
    gone = {"unreadable image": broken} if len(broken) else {}
    return Raw(name, "image", pictures, labels, np.asarray(kept), tuple(notes), left_out=gone)


# --- sheets of tiles ---------------------------------------------------------------------------------------


def read_sheets(folder: Path, part: str | None, options: ReadOptions) -> Raw:
    """CIFAR-10 as lossless sheets of 100 × 100 tiles (``train_0.webp`` …, ``test.webp``) with ``labels.npz``.

    Sheets that are absent are left out, each with its 10 000 images and labels, and a message.
    """
    np = need("numpy")
    part = part or "train"
    labels = read_npz(folder / "labels.npz", options)
    if part not in labels:
        raise HyperkronError(f"part={part!r} is not in {str(folder)!r}; there is {listing(sorted(labels))}.")
    known, each = labels[part].reshape(-1), _TILES * _TILES
    if not len(known) or len(known) % each or known.max() >= len(CIFAR10):
        raise HyperkronError(
            f"{str(folder)!r} has {len(known)} labels of CIFAR-10 for {part}; a sheet has {each}, of classes 0 to 9."
        )
    names = [f"{part}_{i}.webp" for i in range(len(known) // each)]
    if not any((folder / name).is_file() for name in names):
        names = [f"{part}.webp"] if len(names) == 1 else names
    there = [i for i, name in enumerate(names) if (folder / name).is_file()]
    if not there:
        raise HyperkronError(f"{str(folder)!r} holds none of {names[0]} to {names[-1]}; fetch at least one.")
    pictures = np.concatenate([_tiles(folder, names[i], options) for i in there])
    rows = np.concatenate([np.arange(each * i, each * (i + 1)) for i in there])
    absent = [name for i, name in enumerate(names) if i not in there]
    notes = (f"{listing(absent)} absent: left out, with {each * len(absent)} images.",) if absent else ()
    given: list[str | None] = [CIFAR10[label] for label in known[rows]]
    gone = {"absent sheet": np.setdiff1d(np.arange(len(known)), rows)} if absent else {}
    return Raw(f"{folder.name}:{part}", "image", pictures, given, rows, notes, classes=CIFAR10, left_out=gone)


def _tiles(folder: Path, name: str, options: ReadOptions) -> Array:
    """The tiles of a sheet, row by row, as (10000, 3, H, W)."""
    np = need("numpy")
    sheet = folder / name
    try:
        with _open(name, folder, folder.name, options.max_pixels) as opened:
            pixels = np.asarray(opened.convert("RGB"))
    except (_Unreadable, OSError) as error:
        raise HyperkronError(f"{str(sheet)!r} cannot be read ({error}); fetch it again.") from error
    height, width = pixels.shape[0] // _TILES, pixels.shape[1] // _TILES
    if pixels.shape[:2] != (_TILES * height, _TILES * width) or not height or not width:
        raise HyperkronError(f"{str(sheet)!r} is {pixels.shape[:2]}, no sheet of {_TILES} × {_TILES} tiles.")
    grid: Array = pixels.reshape(_TILES, height, _TILES, width, 3).transpose(0, 2, 4, 1, 3)
    return grid.reshape(-1, 3, height, width)
