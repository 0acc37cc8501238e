"""KFAC on the CPU, ours against curvlinops: factors, damped inverse and one solve; time and peak memory.

    python benchmarks/curvlinops_cpu.py                     # all models, writes results/curvlinops_cpu.json
    python benchmarks/curvlinops_cpu.py --models resnet18 --repeats 3

The same model, batch and choices for both: cross-entropy, Monte-Carlo Fisher with one sample, ``expand``,
weight and bias jointly, damping 1e-3 split by π, Cholesky factorisations, and one product with the inverse.
curvlinops is spared what it does by default and need not (its check for determinism, its passes over the data to
count them). Ours also measures the diagonal of norm layers and embeddings, which curvlinops leaves out;
``ours, blocks only`` leaves them out too. Times are taken in turns in one process. Memory is the peak of resident
memory during one cold call, in a process of its own, above what model and batch need.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

import torch
from common import alternating, peak_memory, write_result
from curvlinops import KFACInverseLinearOperator, KFACLinearOperator
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.evaluation.point import Point
from resnet import resnet18
from transformer import TransformerClassifier

SEED = 0
DAMPING = 1e-3
OURS, BLOCKS, THEIRS = "ours", "ours, blocks only", "curvlinops"


@dataclass
class Case:
    """A model with a batch, and a right-hand side for the solve."""

    model: nn.Module
    x: Tensor
    y: Tensor
    right: dict[str, Tensor]


def resnet(small: bool) -> tuple[nn.Module, Tensor]:
    """ResNet-18 for CIFAR with 128 images."""
    model = resnet18(classes=10, stem="3x3", width=4 if small else 64)
    return model, torch.randn(2 if small else 128, 3, 32, 32)


def encoder(width: int, heads: int, batch: int, length: int) -> Callable[[bool], tuple[nn.Module, Tensor]]:
    """A transformer encoder of four layers with ``batch`` sequences of ``length`` tokens."""

    def build(small: bool) -> tuple[nn.Module, Tensor]:
        w, n = (4 * heads, 2) if small else (width, batch)
        model = TransformerClassifier(30522, 10, layers=4, width=w, heads=heads, ffn=4 * w, max_len=length)
        return model, torch.randint(30522, (n, length))

    return build


MODELS: dict[str, Callable[[bool], tuple[nn.Module, Tensor]]] = {
    "resnet18": resnet,
    **{  # the layers of BERT-mini, BERT-medium and BERT-base, with few tokens and with many
        f"encoder-{width}-{batch * length}": encoder(width, width // 64, batch, length)
        for width in (256, 512, 768)
        for batch, length in ((16, 50), (32, 128))
    },
}


def make(name: str, small: bool = False) -> Case:
    """A model by name; ``small`` makes one to warm libraries up with."""
    torch.manual_seed(SEED)
    model, x = MODELS[name](small)
    y = torch.randint(10, (len(x),))
    return Case(model.train(), x, y, {n: torch.randn_like(p) for n, p in model.named_parameters()})


def inner(model: nn.Module, hyper: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    """Plain cross-entropy."""
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def ours(case: Case, fallback: str = "diagonal") -> dict[str, Tensor]:
    """Factors, inverse and one solve through hyperkron."""
    curvature = hk.curvature.KFAC(damping=DAMPING, fallback=fallback)  # type: ignore[arg-type]
    batch = (case.x, case.y)
    hyper = hk.SampleWeights(1)
    with Point(hk.BilevelProblem(inner, inner), case.model, hyper, batch, batch) as point:
        return curvature.operator(point, curvature.init()).solve(case.right)


def theirs(case: Case) -> dict[str, Tensor]:
    """The same through curvlinops."""
    layers = (nn.Linear, nn.Conv2d)
    covered = {id(p) for m in case.model.modules() if isinstance(m, layers) for p in m.parameters()}
    params = {name: p for name, p in case.model.named_parameters() if id(p) in covered}
    kfac = KFACLinearOperator(
        case.model,
        nn.CrossEntropyLoss(),
        list(params.values()),
        [(case.x, case.y)],
        fisher_type="mc",
        mc_samples=1,
        kfac_approx="expand",
        separate_weight_and_bias=False,
        check_deterministic=False,
        num_data=len(case.x),
        num_per_example_loss_terms=1,
    )
    inverse = KFACInverseLinearOperator(kfac, damping=DAMPING, use_heuristic_damping=True)
    return dict(zip(params, inverse @ [case.right[name] for name in params], strict=True))


CANDIDATES: dict[str, Callable[[Case], dict[str, Tensor]]] = {
    OURS: ours,
    BLOCKS: lambda case: ours(case, "zero"),
    THEIRS: theirs,
}


def memory(model: str, candidate: str, threads: int) -> int:
    """Peak extra memory of one call, in bytes, measured in a process of its own."""
    command = [sys.executable, __file__, "--memory", model, candidate, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


@dataclass
class Row:
    """One line of the table; ratios are to curvlinops in the same run."""

    samples_s: list[float]
    peak_extra_mib: float
    median_s: float = 0.0
    min_s: float = 0.0
    faster_by_median: float = 1.0
    faster_by_min: float = 1.0
    share_of_memory: float = 1.0

    def __post_init__(self) -> None:
        self.median_s, self.min_s = statistics.median(self.samples_s), min(self.samples_s)

    def against(self, base: Row) -> Row:
        """The same with ratios to ``base``."""
        self.faster_by_median, self.faster_by_min = base.median_s / self.median_s, base.min_s / self.min_s
        self.share_of_memory = self.peak_extra_mib / base.peak_extra_mib
        return self


def compare(model: str, repeats: int, threads: int) -> dict[str, Row]:
    """Times and memory of all candidates on one model."""
    case = make(model)
    functions = {name: lambda run=run: run(case) for name, run in CANDIDATES.items()}
    times = alternating(functions, repeats=repeats, warmup=1)
    rows = {name: Row(times[name], memory(model, name, threads) / 2**20) for name in CANDIDATES}
    return {name: row.against(rows[THEIRS]) for name, row in rows.items()}


def table(model: str, rows: dict[str, Row]) -> str:
    """The rows as text."""
    lines = [f"{model:<20} {'median s':>9} {'min s':>7} {'faster':>8} {'by min':>8} {'extra MiB':>10} {'share':>6}"]
    for name, r in rows.items():
        lines.append(
            f"  {name:<18} {r.median_s:9.2f} {r.min_s:7.2f} {r.faster_by_median:7.2f}× {r.faster_by_min:7.2f}× "
            f"{r.peak_extra_mib:10.0f} {100 * r.share_of_memory:5.0f}%"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="curvlinops_cpu.json", help="a name in benchmarks/results, or a path")
    parser.add_argument("--memory", nargs=2, metavar=("MODEL", "CANDIDATE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        run, case = CANDIDATES[args.memory[1]], make(args.memory[0])
        run(make(args.memory[0], small=True))
        print(json.dumps(peak_memory(lambda: run(case))))
        return
    results = {}
    for model in args.models:
        rows = compare(model, args.repeats, args.threads)
        results[model] = {name: asdict(row) for name, row in rows.items()}
        print(table(model, rows), flush=True)
    write_result(args.out, {"seed": SEED, "repeats": args.repeats, "models": results})


if __name__ == "__main__":
    main()
