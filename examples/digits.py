"""Find mislabelled digits and learn to ignore them: hypercleaning with a KFAC hypergradient, in under a minute.

40 % of the training labels are redrawn at random. Every training row gets a weight λ_n ∈ [0, 1]; the network minimises
the weighted loss, and the weights minimise the loss of that network on a few rows whose labels are trusted:

    min_λ J_trusted(θ*(λ))    subject to    θ*(λ) = argmin_θ (1/N) Σ_n λ_n c(f_θ(x_n), y_n) + α‖θ‖²

A weight falls when the trusted rows would be served better without its row, so a low weight marks a wrong label. Rates,
penalties and when to stop are chosen on held-out trusted rows; the test rows are looked at once, at the end.

    python examples/digits.py [seed]
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

import hyperkron as hk

Rows = tuple[Tensor, Tensor]  # images and labels


@dataclass(frozen=True)
class Digits:
    noisy: Rows
    trusted: Rows
    held_out: Rows
    test: Rows
    wrong: Tensor  # which labels of the noisy rows are wrong; only for the final figures


def split(seed: int, test: int) -> Digits:
    """Of every digit 10 trusted rows and 5 held-out ones; ``test`` rows of the rest; what remains is corrupted."""
    images, classes = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    x, y = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(classes)[order]
    rank = (y[:, None] == y).tril(-1).sum(1)  # how many rows of the same digit come before
    rest = (rank >= 15).nonzero()[:, 0]
    roles = [rest[test:], rank < 10, (rank >= 10) & (rank < 15), rest[:test]]
    noisy, trusted, held_out, tested = [(x[role], y[role]) for role in roles]
    redrawn = torch.rand(len(noisy[1]), generator=generator) < 0.4
    labels = torch.where(redrawn, torch.randint(10, redrawn.shape, generator=generator), noisy[1])
    return Digits((noisy[0], labels), trusted, held_out, tested, wrong=labels != noisy[1])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    """J_in: the weighted loss on noisy rows, and a penalty, whose curvature KFAC counts too."""
    x, y, index = batch
    return hk.losses.cross_entropy(model(x), y, weight=weights(index)) + hk.losses.l2(model, 1e-3)


def outer(model: nn.Module, weights: nn.Module, batch: Rows) -> hk.losses.Loss:
    """J_out: the loss on rows whose labels can be trusted."""
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def clean(digits: Digits, rate: float, steps: int) -> tuple[float, Tensor]:
    """Ten steps of θ, one of λ, over and over: the least held-out loss, and the weights that had it."""
    model, weights, index = network(), hk.SampleWeights(len(digits.wrong)), torch.arange(len(digits.wrong))
    problem, hypergradient = hk.BilevelProblem(inner, outer), hk.kfac(damping=0.1)
    inner_optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    outer_optimizer = torch.optim.SGD(weights.parameters(), lr=rate)
    best, kept, batch = float("inf"), weights.weight.detach().clone(), (*digits.noisy, index)
    for step in range(1, steps + 1):
        for _ in range(10):
            inner_optimizer.zero_grad()
            inner(model, weights, batch).backward()
            inner_optimizer.step()
        outer_optimizer.zero_grad()
        result = hypergradient.backward(problem, model, weights, batch, digits.trusted)  # fills weights.weight.grad
        outer_optimizer.step()
        weights.weight.data.clamp_(0, 1)
        held_out = outer(model, weights, digits.held_out).item()
        if held_out < best:
            best, kept = held_out, weights.weight.detach().clone()
        if step % 20 == 0:
            print(f"{rate:4g} {step:5} {result.outer_loss:9.3f} {held_out:9.3f}   {result.status.value}")
    return best, kept


def train(digits: Digits, weights: Tensor, decay: float, steps: int) -> tuple[float, nn.Module]:
    """A fresh network on the weighted noisy rows and the trusted rows: its least held-out loss, and it at that time."""
    x, y = (torch.cat(pair) for pair in zip(digits.noisy, digits.trusted, strict=True))
    weight = torch.cat([weights, torch.ones(len(digits.trusted[0]))])
    model = network()
    optimizer, best, kept = torch.optim.Adam(model.parameters(), lr=3e-3), float("inf"), model
    for _ in range(steps):
        optimizer.zero_grad()
        (hk.losses.cross_entropy(model(x), y, weight=weight) + hk.losses.l2(model, decay)).backward()
        optimizer.step()
        held_out = outer(model, model, digits.held_out).item()
        if held_out < best:
            best, kept = held_out, copy.deepcopy(model)
    return best, kept


def main(seed: int = 0, *, test: int = 500, steps: int = 60) -> dict[str, float]:
    """Clean, train three networks alike, compare them on the test rows; asserts what the title claims."""
    torch.manual_seed(seed)
    start, digits = time.perf_counter(), split(seed, test)
    count, share = len(digits.wrong), float(digits.wrong.double().mean())
    print(f"{count} training rows, {share:.0%} of them mislabelled; 100 trusted, 50 held-out and {test} test rows.\n")
    print("rate  step   trusted  held-out")
    _, weights = min((clean(digits, rate, steps) for rate in (10, 30, 100)), key=lambda run: run[0])
    found = {"auroc": float(roc_auc_score(digits.wrong, 1 - weights))}
    found["average precision"] = float(average_precision_score(digits.wrong, 1 - weights))
    for name, given in (("noisy", torch.ones(count)), ("trusted", torch.zeros(count)), ("cleaned", weights)):
        runs = [train(digits, given, decay, 5 * steps) for decay in (1e-4, 1e-3)]
        answers = min(runs, key=lambda run: run[0])[1](digits.test[0]).argmax(1)
        found[name] = float((answers == digits.test[1]).double().mean())
    print(f"\nTest accuracy       {found['noisy']:.1%}  trained on all rows as they are")
    print(f"                    {found['trusted']:.1%}  trained on the trusted rows alone")
    print(f"                    {found['cleaned']:.1%}  trained on all rows with the learned weights")
    print(f"Wrong labels found  {found['auroc']:.3f}  area under the ROC curve (chance 0.500)")
    print(f"                    {found['average precision']:.3f}  average precision (chance {share:.3f})")
    print(f"Time                {time.perf_counter() - start:.0f} s")
    assert found["cleaned"] > max(found["noisy"], found["trusted"]), "the learned weights did not help"
    assert found["auroc"] > 0.9, "the learned weights do not tell wrong labels from right ones"
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
