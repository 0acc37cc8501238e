"""λ of every kind: a module, and the two objectives written once for the library's losses and for plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk

from .models import LENGTH, Spec

INNER, OUTER = 7, 5
"""Examples in the two batches."""


# --- losses, by the library and by hand --------------------------------------------------------------------


class Library:
    """The losses of hyperkron."""

    @staticmethod
    def loss(output: Tensor, target: Tensor, weight: Tensor | None = None) -> Any:
        return hk.losses.cross_entropy(output, target, weight=weight)

    @staticmethod
    def decay(hyper: Any, model: nn.Module) -> Any:
        return hyper(model)

    @staticmethod
    def l2(parameters: list[Tensor], coefficient: float) -> Any:
        return hk.losses.l2(parameters, coefficient)


@dataclass(frozen=True)
class PlainLoss:
    """J in plain torch, with what its Gauss–Newton matrix is made of.

    Attributes:
        value: J.
        terms: (output f, criterion c), with J = Σ c(f) + penalties; what else c depends on is held constant.
        penalties: (parameter, α) of α‖p‖².
        rows: unweighted losses, one per example.
        weights, target: w and q of the one criterion, J = Σ_r w_r c(f_r, q_r) + …, held constant; r runs over rows.
    """

    value: Tensor
    terms: tuple[tuple[Tensor, Callable[[Tensor], Tensor]], ...] = ()
    penalties: tuple[tuple[Tensor, Tensor], ...] = ()
    rows: Tensor | None = field(default=None, repr=False)
    weights: Tensor | None = field(default=None, repr=False)
    target: Tensor | None = field(default=None, repr=False)

    @property
    def per_example(self) -> Tensor:
        assert self.rows is not None
        return self.rows

    def __add__(self, other: Any) -> PlainLoss:
        if isinstance(other, Tensor):
            return replace(self, value=self.value + other)
        return replace(self, value=self.value + other.value, penalties=self.penalties + other.penalties)

    def __mul__(self, factor: Tensor) -> PlainLoss:
        constant = factor.detach()
        terms = tuple((f, _scaled(c, constant)) for f, c in self.terms)
        assert self.weights is not None and not self.penalties
        return replace(self, value=self.value * factor, terms=terms, weights=self.weights * constant)


def _scaled(criterion: Callable[[Tensor], Tensor], factor: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda f: criterion(f) * factor


class Plain:
    """The same losses by hand."""

    @staticmethod
    def loss(output: Tensor, target: Tensor, weight: Tensor | None = None) -> PlainLoss:
        valid = torch.ones(output.shape[:-1], dtype=output.dtype)
        if not target.is_floating_point():
            valid = (target != -100).to(output.dtype)
            target = F.one_hot(target.clamp(min=0), output.shape[-1]).to(output.dtype)
        share = valid / valid.sum()
        if weight is not None:
            share = share * weight.reshape(-1, *[1] * (valid.ndim - 1))

        def rows(f: Tensor, q: Tensor) -> Tensor:
            return -(q * f.log_softmax(-1)).sum(-1) * valid

        constants = share.detach(), target.detach()
        value, found = (share * rows(output, target)).sum(), rows(output, target)
        each = found.reshape(len(found), -1).sum(1) / valid.reshape(len(valid), -1).sum(1).clamp(min=1)
        criterion = (output, lambda f: (constants[0] * rows(f, constants[1])).sum())
        return PlainLoss(value, (criterion,), (), each, *constants)

    @staticmethod
    def decay(hyper: Any, model: nn.Module) -> PlainLoss:
        pairs = list(zip(model.parameters(), hyper.log, strict=True))
        value = torch.stack([(log.exp() * p.square()).sum() for p, log in pairs if p.requires_grad]).sum()
        return PlainLoss(value, (), tuple((p, log.detach().exp()) for p, log in pairs if p.requires_grad))

    @staticmethod
    def l2(parameters: list[Tensor], coefficient: float) -> PlainLoss:
        value = torch.stack([coefficient * p.square().sum() for p in parameters]).sum()
        return PlainLoss(value, (), tuple((p, torch.tensor(coefficient, dtype=p.dtype)) for p in parameters))


# --- kinds of λ --------------------------------------------------------------------------------------------

Objective = Callable[[Any, Any, Any, Any], Any]
"""(losses, model, λ, batch) → J, with a batch of (x, y, index)."""


def _outer(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, y, _ = batch
    return k.loss(model(x), y)


def _weights(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, y, index = batch
    return k.loss(model(x), y, weight=hyper(index))


def _weights_and_l2(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return _weights(k, model, hyper, batch) + k.l2(matrices, 0.05)


def _weights_of_padded(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    """Some tokens do not count."""
    x, y, index = batch
    return k.loss(model(x), y.masked_fill((index[:, None] + torch.arange(LENGTH)) % 3 == 0, -100), weight=hyper(index))


def _from_losses(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    """Meta-Weight-Net on the losses of the same forward pass; the module itself says whether they are detached."""
    x, y, _ = batch
    output = model(x)
    return k.loss(output, y, weight=hyper(k.loss(output, y).per_example))


def _from_another_pass(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, y, _ = batch
    with torch.no_grad():
        losses = k.loss(model(x), y).per_example
    return k.loss(model(x), y, weight=hyper(losses))


def _decay(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, y, _ = batch
    return k.loss(model(x), y) + k.decay(hyper, model)


def _shifted(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, y, index = batch
    return k.loss(model(x, _like(hyper(index), x, model)), y)


def _shifted_outer(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    """λ changes the inputs of the outer loss as well, and is penalised there."""
    x, y, index = batch
    penalty = sum(p.square().sum() for p in hyper.parameters())
    return k.loss(model(x, _like(hyper(index), x, model)), y) + 0.05 * penalty


def _soft(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, _, index = batch
    return k.loss(model(x), hyper(index).softmax(-1))


def _corrected(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, y, index = batch
    if y.ndim == 1:
        return k.loss(model(x), hyper(index))
    each = index[:, None] * LENGTH + torch.arange(LENGTH)
    return k.loss(model(x), hyper(each.flatten()).reshape(*y.shape, -1))


def _domains(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, y, index = batch
    return k.loss(model(x), y, weight=hyper(index % 3))


def _scale(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, y, _ = batch
    return k.loss(model(x), y) * hyper().exp()


def _augmented(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    x, y, _ = batch
    return k.loss(model(hyper(x)), y)


def _like(shift: Tensor, x: Tensor, model: nn.Module) -> Tensor:
    """A shift in the dtype of the inputs, or of the embeddings of tokens."""
    return shift.to(x.dtype if x.is_floating_point() else next(model.parameters()).dtype)


def _silent_outer(k: Any, model: Any, hyper: Any, batch: Any) -> Any:
    """An outer loss that θ reaches with slope zero."""
    x, y, _ = batch
    penalty = sum(p.square().sum() for p in hyper.parameters())
    return k.loss(model(x), y) * torch.zeros(()) + 0.05 * penalty


class Rows(nn.Module):
    """One free tensor for each example."""

    def __init__(self, *shape: int, scale: float = 0.3) -> None:
        super().__init__()
        self.rows = nn.Parameter(scale * torch.randn(shape))

    def forward(self, index: Tensor) -> Tensor:
        return self.rows[index]


class Attached(nn.Module):
    """Meta-Weight-Net without the detach."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))

    def forward(self, losses: Tensor) -> Tensor:
        return self.net(losses.to(next(self.net.parameters()).dtype)[:, None]).squeeze(1).sigmoid()


class Generator(nn.Module):
    """A network that makes each example's shift."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, int(torch.Size(shape).numel())))
        self.shape = shape

    def forward(self, index: Tensor) -> Tensor:
        dtype = next(self.net.parameters()).dtype
        noise = torch.stack([index.to(dtype).cos(), (2 * index.to(dtype)).sin()], 1)
        return self.net(noise).reshape(len(index), *self.shape)


@dataclass(frozen=True)
class Kind:
    """A kind of λ.

    Attributes:
        make: the module, from the model's spec, the oracle's model and the labels of the inner batch.
        inner, outer: the objectives.
        stops: gradients of θ are stopped on their way to λ.
        draws: it draws random numbers.
        open: KFAC's blocks are not defined to the last digit: penalties that differ within a block, or masked rows.
    """

    make: Callable[[Spec, nn.Module, Tensor], nn.Module]
    inner: Objective
    outer: Objective = _outer
    stops: bool = False
    draws: bool = False
    open: bool = False

    def fits(self, spec: Spec) -> bool:
        """Whether a model can have it."""
        if self.inner is _weights_of_padded:
            return spec.lengthwise
        if self.draws and spec.dtype != torch.float64:  # the oracle would draw other numbers
            return False
        return not (self.inner is _augmented and spec.inputs == "tokens")


HYPERS: dict[str, Kind] = {
    "weights clip": Kind(lambda s, m, y: hk.SampleWeights(INNER), _weights),
    "weights sigmoid": Kind(lambda s, m, y: hk.SampleWeights(INNER, "sigmoid"), _weights),
    "weights softmax": Kind(lambda s, m, y: hk.SampleWeights(INNER, "softmax"), _weights),
    "weights, l2": Kind(lambda s, m, y: hk.SampleWeights(INNER), _weights_and_l2),
    "weights, padded": Kind(lambda s, m, y: hk.SampleWeights(INNER), _weights_of_padded, open=True),
    "mwn": Kind(lambda s, m, y: hk.MetaWeightNet(4), _from_losses, stops=True),
    "mwn normalised": Kind(lambda s, m, y: hk.MetaWeightNet(4, normalise=True), _from_losses, stops=True),
    "mwn no_grad": Kind(lambda s, m, y: hk.MetaWeightNet(4), _from_another_pass, stops=True),
    "mwn attached": Kind(lambda s, m, y: Attached(), _from_losses),
    "decay tensor": Kind(lambda s, m, y: hk.WeightDecay(m, 0.05), _decay),
    "decay entry": Kind(lambda s, m, y: hk.WeightDecay(m, 0.05, "entry"), _decay, open=True),
    "inputs": Kind(lambda s, m, y: Rows(INNER, *s.width), _shifted),
    "generator": Kind(lambda s, m, y: Generator(s.width), _shifted),
    "soft labels": Kind(lambda s, m, y: Rows(*y.shape, s.classes, scale=1.0), _soft),
    "domains": Kind(lambda s, m, y: hk.DomainWeights(3), _domains),
    "label correction": Kind(lambda s, m, y: hk.LabelCorrection(y.flatten(), s.classes), _corrected),
    "scale": Kind(lambda s, m, y: hk.as_hyper(torch.tensor(0.1)), _scale),
    "augmentation": Kind(lambda s, m, y: hk.Augmentation(0.2), _augmented, draws=True),
    "zero right-hand side": Kind(lambda s, m, y: hk.SampleWeights(INNER), _weights, _silent_outer),
    "outer too": Kind(lambda s, m, y: Rows(INNER, *s.width), _shifted, _shifted_outer),
}


def module(kind: Kind, spec: Spec, twin: nn.Module, labels: Tensor, dtype: torch.dtype, seed: int) -> nn.Module:
    """λ somewhere in the middle of where it may be, in ``dtype``."""
    torch.manual_seed(seed)
    made = kind.make(spec, twin, labels).to(dtype)
    with torch.no_grad():
        for p in made.parameters():
            p.add_((0.4 * torch.rand(p.shape) - 0.2).to(dtype))
    return made
