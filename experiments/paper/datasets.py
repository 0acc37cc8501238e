"""Real data for the recipes, from a folder that holds ``mnist/``, ``cifar10/``, ``wrench/`` and the encoders.

The folder is the one given, or the environment variable ``HYPERKRON_DATA``, or ``./data``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyperkron.cleaning.data import Labelled, read, read_idx
from hyperkron.cleaning.data.arrays import find_idx
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

    def to(self, device: torch.device | str) -> Images:
        """The same on a device."""
        return Images(*((x.to(device), y.to(device)) for x, y in (self.train, self.test)))


def mnist(folder: str | Path | None = None, name: str = "mnist") -> Images:
    """MNIST (60 000 and 10 000 images), or ``fashion_mnist``, from its IDX files."""
    return read_mnist(find(name, folder))


def read_mnist(folder: str | Path) -> Images:
    """MNIST, or a dataset of the same form, from the four IDX files in a folder, each with or without ``.gz``."""
    parts = []
    for part in ("train", "t10k"):
        images, labels = (
            read_idx(find_idx(Path(folder), f"{part}-{what}-ubyte")) for what in ("images-idx3", "labels-idx1")
        )
        if len(images) != len(labels):
            raise HyperkronError(
                f"folder={str(folder)!r} holds {len(images)} images but {len(labels)} labels; fetch it again."
            )
        parts.append((images.flatten(1) / 255, labels.long()))
    return Images(*parts)


def cifar10(folder: str | Path | None = None) -> Images:
    """CIFAR-10 (50 000 and 10 000 images) in any form that :func:`hyperkron.cleaning.data.read` knows.

    Of the form of sheets, training sheets that are absent are left out, each with its 10 000 images.
    """
    where = find("cifar10", folder)
    train = read(where, part="train")
    test = read(where, part="test", like=train)
    return Images(_scaled(train), _scaled(test))


def _scaled(rows: Labelled) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(rows.inputs).float() / 255, torch.as_tensor(rows.labels)
