"""λ of very many examples on several processes: the most memory that each of them has ever used.

    python benchmarks/sharded_weights.py [--counts 1e6 1e8 --ranks 1 2 4 --optimizer adam]

Each process trains a small network by ``fit`` for three outer steps, with one weight for each of ``count`` examples,
sharded among the processes. Memory is the largest resident set of a process less that before λ was made, and is
compared with what one process needs that holds all of λ. The record goes to benchmarks/results/sharded_weights.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

from common import RESULTS, write_result

import hyperkron as hk
from parallel_runs import exit_codes, started

ROWS, STEPS = 256, 3
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
KEPT = {"adam": 4, "sgd": 2}
"""Vectors of the size of λ that a process cannot do without: λ, its gradient and the moments."""


def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights(batch[2]))


def outer(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def largest() -> int:
    """Bytes of the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def trained(count: int, optimizer: str, divide: bool = True) -> int:
    """Bytes that λ and all that belongs to it have added to the largest resident set."""
    problem = hk.training.DataParallel(hk.BilevelProblem(inner, outer))
    random = torch.Generator().manual_seed(0)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(ROWS, 8, generator=random)
        index = torch.randint(count, (ROWS,), generator=random)
        return x, (x[:, 0] > 0).long(), index

    def run(weights: hk.SampleWeights) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        moving = OPTIMIZERS[optimizer](weights.parameters(), lr=0.1)
        hk.fit(problem, model, weights, hk.AID(hk.kfac()), batch, batch, steps=STEPS, outer_optimizer=moving)

    before = largest()
    run(hk.SampleWeights(count, group=problem.group if divide else None))
    return largest() - before


def measured(size: int, count: int, optimizer: str) -> list[int]:
    """Bytes on each of ``size`` processes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            trained(10_000, optimizer)  # what does not depend on the count
            (folder / f"bytes-{rank}").write_text(json.dumps(trained(count, optimizer, divide=size > 1)))

        codes = exit_codes(started(size, work, folder))
        assert codes == [0] * size, (folder / "errors-0").read_text()
        return [json.loads((folder / f"bytes-{rank}").read_text()) for rank in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=float, nargs="+", default=[1e6, 1e8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adam")
    options = parser.parse_args()
    path = RESULTS / "sharded_weights.json"
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    for count in map(int, options.counts):
        for size in options.ranks:
            found = measured(size, count, options.optimizer)
            row = {"weights": count, "processes": size, "optimizer": options.optimizer, "bytes": found}
            row["bytes per weight held"] = round(max(found) / (count / size), 2)
            key = ("weights", "processes", "optimizer")
            rows = [old for old in rows if any(old[k] != row[k] for k in key)] + [row]
            print(row, flush=True)
    write_result("sharded_weights.json", {"rows": rows})


if __name__ == "__main__":
    main()
