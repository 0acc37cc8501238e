"""Communication, memory and time of an outer iteration on many GPUs, in closed form; scaling-model.md has its table.

    python benchmarks/scaling_model.py [--rate 45e12 --inverse-rate 30e12 --node 400e9 --network 45e9 --capacity 141e9]

An outer iteration is ten AdamW steps of θ and one hypergradient, in float32 under bfloat16 autocast, on 4 × 512 tokens
per GPU. A factor of size n costs n³ operations to invert. A layer belongs to one rank, the most expensive first.
What is sent is exact, and is compared with what processes did send (benchmarks/results/ranks.json). Memory and time are
compared with one GPU, where they were measured. These are not independent: ``--rate``, ``--inverse-rate``, the hidden
size of the model of 0.7B and the number of vectors in ``memory`` (also on the rows of 3B) were taken from there.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BATCH, TOKENS, STEPS, FLOAT, HALF, GIB, SHARED_NODE = 4, 512, 10, 4, 2, 2**30, 8
ROWS = BATCH * TOKENS
MARKS = ("<!-- made by benchmarks/scaling_model.py -->", "<!-- end -->")


@dataclass(frozen=True)
class Sizes:
    """What counts of a model: entries and tensors of θ; Kronecker blocks as (a, outputs of the layers that share the
    input factor); entries of exact diagonals; whether parameters lie outside layers (a sum of P for each vector)."""

    entries: int
    tensors: int
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    diagonals: int = 0
    bare: bool = False

    @property
    def numbers(self) -> int:
        return self.entries + self.tensors

    @property
    def sides(self) -> list[int]:
        """The sizes of all factors; a shared one once."""
        return [n for a, outputs in self.groups for n in (a, *outputs)]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        return [(a, b) for a, outputs in self.groups for b in outputs]


@dataclass(frozen=True)
class Llama:
    """The shape of a Llama: RMSNorm, grouped queries, gated MLP, output layer tied to the embedding.

    The output layer is left out of the factors: its own has vocabulary² entries.
    """

    layers: int
    width: int
    keys: int
    hidden: int
    vocabulary: int

    @property
    def sizes(self) -> Sizes:
        d, f, k = self.width, self.hidden, self.keys
        layer = ((d, (d, k, k)), (d, (d,)), (d, (f, f)), (f, (d,)))
        matrices = self.layers * sum(a * sum(outputs) for a, outputs in layer)
        norms, words = d * (2 * self.layers + 1), self.vocabulary * d
        return Sizes(matrices + norms + words, 9 * self.layers + 2, layer * self.layers, norms + words)


SHAPES = {
    "1B": Llama(16, 2048, 512, 8192, 128256),
    "3B": Llama(28, 3072, 1024, 8192, 128256),
    "8B": Llama(32, 4096, 1024, 14336, 128256),
    "70B": Llama(80, 8192, 1024, 28672, 128256),
}
MEASURED = {"0.7B": Llama(16, 2048, 2048, 4096, 32000), "3B": Llama(28, 3072, 1024, 8192, 32000)}
"""The shapes of the single-GPU table; layers and width are recorded, the rest is assumed so that sizes agree."""
CROSS, CROSS_SHARDED = 3, 2 * 320 / 135
"""Forward passes that KFAC's cross term costs. By the gradients at the layers: one forward pass, one back to the
activations, and the products with v, as many as in a forward pass. They need weights in one piece. Where θ is sharded
it is forward mode, measured at 320 ms where SAMA's two passes take 135 ms."""
METHODS = ("SAMA", "KFAC", "KFAC cached", "KFAC reduce")
RUN = 3
"""Of results/language_models_h200.jsonl: the one that the model is compared with."""


# --- what is sent -------------------------------------------------------------------------------------------------


def hypergradient_volume(
    sizes: Sizes,
    hyper: int,
    method: str,
    cross: str = "forward",
    vectors: int = 1,
    products: int = 0,
    unrolled: int = 0,
) -> tuple[int, int, int]:
    """Numbers that one hypergradient sums on all ranks, sums on owners, and shares (docs/scaling.md, "What is sent").

    ``hyper`` is the number of entries and tensors of λ; the refresh of factors is counted for KFAC and EKFAC.
    """
    p, summed, reduced, shared = sizes.numbers, sizes.numbers, 0, 0
    if unrolled:
        return 3 * unrolled * p + unrolled * hyper, 0, 0
    if method in ("KFAC", "KFAC cached", "EKFAC"):
        shared = solve = sum(a * b for a, b in sizes.blocks)
        if method != "KFAC cached":
            reduced = sum(n * (n + 1) // 2 for n in sizes.sides)
            summed += len(sizes.blocks) + sizes.diagonals + vectors * sizes.bare * p
        if method == "EKFAC":
            reduced += solve
            shared += sum(a * a + b * b for a, b in sizes.blocks)
    if products:
        summed += (1 + products) * p
    summed += hyper + (p if cross == "reverse" and not (products and method == "Hessian") else 0)
    return summed, reduced, shared


def sent(sizes: Sizes, method: str, hyper: int = 5) -> tuple[int, int, int]:
    """Numbers summed on all ranks, summed on owners, and shared in an outer iteration."""
    name = "KFAC" if method in ("KFAC", "KFAC reduce") else method
    summed, reduced, shared = hypergradient_volume(sizes, hyper, name)
    return STEPS * sizes.numbers + summed, reduced, shared


# --- memory and time ----------------------------------------------------------------------------------------------


def busiest(costs: Sequence[float], ranks: int) -> float:
    """The largest load where each cost goes, the largest first, to the rank with the least so far."""
    loads = [0.0] * ranks
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def layer_costs(sizes: Sizes, small: dict[int, int], ranks: int) -> list[float]:
    """Operations of the inversions that one rank does together; layers that share a factor, if that is not too much."""
    families = [[float(small[a]) ** 3 + float(small[b]) ** 3 for b in outputs] for a, outputs in sizes.groups]
    mean = sum(map(sum, families)) / ranks
    return [cost for one in families for cost in ([sum(one)] if sum(one) <= mean else one)]


def memory(shape: Llama, method: str, ranks: int = 1, sharded: bool = False) -> float:
    """Bytes on one GPU: vectors like θ (four to train; for SAMA three more, for KFAC two), inverses, activations.

    Alone, a factor of few rows (at most half its size) is kept as these rows, and what is kept is in half precision. On
    several ranks it is a matrix on its owner, which has it three times, in float32, while it is inverted.
    """
    sizes, rows = shape.sizes, BATCH if method == "KFAC reduce" else ROWS
    vectors = (7 if method == "SAMA" else 6) * sizes.entries
    inverses = sum(n * (rows if ranks == 1 and rows <= n / 2 else n) for n in sizes.sides)
    inverses = 0 if method == "SAMA" else inverses * (3 / ranks if ranks > 1 else HALF / FLOAT)
    activations = 34 * ROWS * shape.width * shape.layers + 10 * ROWS * shape.vocabulary
    unit = 2 * FLOAT * sizes.entries / shape.layers if sharded else 0
    return FLOAT * (vectors / (ranks if sharded else 1) + inverses) + activations + unit


def compute(shape: Llama, method: str, ranks: int, rates: argparse.Namespace, sharded: bool = False) -> float:
    """Seconds of arithmetic of an outer iteration; ``method`` may be ``plain`` training."""
    sizes = shape.sizes
    matrices = sum(a * b for a, b in sizes.blocks) + shape.vocabulary * shape.width
    forward = 2 * ROWS * (matrices + 2 * TOKENS * shape.width * shape.layers) / rates.rate
    if method == "plain":
        return 3 * STEPS * forward
    total = 3 * (STEPS + 1) * forward  # and the outer gradient
    if method == "SAMA":
        return total + 2 * forward
    rows = BATCH if method == "KFAC reduce" else ROWS
    small = {n: rows if ranks == 1 and rows <= n / 2 else n for n in sizes.sides}  # the size of what is inverted
    applied = sum(2 * a * b * (min(a, 2 * small[a]) + min(b, 2 * small[b])) for a, b in sizes.blocks)
    total += (CROSS_SHARDED if sharded else CROSS) * forward + applied / rates.rate
    if method != "KFAC cached":
        total += 3 * forward + sum(2 * rows * n * small[n] for n in sizes.sides) / rates.rate
        total += busiest(layer_costs(sizes, small, ranks), ranks) / rates.inverse_rate
    return total


def transfer(shape: Llama, method: str, ranks: int, sharded: bool, rates: argparse.Namespace) -> float:
    """Seconds of communication, by rings, none of it hidden behind arithmetic."""
    if ranks == 1:
        return 0.0
    sizes = shape.sizes
    summed, reduced, shared = (STEPS * sizes.numbers, 0, 0) if method == "plain" else sent(sizes, method)
    bandwidth = rates.node if ranks <= SHARED_NODE else rates.network
    share = (ranks - 1) / ranks * FLOAT / bandwidth
    if not sharded:
        return share * (2 * summed + reduced + shared)
    evaluations = STEPS if method == "plain" else STEPS + 1 + (method in ("KFAC", "KFAC reduce"))
    gathered = 0 if method == "plain" else 2 * sizes.numbers  # the cross term: two passes forward
    solve = 2 * shared / ranks  # of b and v each rank sends its rows, or those of the blocks it owns
    return share * (3 * evaluations * sizes.numbers + gathered + reduced + solve)


def row(name: str, ranks: int, rates: argparse.Namespace) -> list[str]:
    """A row of the table."""
    shape = SHAPES[name]
    sharded = max(memory(shape, method, ranks) for method in METHODS) > rates.capacity
    plain = compute(shape, "plain", ranks, rates) + transfer(shape, "plain", ranks, sharded, rates)
    cells = [name, str(ranks), "sharded" if sharded else "copied", f"{plain:.1f} s"]
    for method in METHODS:
        seconds = compute(shape, method, ranks, rates, sharded) + transfer(shape, method, ranks, sharded, rates)
        cells.append(f"{seconds / plain:.2f}×")
    for method in ("SAMA", "KFAC"):
        bytes_ = memory(shape, method, ranks, sharded)
        cells.append(f"{bytes_ / GIB:.0f}" if bytes_ <= rates.capacity else f"**{bytes_ / GIB:.0f}**")
    cubes = layer_costs(shape.sizes, {n: n for n in shape.sizes.sides}, ranks)
    return [*cells, f"{busiest(cubes, ranks) / (sum(cubes) / ranks):.2f}"]


def check(rates: argparse.Namespace) -> list[list[str]]:
    """The model on one GPU beside what was measured there: × of plain training, and GiB."""
    rows = []
    for name, method, times, gib in one_gpu():
        shape = MEASURED[name]
        ours = compute(shape, method, 1, rates) / compute(shape, "plain", 1, rates)
        size = memory(shape, method) / GIB
        measured = "–" if gib is None else f"{gib:.1f} ({(size - gib) / gib:+.0%})"
        rows.append(
            [name, method, f"{ours:.2f}×", f"{times:.2f}× ({(ours - times) / times:+.0%})", f"{size:.1f}", measured]
        )
    return rows


def one_gpu() -> list[tuple[str, str, float, float | None]]:
    """Shape, method, × of ten plain steps and peak GiB on one H200, of the newest run that has all methods without
    CUDA graphs, which several processes do not have. "Cached" is what KFAC and KFAC every 5 leave for a step that does
    not refresh: (5 × every 5 − KFAC) / 4."""
    lines = (ROOT / "benchmarks" / "results" / "language_models_h200.jsonl").read_text("utf-8").splitlines()
    timed = [row for row in map(json.loads, lines) if row["run"] == RUN and "ratio" in row]
    found: list[tuple[str, str, float, float | None]] = []
    for name in MEASURED:
        rows = {row["method"]: row for row in timed if f"({name})" in row["workload"]}
        cached = (5 * rows["KFAC, every 5"]["ratio"] - rows["KFAC"]["ratio"]) / 4
        for method in METHODS:
            row = rows.get(method)
            found.append((name, method, row["ratio"] if row else cached, row["peak_gib"] if row else None))
    return found


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(rates: argparse.Namespace) -> str:
    """Both tables, as they are in benchmarks/scaling-model.md."""
    head = ["θ", "GPUs", "θ is", "plain", *METHODS, "GiB SAMA", "GiB KFAC", "busiest rank"]
    model = markdown(head, [row(name, ranks, rates) for name in SHAPES for ranks in (8, 64, 256, 1024)])
    single = markdown(["θ", "method", "model", "measured", "model GiB", "measured GiB"], check(rates))
    return f"{model}\n\nOn one GPU:\n\n{single}"


def options(arguments: Sequence[str] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=45e12, help="operations a second of passes and Gram matrices")
    parser.add_argument("--inverse-rate", type=float, default=30e12, help="operations a second of inversions (float32)")
    parser.add_argument("--node", type=float, default=400e9, help="bytes a second between the 8 GPUs of a node")
    parser.add_argument("--network", type=float, default=45e9, help="bytes a second of a GPU between nodes")
    parser.add_argument("--capacity", type=float, default=141e9, help="bytes of a GPU")
    return parser.parse_args(arguments)


def main() -> None:
    text = tables(options(sys.argv[1:]))
    print(text)
    if len(sys.argv) == 1:
        page = ROOT / "benchmarks" / "scaling-model.md"
        before, _, rest = page.read_text("utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", "utf-8")


if __name__ == "__main__":
    main()
