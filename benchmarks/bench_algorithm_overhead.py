"""What a step of an algorithm costs over the same step written by hand with autograd, on a problem of 50 numbers.

    OMP_NUM_THREADS=1 python benchmarks/bench_algorithm_overhead.py
    OMP_NUM_THREADS=1 python benchmarks/bench_algorithm_overhead.py --algorithms SOBA SABA --rounds 50

A logistic regression with 50 features and a penalty exp(λ_j) for each, in batches of 64 on one CPU thread: computing
hardly counts, so the ratio is the overhead of the library. The hand-written steps use the same two objectives and
batches and as many gradients and Hessian products; they check nothing, report nothing, and restore no random states.
Objectives are plain torch functions, or the losses of the library, which also record their curvature. Both sides run in
turns; the ratio is the median over rounds of processor times.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import write_result
from torch import Tensor, nn
from torch.nn import functional as F

import hyperkron as hk
from hyperkron.algorithms import BatchSources, Examples

FEATURES, BATCH, INNER, TERMS = 50, 64, 10, 10


def torch_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])


def torch_inner(model: Any, hyper: nn.Module, batch: Any) -> Tensor:
    return torch_loss(model, batch) + 0.5 * (hyper().exp() * model.weight.square()).sum()


def recorded_loss(model: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.binary_cross_entropy(model(batch[0]).squeeze(1), batch[1])


def recorded_inner(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
    return recorded_loss(model, batch) + hk.losses.l2(model, 0.5 * hyper().exp())


PROBLEMS = {
    "torch": hk.BilevelProblem(torch_inner, lambda model, hyper, batch: torch_loss(model, batch)),
    "hyperkron": hk.BilevelProblem(recorded_inner, lambda model, hyper, batch: recorded_loss(model, batch)),
}


def start(seed: int = 0) -> tuple[nn.Linear, nn.Module, BatchSources]:
    """θ, λ and the batches, the same for every run."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(model.weight)
    parts = []
    for count in (1024, 512):
        x = torch.randn(count, FEATURES, generator=generator)
        parts.append(Examples(x, (x.sum(1) > 0).float(), batch_size=BATCH, seed=seed))
    return model, hk.as_hyper(torch.full((1, FEATURES), -2.0)), BatchSources(*parts)


class Hand:
    """The oracles written out: θ and λ are one tensor each, and every method one or two calls of autograd."""

    def __init__(self, problem: hk.BilevelProblem) -> None:
        self.problem = problem
        self.model, self.hyper, batches = start()
        self.theta, (self.lam,) = self.model.weight, self.hyper.parameters()
        self.inner, self.outer = batches.finite("by hand")
        self.v = torch.zeros_like(self.theta)

    def g(self, batch: Any) -> Tensor:
        return getattr(loss := self.problem.inner(self.model, self.hyper, batch), "value", loss)  # type: ignore[no-any-return]

    def f(self, batch: Any) -> Tensor:
        return getattr(loss := self.problem.outer(self.model, self.hyper, batch), "value", loss)  # type: ignore[no-any-return]

    def slope(self, batch: Any) -> Tensor:
        return torch.autograd.grad(self.g(batch), self.theta)[0]

    def b(self, batch: Any) -> Tensor:
        return torch.autograd.grad(self.f(batch), self.theta)[0]

    def products(self, batch: Any, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """∂θ g, Hv and X(v) from one graph."""
        (slope,) = torch.autograd.grad(self.g(batch), self.theta, create_graph=True)
        return slope.detach(), *torch.autograd.grad(slope, (self.theta, self.lam), v)

    def product(self, batch: Any, v: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.g(batch), self.theta, create_graph=True)
        return torch.autograd.grad(slope, self.theta, v)[0]

    def cross(self, batch: Any, v: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.g(batch), self.theta, create_graph=True)
        return torch.autograd.grad(slope, self.lam, v)[0]

    def series(self, batches: list[Any], outer: Any) -> Tensor:
        term = total = self.b(outer)
        for batch in batches[1:]:
            term = term - 0.1 * self.product(batch, term)
            total = total + term
        return -self.cross(batches[0], 0.1 * total)

    @contextmanager
    def at(self, theta: Tensor, lam: Tensor) -> Iterator[None]:
        own = self.theta.data, self.lam.data
        self.theta.data, self.lam.data = theta, lam
        try:
            yield
        finally:
            self.theta.data, self.lam.data = own

    def move(self, theta: Tensor, lam: Tensor, rate: float = 0.1) -> None:
        with torch.no_grad():
            self.theta -= rate * theta
            self.lam -= rate * lam


def soba(o: Hand) -> Iterator[None]:
    while True:
        slope, product, cross = o.products(o.inner.next(), o.v)
        b = o.b(o.outer.next())
        o.v = o.v - 0.1 * (product - b)
        o.move(slope, -cross)
        yield


def saba(o: Hand) -> Iterator[None]:
    tables = [
        torch.zeros(len(s), *x.shape) for s, x in zip((o.inner,) * 3 + (o.outer,), (o.v, o.v, o.lam, o.v), strict=True)
    ]
    means = [x[0].clone() for x in tables]

    def reduced(k: int, index: int, new: Tensor) -> Tensor:
        change = new - tables[k][index]
        tables[k][index] += change
        direction = change + means[k]
        means[k] = means[k] + change / len(tables[k])
        return direction

    while True:
        i, j = o.inner.index(), o.outer.index()
        found = [reduced(k, i, x) for k, x in enumerate(o.products(o.inner.batch(i), o.v))]
        b = reduced(3, j, o.b(o.outer.batch(j)))
        o.v = o.v - 0.1 * (found[1] - b)
        o.move(found[0], -found[2])
        yield


def srba(o: Hand) -> Iterator[None]:
    def directions(inner: Any, outer: Any, v: Tensor) -> list[Tensor]:
        slope, product, cross = o.products(inner, v)
        return [slope, product - o.b(outer), -cross]

    step, period = 0, (len(o.inner) + len(o.outer)) // 2
    d: list[Tensor] = []
    old: tuple[Tensor, ...] = ()
    while True:
        if step % period == 0:
            d = directions(o.inner.full(), o.outer.full(), o.v)
        else:
            pair = o.inner.next(), o.outer.next()
            here = directions(*pair, o.v)
            with o.at(*old[:2]):
                there = directions(*pair, old[2])
            d = [x + (y - z) for x, y, z in zip(d, here, there, strict=True)]
        old = o.theta.detach().clone(), o.lam.detach().clone(), o.v
        o.v = o.v - 0.1 * d[1]
        o.move(d[0], d[2])
        step += 1
        yield


def fsla(o: Hand) -> Iterator[None]:
    d, before = None, o.lam.detach().clone()
    while True:
        theta, last = o.theta.detach().clone(), o.v
        o.move(o.slope(o.inner.next()), torch.zeros(()))
        o.v = o.v - 0.1 * (o.product(o.inner.next(), o.v) - o.b(o.outer.next()))
        batch, outer = o.inner.next(), o.outer.next()
        o.b(outer)  # ∂λ f, which is zero here, at both points
        h = -o.cross(batch, o.v)
        if d is not None:
            with o.at(theta, before):
                o.b(outer)
                h = h + 0.5 * (d + o.cross(batch, last))
        d, before = h, o.lam.detach().clone()
        o.move(torch.zeros(()), d)
        yield


def amigo(o: Hand) -> Iterator[None]:
    while True:
        for _ in range(INNER):
            o.move(o.slope(o.inner.next()), torch.zeros(()))
        b = o.b(o.outer.next())
        for _ in range(TERMS):
            o.v = o.v - 0.1 * (o.product(o.inner.next(), o.v) - b)
        o.move(torch.zeros(()), -o.cross(o.inner.next(), o.v))
        yield


def stocbio(o: Hand) -> Iterator[None]:
    while True:
        for _ in range(INNER):
            o.move(o.slope(o.inner.next()), torch.zeros(()))
        o.move(torch.zeros(()), o.series([o.inner.next() for _ in range(TERMS + 1)], o.outer.next()))
        yield


def mrbo(o: Hand) -> Iterator[None]:
    old, d = None, (o.v, o.v)
    while True:
        first, batches, outer = o.inner.next(), [o.inner.next() for _ in range(TERMS + 1)], o.outer.next()
        here = o.slope(first), o.series(batches, outer)
        if old is not None:
            with o.at(*old):
                there = o.slope(first), o.series(batches, outer)
            here = here[0] + 0.5 * (d[0] - there[0]), here[1] + 0.5 * (d[1] - there[1])
        d, old = here, (o.theta.detach().clone(), o.lam.detach().clone())
        o.move(*d)
        yield


def f2sa(o: Hand) -> Iterator[None]:
    z = o.theta.detach().clone()
    while True:
        for _ in range(INNER):
            batch = o.inner.next()
            y_slope = o.b(o.outer.next()) + o.slope(batch)
            with o.at(z, o.lam.data):
                z_slope = o.slope(batch)
            o.move(y_slope, torch.zeros(()), 0.01)
            z = z - 0.01 * z_slope
        batch, pair = o.inner.next(), (o.theta, o.lam)
        o.b(o.outer.next())
        here = torch.autograd.grad(o.g(batch), pair)[1]
        with o.at(z, o.lam.data):
            there = torch.autograd.grad(o.g(batch), pair)[1]
        o.move(torch.zeros(()), here - there, 0.01)
        yield


def identity(o: Hand) -> Iterator[None]:
    while True:
        for _ in range(INNER):
            o.move(o.slope(o.inner.next()), torch.zeros(()))
        o.move(torch.zeros(()), -o.cross(o.inner.next(), o.b(o.outer.next())))
        yield


a = hk.algorithms
ALGORITHMS: dict[str, tuple[a.Algorithm, Callable[[Hand], Iterator[None]]]] = {
    "SOBA": (a.SOBA(), soba),
    "SABA": (a.SABA(), saba),
    "SRBA": (a.SRBA(), srba),
    "FSLA": (a.FSLA(), fsla),
    "F2SA": (a.F2SA(), f2sa),
    "MRBO": (a.MRBO(), mrbo),
    "stocBiO": (a.StocBiO(), stocbio),
    "AmIGO": (a.AmIGO(), amigo),
    "AID (identity)": (a.AID(hk.identity()), identity),
}


def steps(name: str, problem: hk.BilevelProblem) -> Callable[[], object]:
    """The library's step of an algorithm, from a fresh start."""
    method, (model, hyper, batches) = ALGORITHMS[name][0], start()
    state = method.init(problem, model, hyper)
    return lambda: method.step(state, batches)


def measure(name: str, problem: hk.BilevelProblem, rounds: int, count: int) -> dict[str, float]:
    """Milliseconds of a step by the library and by hand, and the median over rounds of their ratio."""
    ours, by_hand = steps(name, problem), ALGORITHMS[name][1](Hand(problem))
    sides: list[Callable[[], object]] = [ours, lambda: next(by_hand)]
    times: list[list[float]] = [[], []]
    for side in sides:
        side()
        side()
    gc.collect()
    for i in range(rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            begin = time.thread_time()
            for _ in range(count):
                sides[which]()
            times[which].append(1e3 * (time.thread_time() - begin) / count)
    ratios = [x / y for x, y in zip(*times, strict=True)]
    medians = [statistics.median(x) for x in (*times, ratios)]
    return dict(zip(("library_ms", "by_hand_ms", "ratio"), medians, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of the algorithms' steps over steps written by hand.")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--count", type=int, default=8, help="steps in a round")
    parser.add_argument("--out", help="write the result to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'':16}{'objectives':12}{'library':>10}{'by hand':>10}{'ratio':>8}")
    for name in arguments.algorithms:
        for losses, problem in PROBLEMS.items():
            row = measure(name, problem, arguments.rounds, arguments.count)
            rows.append({"algorithm": name, "objectives": losses, **row})
            print(
                f"{name:16}{losses:12}{row['library_ms']:8.2f}ms{row['by_hand_ms']:8.2f}ms{row['ratio']:8.2f}",
                flush=True,
            )
    if arguments.out:
        write_result(arguments.out, {"seed": 0, "rows": rows})


if __name__ == "__main__":
    main()
