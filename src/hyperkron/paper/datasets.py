"""Real data for the recipes, from a folder that holds ``mnist/``, ``cifar10/``, ``wrench/`` and the encoders.

The folder is the one given, or the environment variable ``HYPERKRON_DATA``, or ``./data``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyperkron.data.idx import mnist as read_mnist
from hyperkron.solution import HyperkronError


def find(name: str, folder: str | Path | None = None) -> Path:
    """The folder of one dataset.

    Args:
        name: such as ``mnist`` or ``wrench/trec``.
        folder: where all datasets are; ``None`` for ``HYPERKRON_DATA`` or ``./data``.
    """
    roots = [folder] if folder is not None else [os.environ.get("HYPERKRON_DATA"), "data"]
    for root in roots:
        if root and (Path(root) / name).is_dir():
            return Path(root) / name
    looked = ", ".join(str(Path(root) / name) for root in roots if root)
    raise HyperkronError(
        f"the data {name!r} were not found (looked at {looked}); pass data=FOLDER or set HYPERKRON_DATA to the folder "
        f"that holds {name}/."
    )


@dataclass(frozen=True)
class Images:
    """Images in [0, 1] (N, 784) or (N, 3, 32, 32) with their labels (N,), in two parts."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def mnist(folder: str | Path | None = None, name: str = "mnist") -> Images:
    """MNIST (60 000 and 10 000 images), or ``fashion_mnist``, from its IDX files."""
    data = read_mnist(find(name, folder))
    return Images((data.images, data.labels), (data.test_images, data.test_labels))


def cifar10(folder: str | Path | None = None) -> Images:
    """CIFAR-10 (50 000 and 10 000 images) from six sheets of 100 × 100 tiles and ``labels.npz``.

    Training sheets that are absent are left out, each with its 10 000 images; one must be there.
    """
    np, image = _imaging()
    where = find("cifar10", folder)
    with np.load(where / "labels.npz") as labels:
        found = {key: torch.from_numpy(labels[key]).long().flatten() for key in labels.files}
    train, test = (next((v for k, v in found.items() if part in k), None) for part in ("train", "test"))
    if train is None or test is None:
        raise HyperkronError(
            f"{where}/labels.npz holds {sorted(found)}, not the labels of train and test; fetch it again."
        )
    there = [i for i in range(5) if (where / f"train_{i}.webp").is_file()]
    if not there:
        raise HyperkronError(f"{where} holds none of train_0.webp to train_4.webp; fetch at least one.")
    sheets = torch.cat([_tiles(where / f"train_{i}.webp", np, image) for i in there])
    given = torch.cat([train.chunk(5)[i] for i in there])
    return Images((sheets, given), (_tiles(where / "test.webp", np, image), test))


def _imaging():  # type: ignore[no-untyped-def]
    try:
        import numpy
        from PIL import Image
    except ImportError as error:
        raise HyperkronError(f"reading images needs {error.name}; pip install 'hyperkron[data]'.") from error
    return numpy, Image


def _tiles(path: Path, np, image) -> Tensor:  # type: ignore[no-untyped-def]
    """The 32 × 32 tiles of a sheet, row by row, as (N, 3, 32, 32) in [0, 1]."""
    with image.open(path) as sheet:
        pixels = torch.from_numpy(np.array(sheet.convert("RGB")))
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    tiles = pixels[: rows * 32, : columns * 32].reshape(rows, 32, columns, 32, 3).permute(0, 2, 4, 1, 3)
    return tiles.reshape(-1, 3, 32, 32).float() / 255
