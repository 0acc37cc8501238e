"""Hypercleaning: half of the training labels are drawn anew, and one weight for each example is learned.

    J_in = mean(clip(λ_n) · CE) + α‖θ‖² on the noisy part ,      J_out = mean CE on the first validation part

Hyperparameters are tuned on the second validation part. The test part is looked at only in the final runs, outside the
clock; no choice depends on it: the figure that counts is its loss where the second validation loss is lowest.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments import trial
from experiments.paper import networks
from experiments.paper.datasets import Images
from experiments.paper.methods import Method
from experiments.paper.tuning import Setting
from hyperkron import losses
from hyperkron.algorithms import Examples
from hyperkron.hyper import SampleWeights
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError
from hyperkron.training import Box, Callback, Run, fit

Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Split:
    """Standardised inputs and labels; the training labels are partly wrong, ``clean`` says which are right.

    ``starts`` remembers the models of :func:`start`, which all trials on a split share.
    """

    train: Part
    validation: Part
    second: Part
    test: Part
    clean: Tensor
    starts: dict[tuple[Case, int], nn.Module] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.train[0].device

    def to(self, device: torch.device | str) -> Split:
        """The same on another device."""
        train, validation, second, test = (
            (x.to(device), y.to(device)) for x, y in (self.train, self.validation, self.second, self.test)
        )
        return Split(train, validation, second, test, self.clean.to(device))


Scaling = Literal["each", "one"]
"""Means and deviations of inputs: for each pixel of a vector or channel of an image, or one for all."""


def noisy_split(
    data: Images,
    counts: tuple[int, int, int],
    seed: int,
    noise: float = 0.5,
    clip: float = 10.0,
    scaling: Scaling = "each",
) -> Split:
    """The training part cut at random into training, validation and second validation, with noise in the first.

    A share ``noise`` of the training labels is drawn anew, uniformly; some of those keep their label by chance.
    Inputs are standardised by the training part's mean and deviation and cut off at ±``clip``.
    """
    images, labels = data.train
    if sum(counts) > len(images):
        raise HyperkronError(f"counts={counts!r} add up to {sum(counts)}, but there are {len(images)} examples.")
    generator = torch.Generator().manual_seed(seed)
    place = images.device
    order = torch.randperm(len(images), generator=generator)[: sum(counts)].to(place).split(list(counts))
    given = labels[order[0]].clone()
    again = torch.rand(len(given), generator=generator) < noise
    given[again.to(place)] = torch.randint(10, (int(again.sum()),), generator=generator).to(place)
    train = images[order[0]]
    over = tuple(range(train.ndim)) if scaling == "one" else (0,) if train.ndim == 2 else (0, 2, 3)
    mean, deviation = train.mean(over, keepdim=True), train.std(over, keepdim=True)
    scale = torch.where(deviation > 0, 1 / deviation.clamp(min=1e-12), torch.zeros_like(deviation))

    def standard(x: Tensor) -> Tensor:
        return ((x - mean) * scale).clamp(-clip, clip)

    parts = [(standard(images[i]), labels[i]) for i in order]
    test = (standard(data.test[0]), data.test[1])
    return Split((parts[0][0], given), parts[1], parts[2], test, given == labels[order[0]])


def made_up(shape: tuple[int, ...], train: int, test: int, seed: int = 0) -> Images:
    """Ten noisy prototypes, for runs without data: enough to see that everything works, and nothing more."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(10, *shape, generator=generator)

    def part(count: int) -> Part:
        y = torch.randint(10, (count,), generator=generator)
        return prototypes[y] + 1.5 * torch.randn(count, *shape, generator=generator), y

    return Images(part(train), part(test))


@dataclass(frozen=True)
class Case:
    """What is cleaned, by a linear model.

    Attributes:
        decay: α; its curvature 2α joins the damping of every method.
        batch: of both levels; at most the whole part.
        passes: passes over noisy training and validation data that θ starts from (0: from its initial weights).
    """

    batch: int = 1000
    decay: float = 1e-3
    passes: int = 2


def problem(decay: float, whole: Part | None = None) -> BilevelProblem:
    """The two objectives; with ``whole`` an inner batch is the row numbers of this part, and nothing is copied."""

    def inner(model: nn.Module, weights: nn.Module, batch: Any) -> losses.Loss:
        x, y, index = batch if whole is None else (*whole, batch)
        fit = losses.cross_entropy(model(x), y, weight=weights(index))
        return fit + losses.l2(model, decay) if decay else fit

    def outer(model: nn.Module, weights: nn.Module, batch: Any) -> losses.Loss:
        return losses.cross_entropy(model(batch[0]), batch[1])

    return BilevelProblem(inner, outer)


def loss_and_error(model: nn.Module, part: Part, chunk: int = 2500) -> tuple[float, float]:
    """Mean cross entropy and share of wrong predictions, the model in evaluation mode and left as it was."""
    was = model.training
    model.eval()
    total, wrong = 0.0, 0
    with torch.no_grad():
        for x, y in zip(part[0].split(chunk), part[1].split(chunk), strict=True):
            output = model(x)
            total += float(nn.functional.cross_entropy(output, y, reduction="sum"))
            wrong += int((output.argmax(1) != y).sum())
    model.train(was)
    return total / len(part[1]), wrong / len(part[1])


def start(case: Case, split: Split, seed: int) -> nn.Module:
    """The model that every method starts from: a copy of one that is trained once for a split, case and seed."""
    if (case, seed) not in split.starts:
        split.starts[case, seed] = _trained(case, split, seed)
    return copy.deepcopy(split.starts[case, seed])


def _trained(case: Case, split: Split, seed: int) -> nn.Module:
    """A model after ``case.passes`` over noisy training and validation data."""
    model = networks.linear(split.train[0].shape[1]).to(split.device)
    if case.passes:
        pretrain(model, split, min(case.batch, 1000), seed, case.passes)
    return model


def pretrain(model: nn.Module, split: Split, batch: int, seed: int, passes: int) -> None:
    """Plain SGD over noisy training and validation data, in the same order in every pass."""
    x, y = (torch.cat(pair) for pair in zip(split.train, split.validation, strict=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(split.device)
    parts = order.split(batch) * passes
    rows = iter(parts)
    trial.train(
        model,
        lambda m, i: losses.cross_entropy(m(x[i]), y[i]),
        lambda: next(rows),
        torch.optim.SGD(model.parameters(), lr=0.01),
        len(parts),
    )


def prepare(
    case: Case,
    split: Split,
    method: Method,
    setting: Setting,
    seed: int,
    callbacks: Sequence[Callback] = (),
    *,
    graph: bool = False,
) -> Run:
    """A run of one method that has taken no step yet.

    Args:
        graph: record θ's own steps as a CUDA graph; :func:`experiments.paper.methods.methods` has the same for methods.
    """
    x, y = split.train
    model, weights = start(case, split, seed), SampleWeights(len(x)).to(split.device)
    count, outer_count = min(case.batch, len(x)), min(case.batch, len(split.validation[0]))
    falling = method.name.startswith("MRBO")  # has its own rates, which fall
    sgd = None if falling else torch.optim.SGD(model.parameters(), setting["inner"], setting.get("momentum", 0.0))
    index, whole = torch.arange(len(x), device=split.device), count == len(x)
    return fit(
        problem(case.decay, split.train if whole else None),
        model,
        weights,
        method.algorithm(setting, seed),
        index if whole else Examples(x, y, index, batch_size=count, seed=seed),
        Examples(*split.validation, batch_size=outer_count, seed=seed + 1),
        steps=0,
        inner_optimizer=sgd,
        outer_optimizer=None
        if falling
        else torch.optim.SGD(weights.parameters(), setting["outer"], setting.get("outer_momentum", 0.0)),
        projection=Box(0.0, 1.0),
        graph=graph,
        callbacks=callbacks,
        clock=trial.clock_of(split.device),
        record_failure=True,
        seed=None,
    )


def f1(weights: Tensor, clean: Tensor) -> float:
    """How well weights above ½ find the right labels."""
    kept = weights.detach() > 0.5
    right = int((kept & clean).sum())
    return 2 * right / max(1, int(kept.sum()) + int(clean.sum()))
