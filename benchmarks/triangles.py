"""Factorisation and solve of a few equal systems as a CUDA graph: small triangles by blocks, against the library.

    python benchmarks/triangles.py --device cuda --out triangles.jsonl    # seconds; a CPU has no graphs

Milliseconds of both, the medians of three times twenty in turns, and the errors of the solves relative to float64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import hardware, line_writer, synchronize, versions
from torch import Tensor

from hyperkron.kernels import linalg

SIZES = ((1, 785), (2, 785), (5, 785), (8, 785), (3, 512), (5, 256), (8, 1024), (12, 785))
REPEATS, TURNS = 20, 3


def systems(count: int, n: int, device: str) -> Tensor:
    """Well-conditioned systems (L, n, n)."""
    x = torch.randn(count, n, 2 * n, device=device, generator=torch.Generator(device).manual_seed(0))
    return x @ x.mT / (2 * n) + 0.01 * torch.eye(n, device=device)


def repeated(call: Callable[[], Tensor], device: str) -> tuple[Callable[[], Any], Tensor]:
    """The call as a CUDA graph, and where its answer is; as it is where there is no GPU."""
    if device != "cuda":
        return call, call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = call()
    graph.replay()
    return graph.replay, answer


def compared(count: int, n: int, device: str) -> dict[str, Any]:
    """Milliseconds and errors of both ways."""
    m = systems(count, n, device)
    v = torch.randn(count, n, n, device=device, generator=torch.Generator(device).manual_seed(1))
    exact = torch.linalg.solve(m.double(), v.double())
    row: dict[str, Any] = {"count": count, "n": n}
    calls = {}
    for name, blocks in (("library", False), ("blocks", True)):

        def solved(blocks: bool = blocks) -> Tensor:
            with linalg.full_precision():
                made, _ = linalg._halved(m.clone(), linalg.LEAF, recorded=blocks)
            return made.solve(v)

        calls[name], answer = repeated(solved, device)
        row[f"{name} error"] = float((answer - exact).norm() / exact.norm())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(REPEATS if device == "cuda" else 1):
                call()
            synchronize(device)
            times[name].append(1e3 * (time.perf_counter() - begin) / (REPEATS if device == "cuda" else 1))
    return row | {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", help="file of JSON lines, which are appended")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    keep = line_writer(options.out)
    keep({"hardware": hardware(), "versions": versions(), "seed": 0})
    for count, n in SIZES:
        keep(compared(count, n, options.device))


if __name__ == "__main__":
    main()
