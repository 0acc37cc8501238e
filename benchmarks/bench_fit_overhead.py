"""What ``fit`` adds to a loop written by hand: one outer step, ten inner steps and one hypergradient, of both.

    python benchmarks/bench_fit_overhead.py                                        # linear model, identity, one thread
    python benchmarks/bench_fit_overhead.py --device cuda --graph --workload resnet7

By hand, inner steps are ``loss.backward(); optimizer.step()`` (with ``--graph`` those of ``InnerLoop``) and the
hypergradient is called directly. With "losses of torch" these are of ``torch.nn.functional`` in place of ``hk.losses``;
"torch alone" also computes the hypergradient of the identity by double backward, without any of this library's checks.
All take turns in one process; the table shows medians of blocks of steps and the ratio to the first line. On a CPU the
time is the process's own, which other programs change little.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import synchronize, write_result
from torch import Tensor, nn
from workloads import INNER_STEPS, WORKLOADS, Workload

import hyperkron as hk

FEATURES, EXAMPLES, BATCH = 50, 640, 64
BLOCK = 5


def linear(device: str, small: bool) -> Workload:
    """Logistic regression with one weight per example; SGD."""
    torch.manual_seed(0)
    model, hyper = nn.Linear(FEATURES, 2).to(device), hk.SampleWeights(EXAMPLES).to(device)
    x, y = torch.randn(EXAMPLES + BATCH, FEATURES, device=device), torch.randint(2, (EXAMPLES + BATCH,), device=device)
    rows = torch.arange(EXAMPLES + BATCH, device=device).split(BATCH)
    batches = [(x[i], y[i], i) for i in rows]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload("linear", model, hyper, optimizer, batches[:-1], batches[-1])


ALL: dict[str, Callable[[str, bool], Workload]] = {"linear": linear, **WORKLOADS}
METHODS: dict[str, Callable[[bool], hk.hypergradient.Hypergradient]] = {
    "identity": lambda graph: hk.identity(graph=graph),
    "kfac": lambda graph: hk.kfac(graph=graph),
}


def by_hand(work: Workload, method: hk.hypergradient.Hypergradient, graph: bool, way: str) -> Callable[[], None]:
    """One outer step of a loop written by hand."""
    loop = hk.training.InnerLoop(work.problem, work.model, work.hyper, work.optimizer) if graph else None
    theta, lam = list(work.model.parameters()), list(work.hyper.parameters())

    def loss(batch: Any, weighted: bool) -> Tensor:
        x, y, index = batch
        losses = nn.functional.cross_entropy(work.model(x), y, reduction="none")
        return (losses * work.hyper(index) if weighted else losses).mean()

    def inner_step(i: int) -> None:
        if loop is not None:
            loop.step(work.batches[i])
        elif way == "by hand":
            work.inner_step(i)
        else:
            work.optimizer.zero_grad()
            loss(work.batches[i], True).backward()
            work.optimizer.step()

    def hypergradient() -> None:
        if way != "torch alone":
            method.backward(work.problem, work.model, work.hyper, work.batches[0], work.outer_batch)
            return
        b = torch.autograd.grad(loss(work.outer_batch, False), theta)
        slopes = torch.autograd.grad(loss(work.batches[0], True), theta, create_graph=True)
        for p, g in zip(lam, torch.autograd.grad(slopes, lam, b), strict=True):
            p.grad = -g

    def step() -> None:
        for i in range(INNER_STEPS):
            inner_step(i)
        work.outer_step(hypergradient)

    return step


class Cycle:
    """The batches of a workload in the order of the loop by hand: all of them, then the first for the hypergradient."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.place = [*batches, batches[0]], -1

    def __call__(self) -> Any:
        """The next batch."""
        self.place = (self.place + 1) % len(self.batches)
        return self.batches[self.place]


def by_fit(work: Workload, method: hk.hypergradient.Hypergradient, graph: bool) -> hk.Run:
    """The same as a run."""
    return hk.fit(
        work.problem,
        work.model,
        work.hyper,
        hk.AID(method, inner_steps=INNER_STEPS),
        Cycle(work.batches),
        work.outer_batch,
        steps=0,
        inner_optimizer=work.optimizer,
        outer_optimizer=work.outer_optimizer,
        graph=graph,
    )


def times(block: Callable[[], object], device: str) -> float:
    """Seconds of one block."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    gc.collect()
    synchronize(device)
    begin = clock()
    block()
    synchronize(device)
    return clock() - begin


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--graph", action="store_true", help="CUDA graphs for inner steps and hypergradient")
    parser.add_argument("--workload", default="linear", choices=list(ALL))
    parser.add_argument("--small", action="store_true", help="small sizes of the larger workloads")
    parser.add_argument("--method", default="identity", choices=list(METHODS))
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", help="result file (JSON)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    steps: dict[str, Callable[[], object]] = {}
    for name in ("by hand", "losses of torch", "torch alone") if not args.graph else ("by hand",):
        work, method = ALL[args.workload](args.device, args.small), METHODS[args.method](args.graph)
        step = by_hand(work, method, args.graph, name)
        steps[name] = lambda step=step: [step() for _ in range(BLOCK)]
    run = by_fit(ALL[args.workload](args.device, args.small), METHODS[args.method](args.graph), args.graph)
    steps["fit"] = lambda: run.advance(BLOCK)
    for block in steps.values():
        block()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(args.repeats):
        for name in list(steps)[:: 1 if i % 2 == 0 else -1]:
            found[name].append(1e3 * times(steps[name], args.device) / BLOCK)
    rows = [{"loop": name, "ms": statistics.median(x)} for name, x in found.items()]
    for row in rows:
        row["ratio"] = statistics.median(b / a for a, b in zip(found["by hand"], found[str(row["loop"])], strict=True))
        print(f"{args.workload:8s} {args.method:9s} {row['loop']:20s} {row['ms']:8.3f} ms  {row['ratio']:6.3f}x")
    if args.out:
        write_result(args.out, {"rows": rows, "repeats": args.repeats, "graph": args.graph, "seed": 0})


if __name__ == "__main__":
    main()
