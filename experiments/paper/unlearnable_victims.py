"""Unlearnable examples: sizes and lengths, the images, and the victims that are trained on published images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from experiments.paper.epochs import Epochs
from experiments.paper.networks import seeded
from experiments.paper.unlearnable_networks import cnn, crop_and_flip, published
from hyperkron import losses
from hyperkron.algorithms import InnerOnly, Updates
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError
from hyperkron.training import fit
from support.resnet import resnet18

Part = tuple[Tensor, Tensor]
Victim = Literal["CNN", "ResNet-18"]


@dataclass(frozen=True)
class Case:
    """Sizes and lengths.

    Attributes:
        unet, width, hidden: channels of the generator's and the CNN's first layers, and the CNN's hidden units.
        resnet: channels of ResNet-18's first stage.
        batch: of both levels; BOME has half of it, as printed.
        steps: of λ; of θ as many. BOME, whose step is that of ten others, makes a share of them.
        rate: step size of θ (SGD with momentum 0.9; BOME without).
        looks: how often a short run of a fresh CNN judges the attacker on held-out images; the best one is kept.
        scratch: epochs of such a run.
        epochs: of a victim's training, by victim.
        rounds: passes of error-minimising noise over all images, each with ten steps of θ before it.
        damping: of all hypergradients.
        padding: of crops.
        bome: BOME's share of the steps.
    """

    unet: int = 64
    width: int = 64
    hidden: int = 256
    resnet: int = 64
    batch: int = 512
    steps: int = 4900
    rate: float = 0.03
    looks: int = 10
    scratch: int = 5
    epochs: tuple[int, int] = (100, 100)
    victim_batch: int = 256
    rounds: int = 20
    damping: float = 1e-3
    padding: int = 4
    bome: float = 1.0


@dataclass(frozen=True)
class Data:
    """Images in [0, 1] with labels: those to be published, held-out ones that judge attackers, and the test images."""

    train: Part
    held_out: Part
    test: Part

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.train[0].device

    @property
    def size(self) -> int:
        """Pixels along an edge."""
        return int(self.train[0].shape[-1])


class Sampled(Epochs):
    """Random batches: images, labels, and the numbers of the images; epoch after epoch.

    Where ``padding`` is positive, the images of an epoch are shifted and mirrored, all at once.
    """

    def __init__(self, part: Part, size: int, seed: int, padding: int = 0) -> None:
        super().__init__(torch.Generator(part[0].device).manual_seed(seed))
        self.part, self.size, self.padding = part, min(size, len(part[0])), padding

    def epoch(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Full batches in a new order."""
        (x, y), size = self.part, self.size
        order = torch.randperm(len(x), device=x.device, generator=self.generator)[: len(x) // size * size]
        if not self.padding:
            yield from ((x[index], y[index], index) for index in order.split(size))
            return
        images = crop_and_flip(x[order], self.padding, self.generator)
        yield from zip(images.split(size), y[order].split(size), order.split(size), strict=True)


def half_precision(device: torch.device) -> torch.dtype | None:
    """What networks are trained in on a GPU."""
    return torch.bfloat16 if device.type == "cuda" else None


def train(network: nn.Module, part: Part, steps: int, *, batch: int, rate: float, padding: int, seed: int) -> None:
    """Plain training in one cycle of the step size, with crops and mirror images where ``padding`` is positive."""
    device = part[0].device
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, cycle_momentum=False)
    fit(
        BilevelProblem(lambda m, _, b: losses.cross_entropy(m(b[0]), b[1])),
        network,
        None,
        InnerOnly(report_every=steps),
        Sampled(part, batch, seed, padding),
        steps=steps,
        seed=None,
        graph=True,
        inner_optimizer=Updates(optimizer, cycle, autocast=half_precision(device)),
    )


@torch.no_grad()
def accuracy(network: nn.Module, part: Part) -> float:
    """The share of images in per cent whose class is found."""
    network.eval()
    hits = [network(x).argmax(1).eq(y).sum() for x, y in zip(part[0].split(2000), part[1].split(2000), strict=True)]
    network.train()
    return 100 * float(torch.stack(hits).sum()) / len(part[1])


def classifier(case: Case, data: Data, seed: int, victim: Victim = "CNN") -> nn.Module:
    """A fresh victim."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "CNN": lambda: cnn(data.size, case.width, case.hidden),
        "ResNet-18": lambda: resnet18(width=case.resnet),
    }
    if victim not in makers:
        raise HyperkronError(f"victim={victim!r} is unknown; choose one of {', '.join(makers)}.")
    return seeded(makers[victim], seed, data.device)


def judge(case: Case, data: Data, noise: nn.Module | None, seed: int) -> float:
    """Held-out accuracy in per cent of a CNN trained briefly on the published images: lower is a better attacker."""
    network = classifier(case, data, seed)
    part = published(noise, data.train[0]), data.train[1]
    batch = min(case.batch, len(part[1]))
    steps = case.scratch * max(1, len(part[1]) // batch)
    train(network, part, steps, batch=batch, rate=2 * case.rate, padding=0, seed=seed)
    return accuracy(network, data.held_out)


def victim_accuracy(case: Case, data: Data, noise: nn.Module | None, victim: Victim, seed: int) -> dict[str, float]:
    """A victim trained from scratch on the published images, with crops and mirror images: what it gets right."""
    network = classifier(case, data, 1000 + seed, victim)
    part = published(noise, data.train[0]), data.train[1]
    batch = min(case.victim_batch, len(part[1]))
    steps = case.epochs[victim != "CNN"] * max(1, len(part[1]) // batch)
    rate = 1.5 * case.rate if victim == "CNN" else 0.1
    train(network, part, steps, batch=batch, rate=rate, padding=case.padding, seed=seed)
    return {"test": accuracy(network, data.test), "published": accuracy(network, part)}
