"""Small bilevel problems in float64, each written twice: with the library's losses and in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
import oracles
from hyperkron.curvature.kfac.capture import measure
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.measured import Measured, Measurement
from hyperkron.evaluation.point import Point

DOUBLE = torch.float64


class Weights(nn.Module):
    """λ: σ_n = λ_n, one weight for each example."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values.detach().clone())

    def forward(self) -> Tensor:
        return self.weight


def uniform_weights(count: int, value: float = 0.5) -> Weights:
    return Weights(torch.full((count,), value, dtype=DOUBLE))


def random_weights(count: int, seed: int = 3) -> Weights:
    return Weights(torch.rand(count, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)) + 0.1)


Plain = Callable[[Tensor, Any, Any], Tensor]
"""(output, target, weight or None) → scalar, in plain torch."""


def plain_mse(output: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    rows = 0.5 * (output - target).square().flatten(1).sum(1)
    return (rows if weight is None else weight * rows).mean()


def plain_cross_entropy(output: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    if target.is_floating_point():
        rows = -(target * output.log_softmax(-1)).sum(-1)
        valid = torch.ones_like(rows)
    else:
        rows = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").reshape(target.shape)
        valid = (target != -100).to(rows.dtype)
    if weight is not None:
        rows = rows * weight.reshape(-1, *[1] * (rows.dim() - 1))
    return (rows * valid).sum() / valid.sum()


def plain_binary(output: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    rows = F.binary_cross_entropy_with_logits(output, target, reduction="none").flatten(1).sum(1)
    return (rows if weight is None else weight * rows).mean()


LOSSES: dict[str, tuple[Any, Plain]] = {
    "mse": (hk.losses.mse, plain_mse),
    "cross_entropy": (hk.losses.cross_entropy, plain_cross_entropy),
    "binary": (hk.losses.binary_cross_entropy, plain_binary),
}


@dataclass
class Case:
    """A weighted problem J_in = mean σ_n c(f(x_n), y_n) + Σ α_p‖p‖², J_out = mean c(f(x'_n), y'_n) + ½‖λ‖²/10."""

    model: nn.Module
    hyper: nn.Module
    inner_batch: tuple[Tensor, Tensor]
    outer_batch: tuple[Tensor, Tensor]
    loss: str = "mse"
    decay: dict[str, float | Tensor] = field(default_factory=dict)
    """α of the L2 penalty, by parameter name."""

    def inner(self, model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        x, y = batch
        loss = LOSSES[self.loss][0](model(x), y, weight=hyper())
        named = dict(model.named_parameters())
        for name, alpha in self.decay.items():
            loss = loss + hk.losses.l2(named[name], alpha)
        return loss  # type: ignore[no-any-return]

    def outer(self, model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        x, y = batch
        penalty = sum((p.square().sum() for p in hyper.parameters()), torch.zeros((), dtype=DOUBLE))
        return LOSSES[self.loss][0](model(x), y) + 0.05 * penalty  # type: ignore[no-any-return]

    @property
    def problem(self) -> hk.BilevelProblem:
        return hk.BilevelProblem(self.inner, self.outer)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.problem, self.model, self.hyper, self.inner_batch, self.outer_batch

    @property
    def params(self) -> dict[str, Tensor]:
        return oracles.trainable(self.model)

    def point(self) -> Point:
        return Point(*self.arguments)

    # the same in plain torch

    def plain_inner(self) -> Tensor:
        x, y = self.inner_batch
        return LOSSES[self.loss][1](self.model(x), y, self.hyper()) + self.plain_penalty()

    def plain_penalty(self) -> Tensor:
        named = dict(self.model.named_parameters())
        terms = [(alpha * named[name].square()).sum() for name, alpha in self.decay.items()]
        return sum(terms, torch.zeros((), dtype=DOUBLE))

    def plain_outer(self) -> Tensor:
        x, y = self.outer_batch
        penalty = sum((p.square().sum() for p in self.hyper.parameters()), torch.zeros((), dtype=DOUBLE))
        return LOSSES[self.loss][1](self.model(x), y, None) + 0.05 * penalty

    # its dense curvature

    def hessian(self) -> Tensor:
        return oracles.hessian(self.plain_inner, list(self.params.values()))

    def ggn(self) -> Tensor:
        x, y = self.inner_batch
        params = list(self.params.values())
        sigma = self.hyper().detach()
        return oracles.ggn(self.model(x), lambda f: LOSSES[self.loss][1](f, y, sigma), params) + self.l2()

    def l2(self) -> Tensor:
        """2α on the diagonal."""
        parts = [torch.zeros_like(p) + 2 * self.decay.get(name, 0.0) for name, p in self.params.items()]
        return torch.diag(oracles.flat(parts))

    # what the library measures

    def measured(self, fisher: str = "type-2", sharing: str = "expand", samples: int = 1, seed: int = 0) -> Measured:
        generator = torch.Generator().manual_seed(seed)
        with self.point() as point:
            how = Measurement(fisher, samples, sharing, generator)  # type: ignore[arg-type]
            return measure(point, plan(self.model, "diagonal"), how)

    def slow_factors(
        self, fisher: str = "type-2", sharing: str = "expand", samples: int = 1, seed: int = 0
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """The same by loops, from the vectors the loss gives for the same seed."""
        generator = torch.Generator().manual_seed(seed)

        def vectors(loss: Any) -> Iterator[tuple[Tensor, Tensor]]:
            return ((t.output, v) for t in loss.terms for v in t.vectors(fisher, samples, generator))

        run = lambda: self.inner(self.model, self.hyper, self.inner_batch)  # noqa: E731
        return oracles.kfac_factors(self.model, run, vectors, sharing)


def make(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    loss: str = "mse",
    count: int = 5,
    hyper: nn.Module | None = None,
    seed: int = 0,
    decay: dict[str, float | Tensor] | None = None,
    tokens: int = 0,
) -> Case:
    """Random data for ``model``: inputs of ``shape`` (token indices below ``tokens`` if that is given)."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(DOUBLE)
    batches = []
    for size in (count, 4):
        if tokens:
            x = torch.randint(0, tokens, (size, *shape), generator=generator)
        else:
            x = torch.randn(size, *shape, dtype=DOUBLE, generator=generator)
        with torch.no_grad():
            output = model(x)
        if loss == "cross_entropy":
            y = torch.randint(0, output.shape[-1], output.shape[:-1], generator=generator)
        elif loss == "binary":
            y = torch.rand(output.shape, dtype=DOUBLE, generator=generator)
        else:
            y = torch.randn(output.shape, dtype=DOUBLE, generator=generator)
        batches.append((x, y))
    return Case(model, hyper or uniform_weights(count), batches[0], batches[1], loss, decay or {})


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh, bias: bool = True) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b, bias=bias)] + ([activation()] if i < len(widths) - 2 else [])
    return nn.Sequential(*layers).to(DOUBLE)


class Mean(nn.Module):
    """The mean over all positions: dimensions between the first and the last, or after the second."""

    def __init__(self, channels_first: bool = False) -> None:
        super().__init__()
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2) if self.channels_first else x.flatten(1, -2).mean(1)
