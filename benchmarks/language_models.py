"""What a hypergradient costs on language models: time and memory of an outer iteration, and how exact bfloat16 is.

    python benchmarks/language_models.py --device cuda --out language_models_h200.jsonl     # two minutes
    python benchmarks/language_models.py --small                                            # toys, in seconds

An outer iteration is ten AdamW steps, one hypergradient and the λ step; parameters are float32, objectives run under
bfloat16 autocast. Each line tells the time over that of the ten steps, the peak memory and that over SAMA's; or, with
``--cosine``, the cosine to the hypergradient in float32; or, for the methods named by ``--stages``, the milliseconds of
every stage of one hypergradient, with the device waited for in between. Each is written at once, as a line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from bench_outer_iteration import Method, one_period, ours
from bfloat16 import cosine
from common import hardware, line_writer, peak_memory, synchronize, versions
from launches import Clock
from workloads import LANGUAGE, Workload, inner, outer

import hyperkron as hk
from hyperkron.curvature.kfac import kfac

METHODS = [
    Method("SAMA", ours(lambda w: hk.sama(w.optimizer))),
    Method("KFAC", ours(lambda w: hk.kfac(keep_previous=False))),
    Method("KFAC, every 5", ours(lambda w: hk.kfac(refresh_every=5, keep_previous=False)), 5),
    Method("KFAC reduce", ours(lambda w: hk.kfac(sharing="reduce", keep_previous=False))),
    Method("KFAC, keep_previous", ours(lambda w: hk.kfac())),
    Method("EKFAC, basis every 10", ours(lambda w: hk.ekfac(basis_every=10, keep_previous=False)), 10),
    Method("CG-3", ours(lambda w: hk.cg(3))),
    Method("KFAC, graph", ours(lambda w: hk.kfac(graph=True)), graph=True),
    Method("KFAC, every 5, graph", ours(lambda w: hk.kfac(refresh_every=5, graph=True)), 5, graph=True),
]
LARGE = ("SAMA", "KFAC", "KFAC, every 5", "KFAC reduce")
"""The methods that every workload gets unless others are named; those with a graph need twice the memory."""


class DeviceClock(Clock):
    """Seconds of the device by stage: it is waited for at every turn."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def turn(self) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now


def measured(work: Workload, method: Method, device: str, repeats: int) -> dict[str, Any]:
    """The median time of an iteration over that of its ten steps, and the peak memory of the iterations timed."""
    hypergradient = method.make(work)
    for _ in range(method.warm_up + 1):  # allocations and first-call decisions
        work.outer_step(hypergradient)
    work.inner_steps()
    times: list[tuple[float, float]] = []

    def timed() -> None:
        times.extend(one_period(work, hypergradient, method.period, device) for _ in range(repeats))

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        timed()
        peak = torch.cuda.max_memory_reserved() if method.graph else torch.cuda.max_memory_allocated()
    else:
        peak = peak_memory(timed, device)
    inner, outer = (statistics.median(x) / method.period for x in zip(*times, strict=True))
    return {
        "ratio": 1 + outer / inner,
        "inner_ms": 1e3 * inner,
        "outer_ms": 1e3 * outer,
        "peak_gib": peak / 2**30,
    }


def stages(work: Workload, method: Method, device: str) -> dict[str, Any]:
    """Milliseconds of every stage of one hypergradient, after those that decide something."""
    hypergradient = method.make(work)
    for _ in range(2):
        hypergradient()
    clocks = []
    for _ in range(max(2, min(method.period, 3))):
        clocks.append(clock := DeviceClock(device))
        with clock.attached():
            clock.since = time.perf_counter()
            hypergradient()
            clock.turn()
    return {
        "method": method.name,
        "stages_ms": {
            name: [round(1e3 * clock.seconds[name], 2) for clock in clocks]
            for name in dict.fromkeys(name for clock in clocks for name in clock.seconds)
        },
    }


def exactness(work: Workload, device: str, build: Callable[[], hk.Implicit]) -> dict[str, Any]:
    """The cosine of the hypergradient under autocast to that in float32, from the same draws; and the way it took.

    It depends on how long the model has been trained: compare it with that of solves in float32 in the same run.
    """
    half, full = work.problem, hk.BilevelProblem(inner, outer)
    batch, outside = work.batches[0], work.outer_batch
    found = {}
    for name, problem in (("bfloat16", half), ("float32", full)):
        torch.set_float32_matmul_precision("high" if name == "bfloat16" else "highest")
        found[name] = build().compute(problem, work.model, work.hyper, batch, outside)
        _freed(device)
    torch.set_float32_matmul_precision("high")
    stats = found["bfloat16"].stats
    return {
        "cosine": cosine(found["bfloat16"].grads, found["float32"].grads),
        "cross": str(stats["cross"]),
        "cross_error": stats.get("cross_error", 0.0),
        "cross_float32": str(found["float32"].stats["cross"]),
        "hypergradient": [round(x, 6) for g in found["float32"].grads.values() for x in g.flatten().tolist()[:4]],
    }


def _freed(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def rows_of(name: str, args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """All lines of one workload; a method that fails is a line, not the end."""
    started = time.perf_counter()
    work = LANGUAGE[name](args.device, args.small)
    work.inner_steps()
    least: float | None = None
    for method in METHODS:
        if method.name not in (args.methods or LARGE):
            continue
        row: dict[str, Any] = {"workload": work.name, "method": method.name}
        try:
            row |= measured(work, method, args.device, 1 if method.period > 1 else args.repeats)
            least = row["peak_gib"] if method.name == "SAMA" else least
            row["memory_over_sama"] = None if not least else row["peak_gib"] / least
            row["seconds"] = time.perf_counter() - started
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        keep(row)
        _freed(args.device)
        if method.name in args.stages and "error" not in row:
            keep({"workload": work.name, **stages(work, method, args.device)})
            _freed(args.device)
    if args.cosine and (args.small or name in ("llama07", "llama01")):
        for label, build in {"identity": hk.identity, "KFAC": lambda: hk.kfac(keep_previous=False)}.items():
            keep({"workload": work.name, "method": label, **exactness(work, args.device, build)})
        with patch.object(kfac, "tf32_products", lambda device: False):
            keep({"workload": work.name, "method": "KFAC, solves in float32", **exactness(work, args.device, build)})


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="toys of the same structure")
    parser.add_argument("--workloads", nargs="+", default=["llama07", "llama3", "bert-dropout"], choices=list(LANGUAGE))
    parser.add_argument("--methods", nargs="+", choices=[m.name for m in METHODS])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--stages", nargs="+", default=[], choices=[m.name for m in METHODS])
    parser.add_argument("--cosine", action="store_true")
    parser.add_argument("--out", help="file of JSON lines, which are appended")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    keep = line_writer(args.out)
    keep({"hardware": hardware(), "versions": versions(), "repeats": args.repeats, "seed": 0})
    for name in args.workloads:
        rows_of(name, args, keep)
        _freed(args.device)


if __name__ == "__main__":
    main()
