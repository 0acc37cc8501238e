"""The datasets of the cleaning table: images and texts, with made-up or real label noise, and a few trusted rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.paper.datasets import cifar10, mnist

IMAGES = ("digits", "mnist", "fashion_mnist", "cifar10")
TEXTS = ("trec", "semeval", "youtube", "sms", "chemprot")
NOISES = ("uniform-20", "uniform-50", "class-40")
PER_CLASS = (10, 50)
ROWS = {"digits": 2000, "mnist": 10000, "fashion_mnist": 10000, "cifar10": 20000}
TEST_ROWS = {"digits": 500, "mnist": 5000, "fashion_mnist": 5000, "cifar10": 5000}
DATA = Path(os.environ.get("HYPERKRON_DATA", "data"))


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    dataset: str
    noise: str
    per_class: int

    def __str__(self) -> str:
        return f"{self.dataset} {self.noise} {self.per_class}/class"


def settings() -> list[Setting]:
    """All of them: four image sets under three kinds of noise, five texts with their weak labels, two trusted sizes."""
    images = [Setting(d, noise, per) for d in IMAGES for noise in NOISES for per in PER_CLASS]
    return images + [Setting(d, "weak", per) for d in TEXTS for per in PER_CLASS]


@dataclass(frozen=True)
class Problem:
    """Inputs as a network takes them; ``gold`` only scores the result."""

    kind: str
    x: Tensor
    given: Tensor
    gold: Tensor
    trusted_x: Tensor
    trusted_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int


def corrupt(labels: Tensor, classes: int, noise: str, random: torch.Generator) -> Tensor:
    """Uniform: redrawn among all classes. Class-dependent: moved to the next class, k → k + 1."""
    kind, percent = noise.split("-")
    hit = torch.rand(len(labels), generator=random) < int(percent) / 100
    other = torch.randint(classes, labels.shape, generator=random) if kind == "uniform" else (labels + 1) % classes
    return torch.where(hit, other, labels)


def images(name: str) -> tuple[Tensor, Tensor]:
    """All images (N, C, H, W) in [0, 1] and their classes."""
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return torch.tensor(x / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(y)
    if name == "cifar10":
        return cifar10(DATA).train
    x, y = mnist(DATA, name).train
    return x.reshape(-1, 1, 28, 28), y


def _first_of_each(labels: Tensor, classes: int, count: int) -> Tensor:
    """True for the first ``count`` rows of every class."""
    rank = torch.nn.functional.one_hot(labels, classes).cumsum(0).gather(1, labels[:, None])[:, 0]
    return rank <= count


def load(setting: Setting, seed: int) -> Problem:
    """A setting under a seed: which rows are trusted, and which labels are wrong."""
    random = torch.Generator().manual_seed(seed)
    return (_text if setting.noise == "weak" else _image)(setting, random)


def _image(setting: Setting, random: torch.Generator) -> Problem:
    x, y = images(setting.dataset)
    order = torch.randperm(len(x), generator=random)
    test, rest = order[: TEST_ROWS[setting.dataset]], order[TEST_ROWS[setting.dataset] :]
    picked = _first_of_each(y[rest], 10, setting.per_class)
    trusted, noisy = rest[picked], rest[~picked][: ROWS[setting.dataset]]
    given = corrupt(y[noisy], 10, setting.noise, random)
    mean, deviation = x[noisy].mean((0, 2, 3), keepdim=True), x[noisy].std((0, 2, 3), keepdim=True)
    scaled = (x - mean) / deviation
    return Problem("image", scaled[noisy], given, y[noisy], scaled[trusted], y[trusted], scaled[test], y[test], 10)


def _text(setting: Setting, random: torch.Generator) -> Problem:
    with np.load(DATA / "embeddings" / f"{setting.dataset}.npz", allow_pickle=False) as file:
        a = {key: torch.tensor(file[key]) for key in file.files if file[key].dtype.kind in "fiu"}
    x, valid = a["x_train"].float(), a["x_valid"].float()
    classes = int(max(a["y_train"].max(), a["y_valid"].max(), a["y_test"].max())) + 1
    order = torch.randperm(len(valid), generator=random)
    picked = order[_first_of_each(a["y_valid"].long()[order], classes, setting.per_class)]
    mean, deviation = x.mean(0), x.std(0) + 1e-6
    return Problem(
        "text",
        (x - mean) / deviation,
        a["majority_train"].long(),
        a["y_train"].long(),
        (valid[picked] - mean) / deviation,
        a["y_valid"].long()[picked],
        (a["x_test"].float() - mean) / deviation,
        a["y_test"].long(),
        classes,
    )


def prepare(names: tuple[str, ...] = TEXTS, *, encoder: str | None = None) -> None:
    """Embed the texts once, with the readers and the encoder that ``hyperkron clean`` uses."""
    from hyperkron.cleaning.data import ReadOptions, read, read_pair
    from hyperkron.cleaning.models import TextEncoder

    model, folder = TextEncoder(encoder), DATA / "embeddings"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        train, valid = read_pair(DATA / "wrench" / name, options=ReadOptions(keep_overlap=True, abstain="first"))
        test = read(DATA / "wrench" / name, part="test", like=train)
        arrays: dict[str, Any] = {"majority_train": train.labels, "y_train": train.gold}
        for part, rows in (("train", train), ("valid", valid), ("test", test)):
            arrays[f"x_{part}"] = model.embed(list(rows.inputs)).numpy().astype(np.float16)
            if part != "train":
                arrays[f"y_{part}"] = rows.labels
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        print(name, len(train), len(valid), len(test), flush=True)
