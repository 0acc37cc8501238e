"""How many calls one hypergradient makes, and the time Python and the dispatcher take for them, stage by stage.

    python benchmarks/launches.py                     # ResNet-18 with the 7x7 stem, SAMA, identity and KFAC
    python benchmarks/launches.py --stem 3x3 --out launches.json

A GPU that computes faster than Python can ask is idle in between; the asking can be counted without a GPU. The network
has the structure of ``bench_outer_iteration.py`` at a sixteenth of its width and batch, so computing hardly counts,
and the ways that the library takes on a GPU are taken on the CPU (:func:`as_on_gpu`), at sizes divided likewise.
"Calls" are all that reach the dispatcher, "launches" those of them that are not views. Milliseconds are processor time
on four examples, the least of all rounds.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from common import write_result
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import INNER_STEPS, Workload, _batches

import hyperkron as hk
from hyperkron import cross, trees
from hyperkron.curvature.kfac import diagonals, factors, grams, inverse, kronecker, layers, recorder
from hyperkron.evaluation import point, snapshot
from hyperkron.hypergradient import implicit, passes
from hyperkron.kernels import linalg, split_products
from hyperkron.kernels.execution import Execution
from hyperkron.losses import classification
from hyperkron.solvers import Direct
from resnet import resnet18

SHRINK = 16
"""Width and batch are divided by this, and so are the sizes by which the library decides."""

Place = tuple[Any, str]
STAGES: dict[str, list[Place]] = {
    "state kept and rewound": [
        (point.Point, "__init__"),
        (snapshot.Snapshot, "__init__"),
        (snapshot.Snapshot, "rewind"),
        (snapshot.Snapshot, "restore"),
    ],
    "outer gradient": [(implicit, "outer_gradients")],
    "passes of the factors": [(kronecker, "measure")],
    "Gram matrices": [
        (grams.InputGrams, "gram"),
        (recorder.Recorder, "_on_gradient"),
        (recorder.Recorder, "_finish"),
    ],
    "diagonals": [
        (diagonals, "example_gradients"),
        (diagonals, "embedding_squares"),
        (diagonals, "_squares"),
        (hk.curvature.KFAC, "_diagonal"),
    ],
    "damping": [(inverse._Systems, "shifts")],
    "factorisation": [(hk.curvature.KFAC, "_invert"), (inverse._Systems, "outcome")],
    "solve": [(Direct, "solve_system")],
    "cross term": [(cross.Cross, "term")],
    "recorded passes": [(passes._RecordedPass, "replay")],
}
REST = "rest"
TIMED = 4
"""Examples in a batch when the time is taken."""


class Clock:
    """Which stage is running, and the time spent in each without those inside it."""

    def __init__(self) -> None:
        self.stack, self.seconds, self.since = [REST], Counter[str](), 0.0

    def turn(self) -> None:
        """Credit the time since the last turn to the stage that was running."""
        now = time.thread_time()  # of this thread alone: the machine may be shared
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    def wrapped(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """``function``, with its time credited to ``stage``."""

        def call(*args: Any, **named: Any) -> Any:
            self.turn()
            self.stack.append(stage)
            try:
                return function(*args, **named)
            finally:
                self.turn()
                self.stack.pop()

        return call

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch all stages."""
        with ExitStack() as patches:
            for stage, places in STAGES.items():
                for owner, name in places:
                    patches.enter_context(patch.object(owner, name, self.wrapped(getattr(owner, name), stage)))
            yield


class Calls(TorchDispatchMode):
    """Counts calls, and those that are not views, by the stage of a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.calls, self.launches = clock, Counter[str](), Counter[str]()
        self.names: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run."""
        stage = self.clock.stack[-1]
        self.calls[stage] += 1
        if not func.is_view and func._schema.name not in ("aten::detach", "aten::_unsafe_view"):
            self.launches[stage] += 1
            self.names[stage, func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_gpu(shrink: int = SHRINK) -> Iterator[None]:
    """The library's decisions as they are for CUDA tensors: patches copied, factorisation by halves, nothing read.

    Sizes that decisions depend on are divided by ``shrink``, as the network's width and batch are.
    """

    def factorize(matrices: torch.Tensor, lean: bool, overwrite: bool) -> Any:
        count, n, _ = matrices.shape
        few = count <= linalg.FEW_MATRICES and n <= 2 * linalg.LARGE_LEAF // shrink
        leaf = (linalg.LARGE_LEAF if few and not lean else linalg.LEAF) // shrink
        leaf = n if n in (27, 147) else leaf  # stems keep their size
        with split_products.full_precision():
            return linalg._halved(matrices, leaf)

    def solve(self: Direct, system: Any) -> Any:
        return hk.solution.Solution(system.operator.solve(system.b), system.operator.status)

    def check_finite(self: Execution, value: torch.Tensor, error: Callable[[str], Exception]) -> None:
        self._finite.append((value.detach(), error))

    def norm(a: trees.Tree) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(a.values()))))

    def examples(self: layers.ConvLayer, x: torch.Tensor) -> int:
        """As many chunks as at full size; the images keep their three channels."""
        m, (height, width) = self.module, x.shape[2:]
        numbers = m.weight.shape[1:].numel() * (1 if m.in_channels == 3 else shrink) * height * width
        return max(1, layers.CHUNK_ELEMENTS["cuda"] // (numbers // (m.stride[0] * m.stride[1])) // shrink)

    def statistics(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In one launch."""
        _, mean, scale = torch.native_batch_norm(x, None, None, None, None, True, 0.0, module.eps)
        return mean, scale

    replaced = [
        (linalg, "MIN_BLOCKED_WIDTH", {}),
        (layers.ConvLayer, "_examples_per_chunk", examples),
        (layers.ConvLayer, "input_gram", lambda self, x: None),
        (inverse, "_common_sizes", lambda sizes, *_: {n: n + 1 if n + 1 in sizes else n for n in sizes}),  # 2 %
        (diagonals, "MAX_WAITING", diagonals.MAX_WAITING // shrink**2),
        (diagonals, "_batch_norm_statistics", statistics),
        (inverse, "factorize", factorize),
        (inverse, "_alone", lambda factor: False),
        (Execution, "queued", True),
        (classification, "answers_at_once", lambda x: False),
        (Direct, "solve_system", solve),
        (Execution, "check_finite", check_finite),
        (trees, "norm", norm),
    ]
    with ExitStack() as patches:
        for owner, name, value in replaced:
            patches.enter_context(patch.object(owner, name, value))
        yield


def workload(stem: str) -> Workload:
    """ResNet-18 in training, small."""
    torch.manual_seed(0)
    batch = 512 // SHRINK
    model = resnet18(classes=10, stem=stem, width=64 // SHRINK).train()  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = _batches(lambda: torch.randn(batch, 3, 32, 32), batch, 10, "cpu")
    return Workload(f"ResNet-18 ({stem})", model, hk.SampleWeights(batch * INNER_STEPS), optimizer, data[:-1], data[-1])


METHODS: dict[str, Callable[[Workload], hk.Implicit]] = {
    "SAMA": lambda w: hk.sama(w.optimizer),
    "identity": lambda w: hk.Implicit(hk.curvature.Identity(), hk.solvers.Direct(), cross="difference"),
    "KFAC mc": lambda w: hk.Implicit(hk.curvature.KFAC(), hk.solvers.Direct(), cross="difference"),
    "KFAC mc, every 5, reused": lambda w: hk.Implicit(
        hk.curvature.KFAC(refresh_every=10**6), hk.solvers.Direct(), cross="difference"
    ),
}


@contextmanager
def few_examples(work: Workload) -> Iterator[None]:
    """``TIMED`` examples in every batch, and factors kept as matrices or as rows as if there were all."""
    plain, left_out = factors.few_rows, len(work.outer_batch[1]) // TIMED
    *inner, outer = [(x[:TIMED], y[:TIMED], index[:TIMED]) for x, y, index in (*work.batches, work.outer_batch)]
    with ExitStack() as patches:
        for module in (factors, grams):
            patches.enter_context(patch.object(module, "few_rows", lambda rows, d: plain(rows * left_out, d)))
        patches.enter_context(patch.object(work, "batches", inner))
        patches.enter_context(patch.object(work, "outer_batch", outer))
        yield


def measure(work: Workload, build: Callable[[Workload], hk.Implicit], repeats: int) -> dict[str, Any]:
    """Calls, launches and milliseconds of one hypergradient by stage."""
    method = build(work)

    def once() -> None:
        method.compute(work.problem, work.model, work.hyper, work.batches[0], work.outer_batch)

    once()
    counting = Clock()
    with counting.attached(), Calls(counting) as calls:
        once()
    rounds = []
    with few_examples(work):
        once()
        for _ in range(repeats):
            clock = Clock()
            gc.collect()
            with clock.attached():
                clock.since = time.thread_time()
                once()
                clock.turn()
            rounds.append(clock.seconds)
    names = [name for name in (*STAGES, REST) if calls.calls[name] or any(r[name] for r in rounds)]
    milliseconds = {name: 1e3 * min(r[name] for r in rounds) for name in names}
    total = {"calls": calls.calls.total(), "launches": calls.launches.total()}
    total["ms"] = 1e3 * min(r.total() for r in rounds)  # type: ignore[assignment]
    stages = {n: {"calls": calls.calls[n], "launches": calls.launches[n], "ms": milliseconds[n]} for n in names}
    return {"stages": stages, "total": total, "names": calls.names}


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stem", default="7x7", choices=["7x7", "3x3"])
    parser.add_argument("--methods", nargs="+", help="only methods whose name contains one of these words")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--verbose", action="store_true", help="also print which operations each stage launches")
    parser.add_argument("--out", help="result file (JSON)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, build in METHODS.items():
        if args.methods and not any(word.lower() in name.lower() for word in args.methods):
            continue
        with as_on_gpu():
            row = measure(workload(args.stem), build, args.repeats)
        launched = row.pop("names")
        found[name] = row
        print(f"\n{name:28s} calls  launches       ms")
        for stage, line in [*row["stages"].items(), ("all", row["total"])]:
            print(f"  {stage:26s} {line['calls']:5d} {line['launches']:9d} {line['ms']:8.2f}")
            if args.verbose:
                mine = sorted(((c, op) for (s, op), c in launched.items() if s == stage), reverse=True)
                print("    " + ", ".join(f"{op.removeprefix('aten::')} {c}" for c, op in mine))
    if args.out:
        write_result(args.out, {"stem": args.stem, "shrink": SHRINK, "seed": 0, "methods": found})


if __name__ == "__main__":
    main()
