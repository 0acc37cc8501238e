"""Small noisy data and a quick plan, for the tests of cleaning."""

from __future__ import annotations

import csv
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hyperkron.cleaning import method, run
from hyperkron.cleaning.label_noise import label_noise
from hyperkron.cleaning.models import trees
from hyperkron.cleaning.trainer import TrainingPlan


@dataclass(frozen=True)
class Blobs:
    """Three round classes in the plane; ``wrong`` says which labels of ``noisy`` are not ``true``."""

    x: Tensor
    true: Tensor
    noisy: Tensor
    wrong: Tensor
    trusted: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        return self.x, self.noisy


def blobs(rows: int = 200, trusted: int = 24, test: int = 60, rate: float = 0.3, apart: float = 6.0) -> Blobs:
    """Data with ``rate`` of the training labels wrong."""
    random = torch.Generator().manual_seed(0)
    total = rows + trusted + test
    y = torch.arange(total) % 3
    centres = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]) * apart
    x = centres[y] + torch.randn(total, 2, generator=random)
    wrong = torch.rand(rows, generator=random) < rate
    noisy = torch.where(wrong, (y[:rows] + torch.randint(1, 3, (rows,), generator=random)) % 3, y[:rows])
    middle = rows + trusted
    return Blobs(x[:rows], y[:rows], noisy, wrong, (x[rows:middle], y[rows:middle]), (x[middle:], y[middle:]))


def write_csv(path: Path, part: tuple[Tensor, Tensor]) -> Path:
    """A table with two features and the names of the classes."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["across", "up", "label"])
        for (a, b), y in zip(part[0].tolist(), part[1].tolist(), strict=True):
            writer.writerow([f"{a:.6f}", f"{b:.6f}", "ABC"[y]])
    return path


def quicken(monkeypatch: pytest.MonkeyPatch, least: int = 16, forest: int = 3) -> None:
    """Trainings of a dozen steps instead of hundreds, forests of a few trees, and few iterations of EM."""
    monkeypatch.setattr(run, "TrainingPlan", partial(TrainingPlan, least=least))
    monkeypatch.setattr(method, "label_noise", partial(label_noise, iterations=10))
    monkeypatch.setattr(trees, "TREES", forest)
    monkeypatch.setattr(trees, "ROUNDS", 3)


class Watch:
    """A progress that keeps what it was told and, if asked to, sends a signal after so many steps."""

    def __init__(self, stop_after: int | None = None, number: int = signal.SIGINT) -> None:
        self.totals: list[int] = []
        self.by_bar: list[int] = []  # steps between two starts
        self.messages: list[str] = []
        self.stages: list[str] = []
        self.steps, self.stops, self.stop_after, self.number = 0, 0, stop_after, number

    def start(self, total: int) -> None:
        self.totals.append(total)
        self.by_bar.append(0)

    def advance(self, steps: int, stage: str) -> None:
        self.steps += steps
        self.by_bar[-1] += steps
        self.stages.append(stage)
        if self.stop_after is not None and self.steps >= self.stop_after:
            self.stop_after = None
            signal.raise_signal(self.number)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def stop(self) -> None:
        self.stops += 1
