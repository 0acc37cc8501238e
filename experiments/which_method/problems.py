"""Ten kinds of λ on scikit-learn's digits, small enough to be solved in seconds.

Each problem has training rows, trusted rows for J_out, held-out rows that choose the step size of λ, and test rows. The
inner model is the same everywhere: 64 → 32 → 10 with tanh, and a small penalty that every curvature knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hyperkron as hk
from experiments import trial
from experiments.paper.networks import seeded
from hyperkron.optimizers import Project

DECAY = 1e-3
RATE = 0.5
"""Step size of θ: gradient descent on the whole training part."""
Rows = tuple[Tensor, ...]
Judge = Callable[[nn.Module, nn.Module], float]


@dataclass(frozen=True)
class Task:
    """A bilevel problem with its data, and what its user wanted.

    Attributes:
        hyper: makes λ for a model.
        inner_rows, outer_rows: the whole batches of J_in and J_out.
        held: J_out on held-out rows; chooses the step size of λ.
        judge: what the user wanted, on test rows; in per cent, more is better.
        projection: of λ.
    """

    hyper: Callable[[nn.Module], nn.Module]
    problem: hk.BilevelProblem
    inner_rows: Rows
    outer_rows: Rows
    held: Judge
    judge: Judge
    projection: Project | None = None


@dataclass(frozen=True)
class Digits:
    """Images in [0, 1] with their labels, shuffled by a seed."""

    train: Rows
    trusted: Rows
    held: Rows
    test: Rows
    generator: torch.Generator


def digits(seed: int, data: Path | None = None) -> Digits:
    """500 training, 250 trusted, 250 held-out and 797 test rows; from ``data/digits.npz`` if it is there."""
    if data is not None and (data / "digits.npz").exists():
        with np.load(data / "digits.npz") as found:
            images, labels = found["images"], found["labels"]
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    x, y = torch.as_tensor(images / 16, dtype=torch.float32)[order], torch.as_tensor(labels).long()[order]
    parts = [(x[i], y[i]) for i in torch.arange(len(x)).split([500, 250, 250, len(x) - 1000])]
    return Digits(parts[0], parts[1], parts[2], parts[3], generator)


def network(seed: int) -> nn.Module:
    """The inner model."""
    return seeded(lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)), seed)


def fit_plain(loss: Callable[[nn.Module], hk.losses.Loss], seed: int, steps: int = 500) -> nn.Module:
    """A fresh model trained on a loss."""
    model = network(seed)
    trial.train(model, lambda m, _: loss(m), (), torch.optim.SGD(model.parameters(), RATE), steps)
    return model


def entropy(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> hk.losses.Loss:
    """Cross entropy of a model."""
    return hk.losses.cross_entropy(model(x), y, **options)


def penalty(model: nn.Module) -> hk.losses.Loss:
    """α‖θ‖²."""
    return hk.losses.l2(model, DECAY)


def loss_on(rows: Rows) -> Judge:
    """The loss of a model on rows."""

    @torch.no_grad()
    def judge(model: nn.Module, _: nn.Module) -> float:
        return float(nn.functional.cross_entropy(model(rows[0]), rows[1]))

    return judge


def accuracy_on(rows: Rows) -> Judge:
    """Right answers of a model on rows, in per cent."""

    @torch.no_grad()
    def judge(model: nn.Module, _: nn.Module) -> float:
        return 100 * float((model(rows[0]).argmax(1) == rows[1]).double().mean())

    return judge


def trusted_outer(model: nn.Module, _: nn.Module, batch: Rows) -> hk.losses.Loss:
    """J_out of most problems: cross entropy on trusted rows."""
    return entropy(model, batch[0], batch[1])


def _ordinary(parts: Digits, hyper: Any, inner: Any, rows: Rows, projection: Project | None = None) -> Task:
    """A problem with trusted rows and test accuracy."""
    problem = hk.BilevelProblem(inner, trusted_outer)
    return Task(hyper, problem, rows, parts.trusted, loss_on(parts.held), accuracy_on(parts.test), projection)


def _noisy(parts: Digits) -> Tensor:
    """The training labels with 40 % of them redrawn."""
    y = parts.train[1]
    again = torch.rand(len(y), generator=parts.generator) < 0.4
    return torch.where(again, torch.randint(10, y.shape, generator=parts.generator), y)


def example_weights(parts: Digits) -> Task:
    """A weight for each row with perhaps a wrong label."""
    rows = (parts.train[0], _noisy(parts), torch.arange(500))

    def inner(model: nn.Module, weights: nn.Module, batch: Rows) -> hk.losses.Loss:
        return entropy(model, batch[0], batch[1], weight=weights(batch[2])) + penalty(model)

    return _ordinary(parts, lambda m: hk.SampleWeights(500), inner, rows, hk.Box(0.0, 1.0))


def weight_network(parts: Digits) -> Task:
    """A network from a row's loss to its weight (Meta-Weight-Net)."""
    rows = (parts.train[0], _noisy(parts))

    def inner(model: nn.Module, weights: nn.Module, batch: Rows) -> hk.losses.Loss:
        output = model(batch[0])
        rowwise = nn.functional.cross_entropy(output, batch[1], reduction="none")
        return hk.losses.cross_entropy(output, batch[1], weight=weights(rowwise)) + penalty(model)

    return _ordinary(parts, lambda m: hk.MetaWeightNet(32), inner, rows)


def label_correction(parts: Digits) -> Task:
    """A soft label for each row."""
    noisy = _noisy(parts)

    def inner(model: nn.Module, labels: nn.Module, batch: Rows) -> hk.losses.Loss:
        return entropy(model, batch[0], labels(batch[1])) + penalty(model)

    rows = (parts.train[0], torch.arange(500))
    return _ordinary(parts, lambda m: hk.LabelCorrection(noisy, 10), inner, rows)


def _decay(each: str) -> Callable[[Digits], Task]:
    def made(parts: Digits) -> Task:
        """A learned penalty, with 60 training rows and blurred pixels."""
        x, y = parts.train[0][:60], parts.train[1][:60]
        rows = (x + 0.3 * torch.randn(x.shape, generator=parts.generator), y)

        def inner(model: nn.Module, decay: nn.Module, batch: Rows) -> hk.losses.Loss:
            return entropy(model, batch[0], batch[1]) + decay(model)

        return _ordinary(parts, lambda m: hk.WeightDecay(m, DECAY, each=each), inner, rows)  # type: ignore[arg-type]

    return made


def augmentation(parts: Digits) -> Task:
    """Strengths of random contrast, brightness and noise; trusted, held-out and test rows are disturbed that way."""
    few = (parts.train[0][:100], parts.train[1][:100])

    def disturbed(rows: Rows) -> Rows:
        x, y = rows
        shift = 0.6 * (2 * torch.rand((len(x), 1), generator=parts.generator) - 1)
        return x + shift + 0.2 * torch.randn(x.shape, generator=parts.generator), y

    changed = Digits(few, disturbed(parts.trusted), disturbed(parts.held), disturbed(parts.test), parts.generator)

    def inner(model: nn.Module, change: nn.Module, batch: Rows) -> hk.losses.Loss:
        return entropy(model, change(batch[0]), batch[1]) + penalty(model)

    return _ordinary(changed, lambda m: hk.Augmentation(0.05), inner, few)


def domain_weights(parts: Digits) -> Task:
    """Weights of four sources: as they are, mirrored, with random labels, and dark."""
    x, y = parts.train
    domain = torch.arange(500) % 4
    mirrored = x.reshape(-1, 8, 8).flip(2).reshape(-1, 64)
    random = torch.randint(10, y.shape, generator=parts.generator)
    x = torch.where((domain == 1)[:, None], mirrored, torch.where((domain == 3)[:, None], 0.3 * x, x))
    rows = (x, torch.where(domain == 2, random, y), domain)

    def inner(model: nn.Module, weights: nn.Module, batch: Rows) -> hk.losses.Loss:
        return entropy(model, batch[0], batch[1], weight=weights(batch[2])) + penalty(model)

    return _ordinary(parts, lambda m: hk.DomainWeights(4), inner, rows)


def poisoning(parts: Digits) -> Task:
    """Twenty added rows with chosen pixels and wrong labels; what is wanted is a high test error after retraining."""
    x, y = parts.train
    wrong = (y[:20] + 1) % 10

    def inner(model: nn.Module, poison: nn.Module, batch: Rows) -> hk.losses.Loss:
        rows = torch.cat([batch[0], poison()]), torch.cat([batch[1], wrong.to(batch[1].device)])
        return entropy(model, *rows) + penalty(model)

    def outer(model: nn.Module, poison: nn.Module, batch: Rows) -> hk.losses.Loss:
        return -1.0 * entropy(model, batch[0], batch[1])

    def judge(_: nn.Module, poison: nn.Module) -> float:
        fresh = fit_plain(lambda m: inner(m, lambda: poison().detach(), (x, y)), 1000)  # type: ignore[arg-type]
        return 100 - accuracy_on(parts.test)(fresh, poison)

    held = loss_on(parts.held)
    problem = hk.BilevelProblem(inner, outer)
    start = hk.as_hyper(x[:20].clone())
    return Task(lambda m: start, problem, (x, y), parts.trusted, lambda m, h: -held(m, h), judge, hk.Box(0.0, 1.0))


class Noise(nn.Module):
    """A network that adds at most ``size`` to every pixel."""

    def __init__(self, size: float = 0.25) -> None:
        super().__init__()
        self.size = size
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        """The changed images."""
        return x + self.size * self.net(x).tanh()


def generator_noise(parts: Digits) -> Task:
    """Changes by a generator that keep images from being learnt; what is wanted is a high test error on clean rows."""
    x, y = parts.train

    def inner(model: nn.Module, noise: nn.Module, batch: Rows) -> hk.losses.Loss:
        return entropy(model, noise(batch[0]), batch[1]) + penalty(model)

    def outer(model: nn.Module, noise: nn.Module, batch: Rows) -> hk.losses.Loss:
        output = model(batch[0])
        likeliest = output.detach().scatter(1, batch[1][:, None], -math.inf).argmax(1)
        return hk.losses.cross_entropy(output, likeliest)

    def judge(_: nn.Module, noise: nn.Module) -> float:
        changed = noise(x).detach()
        fresh = fit_plain(lambda m: entropy(m, changed, y) + penalty(m), 1000)
        return 100 - accuracy_on(parts.test)(fresh, noise)

    @torch.no_grad()
    def held(model: nn.Module, noise: nn.Module) -> float:
        return outer(model, noise, parts.held).item()

    return Task(lambda m: Noise(), hk.BilevelProblem(inner, outer), (x, y), parts.trusted, held, judge)


def distillation(parts: Digits) -> Task:
    """Twenty made-up images that a model is trained on instead of the 500 true ones."""
    y = torch.arange(20) % 10
    start = hk.as_hyper(0.5 + 0.1 * torch.randn(20, 64, generator=parts.generator))

    def inner(model: nn.Module, images: nn.Module, batch: Rows) -> hk.losses.Loss:
        return entropy(model, images(), batch[0]) + penalty(model)

    def judge(_: nn.Module, images: nn.Module) -> float:
        fixed = images().detach()
        fresh = fit_plain(lambda m: entropy(m, fixed, y) + penalty(m), 1000)
        return accuracy_on(parts.test)(fresh, images)

    problem = hk.BilevelProblem(inner, trusted_outer)
    return Task(lambda m: start, problem, (y,), parts.train, loss_on(parts.held), judge)


PROBLEMS: dict[str, Callable[[Digits], Task]] = {
    "example weights": example_weights,
    "weight network": weight_network,
    "label correction": label_correction,
    "penalty per tensor": _decay("tensor"),
    "penalty per weight": _decay("entry"),
    "augmentation": augmentation,
    "domain weights": domain_weights,
    "poisoning": poisoning,
    "generator noise": generator_noise,
    "distilled images": distillation,
}
