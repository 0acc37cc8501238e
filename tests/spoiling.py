"""A good problem, ways to spoil it, and the table of what is said then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk

N, D, C = 6, 4, 3
NAN, INF = float("nan"), float("inf")


class Given:
    """A good problem; every row of the table spoils one thing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C))
        self.hyper: Any = hk.SampleWeights(N)
        self.inner = inner
        self.outer = outer
        self.x, self.y = torch.randn(N, D), torch.arange(N) % C
        self.held: Any = (torch.randn(N, D), torch.arange(N) % C)
        self.curvature_batch: Any = None

    @property
    def problem(self) -> hk.BilevelProblem:
        return hk.BilevelProblem(self.inner, self.outer)

    def run(self, method: hk.hypergradient.Hypergradient | None = None) -> hk.HypergradientResult:
        extra = {} if self.curvature_batch is None else {"curvature_batch": self.curvature_batch}
        method = hk.kfac(1e-2) if method is None else method
        return method.backward(self.problem, self.model, self.hyper, (self.x, self.y), self.held, **extra)


def inner(model: Any, weights: Any, batch: Any) -> Any:
    x, y = batch
    return hk.losses.cross_entropy(model(x), y, weight=weights(torch.arange(len(x))))


def outer(model: Any, weights: Any, batch: Any) -> Any:
    x, y = batch
    return hk.losses.cross_entropy(model(x), y)


def scalar_inner(model: Any, weights: Any, batch: Any) -> Tensor:
    x, y = batch
    return (F.cross_entropy(model(x), y, reduction="none") * weights(torch.arange(len(x)))).mean()


Spoil = Callable[[Given], Any]


class Table(dict[str, tuple[Spoil, type[Exception], list[str]]]):
    """Under a name: what spoils the problem, the error it gets, and fragments of its message."""

    def row(self, name: str, spoil: Spoil, *fragments: str, error: type[Exception] = hk.HyperkronError) -> None:
        assert name not in self
        self[name] = (spoil, error, list(fragments))


def setting(method: hk.hypergradient.Hypergradient | None = None, **attributes: Any) -> Spoil:
    """Set attributes of a good problem, then run."""

    def spoil(given: Given) -> Any:
        for name, value in attributes.items():
            setattr(given, name, value)
        return given.run(copy.deepcopy(method))

    return spoil


def touching(
    touch: Callable[[Given], Any], method: Callable[[], hk.hypergradient.Hypergradient] | None = None
) -> Spoil:
    """Change a good problem in place, then run."""

    def spoil(given: Given) -> Any:
        touch(given)
        return given.run(None if method is None else method())

    return spoil


@torch.no_grad()
def poison(x: Tensor, value: float = NAN) -> None:
    x.reshape(-1)[1] = value
