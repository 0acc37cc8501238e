"""Find mislabelled digits and learn to ignore them: hypercleaning with a KFAC hypergradient, in under a minute.

40 % of the training labels are redrawn at random. Every training row gets a weight λ_n ∈ [0, 1]; the network minimises
the weighted loss, and the weights minimise the loss of that network on a few rows whose labels are trusted:

    min_λ J_trusted(θ*(λ))    subject to    θ*(λ) = argmin_θ (1/N) Σ_n λ_n c(f_θ(x_n), y_n) + α‖θ‖²

A weight falls when the trusted rows would be served better without its row, so a low weight marks a wrong label. The
learning rate of λ, and when to stop any training, are chosen on held-out rows; the test rows are looked at once.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

import hyperkron as hk

Rows = tuple[Tensor, Tensor]  # images and labels


class Digits(NamedTuple):
    noisy: Rows
    trusted: Rows
    held_out: Rows
    test: Rows
    wrong: Tensor  # which labels of the noisy rows are wrong; for the final figures only


def split(seed: int) -> Digits:
    """Of every digit 10 trusted rows and 5 held-out ones; 500 test rows; the remaining 1147 are corrupted."""
    images, classes = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    x, y = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(classes)[order]
    rank = (y[:, None] == y).tril(-1).sum(1)  # how many rows of the same digit come before
    rest = (rank >= 15).nonzero()[:, 0]
    roles = [rest[500:], rank < 10, (rank >= 10) & (rank < 15), rest[:500]]
    noisy, trusted, held_out, tested = [(x[role], y[role]) for role in roles]
    redrawn = torch.rand(len(noisy[1]), generator=generator) < 0.4
    labels = torch.where(redrawn, torch.randint(10, redrawn.shape, generator=generator), noisy[1])
    return Digits((noisy[0], labels), trusted, held_out, tested, labels != noisy[1])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def inner(model: Any, weights: Any, batch: Any) -> hk.losses.Loss:
    """J_in: the weighted loss, and a penalty whose curvature KFAC counts too."""
    x, y, index = batch
    return hk.losses.cross_entropy(model(x), y, weight=weights(index)) + hk.losses.l2(model, 1e-3)


def outer(model: Any, weights: Any, batch: Any) -> hk.losses.Loss:
    """J_out: the loss on rows whose labels can be trusted."""
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def score(model: nn.Module, rows: Rows) -> tuple[float, float]:
    """The share of wrong answers and, to decide between equals, the loss."""
    return float((model(rows[0]).argmax(1) != rows[1]).double().mean()), outer(model, None, rows).item()


class KeepBest(hk.training.Callback):
    """Keeps what ``copied`` returns at the step where the network scores best on ``rows``."""

    def __init__(self, rows: Rows, copied: Callable[[], Any], every: int = 1) -> None:
        self.rows, self.copied, self.every = rows, copied, every
        self.best: tuple[float, float] = (2.0, 0.0)

    def on_step(self, run: hk.Run, report: hk.algorithms.StepReport) -> None:
        if report.step % self.every == 0 and (now := score(run.state.model, self.rows)) < self.best:
            self.best, self.kept = now, self.copied()


def clean(digits: Digits, rate: float, steps: int) -> tuple[tuple[float, float], Tensor]:
    """Ten steps of θ, one of λ, over and over; the best score on the way, and the weights that had it."""
    model, weights = network(), hk.SampleWeights(len(digits.wrong))
    best = KeepBest(digits.held_out, lambda: weights.weight.detach().clone())
    hk.fit(
        hk.BilevelProblem(inner, outer),
        model,
        weights,
        hk.AID(hk.kfac(damping=0.1), inner_steps=10),
        (*digits.noisy, torch.arange(len(digits.wrong))),
        digits.trusted,
        steps=steps,
        inner_optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        outer_optimizer=torch.optim.SGD(weights.parameters(), lr=rate),
        projection=hk.Box(0.0, 1.0),
        callbacks=[best],
        seed=None,
    )
    return best.best, best.kept


def train(digits: Digits, given: Tensor, steps: int) -> nn.Module:
    """A fresh network on the weighted noisy rows and the trusted rows, as it was when it scored best."""
    x, y = (torch.cat(pair) for pair in zip(digits.noisy, digits.trusted, strict=True))
    weight = torch.cat([given, torch.ones(len(digits.trusted[0]))])
    model = network()
    best = KeepBest(digits.held_out, lambda: copy.deepcopy(model), every=5)
    hk.fit(
        hk.BilevelProblem(lambda model, _, batch: inner(model, weight.__getitem__, batch)),
        model,
        None,
        hk.algorithms.InnerOnly(),
        (x, y, torch.arange(len(x))),
        steps=steps,
        inner_optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        callbacks=[best],
        seed=None,
    )
    return best.kept


def main(seed: int = 0, *, splits: int = 3, steps: int = 40, training: int = 250) -> dict[str, float]:
    """Clean and compare on several random splits; asserts what the title claims, on their mean."""
    torch.manual_seed(seed)
    names, rows = ("auroc", "precision", "noisy", "trusted", "cleaned", "ideal"), []
    print("         wrong labels found    test accuracy of a network trained on")
    print("split  ", *(f"{title:>9}" for title in ("AUROC", "av. prec.", "all rows", "trusted", "weighted", "correct")))
    for number in range(splits):
        digits = split(seed * splits + number)
        _, weights = min((clean(digits, rate, steps) for rate in (10, 30)), key=lambda run: run[0])
        found = [float(metric(digits.wrong, 1 - weights)) for metric in (roc_auc_score, average_precision_score)]
        for given in (torch.ones_like(weights), torch.zeros_like(weights), weights, 1.0 - digits.wrong.float()):
            found.append(1 - score(train(digits, given, training), digits.test)[0])
        rows.append(found)
        print(f"{number + 1:<7}", *(f"{x:9.1%}" for x in found))
    mean = dict(zip(names, torch.tensor(rows).mean(0).tolist(), strict=True))
    print("mean   ", *(f"{x:9.1%}" for x in mean.values()))
    assert mean["cleaned"] > max(mean["noisy"], mean["trusted"]), "the learned weights did not help"
    assert mean["auroc"] > 0.9, "the learned weights do not tell wrong labels from right ones"
    return mean


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
