"""The data sets and networks on which attributions are judged, and the training that all of them share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import hyperkron as hk
from experiments.attribution import text
from experiments.paper import datasets
from hyperkron.algorithms import InnerOnly, Updates
from hyperkron.attribution import training_damping

MOMENTUM = 0.9
DECAY = 1e-4
"""α of the penalty α‖θ‖²: the minimum is isolated, and every method knows it."""


@dataclass(frozen=True)
class Setting:
    """A network with its data, and how it is trained."""

    name: str
    network: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]
    epochs: int
    rate: float
    batch: int = 64

    def steps(self, rows: int) -> int:
        """Of a training on this many rows."""
        return self.epochs * max(1, rows // self.batch)

    @property
    def damping(self) -> float:
        """By the rule of :func:`hyperkron.attribution.training_damping`: the rate falls linearly to zero."""
        total = self.steps(len(self.train[0]))
        return training_damping([self.rate * (1 - step / total) for step in range(total)], momentum=MOMENTUM)

    def to(self, device: torch.device) -> Setting:
        train, queries = ((x.to(device), y.to(device)) for x, y in (self.train, self.queries))
        return replace(self, train=train, queries=queries)


def digits_mlp(data: Path | None) -> Setting:
    """scikit-learn's digits; needs no data folder."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16 - 0.3, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Setting("digits, MLP", lambda: mlp(64, 64, 32), (x[:1200], y[:1200]), (x[1200:1300], y[1200:1300]), 40, 0.05)


def digits_cnn(data: Path | None) -> Setting:
    """The same with convolutions."""
    base = digits_mlp(data)
    train, queries = ((x.reshape(-1, 1, 8, 8), y) for x, y in (base.train, base.queries))
    return Setting("digits, CNN", lambda: cnn(1, (8, 16), 16 * 16), train, queries, 40, 0.05)


def fashion_mlp(data: Path | None) -> Setting:
    """5000 images of Fashion-MNIST."""
    images = datasets.mnist(data, "fashion_mnist")
    train, queries = ((x[:n].reshape(n, -1) - 0.3, y[:n]) for (x, y), n in ((images.train, 5000), (images.test, 100)))
    return Setting("Fashion-MNIST, MLP", lambda: mlp(784, 128, 64), train, queries, 20, 0.03)


def cifar_cnn(data: Path | None) -> Setting:
    """5000 images of CIFAR-10."""
    images = datasets.cifar10(data)
    train, queries = (((x[:n] - 0.47) / 0.25, y[:n]) for (x, y), n in ((images.train, 5000), (images.test, 100)))
    return Setting("CIFAR-10, CNN", lambda: cnn(3, (16, 32, 32), 32 * 16), train, queries, 20, 0.03)


def trec_minilm(data: Path | None) -> Setting:
    """2000 questions of TREC; the last layer of MiniLM is fine-tuned."""
    network, train, queries = text.load(data, 2000, 100)
    return Setting("TREC, MiniLM", network, train, queries, 6, 0.03)


SETTINGS = {
    "digits_mlp": digits_mlp,
    "digits_cnn": digits_cnn,
    "fashion_mlp": fashion_mlp,
    "cifar_cnn": cifar_cnn,
    "trec_minilm": trec_minilm,
}


def mlp(inputs: int, *hidden: int) -> nn.Module:
    """A perceptron with ten outputs."""
    widths = (inputs, *hidden)
    layers = [m for a, b in zip(widths, hidden, strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 10))


def cnn(channels: int, widths: tuple[int, ...], features: int) -> nn.Module:
    """Convolutions, each but the first followed by halving the image."""
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            *([nn.MaxPool2d(2)] if i or len(widths) > 2 else []),
        ]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 10))


class Stack(nn.Module):
    """Networks of one shape as one computation: each parameter has a leading dimension for the network."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        params, _ = stack_module_state(networks)
        self.names = list(params)
        self.stacked = nn.ParameterList(params.values())
        self.first = [networks[0]]  # in a list, so that its own parameters are not the stack's

    def forward(self, x: Tensor) -> Tensor:
        """The outputs for a batch of each network, (networks, batch, …)."""
        params = dict(zip(self.names, self.stacked, strict=True))
        found: Tensor = vmap(lambda one, rows: functional_call(self.first[0], one, (rows,)))(params, x)
        return found

    def write(self, networks: list[nn.Module]) -> None:
        """Put the parameters back where they came from."""
        for i, network in enumerate(networks):
            network.load_state_dict({n: p[i].detach() for n, p in zip(self.names, self.stacked, strict=True)})


def train_many(setting: Setting, subsets: list[Tensor], seeds: list[int], looks: Sequence[int] = ()) -> list[nn.Module]:
    """A network for each subset of the training rows, all trained at once by SGD with momentum and a linear decay.

    With ``looks`` copies of them are put in front, as they were after these numbers of steps.
    """
    (x, y), device = setting.train, setting.train[0].device
    networks = []
    for seed in seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            networks.append(setting.network().to(device))
    stack = Stack(networks)
    size = min(len(rows) for rows in subsets)
    total = setting.steps(size)
    steps = total // setting.epochs

    def batches() -> Iterator[Tensor]:
        random = torch.Generator().manual_seed(seeds[0])
        for _ in range(setting.epochs):
            orders = torch.stack(
                [rows[torch.randperm(len(rows), generator=random).to(device)][:size] for rows in subsets]
            )
            yield from orders[:, : steps * setting.batch].split(setting.batch, 1)

    def loss(model: nn.Module, _: nn.Module, rows: Tensor) -> Tensor:
        each = F.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten(), reduction="sum") / rows.shape[1]
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        return each + DECAY * penalty

    stream = batches()
    optimizer = torch.optim.SGD(stack.parameters(), lr=setting.rate, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    made = hk.fit(
        hk.BilevelProblem(loss),
        stack,
        None,
        InnerOnly(report_every=total),
        lambda: next(stream),
        steps=0,
        seed=None,
        graph=True,
        inner_optimizer=Updates(optimizer, schedule, schedule="update"),
    )
    found: list[nn.Module] = []
    for step in (*looks, total):
        made.advance(step - made.state.step)
        stack.write(networks)
        found += networks if step == total else copy.deepcopy(networks)
    return found
