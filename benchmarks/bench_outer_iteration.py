"""What one outer iteration costs: ten inner steps, one hypergradient and the λ step, over the ten inner steps alone.

    python benchmarks/bench_outer_iteration.py --device cuda            # the real sizes, on a GPU
    python benchmarks/bench_outer_iteration.py --small                  # the same at small size on two cores

Ours and the reference ways are timed in one run, each iteration bracketed by device synchronisation; the table shows
the median over repetitions of (iteration / inner steps; with a curvature that serves τ iterations, the mean over τ)
and the peak memory of an iteration: the most that was allocated, or, where a CUDA graph holds memory for itself,
reserved. On a CPU there are no graphs, and no rows of them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import references
import torch
from common import peak_memory, seconds, synchronize, write_result
from workloads import WORKLOADS, Workload

import hyperkron as hk


@dataclass
class Method:
    """A name, how to make the hypergradient, over how many iterations its cost repeats (τ), whether it is a graph, and
    how many iterations come before those that are timed."""

    name: str
    make: Callable[[Workload], Callable[[], object]]
    period: int = 1
    graph: bool = False
    warm_up: int = 0

    def __post_init__(self) -> None:
        self.warm_up = self.warm_up or (self.period + 2 if self.graph else 1)


def ours(build: Callable[[Workload], hk.hypergradient.Hypergradient]) -> Callable[[Workload], Callable[[], object]]:
    """A library method as a function without arguments."""

    def make(work: Workload) -> Callable[[], object]:
        method = build(work)
        batch, outer = work.batches[0], work.outer_batch

        def hypergradient() -> object:
            return method.backward(work.problem, work.model, work.hyper, batch, outer)

        hypergradient.method = method  # type: ignore[attr-defined]
        return hypergradient

    return make


def reference(function: Callable[[Workload], None]) -> Callable[[Workload], Callable[[], object]]:
    """A reference way as a function without arguments."""
    return lambda work: lambda: function(work)


METHODS = [
    Method("SAMA (Betty's way)", reference(references.sama_betty)),
    Method("SAMA", ours(lambda w: hk.sama(w.optimizer))),
    Method("SAMA, graph", ours(lambda w: hk.sama(w.optimizer, graph=True)), graph=True),
    Method("identity", ours(lambda w: hk.identity())),
    Method("KFAC mc", ours(lambda w: hk.kfac())),
    Method("KFAC mc reduce", ours(lambda w: hk.kfac(sharing="reduce"))),
    Method("KFAC empirical", ours(lambda w: hk.kfac(fisher="empirical"))),
    Method("KFAC mc, every 5", ours(lambda w: hk.kfac(refresh_every=5)), 5),
    Method("KFAC mc, keep_previous=False", ours(lambda w: hk.kfac(keep_previous=False))),
    Method("identity, graph", ours(lambda w: hk.identity(graph=True)), graph=True),
    Method("KFAC mc, graph", ours(lambda w: hk.kfac(graph=True)), graph=True),
    Method("KFAC mc reduce, graph", ours(lambda w: hk.kfac(sharing="reduce", graph=True)), graph=True),
    Method("KFAC empirical, graph", ours(lambda w: hk.kfac(fisher="empirical", graph=True)), graph=True),
    Method("KFAC mc, every 5, graph", ours(lambda w: hk.kfac(refresh_every=5, graph=True)), 5, graph=True),
    Method("EKFAC", ours(lambda w: hk.ekfac())),
    Method("EKFAC, basis every 10", ours(lambda w: hk.ekfac(basis_every=10)), 10),
    Method("EKFAC, basis every 10, graph", ours(lambda w: hk.ekfac(basis_every=10, graph=True)), 10, graph=True),
    Method("EKFAC, every 10", ours(lambda w: hk.ekfac(refresh_every=10)), 10),
    Method("EKFAC, every 10, graph", ours(lambda w: hk.ekfac(refresh_every=10, graph=True)), 10, graph=True),
    Method(
        "EKFAC, every 10, basis every 100, graph",
        ours(lambda w: hk.ekfac(refresh_every=10, basis_every=10, graph=True)),
        100,
        graph=True,
        warm_up=13,
    ),
    Method("CG-3", ours(lambda w: hk.cg(3))),
    Method("CG-3, graph", ours(lambda w: hk.cg(3, graph=True)), graph=True),
    Method("CG-3, GGN", ours(lambda w: hk.cg(3, curvature=hk.curvature.GGN(1e-3)))),
    Method("CG-3, GGN, graph", ours(lambda w: hk.cg(3, curvature=hk.curvature.GGN(1e-3), graph=True)), graph=True),
    Method("Neumann-10", ours(lambda w: hk.neumann(10, step=1e-2))),
    Method("Neumann-10, graph", ours(lambda w: hk.neumann(10, step=1e-2, graph=True)), graph=True),
    Method("Neumann-10, GGN", ours(lambda w: hk.neumann(10, step=1e-2, curvature=hk.curvature.GGN(1e-3)))),
    Method("KFAC (curvlinops)", reference(references.kfac_curvlinops)),
    Method("CG-3 (normal equations)", reference(references.cg_normal_equations)),
]


def measure(work: Workload, method: Method, device: str, repeats: int) -> dict[str, float | str]:
    """Median cost ratio and peak memory of one method.

    Peak memory is that of the iterations that are timed: on a GPU with model, optimizer and method state, on a CPU on
    top of these.
    """
    hypergradient = method.make(work)
    for _ in range(method.warm_up):  # allocations, first-call decisions, recordings
        work.inner_steps()
        work.outer_step(hypergradient)
    times: list[tuple[float, float]] = []

    def timed() -> None:
        for _ in range(-(-repeats // method.period)):
            times.append(one_period(work, hypergradient, method.period, device))

    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        timed()
        peak = torch.cuda.max_memory_reserved() if method.graph else torch.cuda.max_memory_allocated()
    else:
        peak = peak_memory(timed, device)
    return {
        "method": method.name,
        "ratio": statistics.median((inner + outer) / inner for inner, outer in times),
        "inner_ms": 1e3 * statistics.median(inner for inner, _ in times) / method.period,
        "outer_ms": 1e3 * statistics.median(outer for _, outer in times) / method.period,
        "peak_gib": peak / 2**30,
    }


def one_period(work: Workload, hypergradient: Callable[[], object], period: int, device: str) -> tuple[float, float]:
    """Seconds of the inner steps, and of hypergradient and λ step, in so many iterations."""
    inner = outer = 0.0
    for _ in range(period):
        synchronize(device)
        start = time.perf_counter()
        work.inner_steps()
        synchronize(device)
        middle = time.perf_counter()
        work.outer_step(hypergradient)
        synchronize(device)
        inner += middle - start
        outer += time.perf_counter() - middle
    return inner, outer


def inner_loops(name: str, args: argparse.Namespace) -> list[dict[str, float | str]]:
    """The ten inner steps alone: eager, replayed as a CUDA graph, and that in bfloat16; times and losses."""
    rows = []
    for label, options in (
        ("eager", {"graph": False}),
        ("graph", {"graph": True}),
        ("graph, bfloat16", {"graph": True, "autocast": torch.bfloat16}),
    ):
        rows.append(one_loop(name, label, options, args))
        gc.collect()
        if args.device == "cuda":  # the memory of a graph, too
            torch.cuda.empty_cache()
    return rows


def one_loop(name: str, label: str, options: dict[str, Any], args: argparse.Namespace) -> dict[str, float | str]:
    """One way to run the inner loop; on a GPU also a whole outer iteration with KFAC."""
    work = WORKLOADS[name](args.device, args.small)
    loop = hk.training.InnerLoop(work.problem, work.model, work.hyper, work.optimizer, **options)
    losses = [float(loop.step(batch)) for _ in range(2) for batch in work.batches]

    def ten() -> None:
        for batch in work.batches:
            loop.step(batch)

    row: dict[str, float | str] = {
        "workload": work.name,
        "inner loop": label,
        "ms": 1e3 * statistics.median(seconds(ten, args.device) for _ in range(args.repeats)),
        "last_losses": " ".join(f"{x:.5f}" for x in losses[-3:]),
    }
    print(f"{work.name:18s} inner loop {label:16s} {row['ms']:8.1f} ms  {row['last_losses']}", flush=True)
    if args.device == "cuda" and label != "eager":
        hypergradient = ours(lambda w: hk.kfac(graph=True))(work)
        for _ in range(3):
            work.outer_step(hypergradient)

        def whole() -> None:
            ten()
            work.outer_step(hypergradient)

        row["outer_iteration_ms"] = 1e3 * statistics.median(seconds(whole, args.device) for _ in range(args.repeats))
        print(f"{'':18s} with KFAC, whole outer iteration {row['outer_iteration_ms']:8.1f} ms", flush=True)
    return row


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="small sizes, for machines without a GPU")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", help="only methods whose name contains one of these words")
    parser.add_argument("--skip", nargs="+", default=[], help="not those whose name contains one of these")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inner-loops", action="store_true", help="also time the ways to run the inner loop")
    parser.add_argument("--out", help="result file (JSON)")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    wanted = [m for m in METHODS if not args.methods or any(w.lower() in m.name.lower() for w in args.methods)]
    possible = [m for m in wanted if args.device != "cpu" or not m.graph]  # there it would be the row before once more
    chosen = [m for m in possible if not any(w.lower() in m.name.lower() for w in args.skip)]
    rows: list[dict[str, float | str]] = []
    loops: list[dict[str, float | str]] = []

    def keep() -> None:
        """After every row, so that an interrupted run leaves what it has."""
        if args.out:
            found = {"rows": rows, "inner_loops": loops, "seed": 0, "repeats": args.repeats, "small": args.small}
            write_result(args.out, found)

    for name in args.workloads:
        for method in chosen:
            rows.append(one_row(name, method, args))
            keep()
        if args.inner_loops:
            loops += inner_loops(name, args)
            keep()


def one_row(name: str, method: Method, args: argparse.Namespace) -> dict[str, float | str]:
    """Measure one method on one workload and print its line; a method that fails is a line, not the end."""
    work = WORKLOADS[name](args.device, args.small)
    row: dict[str, float | str] = {"workload": work.name, "method": method.name}
    try:
        row |= measure(work, method, args.device, args.repeats)
        line = "{ratio:6.3f}x  inner {inner_ms:8.1f} ms  outer {outer_ms:8.1f} ms  {peak_gib:6.2f} GiB".format(**row)
    except Exception as error:
        row["error"] = line = f"{type(error).__name__}: {error}"
    print(f"{work.name:18s} {method.name:40s} {line}", flush=True)
    del work
    gc.collect()
    if args.device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # those of a recording's stream would stay, and count for later rows
        torch.cuda.empty_cache()
    return row


if __name__ == "__main__":
    main()
