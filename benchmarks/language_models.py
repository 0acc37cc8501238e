"""What a hypergradient costs on language models: time and memory of an outer iteration.

    python benchmarks/language_models.py --device cuda --out language_models_h200.jsonl     # two minutes
    python benchmarks/language_models.py --small                                            # toys, in seconds

An outer iteration is ten AdamW steps, one hypergradient and the λ step; parameters are float32, objectives run under
bfloat16 autocast. Each line tells the time over that of the ten steps, the peak memory and that over SAMA's, allocated
and reserved (recordings keep memory for themselves, so of these only what is reserved counts); the first line of a
workload has the memory of the ten steps alone. For the methods named by ``--stages`` another line has the milliseconds
of every stage of one hypergradient, with the device waited for in between. "every 5" measures the curvature in one of
five calls, "kept" in none of those timed. ``--most 1.1`` gives every method after SAMA at most 1.1 times the memory
that was reserved for SAMA: one that needs more fails, which is a line, and the others are timed as they run within it.
``exactness.py`` has the error of bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_outer_iteration import Method, one_period, ours
from common import freed, hardware, line_writer, peak_memory, synchronize, versions
from launches import Clock
from workloads import LANGUAGE, Workload

import hyperkron as hk

PASSES: dict[str, Any] = {"graph": "passes", "keep_previous": False}
METHODS = [
    Method("SAMA", ours(lambda w: hk.sama(w.optimizer))),
    Method("KFAC", ours(lambda w: hk.kfac(keep_previous=False))),
    Method("KFAC, every 5", ours(lambda w: hk.kfac(refresh_every=5, keep_previous=False)), 5),
    Method("KFAC reduce", ours(lambda w: hk.kfac(sharing="reduce", keep_previous=False))),
    Method("KFAC, keep_previous", ours(lambda w: hk.kfac())),
    Method("EKFAC, basis every 10", ours(lambda w: hk.ekfac(basis_every=10, keep_previous=False)), 10),
    Method("CG-3", ours(lambda w: hk.cg(3))),
    Method("SAMA, passes", ours(lambda w: hk.sama(w.optimizer, graph="passes")), graph=True),
    Method("KFAC, passes", ours(lambda w: hk.kfac(**PASSES)), graph=True),
    Method("KFAC, every 5, passes", ours(lambda w: hk.kfac(refresh_every=5, **PASSES)), 5, graph=True),
    Method("KFAC, kept, passes", ours(lambda w: hk.kfac(refresh_every=10**6, **PASSES)), graph=True),
    Method("KFAC reduce, passes", ours(lambda w: hk.kfac(sharing="reduce", **PASSES)), graph=True),
    Method("EKFAC, basis every 10, passes", ours(lambda w: hk.ekfac(basis_every=10, **PASSES)), 10, graph=True),
    Method("KFAC, graph", ours(lambda w: hk.kfac(graph=True)), graph=True),
    Method("KFAC, every 5, graph", ours(lambda w: hk.kfac(refresh_every=5, graph=True)), 5, graph=True),
]
LARGE = ("SAMA", "KFAC", "KFAC, every 5", "KFAC reduce", *(m.name for m in METHODS if m.name.endswith("passes")))
"""The methods that every workload gets unless others are named; whole steps as graphs need twice the memory."""


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
    """The median time of an iteration over that of its ten steps, and the peak memory of these and the one before."""
    hypergradient = method.make(work)
    for _ in range(method.warm_up + 1):  # first-call decisions and recordings
        work.outer_step(hypergradient)
    work.inner_steps()
    times: list[tuple[float, float]] = []

    def timed() -> None:
        one_period(work, hypergradient, 1, device)  # memory is reserved
        times.extend(one_period(work, hypergradient, method.period, device) for _ in range(repeats))

    freed(device, workspaces=False)  # what only the first calls needed
    memory = peaks(timed, device)
    inner, outer = (statistics.median(x) / method.period for x in zip(*times, strict=True))
    return {
        "ratio": 1 + outer / inner,
        "inner_ms": 1e3 * inner,
        "outer_ms": 1e3 * outer,
        "peak_gib": memory["reserved_gib" if method.graph else "allocated_gib"],
        **memory,
        "replays": hypergradient.method._replays._served,  # type: ignore[attr-defined]
    }


def peaks(function: Callable[[], Any], device: str) -> dict[str, float]:
    """The most memory while ``function()`` runs: allocated, reserved, and reserved for recordings."""
    if device != "cuda":
        peak = peak_memory(function, device) / 2**30
        return {"allocated_gib": peak, "reserved_gib": peak, "recordings_gib": 0.0}
    torch.cuda.reset_peak_memory_stats()
    function()
    segments = torch.cuda.memory_snapshot()
    own = sum(x["total_size"] for x in segments if tuple(x.get("segment_pool_id", (0, 0))) != (0, 0))
    found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), own
    return dict(zip(("allocated_gib", "reserved_gib", "recordings_gib"), (x / 2**30 for x in found), strict=True))


def allow(gib: float | None, device: str) -> None:
    """At most so much memory from now on, where there is a GPU; None: all of it."""
    if device == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib / whole)


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


def rows_of(name: str, args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """All lines of one workload; a method that fails is a line, not the end."""
    started = time.perf_counter()
    allow(None, args.device)
    work = LANGUAGE[name](args.device, args.small)
    work.inner_steps()
    freed(args.device)
    keep({"workload": work.name, "method": "ten steps", **peaks(work.inner_steps, args.device)})
    least: dict[str, Any] = {}
    for method in METHODS:
        if method.name not in (args.methods or LARGE):
            continue
        row: dict[str, Any] = {"workload": work.name, "method": method.name}
        try:
            row |= measured(work, method, args.device, 1 if method.period > 1 else args.repeats)
            least = row if method.name == "SAMA" else least
            row |= {f"{x}_over_sama": row[f"{x}_gib"] / least[f"{x}_gib"] for x in ("peak", "reserved") if least}
            row["seconds"] = time.perf_counter() - started
            if args.most and method.name == "SAMA":
                freed(args.device)
                allow(args.most * row["reserved_gib"], args.device)
                keep({"workload": work.name, "allowed_gib": args.most * row["reserved_gib"]})
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        keep(row)
        freed(args.device)
        if method.name in args.stages and "error" not in row:
            keep({"workload": work.name, **stages(work, method, args.device)})
            freed(args.device)


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="toys of the same structure")
    parser.add_argument("--workloads", nargs="+", default=["llama07", "llama3", "bert-dropout"], choices=list(LANGUAGE))
    parser.add_argument("--methods", nargs="+", choices=[m.name for m in METHODS])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--stages", nargs="+", default=[], choices=[m.name for m in METHODS])
    parser.add_argument("--most", type=float, help="memory for the methods after SAMA, over SAMA's")
    parser.add_argument("--out", help="file of JSON lines, which are appended")
    args = parser.parse_args()
    if args.most and args.methods and "SAMA" not in args.methods:
        parser.error("--most needs SAMA among the methods: it is over SAMA's memory.")
    torch.set_float32_matmul_precision("high")
    keep = line_writer(args.out)
    keep({"hardware": hardware(), "versions": versions(), "repeats": args.repeats, "seed": 0})
    for name in args.workloads:
        rows_of(name, args, keep)
        freed(args.device)


if __name__ == "__main__":
    main()
