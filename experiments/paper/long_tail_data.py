"""Long-tailed images: fewer and fewer of each class, with a small balanced part for λ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.paper import datasets
from experiments.paper.epochs import Epochs
from hyperkron.cleaning.data import read
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_whole

Part = tuple[Tensor, Tensor]
"""Images (N, C, H, W) with their labels (N,)."""

FILES = ("train_images", "train_labels", "test_images", "test_labels")
"""Of a folder of decoded images."""


def counts(largest: float, imbalance: float, classes: int) -> list[int]:
    """Images of each class: n_c = largest · (1/imbalance)^(c/(C−1)), rounded down.

    Example:
        >>> counts(4990, 100, 10)
        [4990, 2991, 1793, 1075, 644, 386, 231, 138, 83, 49]
    """
    return [int(largest * (1 / imbalance) ** (c / (classes - 1)) + 1e-9) for c in range(classes)]


@dataclass(frozen=True)
class LongTail:
    """The parts of a long-tailed data set, standardised by channel.

    Attributes:
        train: its classes have ``counts`` images.
        meta: a few training images of each class, for λ.
        held_out: further training images of each class, to choose settings.
        test: all test images.
    """

    train: Part
    meta: Part
    held_out: Part
    test: Part
    counts: tuple[int, ...]


def long_tailed(
    train: Part, test: Part, imbalance: float, *, meta: int = 10, held_out: int = 200, seed: int = 0
) -> LongTail:
    """Cut balanced training images into the parts of a long-tailed data set.

    Args:
        train, test: images of type uint8.
        imbalance: how many times the first class outnumbers the last.
        meta, held_out: images of each class in these parts; n_0 = N/C − meta − held_out.
        seed: which images.
    """
    labels = train[1]
    classes = int(labels.max()) + 1
    sizes = counts(len(labels) / classes - meta - held_out, imbalance, classes)
    generator = torch.Generator().manual_seed(seed)
    rows: dict[str, list[Tensor]] = {"meta": [], "held_out": [], "train": []}
    for c in range(classes):
        own = torch.nonzero(labels == c).flatten()
        own = own[torch.randperm(len(own), generator=generator)]
        if meta + held_out >= len(own) or sizes[c] < 1:
            raise HyperkronError(
                f"class {c} has {len(own)} images: too few for meta={meta}, held_out={held_out} and "
                f"imbalance={imbalance:g}."
            )
        rows["meta"].append(own[:meta])
        rows["held_out"].append(own[meta : meta + held_out])
        rows["train"].append(own[meta + held_out : meta + held_out + sizes[c]])
    chosen = {name: torch.cat(parts) for name, parts in rows.items()}
    pixels = train[0][chosen["train"]].float()
    mean, deviation = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True).clamp(min=1e-3)

    def part(images: Tensor, own: Tensor) -> Part:
        return (images.float() - mean) / deviation, own

    parts = {name: part(train[0][index], labels[index]) for name, index in chosen.items()}
    found = tuple(len(x) for x in rows["train"])
    return LongTail(parts["train"], parts["meta"], parts["held_out"], part(*test), found)


class Augmented(Epochs):
    """Epoch after epoch of images, shuffled, shifted by up to ``shift`` pixels (mirrored edges) and flipped.

    An epoch is made at once on the images' device. What does not fill a batch is left out of the epoch.

    Args:
        part: the images and labels.
        batch: images of a batch; all of them, where there are fewer.
        shift: in pixels.
        flip: whether half of the images are flipped.
        seed: of order, shifts and flips.
    """

    def __init__(self, part: Part, batch: int, *, shift: int = 4, flip: bool = True, seed: int = 0) -> None:
        check_whole("batch", batch)
        self.images, self.labels = F.pad(part[0], (shift,) * 4, "reflect"), part[1]
        self.batch, self.shift, self.flip = min(batch, len(part[1])), shift, flip
        self.side = part[0].shape[-1]
        super().__init__(torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.labels) // self.batch

    def epoch(self) -> Iterator[Part]:
        """All batches of an epoch."""
        images, labels = self._epoch()
        cuts = (slice(i * self.batch, (i + 1) * self.batch) for i in range(len(self)))
        return ((images[cut], labels[cut]) for cut in cuts)

    def _epoch(self) -> Part:
        count, device, random = len(self.labels), self.images.device, self.generator
        order = torch.randperm(count, generator=random).to(device)
        corner = torch.randint(0, 2 * self.shift + 1, (2, count, 1), generator=random).to(device)
        flipped = (torch.rand(count, 1, generator=random) < 0.5 * self.flip).to(device)
        pixel = torch.arange(self.side, device=device)
        rows, columns = corner[0] + pixel, corner[1] + torch.where(flipped, self.side - 1 - pixel, pixel)
        images = self.images[order[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return images.permute(0, 3, 1, 2).contiguous(), self.labels[order]


def decoded(name: str, folder: str | Path | None) -> tuple[Part, Part]:
    """Training and test images as uint8: ``digits`` (8 × 8, of scikit-learn), or a folder such as ``cifar10``.

    A folder made by :func:`keep_decoded` is read at once.
    """
    if name == "digits":
        return _digits()
    where = datasets.find(name, folder)
    if all((where / f"{file}.npy").exists() for file in FILES):
        import numpy as np

        a, b, c, d = (torch.from_numpy(np.load(where / f"{file}.npy")) for file in FILES)
        return (a, b), (c, d)
    train = read(where, part="train")
    test = read(where, part="test", like=train)
    return _tensors(train), _tensors(test)


def keep_decoded(parts: tuple[Part, Part], folder: Path) -> None:
    """Write decoded images into a folder, for other processes to read at once."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    for file, value in zip(FILES, (x for part in parts for x in part), strict=True):
        np.save(folder / f"{file}.npy", value.numpy())


def _tensors(rows: Any) -> Part:
    return torch.as_tensor(rows.inputs), torch.as_tensor(rows.labels)


def _digits() -> tuple[Part, Part]:
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(x) for x in load_digits(return_X_y=True))
    x = (images.reshape(-1, 1, 8, 8) * 15).to(torch.uint8).expand(-1, 3, -1, -1)
    cut = 1400
    return (x[:cut], labels[:cut]), (x[cut:], labels[cut:])


def moved(data: LongTail, device: torch.device) -> LongTail:
    """The same data on a device."""

    def part(x: Part) -> Part:
        return x[0].to(device), x[1].to(device)

    return LongTail(part(data.train), part(data.meta), part(data.held_out), part(data.test), data.counts)


def class_shares(sizes: Sequence[int], device: torch.device) -> Tensor:
    """The share of each class in the training images."""
    found = torch.tensor(sizes, dtype=torch.float32, device=device)
    return found / found.sum()
