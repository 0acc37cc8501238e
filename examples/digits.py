"""Find mislabelled digits and learn to ignore them: hypercleaning with a KFAC hypergradient, in under a minute.

40 % of the training labels are replaced by random ones. Every training row gets a weight λ_n ∈ [0, 1]; the network
minimises the weighted loss, and the weights minimise the loss of that network on a few rows whose labels are trusted:

    min_λ J_trusted(θ*(λ))    subject to    θ*(λ) = argmin_θ (1/N) Σ_n λ_n c(f_θ(x_n), y_n) + α‖θ‖²

A weight falls when the trusted rows would be served better without its row: a low weight marks a wrong label. When to
stop, here and in the training of every network compared, is decided on held-out trusted rows; the test set is looked at
once, at the end.

    python examples/digits.py [seed]
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

import hyperkron as hk

NOISE, DECAY = 0.4, 1e-4
Rows = tuple[Tensor, Tensor]  # images and labels


@dataclass(frozen=True)
class Digits:
    """The rows of scikit-learn's digits in their four roles; ``wrong`` marks the training labels that were changed."""

    noisy: Rows
    trusted: Rows
    held_out: Rows
    test: Rows
    wrong: Tensor


def split(seed: int, trusted: int, test: int) -> Digits:
    """Shuffle, give three in ten of the trusted rows to the held-out set, and corrupt the training labels."""
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    x, y = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    sizes = [trusted - 3 * trusted // 10, 3 * trusted // 10, test, len(x) - trusted - test]
    (x_trusted, x_held, x_test, x_train), (y_trusted, y_held, y_test, y_train) = x.split(sizes), y.split(sizes)
    random = torch.randint(10, y_train.shape, generator=generator)
    noisy = torch.where(torch.rand(y_train.shape, generator=generator) < NOISE, random, y_train)
    rows = (x_train, noisy), (x_trusted, y_trusted), (x_held, y_held), (x_test, y_test)
    return Digits(*rows, wrong=noisy != y_train)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def inner(model: nn.Module, weights: nn.Module, rows: Rows) -> hk.losses.Loss:
    """J_in: the weighted loss on noisy rows, and a penalty whose curvature KFAC counts."""
    index = torch.arange(len(rows[0]))
    return hk.losses.cross_entropy(model(rows[0]), rows[1], weight=weights(index)) + hk.losses.l2(model, DECAY)


def outer(model: nn.Module, weights: nn.Module | None, rows: Rows) -> hk.losses.Loss:
    """J_out: the loss on rows whose labels can be trusted."""
    return hk.losses.cross_entropy(model(rows[0]), rows[1])


@torch.no_grad()
def accuracy(model: nn.Module, rows: Rows) -> float:
    return float((model(rows[0]).argmax(1) == rows[1]).double().mean())


def clean(digits: Digits, steps: int) -> Tensor:
    """The learned weights: ten steps of θ, one of λ, over and over; those that served the held-out rows best."""
    model, weights = network(), hk.SampleWeights(len(digits.wrong))
    problem, hypergradient = hk.BilevelProblem(inner, outer), hk.kfac(damping=1e-2)
    inner_optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    outer_optimizer = torch.optim.Adam(weights.parameters(), lr=0.05)
    best, kept = float("inf"), weights.weight.detach().clone()
    for step in range(1, steps + 1):
        for _ in range(10):
            inner_optimizer.zero_grad()
            inner(model, weights, digits.noisy).backward()
            inner_optimizer.step()
        outer_optimizer.zero_grad()
        result = hypergradient.backward(problem, model, weights, digits.noisy, digits.trusted)  # fills weights' .grad
        outer_optimizer.step()
        with torch.no_grad():
            weights.weight.clamp_(0, 1)
            held_out = outer(model, weights, digits.held_out).item()
        if held_out < best:
            best, kept = held_out, weights.weight.detach().clone()
        if step == 1 or step % 10 == 0:
            print(f"{step:4}  {result.outer_loss:7.3f}  {held_out:8.3f}  {float(kept.mean()):11.2f}  {result.status.value}")
    return kept


def train(digits: Digits, weights: Tensor, steps: int) -> nn.Module:
    """A fresh network on noisy rows with these weights and on the trusted rows; that of the best held-out loss."""
    model = network()
    x, y = torch.cat([digits.noisy[0], digits.trusted[0]]), torch.cat([digits.noisy[1], digits.trusted[1]])
    given = hk.as_hyper(torch.cat([weights, torch.ones(len(digits.trusted[0]))]))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    best, kept = float("inf"), copy.deepcopy(model)
    for _ in range(steps):
        optimizer.zero_grad()
        (hk.losses.cross_entropy(model(x), y, weight=given()) + hk.losses.l2(model, DECAY)).backward()
        optimizer.step()
        with torch.no_grad():
            held_out = outer(model, None, digits.held_out).item()
        if held_out < best:
            best, kept = held_out, copy.deepcopy(model)
    return kept


def main(seed: int = 0, *, trusted: int = 100, test: int = 500, steps: int = 60) -> dict[str, float]:
    """Clean, train three networks alike, and compare them on the test set; asserts what the title claims."""
    torch.manual_seed(seed)
    start, digits = time.perf_counter(), split(seed, trusted, test)
    count, wrong = len(digits.wrong), float(digits.wrong.double().mean())
    print(f"{count} training rows, {wrong:.0%} of them mislabelled; {trusted} trusted rows, {test} test rows.\n")
    print("step  trusted  held-out  mean weight  status")
    weights = clean(digits, steps)
    mistrust = 1 - weights.double()
    found = {
        "auroc": float(roc_auc_score(digits.wrong, mistrust)),
        "average_precision": float(average_precision_score(digits.wrong, mistrust)),
        "prevalence": wrong,
    }
    for name, given in (("noisy", torch.ones(count)), ("trusted", torch.zeros(count)), ("cleaned", weights)):
        found[name] = accuracy(train(digits, given, 5 * steps), digits.test)
    print("\nTest accuracy")
    print(f"  {found['noisy']:.1%}  trained on all rows as they are")
    print(f"  {found['trusted']:.1%}  trained on the trusted rows alone")
    print(f"  {found['cleaned']:.1%}  trained on all rows with the learned weights")
    print("Finding the wrong labels by low weight")
    print(f"  {found['auroc']:.3f}  area under the ROC curve (chance 0.500)")
    print(f"  {found['average_precision']:.3f}  average precision (chance {wrong:.3f})")
    print(f"{time.perf_counter() - start:.1f} s")
    assert found["cleaned"] > max(found["noisy"], found["trusted"]), "cleaning did not help"
    assert found["auroc"] > 0.9, "the weights do not tell wrong labels from right ones"
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
