"""How near are the hypergradients of AID's solvers to the exact one, along a run of ResNet-18?

At some outer steps of a run of AID-KFAC (the winner of :mod:`experiments.paper.resnet_length`) every solver computes
the hypergradient at the same point on the same batches. Exact is (GGN + 2α + δ)⁻¹ by a long preconditioned CG with the
run's own damping δ. Recorded is the cosine of the angle between λ's hypergradient and the exact one.

    python -m experiments.paper.resnet_cosines --device cuda      # after resnet_length; about a minute
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from experiments import records
from experiments.paper import cleaning, datasets, resnet_runs
from experiments.paper.cleaning import Split
from experiments.paper.resnet_length import OWN, RESULT, Contest
from experiments.paper.resnet_runs import Size
from experiments.paper.tuning import Setting
from experiments.pieces import Lines
from hyperkron.curvature import GGN
from hyperkron.hypergradient import Hypergradient, cg, ekfac, identity, kfac, neumann, pcg
from hyperkron.training import Evaluate, Run

COSINES = records.RESULTS / "paper" / "resnet-length-cosines.jsonl"
STEPS = (1, 10, 30, 100, 300)
SOLVERS: dict[str, Callable[[float], Hypergradient]] = {
    "KFAC": lambda damping: kfac(damping),
    "EKFAC": lambda damping: ekfac(damping),
    "identity": lambda damping: identity(),
    "CG-3": lambda damping: cg(3, damping),
    "GGN-CG-3": lambda damping: cg(3, curvature=GGN(damping)),
    "GGN-CG-10": lambda damping: cg(10, curvature=GGN(damping)),
    "Neumann-10": lambda damping: neumann(10, damping, step=0.03),
}


def measure(run: Run, damping: float, batches: int, iterations: int) -> dict[str, Any]:
    """Mean cosine of every solver over some pairs of batches, and the largest relative residual of the exact one."""
    state = run.state
    found: dict[str, list[float]] = {name: [] for name in SOLVERS}
    left = []
    for _ in range(batches):
        at = state.problem, state.model, state.hyper, run.batches.inner(), run.batches.outer()
        exact = pcg(iterations, damping, tolerance=1e-4).compute(*at)
        left.append(float(exact.stats["residual"]))
        truth = _flat(exact.grads)
        for name, make in SOLVERS.items():
            found[name].append(float(torch.cosine_similarity(_flat(make(damping).compute(*at).grads), truth, dim=0)))
    return {**{name: statistics.fmean(values) for name, values in found.items()}, "residual": max(left)}


def _flat(grads: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.flatten() for x in grads.values()]).double()


def along(
    setting: Setting,
    split: Split,
    size: Size,
    steps: Collection[int] = STEPS,
    *,
    batches: int = 2,
    iterations: int = 100,
) -> list[dict[str, Any]]:
    """The cosines at ``steps`` of a run of AID-KFAC with seed 0."""
    seen = Evaluate(lambda run: measure(run, setting["damping"], batches, iterations), at=steps)
    made = resnet_runs.prepare("AID-KFAC", setting, split, 0, size, (seen,))
    made.advance(max(steps))
    return [{"step": row["step"], "damping": setting["damping"], **row} for row in seen.rows]


def main(arguments: list[str] | None = None) -> None:
    """Measure and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RESULT, help="file of the runs that chose the setting")
    parser.add_argument("--out", type=Path, default=COSINES)
    parser.add_argument("--data", type=Path, default=None, help="folder with cifar10/")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    contest = Contest(Lines(options.runs).rows)
    setting = contest.winner("AID-KFAC", OWN)
    if setting is None:
        parser.error(f"{options.runs} has no finished trials of AID-KFAC; run experiments.paper.resnet_length first.")
    size = Size()
    split = cleaning.noisy_split(datasets.cifar10(options.data), size.counts, 0).to(options.device)
    lines = Lines(options.out)
    for row in along(setting, split, size):
        print(lines.append(records.rounded(records.plain(row), 4)), flush=True)


if __name__ == "__main__":
    main()
