"""Data poisoning as a measurement of robustness: how much accuracy do ε = 3 % of added rows cost a training pipeline?

    J_in(λ, θ)  = 1/(1 + ε) · mean CE on clean rows  +  ε/(1 + ε) · mean CE on rows (g_λ(x, y), y)
    J_out(θ)    = − mean CE on validation rows

λ are the weights of a network g_λ that starts as an autoencoder, so that the added rows are copies of training rows at
first. The verdict is the test accuracy of a network that is trained from scratch on clean and added rows. This is the
TGDA benchmark on public data: it tells a user which accuracy to expect in the worst case, and what cleaning gives back.

Reference: Lu, Kamath & Yu, "Indiscriminate data poisoning attacks on neural networks" (TMLR 2022).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import trial
from experiments.paper import datasets
from experiments.paper.epochs import Epochs
from experiments.paper.networks import seeded
from hyperkron import losses
from hyperkron.batches import Source
from hyperkron.cleaning.models import mlp
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError
from hyperkron.training import Run

Part = tuple[Tensor, Tensor]
Data = Literal["digits", "mnist", "cifar10"]
Network = Literal["linear", "mlp", "cnn"]
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A data set, a network, and how long everything is trained.

    Attributes:
        data, network: ``mlp`` has two hidden layers as wide as its input; ``cnn`` is LeNet.
        counts: training, validation and held-out rows; the rest of the training part is not used.
        batch: clean rows of a batch, and validation rows.
        added: rows g_λ(x, y) of a batch; they count as ε/(1 + ε) of J_in however many they are.
        share: ε.
        steps: of λ.
        inner_steps: of θ for each of them.
        epochs: of the follower before the attack, and of the network that gives the verdict.
        leader_epochs: of the autoencoder.
        rate: SGD's step size in both of these trainings.
        cleaned: clean rows of the set that the defence is measured on; 0 to leave it out.
        trusted: rows with trusted labels that the defence has.
    """

    data: Data
    network: Network
    counts: tuple[int, int, int]
    batch: int = 1000
    added: int = 330
    share: float = 0.03
    steps: int = 1000
    inner_steps: int = 20
    epochs: int = 100
    leader_epochs: int = 20
    rate: float = 0.1
    cleaned: int = 0
    trusted: int = 200


# --- rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Inputs in [−1, 1] and labels. ``origin`` are the training rows that the added rows are made from."""

    train: Part
    validation: Part
    held_out: Part
    test: Part
    origin: Part

    @property
    def clean(self) -> Part:
        """What the network of the verdict is given besides the added rows: training and validation rows."""
        return joined(self.train, self.validation)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.train[0].device


def joined(*parts: Part) -> Part:
    """The rows of several parts."""
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def load(case: Case, folder: Path | None = None) -> datasets.Images:
    """The data set; ``digits`` are scikit-learn's and need no folder."""
    if case.data == "mnist":
        return datasets.mnist(folder)
    if case.data == "cifar10":
        return datasets.cifar10(folder)
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return datasets.Images((x[:-400], y[:-400]), (x[-400:], y[-400:]))


def split_of(case: Case, data: datasets.Images, seed: int, device: torch.device | str = "cpu") -> Split:
    """The training part cut at random; the test part as it is. Pictures are flat unless the network is a CNN."""
    images, labels = data.train
    if sum(case.counts) > len(images):
        raise HyperkronError(f"counts={case.counts!r} add up to {sum(case.counts)}, but there are {len(images)} rows.")

    def scaled(x: Tensor) -> Tensor:
        x = 2 * x - 1
        if case.network != "cnn":
            return x.flatten(1)
        side = round(x[0].numel() ** 0.5)
        return x if x.ndim == 4 else x.reshape(-1, 1, side, side)

    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: sum(case.counts)]
    parts = [(scaled(images[i]).to(device), labels[i].to(device)) for i in order.split(list(case.counts))]
    count = round(case.share * (case.counts[0] + case.counts[1]))
    origin = (parts[0][0][:count], parts[0][1][:count])
    test = (scaled(data.test[0]).to(device), data.test[1].to(device))
    return Split(parts[0], parts[1], parts[2], test, origin)


class Shuffled(Epochs):
    """Full batches of a part for ever, each epoch in a new order and without the few rows that do not fill a batch.

    The rows are put in order once an epoch, so that a batch is a view of them.
    """

    def __init__(self, part: tuple[Tensor, ...], size: int, seed: int) -> None:
        super().__init__(torch.Generator().manual_seed(seed))
        self.part, self.size = part, min(size, len(part[0]))

    def epoch(self) -> Iterable[tuple[Tensor, ...]]:
        """Inputs and labels of its batches."""
        order = torch.randperm(len(self.part[0]), generator=self.generator).to(self.part[0].device)
        columns = (z[order[: self.size * (len(order) // self.size)]].split(self.size) for z in self.part)
        return reversed([*zip(*columns, strict=True)])

    def epochs(self, count: int) -> int:
        """The batches of this many epochs."""
        return count * (len(self.part[0]) // self.size)


class Both(Source):
    """Inner batches: (clean x, clean y, x to poison, its y, its position among the rows to poison)."""

    def __init__(self, split: Split, case: Case, seed: int) -> None:
        x, y = split.origin
        origin = x, y, torch.arange(len(x), device=x.device)
        self.parts = {
            "clean": Shuffled(split.train, case.batch, seed),
            "origin": Shuffled(origin, case.added, seed + 1),
        }

    def next(self) -> tuple[Tensor, ...]:
        """The next batches of both."""
        return tuple(x for part in self.parts.values() for x in part.next())

    def state_dict(self) -> dict[str, Any]:
        """Where both stand."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batches that would have followed."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


# --- networks -----------------------------------------------------------------------------------------------


def lenet(channels: int, side: int) -> nn.Sequential:
    """LeNet: two 5×5 convolutions with ReLU and max pooling, three linear layers; small pictures are padded.

    Example:
        >>> lenet(3, 32)(torch.zeros(2, 3, 32, 32)).shape, lenet(1, 8)(torch.zeros(2, 1, 8, 8)).shape
        (torch.Size([2, 10]), torch.Size([2, 10]))
    """
    padding = 0 if side >= 28 else 2
    for _ in range(2):
        side = (side + 2 * padding - 4) // 2
    body = [nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
    body += [nn.Conv2d(6, 16, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(
        *body, nn.Linear(16 * side**2, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)
    )


class Leader(nn.Module):
    """g_λ of flat rows: three linear layers with leaky ReLU and a final tanh; it reads the label before the pixels."""

    def __init__(self, features: int) -> None:
        super().__init__()
        sizes = (features + 1, features, features, features)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]
        self.net = nn.Sequential(*layers[:-1], nn.Tanh())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Rows in [−1, 1]; the label is scaled to [−1, 1], too."""
        label = 2 * y.to(x.dtype) / (CLASSES - 1) - 1
        made: Tensor = self.net(torch.cat([label[:, None], x], 1))
        return made


class ConvolutionalLeader(nn.Module):
    """g_λ of pictures: three convolutions that halve them (12, 24, 48 channels) and the mirrored transposed ones."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = (channels, 12, 24, 48)
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            down += [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.LeakyReLU(0.2)]
            up = [nn.ConvTranspose2d(outputs, inputs, 4, 2, 1), nn.LeakyReLU(0.2), *up]
        self.net = nn.Sequential(*down, *up[:-1], nn.Tanh())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Pictures in [−1, 1]."""
        made: Tensor = self.net(x)
        return made


def network(case: Case, rows: Part, seed: int) -> nn.Module:
    """A follower with the initial weights of ``seed``."""
    x = rows[0]

    def make() -> nn.Module:
        if case.network == "cnn":
            return lenet(x.shape[1], x.shape[2])
        return mlp(x.shape[1], CLASSES, () if case.network == "linear" else (x.shape[1], x.shape[1]))

    return seeded(make, seed, x.device)


def leader(rows: Part, seed: int) -> nn.Module:
    """A leader with the initial weights of ``seed``."""
    x = rows[0]
    make = (lambda: ConvolutionalLeader(x.shape[1])) if x.ndim == 4 else (lambda: Leader(x.shape[1]))
    return seeded(make, seed, x.device)


# --- the bilevel problem and plain training -----------------------------------------------------------------


def problem(share: float) -> BilevelProblem:
    """The two objectives; an inner batch is one of :class:`Both`, and the position of a row is not read."""

    def inner(model: nn.Module, lead: nn.Module, batch: Any) -> losses.Loss:
        x, y, origin, labels = batch[:4]
        weight = (len(x) + len(origin)) * row_weights(x, len(origin), share)
        rows = torch.cat([x, lead(origin, labels)])
        return losses.cross_entropy(model(rows), torch.cat([y, labels]), weight=weight)

    def outer(model: nn.Module, lead: nn.Module, batch: Any) -> losses.Loss:
        return -losses.cross_entropy(model(batch[0]), batch[1])

    return BilevelProblem(inner, outer)


def row_weights(x: Tensor, added: int, share: float) -> Tensor:
    """What the CE of each row counts in J_in: first the clean rows ``x``, then the ``added`` ones.

    Example:
        >>> row_weights(torch.zeros(2, 3, dtype=torch.float64), 4, 0.5).tolist() == [1 / 3, 1 / 3, *[1 / 12] * 4]
        True
    """
    clean = x.new_full((len(x),), 1 / (len(x) * (1 + share)))
    return torch.cat([clean, x.new_full((added,), share / (added * (1 + share)))])


@torch.no_grad()
def made(lead: nn.Module, origin: Part) -> Tensor:
    """g_λ of all rows."""
    return torch.cat([lead(x, y) for x, y in zip(origin[0].split(2000), origin[1].split(2000), strict=True)])


class FixedRows:
    """J_in for the steps of θ between two steps of λ, in which the added rows stay the same: they are made once.

    Call :meth:`renew` after every step of λ.
    """

    def __init__(self, lead: nn.Module, origin: Part, share: float) -> None:
        self.lead, self.origin, self.share = lead, origin, share
        self.rows = made(lead, origin)
        self._weights: dict[tuple[int, int], Tensor] = {}

    def renew(self) -> None:
        """Make the rows again, in the same memory: CUDA graphs read it."""
        self.rows.copy_(made(self.lead, self.origin))

    def inner(self, model: nn.Module, lead: nn.Module, batch: Any) -> Tensor:
        """J_in as in :func:`problem`, by fewer kernels; no derivative to λ."""
        x, y, _, labels, positions = batch
        sizes = len(x), len(labels)
        if sizes not in self._weights:
            self._weights[sizes] = row_weights(x, len(labels), self.share)
        output = model(torch.cat([x, self.rows[positions]]))
        return F.cross_entropy(output, torch.cat([y, labels]), reduction="none") @ self._weights[sizes]

    def attach(self, run: Run) -> None:
        """Have the steps of θ in ``run`` take this in place of the problem's own J_in."""
        run.state.loop.replace_objective(self.inner)
        run.state.outer.optimizer.register_step_post_hook(lambda *_: self.renew())


def trained(case: Case, rows: Part, seed: int) -> nn.Module:
    """A network trained from scratch on ``rows``."""
    model, batches = network(case, rows, seed), Shuffled(rows, case.batch, seed)
    sgd = torch.optim.SGD(model.parameters(), lr=case.rate)
    trial.train(
        model,
        lambda m, b: losses.cross_entropy(m(b[0]), b[1]),
        batches,
        sgd,
        batches.epochs(case.epochs),
        graph=True,
    )
    return model


def autoencoder(case: Case, split: Split, seed: int) -> nn.Module:
    """The leader before the attack: it gives back the training rows (mean squared error, Adam)."""
    made, batches = leader(split.train, seed), Shuffled(split.train, min(500, case.batch), seed)
    trial.train(
        made,
        lambda g, b: (g(*b) - b[0]).square().mean(),
        batches,
        torch.optim.Adam(made.parameters(), lr=1e-3),
        batches.epochs(case.leader_epochs),
        graph=True,
    )
    return made


@torch.no_grad()
def accuracy(model: nn.Module, part: Part, chunk: int = 5000) -> float:
    """In per cent."""
    hits = [(model(x).argmax(1) == y).sum() for x, y in zip(part[0].split(chunk), part[1].split(chunk), strict=True)]
    return 100 * float(sum(hits)) / len(part[1])


@dataclass
class Starts:
    """The pretrained leader and follower of every seed, made when they are first asked for and given as copies."""

    case: Case
    split: Callable[[int], Split]
    made: dict[int, tuple[nn.Module, nn.Module]] = field(default_factory=dict)

    def __call__(self, seed: int) -> tuple[nn.Module, nn.Module]:
        """Leader and follower."""
        if seed not in self.made:
            split = self.split(seed)
            self.made[seed] = autoencoder(self.case, split, seed), trained(self.case, split.train, seed)
        lead, follower = self.made[seed]
        return copy.deepcopy(lead), copy.deepcopy(follower)


def distance(after: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    """‖after − before‖ / ‖before‖ over all tensors together.

    Example:
        >>> distance([torch.tensor([3.0, 5.0])], [torch.tensor([3.0, 4.0])])
        0.2
    """
    change = sum(float((a.detach() - b.detach()).square().sum()) for a, b in zip(after, before, strict=True))
    return float((change / sum(float(b.detach().square().sum()) for b in before)) ** 0.5)
