"""Inner losses in which λ is everything it can be, and the dense mixed derivative ∂²_λθ J_in · v of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE
from hyperkron import trees
from hyperkron.evaluation.point import Point

X = torch.randn(5, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 1, 0])


class Lambda(nn.Module):
    """λ as named tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, t in tensors.items():
            setattr(self, name, nn.Parameter(t.to(DOUBLE)))


def weights(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X), Y, weight=hyper.a.sigmoid())


def perturbation(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X + hyper.a), Y)


def soft_labels(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X), hyper.a.softmax(-1))


def decay(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    named = dict(model.named_parameters())
    penalty = sum((hk.losses.l2(p, a.exp()) for p, a in zip(named.values(), hyper.a, strict=True)), 0)
    return hk.losses.cross_entropy(model(X), Y) + penalty  # type: ignore[no-any-return, operator]


def network(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    """λ is part of the network, with a part that J_in does not see."""
    features = torch.tanh(X @ hyper.a)
    return hk.losses.mse(model(features), torch.ones(5, 3, dtype=DOUBLE))


def everything(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    data = hk.losses.cross_entropy(model(X + hyper.a), hyper.b.softmax(-1), weight=hyper.c.sigmoid())
    return data * hyper.d.exp() + hk.losses.l2(model, hyper.d.exp())


random = torch.Generator().manual_seed(2)
KINDS: dict[str, tuple[Callable[..., hk.losses.Loss], Callable[[], nn.Module]]] = {
    "weights": (weights, lambda: Lambda(a=torch.randn(5, generator=random))),
    "perturbation": (perturbation, lambda: Lambda(a=torch.randn(5, 3, generator=random))),
    "soft labels": (soft_labels, lambda: Lambda(a=torch.randn(5, 3, generator=random))),
    "decay per parameter": (decay, lambda: Lambda(a=torch.randn(4, generator=random))),
    "network": (network, lambda: Lambda(a=torch.randn(3, 3, generator=random), unused=torch.ones(2))),
    "everything": (
        everything,
        lambda: Lambda(
            a=torch.randn(5, 3, generator=random),
            b=torch.randn(5, 3, generator=random),
            c=torch.randn(5, generator=random),
            d=torch.tensor(-0.5),
        ),
    ),
}


Inner = Callable[..., hk.losses.Loss]


def setting(inner: Inner, hyper: nn.Module, model: nn.Module) -> tuple[Point, dict[str, Tensor]]:
    problem = hk.BilevelProblem(inner, lambda m, h, b: hk.losses.cross_entropy(m(X), Y))
    v = trees.normal_like(oracles.trainable(model), torch.Generator().manual_seed(3))
    return Point(problem, model, hyper, None, None), v


def dense_cross(inner: Inner, model: nn.Module, hyper: nn.Module, v: Any) -> dict[str, Tensor]:
    params, hypers = list(oracles.trainable(model).values()), oracles.trainable(hyper)
    matrix = oracles.hessian(lambda: inner(model, hyper, None).value, params, list(hypers.values()))
    return oracles.tree(matrix.T @ oracles.flat(v), hypers)
