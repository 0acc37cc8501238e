"""What bfloat16 autocast and solves in float16 do to KFAC's hypergradient on a small language model in training.

    python benchmarks/half_solves.py --out half_solves.json      # on a CPU, five minutes

After some training steps the hypergradient under bfloat16 autocast, once with solves in float32 and once with the
linear algebra that a GPU has in float16 (emulated: products in float32 of numbers rounded to float16), is compared with
the one in float32, from the same draws; and two seeds of the draws with each other. Each line has cosines.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import workloads
from bfloat16 import cosine
from common import write_result
from workloads import Llama, inner, language, outer

import hyperkron as hk
from hyperkron.curvature.kfac import factors, grams, half_inverses, inverse, kfac
from hyperkron.kernels import linalg, split_products
from hyperkron.trees import HALF_TYPES

SHAPE = Llama("Llama 4 x 96", 4, 96, 96, 384, vocabulary=256, tokens=32)
"""Its factors of 96 inputs are matrices, those of 384 are kept as their 128 rows."""
ROUNDS = (2, 5, 10, 20, 35, 60, 100)
"""Rounds of ten training steps after which hypergradients are compared."""
FISHERS = ("mc", "empirical")


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """The library's linear algebra as it is for large CUDA tensors where TF32 is allowed."""

    def split(*sizes: int, like: torch.Tensor) -> bool:
        return like.dtype == torch.float32

    def plus_gram(total: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        found = grams.gram(rows.float())
        return found if total is None else total.add_(found)

    replaced: list[tuple[Any, str, Any]] = [
        (kfac, "tf32_products", lambda device: True),
        (inverse, "factorize", lambda m, lean=False, overwrite=False: linalg._scaled(m.clone(), 16)),
        (grams, "_stays_half", lambda rows, dtype: rows.dtype in HALF_TYPES),
        (grams, "_plus_half_gram", plus_gram),
        *((module, "splits", split) for module in (split_products, linalg)),
        *((factors, name, 8) for name in ("MIN_SIZE", "MIN_ROWS")),
        (half_inverses, "NARROWEST", 16),
    ]
    with ExitStack() as patches:
        for owner, name, value in replaced:
            patches.enter_context(patch.object(owner, name, value))
        yield


def compared(work: workloads.Workload, fisher: Any) -> dict[str, float]:
    """Cosines between the hypergradients of one moment."""
    half, full = work.problem, hk.BilevelProblem(inner, outer)
    where = work.model, work.hyper, work.batches[0], work.outer_batch

    def found(problem: hk.BilevelProblem, seed: int = 0) -> dict[str, torch.Tensor]:
        return dict(hk.kfac(fisher=fisher, seed=seed).compute(problem, *where).grads)

    exact, plain = found(full), found(half)
    with as_on_gpu():
        halved = found(half)
    return {
        "autocast": cosine(plain, exact),
        "autocast, solves in float16": cosine(halved, exact),
        "solves in float16 to float32": cosine(halved, plain),
        "two seeds": cosine(found(full, seed=1), exact),
    }


def main() -> None:
    """Train, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", nargs="+", type=int, default=list(ROUNDS))
    parser.add_argument("--out", help="file of JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    workloads.TOY = SHAPE
    work, done, lines = language("cpu", True, ""), 0, []
    for rounds in args.rounds:
        while done < rounds:
            work.inner_steps()
            done += 1
        for fisher in FISHERS:
            line = {"steps": 10 * done, "fisher": fisher, **compared(work, fisher)}
            print({name: x if isinstance(x, str) else round(x, 5) for name, x in line.items()}, flush=True)
            lines.append(line)
    if args.out:
        write_result(args.out, {"workload": SHAPE.name, "seed": 0, "rows": lines})


if __name__ == "__main__":
    main()
