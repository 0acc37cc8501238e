"""Folders of pictures: one folder per class, or sheets of tiles."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from hyperkron.cleaning.data.arrays import pictures_npz, read_npz
from hyperkron.cleaning.data.files import listing, np, several
from hyperkron.cleaning.data.images import SUFFIXES, load_images, open_image
from hyperkron.cleaning.data.kept import Kept, csv_table
from hyperkron.cleaning.data.labelled import Place, Raw
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.provenance import RowHashes
from hyperkron.cleaning.data.values import Array, composed
from hyperkron.solution import HyperkronError
from hyperkron.training.writing import open_plain

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TILES = 100  # in each direction of a sheet
_PARTS = ("train", "trusted", "valid", "validation", "val", "test")
_CHUNK = 2**20
_TYPES = f"files of the types {listing(SUFFIXES, 20)}."


def _root(folder: Path, part: str | None) -> Path:
    """The folder of a part, which holds those of the classes."""
    inner = [name for name in _PARTS if (folder / name).is_dir()]
    if part is not None:
        if not (folder / part).is_dir():
            raise HyperkronError(
                f"part={part!r} is not a folder of {str(folder)!r}; there is {listing(inner) or 'none'}."
            )
        return folder / part
    direct = [p for p in folder.iterdir() if p.is_dir() and p.name not in _PARTS and not p.name.startswith(".")]
    return folder if direct or not inner else folder / inner[0]


def class_files(folder: Path, part: str | None = None) -> list[tuple[str, str]]:
    """(path relative to the folder, class) of the images of ``folder/class/…`` or ``folder/part/class/…``, in order."""
    found = []
    for entry in sorted(p for p in _root(folder, part).iterdir() if p.is_dir() and not p.name.startswith(".")):
        files = (p for p in sorted(entry.rglob("*")) if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        found += [(p.relative_to(folder).as_posix(), entry.name) for p in files]
    return found


def read_class_folder(place: Place) -> Raw:
    """Images in one folder per class; the name of a folder is the name of its class. Rows are known by their file."""
    files = class_files(place.path, place.part)
    if not files:
        raise HyperkronError(
            f"{str(place.path)!r} is empty: no image in it. It must hold one folder per class with {_TYPES}"
        )
    paths, labels = [path for path, _ in files], [composed(name) for _, name in files]
    pictures, broken, notes = load_images(paths, place.path, place.name, place.options, place.shape)
    notes += other_files(_root(place.path, place.part), {place.path / path for path in paths}, place.name)
    raw = Raw(place.name, "image", pictures, [*labels], np.arange(len(files)), tuple(notes), ids={"file": paths})
    return raw.without(broken, "unreadable image")


def other_files(folder: Path, read: Collection[Path], name: str) -> list[str]:
    """What to say about files in a folder of pictures that were not read."""
    every = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    others = [repr(path.relative_to(folder).as_posix()) for path in every if path not in read]
    told = f"{name}: {several(len(others), 'file')} not read: {listing(others)}. Images are {_TYPES}"
    return [told] if others else []


def folder_hashes(place: Place) -> RowHashes:
    """A row is the name, the class and the bytes of a file; no bytes where it cannot be read."""

    def content(path: Path) -> bytes:
        with suppress(OSError), open_plain(path) as file:
            digest = hashlib.sha256()
            for chunk in iter(lambda: file.read(_CHUNK), b""):
                digest.update(chunk)
            return digest.digest()
        return b""

    files = class_files(place.path, place.part)
    return RowHashes.of_bytes("", (repr(file).encode() + content(place.path / file[0]) for file in files))


def write_class_folder(place: Place, kept: Kept) -> bytes:
    """A CSV list of the files, or an ``.npz`` of the pictures."""
    name = place.path.name
    if kept.out.suffix.lower() == ".npz":
        return pictures_npz(read_class_folder(place), kept)
    files = class_files(place.path, place.part)
    lines = ((row, [files[row][0], kept.label(row, files[row][1])]) for row in kept.within(len(files), name))
    return csv_table(["image", "label"], lines, kept.formulas, name).encode()


def read_sheets(place: Place) -> Raw:
    """CIFAR-10 as lossless sheets of 100 × 100 tiles (``train_0.webp`` …, ``test.webp``) with ``labels.npz``.

    Sheets that are absent are left out, each with its 10 000 images and labels, and a message.
    """
    folder, part, options = place.path, place.part or "train", place.options
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
    sheet = folder / name
    try:
        with open_image(name, folder, folder.name, options.max_pixels) as opened:
            pixels = np.asarray(opened.convert("RGB"))
    except HyperkronError:
        raise
    except Exception as error:  # decoders of hostile bytes raise nearly anything
        raise HyperkronError(f"{str(sheet)!r} cannot be read ({error}); fetch it again.") from error
    height, width = pixels.shape[0] // _TILES, pixels.shape[1] // _TILES
    if pixels.shape[:2] != (_TILES * height, _TILES * width) or not height or not width:
        raise HyperkronError(f"{str(sheet)!r} is {pixels.shape[:2]}, not a sheet of {_TILES} × {_TILES} tiles.")
    grid: Array = pixels.reshape(_TILES, height, _TILES, width, 3).transpose(0, 2, 4, 1, 3)
    return grid.reshape(-1, 3, height, width)
