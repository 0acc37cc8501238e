"""How cost grows with width, depth, batch and tokens: measured against the closed forms of ``cost_model.py``.

    python benchmarks/scaling.py --device cuda   # the whole grid on a GPU; sizes beyond --limit 240 s are left out
    python benchmarks/scaling.py --small     # small sizes, one and a half to two minutes on one core

One axis is varied at a time around a base size. For every size: one inner step, the KFAC hypergradient and its parts,
CG-3 on the Gauss–Newton matrix (the iterative alternative), peak memory, and which form the factors took. The axis
``strategy`` times the primal against the dual form of one factor. Rates of the machine (products, Cholesky, triangular
solves, copies, the latency of a call) are measured before every size, for a shared machine changes its speed; they
are not fitted to the encoder's times.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

import torch
from common import RESULTS, alternating, peak_memory, seconds, write_result
from cost_model import (
    FLOAT,
    INNER_STEPS,
    Encoder,
    Machine,
    Prediction,
    activations,
    crossover,
    factorisation_flops,
    kfac_memory,
    predict,
    training_memory,
)
from torch import Tensor, nn
from workloads import Workload

import hyperkron as hk
from hyperkron.cross import difference
from hyperkron.curvature.kfac.factors import DUAL_RATIO, Dual, Primal
from hyperkron.evaluation.point import Point
from hyperkron.hypergradient.implicit import outer_gradients
from hyperkron.kernels.linalg import factorize, gram
from hyperkron.kernels.split_products import full_precision
from storages import Storages
from transformer import TransformerClassifier

SEED = 0
DAMPING = 1e-3


@dataclass(frozen=True)
class Grid:
    """The base size, the values of each axis, the sizes at which rates are measured, and those of ``strategy``."""

    base: Encoder
    axes: dict[str, tuple[int, ...]]
    sizes: tuple[int, ...]
    dimensions: tuple[int, ...]
    repeats: int
    least: float = 0.05  # seconds given to each rate


FULL = Grid(
    Encoder(width=768, depth=4, batch=64, tokens=128),
    {
        "width": (256, 512, 1024, 2048, 4096),
        "depth": (2, 4, 12, 24, 48),
        "batch": (32, 64, 128, 256, 512, 1024),
        "tokens": (64, 128, 256, 512),
    },
    (64, 256, 1024, 4096),
    (768, 3072),
    3,
)
SMALL = Grid(
    Encoder(width=128, depth=2, batch=16, tokens=32),
    {"width": (32, 64, 128, 256), "depth": (1, 2, 4), "batch": (8, 16, 32, 64), "tokens": (8, 16, 32, 64)},
    (32, 128, 512, 1024),
    (256, 512),
    5,
)
RATIOS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0, 1.5)
STRATEGY = "strategy"


# --- the machine -------------------------------------------------------------------------------------------


def typical(function: Callable[[], object], device: str, repeats: int, least: float = 0.0) -> float:
    """The median time of a short call, after one that is not counted; of more calls until ``least`` seconds are up."""
    function()
    times = [seconds(function, device) for _ in range(repeats)]
    while sum(times) < least:
        times.append(seconds(function, device))
    return statistics.median(times)


def calibrate(device: str, sizes: Sequence[int], least: float) -> Machine:
    """Effective rates: products (4n, n) × (n, n), factorising and solving systems of n, a copy, a call."""

    def rate(operations: float, function: Callable[[], object]) -> float:
        return operations / typical(function, device, 3, least)

    matmul, cholesky, solve = {}, {}, {}
    for n in sizes:
        x, y, many = torch.randn(4 * n, n, device=device), torch.randn(n, n, device=device), 8 if n <= 1024 else 2
        inner = min(512, max(1, 2 ** (24 if device == "cpu" else 30) // n**3))  # so that the clock is not measured
        if device == "cpu":
            matmul[n] = rate(inner * 8 * n**3, lambda x=x, y=y, k=inner: [x @ y for _ in range(k)])
        else:  # in one call, as those of attention: calls are counted apart
            matmul[n] = rate(
                inner * 8 * n**3, lambda x=x, y=y, k=inner: torch.bmm(x.expand(k, -1, -1), y.expand(k, -1, -1))
            )
        systems = (y @ y.mT / n + torch.eye(n, device=device)).expand(many, n, n).contiguous()
        made, right = factorize(systems)[0], torch.randn(many, n, n, device=device)
        cholesky[n] = rate(many * factorisation_flops(n, device), lambda m=systems: factorize(m))
        solve[n] = rate(many * 2 * n**3, lambda made=made, v=right: made.solve(v))
        del x, y, systems, made, right
    here, there = (torch.zeros(2 ** (22 if device == "cpu" else 27), device=device) for _ in range(2))
    bandwidth = 2 * FLOAT * here.numel() / typical(lambda: there.copy_(here), device, 3, least)
    chain, tiny = nn.Sequential(*[nn.Linear(4, 4, device=device) for _ in range(50)]), torch.ones(4, 4, device=device)
    latency = typical(lambda: chain(tiny), device, 3, least) / 50
    return Machine(matmul, cholesky, solve, bandwidth, latency, device)


def available(device: str) -> float:
    """Bytes that can be allocated."""
    if device != "cpu":
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info()[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


# --- one size ----------------------------------------------------------------------------------------------


def make(e: Encoder, device: str) -> Workload:
    """An encoder in training, with one weight for each example."""
    torch.manual_seed(SEED)
    with torch.device(device):
        model = TransformerClassifier(e.vocab, e.classes, e.depth, e.width, e.heads, e.ffn, e.tokens)
        hyper = hk.SampleWeights(e.batch)
        batches = [
            (
                torch.randint(e.vocab, (e.batch, e.tokens)),
                torch.randint(e.classes, (e.batch,)),
                torch.arange(e.batch),
            )
            for _ in range(2)
        ]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        return Workload("encoder", model.train(), hyper, optimizer, batches[:1], batches[1])


def peak(function: Callable[[], object], device: str, work: Workload) -> int:
    """The most bytes of tensors that a call makes live at one time, above what is live before it.

    On a CPU by counting storages: at these sizes resident memory is mostly what malloc keeps, and the allocator's
    record takes what was made before it began for something else that had its address.
    """
    if device != "cpu":
        return peak_memory(function, device)
    modules = (work.model, work.hyper)
    known = [x for m in modules for x in (*m.parameters(), *m.buffers())]
    batches = [x for batch in (*work.batches, work.outer_batch) for x in batch]
    with Storages([*known, *(x.grad for x in known if x.grad is not None), *batches]) as count:
        function()
    return count.peak


def parts(work: Workload, device: str) -> dict[str, float]:
    """Seconds of the pieces of one KFAC hypergradient; ``curvature`` is its passes, Gram matrices and Cholesky."""
    curvature = hk.curvature.KFAC(damping=DAMPING)
    found: dict[str, float] = {}
    made: dict[str, Any] = {}
    with Point(work.problem, work.model, work.hyper, work.batches[0], work.outer_batch) as point:
        steps: dict[str, Callable[[], Any]] = {
            "curvature": lambda: curvature.operator(point, curvature.init()),
            "outer gradient": lambda: outer_gradients(point)[1],
            "solves": lambda: made["curvature"].solve(made["outer gradient"]),
            "cross term": lambda: difference(point, made["solves"], 1e-2),
        }
        for name, step in steps.items():
            found[name] = seconds(lambda name=name, step=step: made.update({name: step()}), device)
    return found


def measure(e: Encoder, device: str, repeats: int, iterative: bool = True) -> dict[str, Any]:
    """Medians of one inner step, the KFAC hypergradient, its parts and CG-3; peak memory and strategies."""
    work = make(e, device)
    kfac, cg = hk.kfac(DAMPING), hk.cg(3, curvature=hk.curvature.GGN(DAMPING))

    def run(method: hk.hypergradient.Hypergradient) -> Any:
        return method.backward(work.problem, work.model, work.hyper, work.batches[0], work.outer_batch)

    functions: dict[str, Callable[[], object]] = {
        "inner step": lambda: work.inner_step(0),
        "KFAC": lambda: work.outer_step(lambda: run(kfac)),
    }
    if iterative:
        functions["CG-3"] = lambda: work.outer_step(lambda: run(cg))
    times = {n: statistics.median(t) for n, t in alternating(functions, repeats=repeats, device=device).items()}
    stats = run(kfac).stats
    pieces = [parts(work, device) for _ in range(repeats)]
    return {
        "inner_step_s": times["inner step"],
        "kfac_s": times["KFAC"],
        "cg3_s": times.get("CG-3"),
        "ratio": 1 + times["KFAC"] / (INNER_STEPS * times["inner step"]),
        "parts_s": {name: statistics.median(p[name] for p in pieces) for name in pieces[0]},
        "kfac_bytes": peak(functions["KFAC"], device, work),
        "cg3_bytes": peak(functions["CG-3"], device, work) if iterative else None,
        "strategies": stats["curvature_strategy"],
        "cross": stats["cross"],
    }


def as_row(found: Prediction) -> dict[str, Any]:
    """A prediction under the names of :func:`measure`."""
    s = found.stages_s
    curvature = s["passes of the factors"] + s["Gram matrices"] + s["Cholesky"]
    pieces = {"curvature": curvature} | {name: s[name] for name in ("outer gradient", "solves", "cross term")}
    return {**asdict(found), "kfac_s": found.kfac_s, "ratio": found.ratio, "parts_s": pieces}


def obstacle(e: Encoder, machine: Machine, left: float, repeats: int) -> str:
    """Why a size is skipped; empty if it is not."""
    need, free = training_memory(e) + max(kfac_memory(e, machine.device).values()), available(machine.device)
    if need > 0.9 * free:
        return f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    expected = predict(e, machine)
    whole = (repeats + 4) * (expected.inner_step_s + 2 * expected.kfac_s + expected.cg3_s)
    return f"would take about {whole:.0f} s, {max(0.0, left):.0f} s are left" if whole > left else ""


def one_size(e: Encoder, machine: Machine, left: float, repeats: int) -> dict[str, Any]:
    """Prediction and measurement of one size, or the reason why it was skipped."""
    row: dict[str, Any] = {"encoder": asdict(e), "rows": e.rows, "machine": asdict(machine)}
    row["predicted"] = as_row(predict(e, machine))
    if reason := obstacle(e, machine, left, repeats):
        return {**row, "skipped": reason}
    room = training_memory(e) + 4 * activations(e) < 0.9 * available(machine.device)  # CG keeps the gradient's graph
    try:
        row["measured"] = measure(e, machine.device, repeats, iterative=room)
    except torch.OutOfMemoryError as error:
        row["skipped"] = str(error).splitlines()[0]
    gc.collect()
    if machine.device != "cpu":
        torch.cuda.empty_cache()
    return row


def line(axis: str, row: dict[str, Any]) -> str:
    """Measured / predicted, for people."""
    head = f"{axis:7s}{row['encoder'][axis]:6d}{row['rows']:8d}"
    if "skipped" in row:
        return f"{head}  skipped: {row['skipped']}"
    m, p = row["measured"], row["predicted"]
    names = ("inner_step_s", "kfac_s", "cg3_s")
    cells = [f"{1e3 * m[k]:9.1f} /{1e3 * p[k]:9.1f}" if m[k] else f"{'–':>20}" for k in names]
    memory = f"{m['kfac_bytes'] / 2**20:8.0f} /{p['kfac_bytes'] / 2**20:8.0f}"
    return f"{head} {' '.join(cells)} {m['ratio']:6.2f} /{p['ratio']:5.2f} {memory}  {m['strategies']}"


HEAD = (
    f"{'axis':7s}{'value':>6s}{'rows':>8s} {'inner step, ms':>20s} {'KFAC, ms':>20s} {'CG-3, ms':>20s} "
    f"{'ratio':>13s} {'memory, MiB':>18s}  strategies   (measured / predicted)"
)


# --- primal against dual -----------------------------------------------------------------------------------


def primal(rows: Tensor, v: Tensor) -> Tensor:
    """(XᵀX + δI)⁻¹ V from the matrix."""
    matrix = gram(rows)
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return Primal(factorize(matrix)[0]).solve(v)


def dual(rows: Tensor, v: Tensor) -> Tensor:
    """The same from the rows."""
    with full_precision():
        kernel = gram(rows.mT)
    kernel.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return Dual(rows, Primal(factorize(kernel)[0]), rows.new_ones(1)).solve(v)


def strategy(d: int, columns: int, device: str, repeats: int) -> dict[str, Any]:
    """Seconds of both forms of one factor over R/d, and where they cross by time and by operations."""
    torch.manual_seed(SEED)
    found = []
    for ratio in RATIOS:
        rows, v = torch.randn(1, int(ratio * d), d, device=device), torch.randn(1, d, columns, device=device)
        forms = {"primal": lambda x=rows, v=v: primal(x, v), "dual": lambda x=rows, v=v: dual(x, v)}
        found.append({"ratio": ratio} | {f"{name}_s": typical(form, device, repeats) for name, form in forms.items()})
    return {
        "d": d,
        "columns": columns,
        "times": found,
        "crossover": crossing([(x["ratio"], math.log(x["dual_s"] / x["primal_s"])) for x in found]),
        "crossover_in_operations": crossover(d, columns, device),
        "at_rule": DUAL_RATIO,
    }


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """Where the values of points (x, y) last pass from below zero to above, between neighbours; ``None``: nowhere."""
    for (x0, y0), (x1, y1) in reversed(list(pairwise(points))):
        if y0 < 0 <= y1:
            return x0 + (x1 - x0) * -y0 / (y1 - y0)
    return None


def strategies(grid: Grid, device: str) -> list[dict[str, Any]]:
    """Both forms for every dimension, with a quarter of, as many, and four times as many columns."""
    rows = []
    for d in grid.dimensions:
        for columns in (d // 4, d, 4 * d):
            row = strategy(d, columns, device, grid.repeats)
            rows.append(row)
            speeds = " ".join(f"{x['ratio']}: {x['dual_s'] / x['primal_s']:.2f}" for x in row["times"])
            where = "nowhere" if row["crossover"] is None else f"{row['crossover']:.2f}"
            print(
                f"dual/primal d={d} columns={columns}  {speeds}  cross at R/d = {where} "
                f"({row['crossover_in_operations']:.2f} by operations; the rule is {DUAL_RATIO})",
                flush=True,
            )
    return rows


# --- all of it ---------------------------------------------------------------------------------------------


def run(grid: Grid, axes: Sequence[str], device: str, limit: float, out: str, resume: bool) -> dict[str, Any]:
    """Measure the axes one after the other, writing what there is after every size."""
    begin = time.perf_counter()
    earlier = RESULTS / out if Path(out).parent == Path() else Path(out)
    known: dict[str, Any] = json.loads(earlier.read_text("utf-8")) if resume and earlier.exists() else {}
    done = {json.dumps(r["encoder"]): r for rows in known.get("axes", {}).values() for r in rows if "measured" in r}
    result: dict[str, Any] = {"seed": SEED, "repeats": grid.repeats, "axes": {}}
    result["strategy"] = known.get("strategy", [])
    print(HEAD, flush=True)
    for axis in (a for a in grid.axes if a in axes):
        result["axes"][axis] = []
        for value in grid.axes[axis]:
            e = replace(grid.base, **{axis: value})
            key = json.dumps(asdict(e))
            if key not in done:
                machine = calibrate(device, grid.sizes, grid.least)  # anew, for a shared machine changes its speed
                done[key] = one_size(e, machine, limit - (time.perf_counter() - begin), grid.repeats)
            result["axes"][axis].append(done[key])
            print(line(axis, done[key]), flush=True)
            write_result(out, result)
    if STRATEGY in axes and not result["strategy"]:
        result["strategy"] = strategies(grid, device)
    write_result(out, result)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*FULL.axes, STRATEGY]
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--axes", nargs="+", choices=names, default=names)
    parser.add_argument("--small", action="store_true", help="small sizes, for machines without a GPU")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds; sizes that would take longer are skipped")
    parser.add_argument("--resume", action="store_true", help="keep the sizes that the result file has already")
    parser.add_argument("--out", help="result file, by default results/scaling_<device>.json")
    args = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    run(
        SMALL if args.small else FULL,
        args.axes,
        args.device,
        args.limit,
        args.out or f"scaling_{args.device}.json",
        args.resume,
    )


if __name__ == "__main__":
    main()
