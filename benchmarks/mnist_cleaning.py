"""MNIST hypercleaning: does KFAC in place of the solver of AID, AmIGO and MRBO reach the same test loss sooner?

Half of the training labels are drawn anew, uniformly. λ is one weight for every training example, θ a linear classifier:

    J_in = mean(clip(λ_n) · CE) + 0.001 ‖θ‖² on the noisy part ,      J_out = mean CE on the first validation part

Every method is tuned by the same trials (step sizes of θ and λ, and one number of its solver: damping, or the step of
its iteration) on the *second* validation part, in two rounds: all settings for a fifth of the iterations, the best few
for all of them. The chosen setting runs with every seed, a method and its KFAC version taking turns step block by step
block, so that whatever slows the machine slows both; only then is the test part looked at, outside the clock.

    python benchmarks/mnist_cleaning.py             # continues where an earlier run stopped
    python benchmarks/mnist_cleaning.py --table     # the tables of docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import common
import hyperkron as hk
from hyperkron.data import mnist

RESULT = "mnist_cleaning.json"
PAIRS = (("AID-CG", "AID-KFAC"), ("AmIGO", "AmIGO-KFAC"), ("MRBO", "MRBO-KFAC"))
DAMPINGS = (1e-2, 1e-1, 1.0)
STEPS = (0.01, 0.03, 0.1)
SOLVER = {
    "AID-CG": ("damping", DAMPINGS),
    "AID-KFAC": ("damping", DAMPINGS),
    "AmIGO": ("step of v", STEPS),
    "AmIGO-KFAC": ("damping", DAMPINGS),
    "MRBO": ("step of the series", STEPS),
    "MRBO-KFAC": ("damping", DAMPINGS),
}


# --- the problem -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Standardised images and labels; the training labels are partly wrong, ``clean`` says which are right."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    clean: Tensor


def noisy_mnist(folder: str | Path, counts: tuple[int, int, int], noise: float = 0.5, seed: int = 0) -> Split:
    """MNIST's training part cut at random into training, validation and second validation; noise in the first."""
    data = mnist(folder)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.images), generator=generator)[: sum(counts)].split(list(counts))
    labels = data.labels[order[0]].clone()
    again = torch.rand(len(labels), generator=generator) < noise
    labels[again] = torch.randint(10, (int(again.sum()),), generator=generator)
    mean, deviation = data.images[order[0]].mean(0), data.images[order[0]].std(0)
    scale = torch.where(deviation > 0, 1 / deviation.clamp(min=1e-12), torch.zeros_like(deviation))

    def standard(x: Tensor) -> Tensor:
        return ((x - mean) * scale).clamp(-10, 10)

    parts = [(standard(data.images[i]), data.labels[i]) for i in order]
    test = (standard(data.test_images), data.test_labels)
    return Split((parts[0][0], labels), parts[1], parts[2], test, labels == data.labels[order[0]])


def cleaning(decay: float = 1e-3) -> hk.BilevelProblem:
    """The two objectives."""

    def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
        x, y, index = batch
        return hk.losses.cross_entropy(model(x), y, weight=weights(index)) + hk.losses.l2(model, decay)

    def outer(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
        x, y = batch
        return hk.losses.cross_entropy(model(x), y)

    return hk.BilevelProblem(inner, outer)


def loss_and_error(model: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[float, float]:
    with torch.no_grad():
        output = model(part[0])
        wrong = (output.argmax(1) != part[1]).double().mean()
        return float(nn.functional.cross_entropy(output, part[1])), float(wrong)


# --- the methods -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is tuned: the step sizes of θ and λ, and the number of the solver."""

    inner: float
    outer: float
    solver: float


def algorithm(name: str, setting: Setting, seed: int, refresh: int) -> hk.Algorithm:
    rates: dict[str, Any] = {"inner_rate": setting.inner, "outer_rate": setting.outer, "seed": seed}
    falling = rates | {k: hk.Rate(rates[k], 1 / 3) for k in ("inner_rate", "outer_rate")}
    kfac = hk.kfac(setting.solver, refresh_every=refresh, seed=seed) if name.endswith("KFAC") else None
    if name == "AID-CG":
        return hk.AID(hk.cg(3, setting.solver), **rates)
    if name == "AID-KFAC":
        return hk.AID(kfac, **rates)
    if name == "AmIGO":
        return hk.AmIGO(linear_rate=setting.solver, **rates)
    if name == "AmIGO-KFAC":
        return hk.AmIGO(hypergradient=kfac, **rates)
    if name == "MRBO":
        return hk.MRBO(hk.StochasticNeumann(10, setting.solver), **falling)
    return hk.MRBO(kfac, **falling)


@dataclass
class Trial:
    """One run of one method that can be advanced a few steps at a time, with its own clock."""

    name: str
    setting: Setting
    split: Split
    batch: int
    seed: int
    refresh: int = 5

    def __post_init__(self) -> None:
        x, y = self.split.train
        self.model = nn.Linear(x.shape[1], 10)
        self.weights = hk.SampleWeights(len(x))
        self._pretrain()
        self.algorithm = algorithm(self.name, self.setting, self.seed, self.refresh)
        self.state = self.algorithm.init(cleaning(), self.model, self.weights, project=hk.Box(0.0, 1.0))
        inner = hk.Examples(x, y, torch.arange(len(x)), batch_size=self.batch, seed=self.seed)
        self.draw = hk.Draw(inner, hk.Examples(*self.split.validation, batch_size=self.batch, seed=self.seed + 1))
        self.seconds = self.cpu = 0.0
        self.curve: list[dict[str, float]] = []
        self.failed = False

    def _pretrain(self) -> None:
        """θ of every method starts at the same point: a few passes over noisy training and validation data."""
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        x, y = (torch.cat(pair) for pair in zip(self.split.train, self.split.validation, strict=True))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        for i in torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split(self.batch) * 2:
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x[i]), y[i]).backward()
            optimizer.step()

    def advance(self, steps: int) -> None:
        """``steps`` more steps, on the clock."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            for _ in range(0 if self.failed else steps):
                self.algorithm.step(self.state, self.draw)
        except hk.HyperkronError:
            self.failed = True
        self.seconds += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu

    def look(self, **parts: tuple[Tensor, Tensor]) -> None:
        """Add a row to the curve, off the clock."""
        row = {"step": self.state.step, "seconds": self.seconds, "cpu": self.cpu}
        for name, part in parts.items():
            found = (math.inf, 1.0) if self.failed else loss_and_error(self.model, part)
            row[f"{name}_loss"], row[f"{name}_error"] = (x if math.isfinite(x) else 1e9 for x in found)
        self.curve.append(row)
