"""Small runs that exercise everything a checkpoint holds, and the digest that says whether two states are equal."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hyperkron as hk
from hyperkron.training.encoding import split
from hyperkron.training.files import write_tensors

EXAMPLES, FEATURES, CLASSES = 20, 6, 3


class Network(nn.Module):
    """Two layers of one shape (their factors are stacked), BatchNorm (buffers), dropout (the global random state)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, FEATURES),
            nn.BatchNorm1d(FEATURES),
            nn.Tanh(),
            nn.Dropout(0.1),
            nn.Linear(FEATURES, FEATURES),
            nn.Tanh(),
            nn.Linear(FEATURES, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
    x, y, index = batch
    return hk.losses.cross_entropy(model(x), y, weight=hyper(index)) + hk.losses.l2(model, 1e-2)


def outer(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
    x, y, _ = batch
    return hk.losses.cross_entropy(model(x), y)


ALGORITHMS: dict[str, Callable[[], hk.algorithms.Algorithm]] = {
    "KFAC": lambda: hk.AID(hk.kfac(1e-2, refresh_every=3, ema=0.5), inner_steps=2),
    "EKFAC": lambda: hk.AID(hk.ekfac(1e-2, refresh_every=2), inner_steps=2),
    "CG": lambda: hk.AID(hk.cg(3, curvature=hk.curvature.GGN(1e-2), warm_start=True), inner_steps=2),
    "SAMA": lambda: hk.algorithms.SAMA(2),
    "MRBO": lambda: hk.algorithms.MRBO(hk.algorithms.StochasticNeumann(3, 0.1)),
    "SABA": lambda: hk.algorithms.SABA(),
}


def data(examples: bool, seed: int) -> Any:
    """Examples in batches of their own order, or a shuffled loader that draws from torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(EXAMPLES, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    tensors = x, y, torch.arange(EXAMPLES)
    if examples:
        return hk.algorithms.Examples(*tensors, batch_size=8, seed=seed)
    return DataLoader(TensorDataset(*tensors), batch_size=8, shuffle=True)


def noisy(run: hk.Run) -> dict[str, Any]:
    """A figure that depends on Python's own random state."""
    return {"noise": random.random()}


def start(method: str, callbacks: Sequence[Any] = (), steps: int = 0, **options: Any) -> hk.Run:
    """A run of ``method``: AdamW and a schedule on both levels (own rates for SABA), λ in a box."""
    torch.manual_seed(3)
    model, weights = Network(), hk.SampleWeights(EXAMPLES)
    if method != "SABA":
        adam, momentum = (
            torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0),
            torch.optim.SGD(weights.parameters(), lr=0.1, momentum=0.9),
        )
        options["inner_optimizer"] = hk.algorithms.Updates(
            adam, torch.optim.lr_scheduler.MultiStepLR(adam, [3, 6], 0.5), clip=1.0
        )
        options["outer_optimizer"] = hk.algorithms.Updates(
            momentum, torch.optim.lr_scheduler.CosineAnnealingLR(momentum, 50)
        )
    return hk.fit(
        hk.BilevelProblem(inner, outer),
        model,
        weights,
        ALGORITHMS[method](),
        data(method == "SABA", 1),
        data(method == "SABA", 2),
        steps=steps,
        projection=hk.Box(0.0, 1.0),
        callbacks=[hk.training.Evaluate(every=1, function=noisy), *callbacks],
        seed=5,
        **options,
    )


def _without_times(state: Any) -> Any:
    if isinstance(state, list):
        return [_without_times(x) for x in state]
    if not isinstance(state, dict):
        return state
    return {name: _without_times(x) for name, x in state.items() if name != "seconds"}


def digest(state: Any, folder: Path) -> str:
    """One hash of every bit of a nested state but ``seconds``: tensors with their layout, numbers, random states."""
    tree, tensors = split(_without_times(state))
    path = folder / f"digest-{os.getpid()}"
    path.unlink(missing_ok=True)
    record = write_tensors(path, tensors)
    path.unlink()
    return hashlib.sha256(json.dumps([tree, record["sha256"]]).encode()).hexdigest()
