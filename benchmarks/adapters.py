"""What a hypergradient costs beside ten training steps that are cheap or recorded: LoRA adapters, BERT with dropout.

    python benchmarks/adapters.py --device cuda --out adapters_h200.jsonl         # a minute and a half
    python benchmarks/adapters.py --small                                         # toys, in seconds

``lora``: adapters of rank 16 on all linear layers of a causal language model whose base is frozen in bfloat16, weights
of four domains. ``bert-dropout``: BERT-base with dropout 0.1 and padding. The ten steps are timed as they are and
recorded as a CUDA graph, in turns with the hypergradient and the λ step; each line, written at once, has the ratio of
an outer iteration to either. ``--peft`` makes the adapters with peft in place of ``support/lora.py``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, hardware, seconds, versions
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


ROWS = {
    "bert-dropout": [
        Row("KFAC", _kfac()),
        Row("KFAC, graph", _kfac(graph=True)),
        Row("KFAC reduce, graph", _kfac(sharing="reduce", graph=True)),
    ],
    "lora": [
        Row("SAMA, graph", lambda work: hk.sama(work.optimizer, graph=True)),
        Row("KFAC", _kfac()),
        Row("KFAC, graph", _kfac(graph=True)),
        Row("KFAC, every 5, graph", _kfac(refresh_every=5, graph=True), period=5),
        Row("KFAC reduce", _kfac(sharing="reduce")),
        Row("KFAC reduce, graph", _kfac(sharing="reduce", graph=True)),
        Row("KFAC of 128 tokens", _kfac(), tokens=128),
        Row("KFAC of 128 tokens, graph", _kfac(graph=True), tokens=128),
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


def measured(work: Workload, row: Row, device: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of ten steps, eager and recorded, and of the hypergradient with the λ step; ratios and memory."""
    problem, method = work.problem, row.build(work)  # one problem: a recording holds for its functions
    loops = {
        kind: hk.InnerLoop(problem, work.model, work.hyper, work.optimizer, graph=kind == "recorded")
        for kind in ("eager", "recorded")
    }
    batch = work.batches[0]
    some = None if row.tokens is None else beginnings(batch, row.tokens)

    def ten(kind: str) -> Callable[[], None]:
        return lambda: [loops[kind].step(b) for b in work.batches[:INNER_STEPS]] and None

    def hypergradient() -> None:
        method.backward(problem, work.model, work.hyper, batch, work.outer_batch, curvature_batch=some)

    for _ in range(row.period + 2):  # decisions, algorithms tried out, recordings
        ten("recorded")()
        work.outer_step(hypergradient)
    times: dict[str, list[float]] = {"eager": [], "recorded": [], "outer": []}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        for kind in loops:
            times[kind].append(seconds(ten(kind), device))
        outer = [seconds(lambda: work.outer_step(hypergradient), device) for _ in range(row.period)]
        times["outer"].append(statistics.mean(outer))
    found = {f"{kind}_ms": 1e3 * statistics.median(values) for kind, values in times.items()}
    stats = method.backward(problem, work.model, work.hyper, batch, work.outer_batch, curvature_batch=some).stats
    return {
        **found,
        "ratio_eager": 1 + found["outer_ms"] / found["eager_ms"],
        "ratio_recorded": 1 + found["outer_ms"] / found["recorded_ms"],
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0,
        "recorded_steps": loops["recorded"].recorded,
        "replays": method._replays._served,
        "cross": stats["cross"],
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checks", action="store_true", help="also compare hypergradients with each other")
    parser.add_argument("--out", help="file of JSON lines, which are appended")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    path = None if args.out is None else Path(args.out)
    path = RESULTS / path if path is not None and path.parent == Path() else path

    def keep(row: dict[str, Any]) -> None:
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, ensure_ascii=False)
        print(line, flush=True)
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    keep({"hardware": hardware(), "versions": versions(), "repeats": args.repeats, "seed": 0})
    for name in args.workloads:
        for row in ROWS[name]:
            if args.methods and row.name not in args.methods:
                continue
            started = time.perf_counter()
            work = (
                lora(args.device, args.small, peft=args.peft) if name == "lora" else usual_bert(args.device, args.small)
            )
            line: dict[str, Any] = {"workload": work.name, "method": row.name}
            try:
                line |= measured(work, row, args.device, args.repeats)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            keep({**line, "seconds": time.perf_counter() - started})
            if args.checks and row.name == "KFAC":
                found = hypergradients(work) if name == "lora" else masks(work)
                keep({"workload": work.name, **found})
            del work
            gc.collect()
            if args.device == "cuda":
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
