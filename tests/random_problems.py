"""Random small bilevel problems in float64, of many kinds of network, loss and λ, each written out of a seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
from cases import DOUBLE

Batch = tuple[Tensor, Tensor, Tensor]
ACTIVATIONS = [nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.Softplus]


class Dense(nn.Module):
    """Linear layers, some called twice, tied, with norms between, or with a use outside the layer."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.width, hidden = r.randint(2, 3), r.randint(2, 4)
        self.first = nn.Linear(self.width, self.width, bias=r.random() < 0.5)
        self.second = nn.Linear(self.width, self.width, bias=False)
        self.kind = r.choice(["once", "twice", "tied", "outside"])
        if self.kind == "tied":
            self.first = nn.Linear(self.width, self.width, bias=False)
            self.second.weight = self.first.weight
        norm = r.choice([nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d])
        self.norm = norm() if norm is nn.Identity else norm(hidden)
        self.wide, self.act = nn.Linear(self.width, hidden), r.choice(ACTIVATIONS)()
        self.head = nn.Linear(hidden, r.randint(2, 3), bias=r.random() < 0.7)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        if self.kind in ("twice", "tied"):
            z = torch.tanh((self.first if self.kind == "twice" else self.second)(z))
        if self.kind == "outside":
            z = z + F.linear(x, self.first.weight)
        return self.head(self.act(self.norm(self.wide(z))))

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, self.width, dtype=DOUBLE)


class Tokens(nn.Module):
    """Embeddings with positions and attention; the output layer may have their weight, and be called at every token."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.length, self.names = r.randint(2, 3), r.randint(3, 4)
        self.embed = nn.Embedding(self.names, 2, padding_idx=r.choice([None, 0]))
        self.place = nn.Embedding(self.length, 2) if r.random() < 0.3 else None
        self.qkv = nn.ModuleList(nn.Linear(2, 2, bias=r.random() < 0.5) for _ in range(3))
        self.head = nn.Linear(2, self.names, bias=False)
        if r.random() < 0.5:
            self.head.weight = self.embed.weight
        self.pool, self.causal = r.random() < 0.5, r.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h if self.place is None else h + self.place(torch.arange(self.length))
        q, k, v = (layer(h) for layer in self.qkv)
        scores = q @ k.mT
        if self.causal:
            scores = scores.masked_fill(torch.ones(self.length, self.length).triu(1).bool(), -1e9)
        h = h + scores.softmax(-1) @ v
        return self.head(h.mean(1) if self.pool else h)

    def rows(self, count: int) -> Tensor:
        return torch.randint(0, self.names, (count, self.length))


class Images(nn.Module):
    """A convolution with any options, a gate on images of one pixel, and a norm."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        groups = r.choice([1, 2])
        self.channels, out = groups * r.randint(1, 2), groups * r.randint(1, 2)
        mode, padding = r.choice(["zeros", "circular", "reflect", "replicate"]), r.randint(0, 1)
        kernel, stride = (r.randint(1, 2), r.randint(1, 2)), (r.randint(1, 2), r.randint(1, 2))
        options = {"groups": groups, "padding_mode": mode, "dilation": r.randint(1, 2), "bias": r.random() < 0.5}
        self.conv = nn.Conv2d(self.channels, out, kernel, stride, padding, **options)  # type: ignore[arg-type]
        self.gate = nn.Conv2d(out, out, 1) if r.random() < 0.5 else None
        self.norm = r.choice([lambda: nn.Identity(), lambda: nn.GroupNorm(1, out), lambda: nn.BatchNorm2d(out)])()
        self.head, self.act = nn.Linear(out, 2), r.choice(ACTIVATIONS)()

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(self.norm(self.conv(x)))
        z = z if self.gate is None else z * torch.sigmoid(self.gate(z.mean((2, 3), keepdim=True)))
        return self.head(z.mean((2, 3)))

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, self.channels, 5, 5, dtype=DOUBLE)


class Lambda(nn.Module):
    """λ: weights of examples, a penalty for each parameter, soft labels, a temperature."""

    def __init__(self, kinds: list[str], count: int, model: nn.Module, output: Tensor) -> None:
        super().__init__()
        shapes = {
            "weights": (count,),
            "decay": (len(list(model.parameters())),),
            "labels": (count, *output.shape[1:]),
            "temperature": (),
        }
        for kind in kinds:
            setattr(self, kind, nn.Parameter(torch.randn(shapes[kind], dtype=DOUBLE) - float(kind == "decay")))


@dataclass
class RandomProblem:
    """J_in = Σ w_n(λ) c(t(λ) f(x_n), y_n(λ)) + Σ_p α_p(λ)‖p‖², with what of it the seed has chosen."""

    seed: int

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.model = r.choice([Dense, Tokens, Images])(r).to(DOUBLE).eval()
        self.frozen = [p for p in self.model.parameters() if r.random() < 0.1][:2]
        for p in self.frozen:
            p.requires_grad_(False)
        self.count = r.choice([2, 3, 5])
        self.loss, self.smoothing = r.choice(["cross_entropy", "cross_entropy", "mse", "binary"]), r.choice([0.0, 0.2])
        kinds = r.sample(["weights", "decay", "labels", "temperature"], r.choice([1, 1, 2, 3]))
        x, outer = self.model.rows(self.count), self.model.rows(3)
        with torch.no_grad():
            output = self.model(x)
            labels, others = self._labels(output), self._labels(self.model(outer))
        self.hyper = Lambda(kinds, self.count, self.model, output)
        self.inner_batch: Batch = (x, labels, torch.arange(self.count))
        self.outer_batch: Batch = (outer, others, torch.arange(3))
        self.problem = hk.BilevelProblem(self.inner, self.outer)

    def _labels(self, output: Tensor) -> Tensor:
        if self.loss == "cross_entropy":
            return torch.randint(0, output.shape[-1], output.shape[:-1])
        return torch.rand_like(output) if self.loss == "binary" else torch.randn_like(output)

    def criterion(self, output: Tensor, labels: Tensor, weight: Tensor | None = None) -> hk.losses.Loss:
        if self.loss == "cross_entropy":
            return hk.losses.cross_entropy(output, labels, weight=weight, label_smoothing=self.smoothing)
        chosen = hk.losses.mse if self.loss == "mse" else hk.losses.binary_cross_entropy
        return chosen(output, labels, weight=weight)

    def inner(self, model: nn.Module, hyper: Any, batch: Batch) -> hk.losses.Loss:
        x, y, index = batch
        output = model(x) * hyper.temperature.exp() if hasattr(hyper, "temperature") else model(x)
        if hasattr(hyper, "labels"):
            y = hyper.labels[index].softmax(-1) if self.loss == "cross_entropy" else hyper.labels[index].sigmoid()
        loss = self.criterion(output, y, hyper.weights[index].sigmoid() if hasattr(hyper, "weights") else None)
        return loss + hk.losses.l2(model, list(hyper.decay.exp())) if hasattr(hyper, "decay") else loss

    def outer(self, model: nn.Module, hyper: nn.Module, batch: Batch) -> hk.losses.Loss:
        return self.criterion(model(batch[0]), batch[1])

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.problem, self.model, self.hyper, self.inner_batch, self.outer_batch

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def by_layers(self) -> bool:
        """Whether KFAC measures all of θ layer by layer, so that equal problems give equal numbers."""
        outside = isinstance(self.model, Dense) and self.model.kind == "outside"
        return not (outside or (isinstance(self.model, Tokens) and self.model.place is not None))
