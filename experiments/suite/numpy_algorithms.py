"""The steps of the suite's algorithms written out in numpy, for a linear model and two kinds of λ.

The published runs compile their loops and make millions of steps, on vectors of 22 numbers. There torch spends its time
on dispatching operations: a step of the library takes 25 to 95 times as long as one of these, the same step written by
hand with autograd 13 to 42 times. As many steps as published_ijcnn1.py makes in its 50 minutes would take the library
about 40 hours. So this file repeats algorithms for these runs alone; everything else uses the library's, and
``tests/experiments/test_suite.py`` holds every loop to the library's steps, batch by batch, to rounding.

*Penalties*: g = mean loss + ½ Σ_j exp(λ_j) θ_j², a logistic regression; X(v) = exp(λ) ⊙ θ ⊙ v.
*Weights*: g = mean σ(λ_n) CE_n + 0.2 ‖θ‖², ten classes; X(v)_n = σ'(λ_n) ⟨p_n − y_n, v x_n⟩ / batch.
In both ∂_λ f = 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hyperkron as hk
from experiments.suite.problems import Case

Array = NDArray[np.float64]
INNER = TERMS = 10
"""Steps on θ, and steps on v or terms of the Neumann series, in one step of AmIGO, stocBiO and MRBO."""


class Oracles(ABC):
    """A point (θ, λ), the batches of both levels in the library's order, and the oracles on them."""

    theta: Array
    hyper: Array

    def __init__(self, case: Case, seed: int, batch: int = 64) -> None:
        self.inner = hk.algorithms.Examples(*case.inner, batch_size=batch, seed=seed)
        self.outer = hk.algorithms.Examples(*case.outer, batch_size=batch, seed=seed + 1000)
        self.train, self.validation = ([_arrays(x.batch(i)) for i in range(len(x))] for x in (self.inner, self.outer))

    @abstractmethod
    def all(self, theta: Array, hyper: Array, v: Array, index: int) -> tuple[Array, Array]:
        """∂_θ g and Hv as two rows, and X(v), on one training batch."""

    @abstractmethod
    def gradient(self, theta: Array, hyper: Array, index: int) -> Array:
        """∂_θ g on a training batch."""

    @abstractmethod
    def product(self, theta: Array, hyper: Array, v: Array, index: int) -> Array:
        """Hv on a training batch."""

    @abstractmethod
    def cross(self, theta: Array, hyper: Array, v: Array, index: int) -> Array:
        """X(v) on a training batch."""

    @abstractmethod
    def b(self, theta: Array, index: int) -> Array:
        """∂_θ f on a validation batch."""

    @abstractmethod
    def slope(self, theta: Array, hyper: Array, index: int) -> Array:
        """∂_λ g on a training batch."""

    def descend(self, rate: float) -> None:
        """Ten steps on θ."""
        for _ in range(INNER):
            self.theta = self.theta - rate * self.gradient(self.theta, self.hyper, self.inner.index())

    def series(self, theta: Array, hyper: Array, indices: list[int], outer: int, step: float) -> Array:
        """The hypergradient −X(v), v a Neumann series; its first batch is X's, then there is one for each product."""
        term = total = self.b(theta, outer)
        for index in indices[1:]:
            term = term - step * self.product(theta, hyper, term, index)
            total = total + term
        return -self.cross(theta, hyper, step * total, indices[0])


class Penalties(Oracles):
    """A logistic regression with a penalty exp(λ_j) for each feature."""

    def __init__(self, case: Case, seed: int, batch: int = 64) -> None:
        super().__init__(case, seed, batch)
        features = case.inner[0].shape[1]
        self.theta, self.hyper = np.zeros(features), np.zeros(features)

    def all(self, theta: Array, hyper: Array, v: Array, index: int) -> tuple[Array, Array]:
        x, y = self.train[index]
        penalty, rows = np.exp(hyper), np.stack((theta, v))
        outputs = rows @ x.T
        p = _sigmoid(outputs[0])
        outputs[0] = p - y
        outputs[1] *= p * (1 - p)
        return outputs @ x / len(y) + penalty * rows, penalty * theta * v

    def gradient(self, theta: Array, hyper: Array, index: int) -> Array:
        x, y = self.train[index]
        return _slope(x, y, theta) + np.exp(hyper) * theta

    def product(self, theta: Array, hyper: Array, v: Array, index: int) -> Array:
        x, y = self.train[index]
        p = _sigmoid(x @ theta)
        return (p * (1 - p) * (x @ v)) @ x / len(y) + np.exp(hyper) * v

    def cross(self, theta: Array, hyper: Array, v: Array, index: int) -> Array:
        return np.exp(hyper) * theta * v

    def b(self, theta: Array, index: int) -> Array:
        x, y = self.validation[index]
        return _slope(x, y, theta)

    def slope(self, theta: Array, hyper: Array, index: int) -> Array:
        found: Array = np.exp(hyper) * theta**2 / 2
        return found


class Weights(Oracles):
    """A linear model with a weight σ(λ_n) for each training example; θ is (classes, features)."""

    decay = 0.4
    """Of 0.2 ‖θ‖²."""

    def __init__(self, case: Case, seed: int, batch: int = 64) -> None:
        super().__init__(case, seed, batch)
        classes, features = int(case.inner[1].max()) + 1, case.inner[0].shape[1]
        self.theta, self.hyper = np.zeros((classes, features)), np.full(len(case.inner[0]), -2.0)
        self.train = [(x, _one_hot(y, classes), index) for x, y, index in self.train]
        self.validation = [(x, _one_hot(y, classes)) for x, y in self.validation]

    def all(self, theta: Array, hyper: Array, v: Array, index: int) -> tuple[Array, Array]:
        x, y, at = self.train[index]
        rows = np.stack((theta, v))
        outputs, weight = rows @ x.T, _sigmoid(hyper[at])
        p = _softmax(outputs[0])
        found = np.zeros_like(hyper)
        outputs[0] = p - y
        found[at] = weight * (1 - weight) * (outputs[0] * outputs[1]).sum(0) / len(at)
        outputs[1] = _softened(p, outputs[1])
        return (outputs * (weight / len(at))) @ x + self.decay * rows, found

    def gradient(self, theta: Array, hyper: Array, index: int) -> Array:
        x, y, at = self.train[index]
        return ((_softmax(theta @ x.T) - y) * (_sigmoid(hyper[at]) / len(at))) @ x + self.decay * theta

    def product(self, theta: Array, hyper: Array, v: Array, index: int) -> Array:
        x, _, at = self.train[index]
        outputs = np.stack((theta, v)) @ x.T
        hv = _softened(_softmax(outputs[0]), outputs[1])
        return (hv * (_sigmoid(hyper[at]) / len(at))) @ x + self.decay * v

    def cross(self, theta: Array, hyper: Array, v: Array, index: int) -> Array:
        x, y, at = self.train[index]
        outputs, weight = np.stack((theta, v)) @ x.T, _sigmoid(hyper[at])
        found = np.zeros_like(hyper)
        found[at] = weight * (1 - weight) * ((_softmax(outputs[0]) - y) * outputs[1]).sum(0) / len(at)
        return found

    def b(self, theta: Array, index: int) -> Array:
        x, y = self.validation[index]
        return (_softmax(theta @ x.T) - y) @ x / len(x)

    def slope(self, theta: Array, hyper: Array, index: int) -> Array:
        x, y, at = self.train[index]
        outputs, weight = theta @ x.T, _sigmoid(hyper[at])
        top = outputs.max(0)
        losses = np.log(np.exp(outputs - top).sum(0)) + top - (outputs * y).sum(0)
        found = np.zeros_like(hyper)
        found[at] = weight * (1 - weight) * losses / len(at)
        return found


def _arrays(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(np.ascontiguousarray(x.numpy()) for x in batch)


def _one_hot(labels: Any, classes: int) -> Array:
    """(classes, examples)."""
    return (np.arange(classes)[:, None] == labels).astype(np.float64)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _softmax(outputs: Array) -> Array:
    """Over the classes, which are the rows."""
    found = np.exp(outputs - outputs.max(0))
    return found / found.sum(0)


def _softened(p: Array, outputs: Array) -> Array:
    """(diag(p) − ppᵀ) times the outputs, for each example."""
    found = p * outputs
    return found - p * found.sum(0)


def _slope(x: Array, y: Array, theta: Array) -> Array:
    return (_sigmoid(x @ theta) - y) @ x / len(y)


def soba(o: Oracles, step: float, outer: float) -> Iterator[None]:
    v, t = np.zeros_like(o.theta), 0
    while True:
        t += 1
        decay = t**-0.5
        (gradient, product), crossed = o.all(o.theta, o.hyper, v, o.inner.index())
        v = v - step * decay * (product - o.b(o.theta, o.outer.index()))
        o.theta, o.hyper = o.theta - step * decay * gradient, o.hyper + outer * decay * crossed
        yield


def saba(o: Oracles, step: float, outer: float) -> Iterator[None]:
    v = np.zeros_like(o.theta)
    pairs, crosses = np.zeros((len(o.inner), 2, *v.shape)), np.zeros((len(o.inner), *o.hyper.shape))
    slopes = np.zeros((len(o.outer), *v.shape))
    means = [np.zeros_like(table[0]) for table in (pairs, crosses, slopes)]
    while True:
        i, j = o.inner.index(), o.outer.index()
        pair, crossed = o.all(o.theta, o.hyper, v, i)
        gradient, product = _reduced(o.inner.share(i) * pair, pairs, i, means[0])
        crossed = _reduced(o.inner.share(i) * crossed, crosses, i, means[1])
        b = _reduced(o.outer.share(j) * o.b(o.theta, j), slopes, j, means[2])
        v = v - step * (product - b)
        o.theta, o.hyper = o.theta - step * gradient, o.hyper + outer * crossed
        yield


def _reduced(new: Array, table: Array, index: int, mean: Array) -> Array:
    """new − table[index] + mean, the table's; both then know of ``new``, which is written over."""
    new -= table[index]
    table[index] += new
    direction = new + mean
    new /= len(table)
    mean += new
    return direction


def amigo(o: Oracles, step: float, outer: float) -> Iterator[None]:
    v = np.zeros_like(o.theta)
    while True:
        o.descend(step)
        b = o.b(o.theta, o.outer.index())
        for _ in range(TERMS):
            v = v - step * (o.product(o.theta, o.hyper, v, o.inner.index()) - b)
        o.hyper = o.hyper + outer * o.cross(o.theta, o.hyper, v, o.inner.index())
        yield


def stocbio(o: Oracles, step: float, outer: float) -> Iterator[None]:
    while True:
        o.descend(step)
        indices = [o.inner.index() for _ in range(TERMS + 1)]
        o.hyper = o.hyper - outer * o.series(o.theta, o.hyper, indices, o.outer.index(), step)
        yield


def mrbo(o: Oracles, step: float, outer: float) -> Iterator[None]:
    old, d, t = None, (o.theta, o.hyper), 0
    while True:
        t += 1
        first, indices, j = o.inner.index(), [o.inner.index() for _ in range(TERMS + 1)], o.outer.index()

        def at(theta: Array, hyper: Array) -> tuple[Array, Array]:
            gradient = o.gradient(theta, hyper, first)  # noqa: B023 - called in this turn of the loop
            return gradient, o.series(theta, hyper, indices, j, step)  # noqa: B023

        here = at(o.theta, o.hyper)
        if old is None:
            d = here
        else:
            there, keep = at(*old), 1 - 0.5 * t ** (-2 / 3)
            d = here[0] + keep * (d[0] - there[0]), here[1] + keep * (d[1] - there[1])
        old, decay = (o.theta, o.hyper), t ** (-1 / 3)
        o.theta, o.hyper = o.theta - step * decay * d[0], o.hyper - outer * decay * d[1]
        yield


def fsla(o: Oracles, step: float, outer: float, momentum: float = 0.5) -> Iterator[None]:
    v, d, t = np.zeros_like(o.theta), np.zeros_like(o.hyper), 0
    before = o.hyper
    while True:
        t += 1
        rate, theta, last = step * t**-0.5, o.theta, v
        o.theta = theta - rate * o.gradient(theta, o.hyper, o.inner.index())
        b = o.b(o.theta, o.outer.index())
        v = v - rate * (o.product(o.theta, o.hyper, v, o.inner.index()) - b)
        k, _ = o.inner.index(), o.outer.index()
        h = -o.cross(o.theta, o.hyper, v, k)
        keep = 1 - min(1.0, momentum * t**-0.5)
        d = h + keep * (d + o.cross(theta, before, last, k)) if t > 1 else h
        before, o.hyper = o.hyper, o.hyper - outer * t**-0.5 * d
        yield


def f2sa(o: Oracles, step: float, outer: float, growth: float = 0.1) -> Iterator[None]:
    """θ is z, which follows θ*(λ)."""
    y, ell, t = o.theta, 1.0, 0
    while True:
        t += 1
        slow, fast = step * t ** (-5 / 7), step * t ** (-4 / 7)
        for _ in range(INNER):
            i, j = o.inner.index(), o.outer.index()
            y = y - slow * (o.b(y, j) + ell * o.gradient(y, o.hyper, i))
            o.theta = o.theta - fast * o.gradient(o.theta, o.hyper, i)
        i, _ = o.inner.index(), o.outer.index()
        difference = o.slope(y, o.hyper, i) - o.slope(o.theta, o.hyper, i)
        o.hyper = o.hyper - outer * t ** (-4 / 7) * ell * difference
        ell += growth * t ** (-1 / 7)
        yield


Loop = Callable[[Any, float, float], Iterator[None]]
"""From oracles, the rate of θ and v, and the rate of λ."""
STEPS: dict[str, Loop] = {
    "SABA": saba,
    "SOBA": soba,
    "AmIGO": amigo,
    "MRBO": mrbo,
    "FSLA": fsla,
    "stocBiO": stocbio,
    "F2SA": f2sa,
}
SIX = tuple(name for name in STEPS if name != "F2SA")
"""Those that Dagréou et al. (2022) compare."""
