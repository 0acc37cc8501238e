"""How much a model under bfloat16 autocast changes its KFAC hypergradient: cosine to that of the float32 model.

python benchmarks/bfloat16.py --device cuda --out bfloat16_h200.json
python benchmarks/bfloat16.py --small
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import write_result
from torch import nn
from workloads import WORKLOADS, inner, outer

import hyperkron as hk
from hyperkron import trees


def under_autocast(function: Any, device: str) -> Any:
    """The objective as a user writes it with autocast inside."""

    def wrapped(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        with torch.autocast(device, torch.bfloat16):
            return function(model, hyper, batch)

    return wrapped


def main() -> None:
    """Parse, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=20, help="inner steps before the comparison")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    for build in WORKLOADS.values():
        work = build(args.device, args.small)
        for i in range(args.steps):
            work.inner_step(i)
        found = {}
        problems = {
            "float32": hk.BilevelProblem(inner, outer),
            "bfloat16": hk.BilevelProblem(under_autocast(inner, args.device), under_autocast(outer, args.device)),
        }
        for label, problem in problems.items():
            method = hk.kfac(fisher="type-2")
            found[label] = method.compute(problem, work.model, work.hyper, work.batches[0], work.outer_batch)
        a, b = found["float32"].grads, found["bfloat16"].grads
        cosine = float(trees.dot(a, b) / (trees.norm(a) * trees.norm(b)))
        row = {"workload": work.name, "cosine": cosine, "ratio_of_norms": float(trees.norm(b) / trees.norm(a))}
        row |= {f"cross_{label}": str(result.stats["cross"]) for label, result in found.items()}
        rows.append(row)
        print(row, flush=True)
        del work
    if args.out:
        write_result(args.out, {"rows": rows, "seed": 0, "steps": args.steps})


if __name__ == "__main__":
    main()
