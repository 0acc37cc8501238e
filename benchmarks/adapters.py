"""What a hypergradient costs beside ten training steps that are cheap or recorded: LoRA adapters, BERT with dropout.

    python benchmarks/adapters.py --device cuda --out adapters_h200.jsonl         # a minute and a half
    python benchmarks/adapters.py --small                                         # toys, in seconds

``lora``: adapters of rank 16 on all linear layers of a causal language model whose base is frozen in bfloat16, weights
of four domains. ``bert-dropout``: BERT-base with dropout 0.1 and padding. The ten steps are timed as they are and
recorded as a CUDA graph, in turns with the hypergradient and the λ step; each line, written at once, has the ratio of
an outer iteration to either (their median over the lines so far). ``--peft`` makes the adapters with peft in place of
``support/lora.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import freed, hardware, line_writer, seconds, versions
from torch import Tensor
from workloads import DOMAINS, INNER_STEPS, SHAPES, TOY, Workload, _sequences, usual_bert

import hyperkron as hk
from lora import add_adapters

RANK = 16


@dataclass(frozen=True)
class Row:
    """A method; with ``tokens`` the curvature is measured on this part of every sequence only."""

    name: str
    build: Callable[[Workload], hk.Implicit]
    period: int = 1
    tokens: int | None = None


def _kfac(**options: Any) -> Callable[[Workload], hk.Implicit]:
    return lambda work: hk.kfac(**options)


PASSES: dict[str, Any] = {"graph": "passes", "keep_previous": False}
ROWS = {
    "bert-dropout": [
        Row("KFAC, graph", _kfac(graph=True)),
        Row("KFAC reduce, graph", _kfac(sharing="reduce", graph=True)),
        Row("KFAC, every 5, graph", _kfac(refresh_every=5, graph=True), period=5),
        Row("KFAC, passes", _kfac(**PASSES)),
        Row("KFAC reduce, passes", _kfac(sharing="reduce", **PASSES)),
        Row("SAMA", lambda work: hk.sama(work.optimizer)),
        Row("KFAC", _kfac()),
    ],
    "lora": [
        Row("KFAC, graph", _kfac(graph=True)),
        Row("KFAC of 128 tokens, graph", _kfac(graph=True), tokens=128),
        Row("KFAC reduce, graph", _kfac(sharing="reduce", graph=True)),
        Row("KFAC, every 5, graph", _kfac(refresh_every=5, graph=True), period=5),
        Row("KFAC, passes", _kfac(**PASSES)),
        Row("KFAC, every 5, passes", _kfac(refresh_every=5, **PASSES), period=5),
        Row("SAMA", lambda work: hk.sama(work.optimizer)),
        Row("KFAC of 128 tokens", _kfac(), tokens=128),
        Row("KFAC", _kfac(keep_previous=False)),
    ],
}


def lora(device: str, small: bool, *, peft: bool = False) -> Workload:
    """AdamW on the adapters of a frozen bfloat16 language model; four domains, of which the outer batch has two."""
    torch.manual_seed(0)
    shape = TOY if small else SHAPES["llama07"]
    with torch.device(device):
        model = shape.model().to(torch.bfloat16)
    if peft:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model.model = get_peft_model(model.model, config)  # type: ignore[arg-type]
    else:
        add_adapters(model, RANK, 2.0 * RANK)
    hyper = hk.DomainWeights(DOMAINS).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    inside = torch.arange(shape.batch, device=device) % DOMAINS
    data = [_sequences(shape, domain) for domain in (*[inside] * INNER_STEPS, inside % 2)]
    name = f"LoRA on {shape.name}{', peft' if peft else ''}"
    return Workload(name, model.train(), hyper, optimizer, data[:-1], data[-1], autocast=True)


def beginnings(batch: tuple[Any, Tensor, Tensor], tokens: int) -> tuple[Any, Tensor, Tensor]:
    """The batch with sequences of this length."""
    return batch[0][:, :tokens], batch[1][:, :tokens], batch[2]


class Runner:
    """A workload, its ten steps in both ways, and how long they took whenever they were timed."""

    def __init__(self, work: Workload, device: str) -> None:
        self.work, self.device, self.problem = (
            work,
            device,
            work.problem,
        )  # one problem: recordings hold for its functions
        self.times: dict[str, list[float]] = {"eager": [], "recorded": []}
        self.loops = {
            kind: hk.training.InnerLoop(self.problem, work.model, work.hyper, work.optimizer, graph=kind == "recorded")
            for kind in self.times
        }
        for kind in self.times:
            self.ten(kind)

    def ten(self, kind: str) -> None:
        """The steps between two hypergradients."""
        for batch in self.work.batches[:INNER_STEPS]:
            self.loops[kind].step(batch)

    def measured(self, row: Row, repeats: int) -> dict[str, Any]:
        """Milliseconds of hypergradient and λ step, in turns with ten steps of both kinds; ratios and memory."""
        work, method, batch = self.work, row.build(self.work), self.work.batches[0]
        some = None if row.tokens is None else beginnings(batch, row.tokens)
        outer: list[float] = []

        def hypergradient() -> Any:
            where = self.problem, work.model, work.hyper, batch, work.outer_batch
            return method.backward(*where, curvature_batch=some)

        for _ in range(row.period + 2):  # decisions, algorithms tried out, recordings
            self.ten("recorded")
            work.outer_step(hypergradient)
        freed(self.device, workspaces=False)  # what only the first calls needed
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats):
            for kind, times in self.times.items():
                times.append(seconds(lambda kind=kind: self.ten(kind), self.device))  # type: ignore[misc]
            each = [seconds(lambda: work.outer_step(hypergradient), self.device) for _ in range(row.period)]
            outer.append(statistics.mean(each))
        spent, inner = statistics.median(outer), {k: statistics.median(t) for k, t in self.times.items()}
        return {
            "outer_ms": 1e3 * spent,
            **{f"{kind}_ms": 1e3 * value for kind, value in inner.items()},  # over all rows so far
            **{f"ratio_{kind}": 1 + spent / value for kind, value in inner.items()},
            "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if self.device == "cuda" else 0.0,
            "recorded_steps": self.loops["recorded"].recorded,
            "replays": method._replays._served,
            "cross": hypergradient().stats["cross"],
        }


def hypergradients(work: Workload) -> dict[str, Any]:
    """Cosines between the hypergradients of the methods, each with the same draws, and their first numbers."""
    found: dict[str, Tensor] = {}
    problem, batch = work.problem, work.batches[0]
    methods: dict[str, tuple[hk.Implicit, Any]] = {
        "identity": (hk.identity(), None),
        "KFAC": (hk.kfac(), None),
        "KFAC again": (hk.kfac(seed=1), None),
        "KFAC reduce": (hk.kfac(sharing="reduce"), None),
        "KFAC of a quarter": (hk.kfac(), beginnings(batch, batch[0].shape[1] // 4)),
    }
    for name, (method, some) in methods.items():
        result = method.compute(problem, work.model, work.hyper, batch, work.outer_batch, curvature_batch=some)
        found[name] = torch.cat([g.flatten() for g in result.grads.values()]).double()
    truth = found["KFAC"]
    return {
        "cosine_to_KFAC": {n: float(torch.cosine_similarity(x, truth, dim=0)) for n, x in found.items()},
        "numbers": {n: [float(f"{v:.4g}") for v in x[:4].tolist()] for n, x in found.items()},
    }


def masks(work: Workload) -> dict[str, Any]:
    """How far recorded hypergradients are from ordinary ones from one random state, and these from another state's."""
    problem, found = work.problem, dict[str, Tensor]()
    for kind in ("eager", "recorded"):
        method = hk.kfac(fisher="empirical", graph=kind == "recorded")
        for seed in (3, 3, 4, 5, 4):
            torch.manual_seed(seed)
            result = method.compute(problem, work.model, work.hyper, work.batches[0], work.outer_batch)
            found[f"{kind} {seed}"] = torch.cat([g.flatten() for g in result.grads.values()])
    size = found["eager 4"].norm()

    def apart(one: str, other: str) -> float:
        return float((found[one] - found[other]).norm() / size)

    return {
        "same_masks": [apart(f"recorded {seed}", f"eager {seed}") for seed in (4, 5)],
        "other_masks": [apart("eager 4", "eager 5"), apart("recorded 4", "recorded 5")],
        "replays": method._replays._served,
    }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="toys of the same structure")
    parser.add_argument("--workloads", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--methods", nargs="+", help="only rows of these names")
    parser.add_argument("--peft", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--checks", action="store_true", help="also compare hypergradients with each other")
    parser.add_argument("--out", help="file of JSON lines, which are appended")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    keep = line_writer(args.out)
    keep({"hardware": hardware(), "versions": versions(), "repeats": args.repeats, "seed": 0})
    for name in args.workloads:
        work = lora(args.device, args.small, peft=args.peft) if name == "lora" else usual_bert(args.device, args.small)
        runner = Runner(work, args.device)
        for row in ROWS[name]:
            if args.methods and row.name not in args.methods:
                continue
            started, line = time.perf_counter(), {"workload": work.name, "method": row.name}
            try:
                line |= runner.measured(row, args.repeats)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            keep({**line, "seconds": time.perf_counter() - started})
            freed(args.device)
        if args.checks:
            keep({"workload": work.name, **(hypergradients(work) if name == "lora" else masks(work))})
        del work, runner
        freed(args.device)


if __name__ == "__main__":
    sys.exit(main())
