"""The steps of six of the suite's algorithms for a logistic regression with penalties, written out in numpy.

The published runs compile their loops and make millions of steps; one step of the library costs milliseconds here,
nearly all of it overhead. These are the same steps at a fraction of the time (tests/test_bilevel_suite.py holds them
against the library's, batch by batch), so that runs on data of IJCNN1's size come near to the published numbers.

For g = mean loss + ½ Σ_j exp(λ_j) θ_j², the cross term of v is X(v) = exp(λ) ⊙ θ ⊙ v, and ∂_λ f = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from bilevel_problems import Case
from numpy.typing import NDArray

import hyperkron as hk

Array = NDArray[np.float64]
INNER = TERMS = 10
"""Steps on θ, and steps on v or terms of the Neumann series, in one step of AmIGO, stocBiO and MRBO."""


class Oracles:
    """A point (θ, λ), the batches of both levels in the library's order, and the oracles on them."""

    def __init__(self, case: Case, seed: int, batch: int = 64) -> None:
        self.inner = hk.Examples(*case.inner, batch_size=batch, seed=seed)
        self.outer = hk.Examples(*case.outer, batch_size=batch, seed=seed + 1000)
        self.train, self.validation = ([_arrays(x.batch(i)) for i in range(len(x))] for x in (self.inner, self.outer))
        features = case.inner[0].shape[1]
        self.theta, self.hyper = np.zeros(features), np.zeros(features)

    def gradient(self, theta: Array, penalty: Array, index: int) -> Array:
        """∂_θ g on a training batch."""
        return _slope(*self.train[index], theta) + penalty * theta

    def b(self, theta: Array, index: int) -> Array:
        """∂_θ f on a validation batch."""
        return _slope(*self.validation[index], theta)

    def both(self, theta: Array, penalty: Array, v: Array, index: int) -> Array:
        """∂_θ g and Hv on one training batch, as two rows."""
        x, y = self.train[index]
        rows = np.stack((theta, v))
        outputs = rows @ x.T
        p = _sigmoid(outputs[0])
        outputs[0] = p - y
        outputs[1] *= p * (1 - p)
        return outputs @ x / len(y) + penalty * rows

    def product(self, theta: Array, penalty: Array, v: Array, index: int) -> Array:
        """Hv on a training batch."""
        x, y = self.train[index]
        p = _sigmoid(x @ theta)
        return (p * (1 - p) * (x @ v)) @ x / len(y) + penalty * v

    def descend(self, rate: float) -> None:
        """Ten steps on θ."""
        penalty = np.exp(self.hyper)
        for _ in range(INNER):
            self.theta = self.theta - rate * self.gradient(self.theta, penalty, self.inner.index())

    def series(self, theta: Array, hyper: Array, indices: list[int], outer: int, step: float) -> Array:
        """The hypergradient −X(v), v a Neumann series with a batch for each product."""
        penalty = np.exp(hyper)
        term = total = self.b(theta, outer)
        for index in indices:
            term = term - step * self.product(theta, penalty, term, index)
            total = total + term
        return -penalty * theta * step * total


def _arrays(batch: tuple[Any, ...]) -> tuple[Array, Array]:
    return np.ascontiguousarray(batch[0].numpy()), batch[1].numpy()


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _slope(x: Array, y: Array, theta: Array) -> Array:
    return (_sigmoid(x @ theta) - y) @ x / len(y)


def soba(o: Oracles, step: float, outer: float) -> Iterator[None]:
    v, t = np.zeros_like(o.theta), 0
    while True:
        t += 1
        penalty, decay = np.exp(o.hyper), t**-0.5
        gradient, product = o.both(o.theta, penalty, v, o.inner.index())
        crossed = penalty * o.theta * v
        v = v - step * decay * (product - o.b(o.theta, o.outer.index()))
        o.theta, o.hyper = o.theta - step * decay * gradient, o.hyper + outer * decay * crossed
        yield


def saba(o: Oracles, step: float, outer: float) -> Iterator[None]:
    v, features = np.zeros_like(o.theta), len(o.theta)
    tables = np.zeros((len(o.inner), 3, features)), np.zeros((len(o.outer), features))
    means = [np.zeros((3, features)), np.zeros(features)]
    while True:
        i, j, penalty = o.inner.index(), o.outer.index(), np.exp(o.hyper)
        found = np.empty((3, features))
        found[:2], found[2] = o.both(o.theta, penalty, v, i), penalty * o.theta * v
        found, b = o.inner.share(i) * found - tables[0][i], o.outer.share(j) * o.b(o.theta, j) - tables[1][j]
        tables[0][i] += found
        tables[1][j] += b
        (gradient, product, crossed), slope = found + means[0], b + means[1]
        means = [means[0] + found / len(tables[0]), means[1] + b / len(tables[1])]
        v = v - step * (product - slope)
        o.theta, o.hyper = o.theta - step * gradient, o.hyper + outer * crossed
        yield


def amigo(o: Oracles, step: float, outer: float) -> Iterator[None]:
    v = np.zeros_like(o.theta)
    while True:
        o.descend(step)
        penalty, b = np.exp(o.hyper), o.b(o.theta, o.outer.index())
        for _ in range(TERMS):
            v = v - step * (o.product(o.theta, penalty, v, o.inner.index()) - b)
        o.inner.index()  # the batch of the cross term, which does not depend on it
        o.hyper = o.hyper + outer * penalty * o.theta * v
        yield


def stocbio(o: Oracles, step: float, outer: float) -> Iterator[None]:
    while True:
        o.descend(step)
        indices = [o.inner.index() for _ in range(TERMS + 1)]
        o.hyper = o.hyper - outer * o.series(o.theta, o.hyper, indices[1:], o.outer.index(), step)
        yield


def mrbo(o: Oracles, step: float, outer: float) -> Iterator[None]:
    old, d, t = None, (o.theta, o.hyper), 0
    while True:
        t += 1
        first, indices, j = o.inner.index(), [o.inner.index() for _ in range(TERMS + 1)], o.outer.index()

        def at(theta: Array, hyper: Array) -> tuple[Array, Array]:
            gradient = o.gradient(theta, np.exp(hyper), first)  # noqa: B023 - called in this turn of the loop
            return gradient, o.series(theta, hyper, indices[1:], j, step)  # noqa: B023

        here = at(o.theta, o.hyper)
        if old is None:
            d = here
        else:
            there, keep = at(*old), 1 - 0.5 * t ** (-2 / 3)
            d = here[0] + keep * (d[0] - there[0]), here[1] + keep * (d[1] - there[1])
        old, decay = (o.theta, o.hyper), t ** (-1 / 3)
        o.theta, o.hyper = o.theta - step * decay * d[0], o.hyper - outer * decay * d[1]
        yield


def fsla(o: Oracles, step: float, outer: float) -> Iterator[None]:
    v, d, t = np.zeros_like(o.theta), np.zeros_like(o.theta), 0
    h = np.zeros_like(o.theta)
    while True:
        t += 1
        penalty, rate = np.exp(o.hyper), step * t**-0.5
        o.theta = o.theta - rate * o.gradient(o.theta, penalty, o.inner.index())
        b = o.b(o.theta, o.outer.index())
        v = v - rate * (o.product(o.theta, penalty, v, o.inner.index()) - b)
        o.inner.index(), o.outer.index()  # the batches of h, which does not depend on them
        before, h = h, -penalty * o.theta * v
        d = h + (1 - 0.5 * t**-0.5) * (d - before) if t > 1 else h
        o.hyper = o.hyper - outer * t**-0.5 * d
        yield


STEPS: dict[str, Callable[[Oracles, float, float], Iterator[None]]] = {
    "SABA": saba,
    "SOBA": soba,
    "AmIGO": amigo,
    "MRBO": mrbo,
    "FSLA": fsla,
    "stocBiO": stocbio,
}
