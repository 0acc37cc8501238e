"""A million training examples × 100 queries in bounded memory: the scores stream to a file.

    python benchmarks/attribution_streaming.py [--examples 1000000 --queries 100]

Examples are made when they are asked for. Counted is the memory of the process that no file backs (RssAnon), at every
batch; it must not grow with the number of examples.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import hyperkron as hk

WIDTH, CLASSES = 32, 10


def anonymous_mb() -> float:
    """Memory of this process that no file backs."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


class Made(Dataset[tuple[Tensor, Tensor]]):
    """Rows that are computed from their numbers."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, list[float]()
        self.directions = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([i])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        self.seen.append(anonymous_mb())
        numbers = torch.tensor(rows, dtype=torch.float32)
        x = torch.sin(numbers[:, None] * self.directions)
        y = (x[:, :CLASSES]).argmax(1)
        return list(zip(x.unbind(), y.unbind(), strict=True))


def loss(model: nn.Module, batch: list[Tensor]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1]) + hk.losses.l2(model, 1e-4)


def main() -> None:
    """Attribute, and print time and memory as a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10**6)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4096)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    train, queries, measured = Made(options.examples), Made(options.queries), Made(20_000)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = hk.attribute(
            loss, model, train, queries, curvature_data=measured, batch_size=options.batch_size, out=folder
        )
        size = (Path(folder) / "scores.npy").stat().st_size / 2**20
        best = found.helpful(0, 1)[0][0]
    early = max(train.seen[: max(2, len(train.seen) // 10)])
    row = {
        "examples": options.examples,
        "queries": options.queries,
        "seconds": round(time.perf_counter() - began, 1),
        "scores_mb": round(size, 1),
        "first_tenth_peak_mb": round(early, 1),
        "peak_mb": round(max(train.seen), 1),
        "most_helpful_row_of_query_0": best,
    }
    print(json.dumps(row))
    if max(train.seen) > early + 32:
        raise SystemExit("memory grew with the number of examples")


if __name__ == "__main__":
    main()
