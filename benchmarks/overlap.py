"""Does it help that a layer's factors are sent while the backward pass goes on?

    python benchmarks/overlap.py [--ranks 2 4 --repeats 15 --width 256 --layers 4 --examples 8]

Hypergradients by KFAC on several processes, by turns as they are and with every process waiting for each layer's
factors to arrive. The results must be the same. The record goes to benchmarks/results/overlap.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

from common import write_result

import hyperkron as hk
from hyperkron.collectives import Group
from parallel_runs import exit_codes, started

TOKENS, CLASSES = 32, 10
beside = Group.reduce


def in_turn(self: Group, tensors: Sequence[Tensor], to: int) -> Callable[[], list[Tensor] | None]:
    """As ``Group.reduce``, but nothing goes on until the sum is there."""
    found = beside(self, tensors, to)()
    return lambda: found


class Network(nn.Module):
    """The residual feed-forward blocks of a transformer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x.mean(1))  # type: ignore[no-any-return]


def outer(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights(batch[2]))


def timed(rank: int, options: argparse.Namespace, out: Path) -> None:
    """Seconds of hypergradients of both kinds, by turns, on one of the processes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, weights = Network(options.width, options.layers), hk.SampleWeights(options.examples)
    x, y = torch.randn(options.examples, TOKENS, options.width), torch.randint(CLASSES, (options.examples,))
    batch, problem = (x, y, torch.arange(options.examples)), hk.training.DataParallel(hk.BilevelProblem(inner, outer))
    seconds: dict[str, list[float]] = {"beside": [], "in turn": []}
    found = {}
    for _ in range(options.repeats + 1):
        for kind, reduce in (("beside", beside), ("in turn", in_turn)):
            Group.reduce = reduce  # type: ignore[method-assign]
            torch.manual_seed(1)
            dist.barrier()
            begin = time.perf_counter()
            found[kind] = hk.kfac(1e-2).compute(problem, model, weights, batch, batch).grads["weight"]
            seconds[kind].append(time.perf_counter() - begin)
    assert torch.equal(found["beside"], found["in turn"])
    if rank == 0:
        out.write_text(json.dumps({kind: times[1:] for kind, times in seconds.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    for name, default in (("repeats", 15), ("width", 256), ("layers", 4), ("examples", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rows = []
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            codes = exit_codes(started(size, lambda rank, to=folder / "out": timed(rank, options, to), folder))  # type: ignore[misc]
            assert codes == [0] * size, (folder / "errors-0").read_text()
            times = json.loads((folder / "out").read_text())
        row: dict[str, Any] = {"processes": size}
        for kind, values in times.items():
            row[kind] = {"fastest": min(values), "median": statistics.median(values), "seconds": values}
        rows.append(row)
        print(size, {kind: [round(row[kind][k], 3) for k in ("fastest", "median")] for kind in times}, flush=True)
    write_result("overlap.json", {"options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
