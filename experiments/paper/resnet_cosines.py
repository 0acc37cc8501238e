"""How near are the hypergradients of AID's solvers to the exact one, along a run of ResNet-18?

At some outer steps of a run of AID-KFAC (the winner of :mod:`experiments.paper.resnet_length`) every solver computes
the hypergradient at the same point on the same batches. Exact is (GGN + 2α + δ)⁻¹ by a long preconditioned CG with the
run's own damping δ. Recorded is the cosine of the angle between λ's hypergradient and the exact one.

    python -m experiments.paper.resnet_cosines --device cuda      # after resnet_length; writes every value at once
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments import records
from experiments.paper import cleaning, datasets, resnet_runs
from experiments.paper.cleaning import Split
from experiments.paper.exactness import exact, nearness
from experiments.paper.image_contest import OWN, RESULT, Contest
from experiments.paper.resnet_runs import Size
from experiments.paper.tuning import Setting
from experiments.pieces import Lines
from hyperkron.curvature import GGN
from hyperkron.hypergradient import Hypergradient, cg, ekfac, identity, kfac, neumann
from hyperkron.training import Evaluate, Run

COSINES = records.RESULTS / "paper" / "resnet-length-cosines.jsonl"
STEPS = (1, 10, 30, 100, 300)
"""Outer steps at which it is measured."""
SOLVERS: dict[str, Callable[[float], Hypergradient]] = {
    "identity": lambda damping: identity(),
    "KFAC": lambda damping: kfac(damping),
    "CG-3": lambda damping: cg(3, damping),
    "GGN-CG-3": lambda damping: cg(3, curvature=GGN(damping)),
    "GGN-CG-10": lambda damping: cg(10, curvature=GGN(damping)),
    "Neumann-10": lambda damping: neumann(10, damping, step=0.03),
    "EKFAC": lambda damping: ekfac(damping),
}


def cosines(run: Run, damping: float, iterations: int) -> Iterator[tuple[str, float]]:
    """The relative residual of the exact solution, then the cosine of every solver, on one pair of batches."""
    state = run.state
    at = state.problem, state.model, state.hyper, run.batches.inner(), run.batches.outer()
    truth, residual = exact(at, damping, iterations)
    yield "residual", residual
    solvers = {name: make(damping) for name, make in SOLVERS.items()}
    yield from ((found.name, found.cosine) for found in nearness(at, truth, solvers))


def along(
    setting: Setting,
    split: Split,
    size: Size,
    keep: Callable[[dict[str, Any]], object],
    steps: Collection[int] = STEPS,
    *,
    iterations: int = 50,
) -> None:
    """Measure at ``steps`` of a run of AID-KFAC with seed 0; each result is kept as soon as it comes."""

    def look(run: Run) -> None:
        for name, value in cosines(run, setting["damping"], iterations):
            keep({"step": run.state.step, "damping": setting["damping"], "name": name, "value": value})

    made = resnet_runs.prepare("AID-KFAC", setting, split, 0, size, (Evaluate(look, at=steps),))
    made.advance(max(steps))


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
    along(setting, split, size, lambda row: print(lines.append(records.rounded(row, 4)), flush=True))


if __name__ == "__main__":
    main()
