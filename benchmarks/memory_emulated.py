"""Peak memory of a hypergradient by the ways that the library takes on a GPU, counted on a CPU.

    python benchmarks/memory_emulated.py                    # ResNet-18 with the 7x7 stem, a minute or two
    python benchmarks/memory_emulated.py --stems 3x3        # ten minutes
    python benchmarks/memory_emulated.py --where            # what is alive at the peak, and where it was made

Live storages are counted, so that what the memory of a GPU needs can be seen without one. Not counted are the
workspaces of its libraries (64 MiB on an H200) and what an operation uses inside; counted besides is a copy of every
system that is factorised, which is made on a CPU only. Convolutions run in float32 as torch lays them out on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

import references
import torch
from common import write_result
from launches import as_on_gpu
from workloads import WORKLOADS, Workload

import hyperkron as hk
from storages import Storages

METHODS: dict[str, Callable[[Workload], hk.hypergradient.Hypergradient]] = {
    "SAMA": lambda w: hk.sama(w.optimizer),
    "KFAC mc": lambda w: hk.kfac(cross="difference"),
    "KFAC mc, keep_previous=False": lambda w: hk.kfac(cross="difference", keep_previous=False),
}


class Origins(Storages):
    """Remembers also where the storages that are alive at the peak were made."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, str]] = {}
        self.at_peak: dict[int, tuple[int, str]] = {}

    def _count(self, storage: torch.UntypedStorage) -> None:
        before = self.peak
        if storage._cdata not in self._seen:
            frames = [f for f in traceback.extract_stack() if "hyperkron" in f.filename and "memory" not in f.filename]
            where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in frames[::-1][:3])
            self.alive[storage._cdata] = (storage.nbytes(), where)
        super()._count(storage)
        if self.peak > before:
            self.at_peak = dict(self.alive)

    def _gone(self, place: int, size: int) -> None:
        self.alive.pop(place, None)
        super()._gone(place, size)


def counted(function: Callable[[], Any], where: bool) -> int:
    """The most bytes alive at one time of what ``function`` makes; with ``where`` their origins are printed."""
    with Origins() if where else Storages() as count:
        function()
    if isinstance(count, Origins):
        sums: dict[str, int] = defaultdict(int)
        for size, origin in count.at_peak.values():
            sums[origin] += size
        for origin, size in sorted(sums.items(), key=lambda pair: -pair[1])[:12]:
            print(f"    {size / 2**20:8.1f} MiB  {origin}")
    return count.peak


def measured(stem: str, where: bool) -> dict[str, float]:
    """MiB of model, optimizer, gradients, batches and the second hypergradient of every method."""
    found: dict[str, float] = {}
    for name in ("SAMA (Betty's way)", *METHODS):
        work = WORKLOADS["resnet7" if stem == "7x7" else "resnet3"]("cpu", False)
        work.inner_step(0)
        held = sum(3 * p.numel() * p.itemsize for p in work.model.parameters())  # with gradients and momentum
        held += sum(x.numel() * x.itemsize for batch in [*work.batches, work.outer_batch] for x in batch)
        with as_on_gpu(shrink=1):
            if name in METHODS:
                method = METHODS[name](work)
                step = lambda m=method, w=work: m.compute(w.problem, w.model, w.hyper, w.batches[0], w.outer_batch)  # noqa: E731
                held += counted_state(method, step)
            else:
                step = lambda w=work: references.sama_betty(w)  # noqa: E731
            found[name] = (held + counted(step, where)) / 2**20
        print(f"ResNet-18 ({stem})  {name:30s} {found[name]:7.0f} MiB", flush=True)
    return found


def counted_state(method: hk.hypergradient.Hypergradient, step: Callable[[], Any]) -> int:
    """The bytes that ``method`` keeps after its first step."""
    step()
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors(method.state_dict())}
    return sum(storages.values())


def tensors(tree: Any) -> list[torch.Tensor]:
    """Those of nested dictionaries and lists."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [x for part in parts for x in tensors(part)]


def main() -> None:
    """Parse, count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stems", nargs="+", default=["7x7"], choices=["7x7", "3x3"])
    parser.add_argument("--where", action="store_true", help="print where what is alive at the peak was made")
    parser.add_argument("--out", help="result file (JSON)")
    args = parser.parse_args()
    found = {stem: measured(stem, args.where) for stem in args.stems}
    for stem, mib in found.items():
        shares = ", ".join(f"{name} {x / mib[next(iter(mib))]:.2f}" for name, x in list(mib.items())[1:])
        print(f"ResNet-18 ({stem}), of Betty's way: {shares}")
    if args.out:
        write_result(args.out, {"mib": found, "seed": 0})


if __name__ == "__main__":
    main()
