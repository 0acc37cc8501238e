"""Why SAMA and KFAC differ in encoder hypercleaning: how many steps each needs, and how exact its hypergradient is.

Steps are counted in the recorded runs of :mod:`experiments.paper.encoder_length`. Cosines are measured here, along a
run of KFAC with the printed set-up: at several outer steps every method computes the hypergradient at the same point on
the same batches, and so does CG on the damped Gauss–Newton matrix, preconditioned by KFAC, until it has converged (its
relative residual is recorded).

    python -m experiments.paper.encoder_why --data data     # the cosines of TREC, eight processor-minutes
    python -m experiments.paper.encoder_why --figures       # both figures from what is recorded
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import records
from experiments.paper import encoder_length, plots
from experiments.paper.encoder_cleaning import Source
from experiments.paper.encoder_length import METHODS, RATES
from experiments.paper.encoder_settings import Part
from experiments.paper.exactness import exact, nearness
from experiments.paper.text_cleaning import Shuffled, TextCase, TextRates, TextTrial, text_methods
from experiments.pieces import Lines
from hyperkron.hypergradient import Hypergradient, cg, identity, kfac, pcg, sama

RESULT = records.RESULTS / "paper" / "encoder-cosines.jsonl"
LOOKS = (0, 10, 30)
"""Outer steps at which hypergradients are compared."""
ROWS = 32
"""Rows of the batches on which they are compared; the run itself has the printed batch."""
DAMPING = 1e-3


def compared(optimizer: torch.optim.Optimizer, seed: int) -> dict[str, Hypergradient]:
    """The methods, as the long runs have them."""
    return {
        "SAMA": sama(optimizer, alpha=0.1),
        "identity": identity(),
        "KFAC": kfac(DAMPING, seed=seed),
        "CG-3": cg(3, DAMPING),
        "PCG-3": pcg(3, DAMPING),
    }


def cosines(source: Source, dataset: str, case: TextCase, seed: int, looks: Sequence[int] = LOOKS) -> dict[str, Any]:
    """Of every method's hypergradient the cosine with the converged one, and the norm relative to it, at each of
    ``looks`` along a run of KFAC.
    """
    split = source.split(Part(dataset, "one", ()), 1, seed)
    setting = {"inner": 1e-5, "rate": 1.0, "outer": 0.0, "damping": DAMPING}
    model = source.model(split.classes, 1, seed)
    trial = TextTrial(case, split, model, text_methods(TextRates())["KFAC"], setting, seed, case.steps)
    cosine: dict[str, list[float]] = {}
    norm: dict[str, list[float]] = {}
    residuals: list[float] = []
    for step in looks:
        trial.advance(step)
        inner = Shuffled(split.train, ROWS, seed + step + 1).next()
        outer = Shuffled(split.trusted, ROWS, seed + step + 2).next()
        at = case.problem(), model, trial.weights, inner, outer
        truth, residual = exact(at, DAMPING, 100)
        residuals.append(residual)
        for found in nearness(at, truth, compared(trial.run.state.inner.optimizer, seed)):
            cosine.setdefault(found.name, []).append(found.cosine)
            norm.setdefault(found.name, []).append(found.norm)
    return {
        "dataset": dataset,
        "seed": seed,
        "looks": list(looks),
        "cosines": cosine,
        "norms": norm,
        "residuals": residuals,
    }


def steps_needed(rows: list[dict[str, Any]], dataset: str) -> dict[str, list[float]]:
    """For every method and step size of λ, the outer steps of seed 0 until the held-out error is halfway from the
    baseline's lowest to the lowest of all runs; ``nan`` where it never is.
    """
    of = {encoder_length.key(row)[1:]: row["curve"] for row in rows if row["dataset"] == dataset and row["seed"] == 0}
    plain = min(of["Baseline", 0.0, 0]["second_error"])
    lowest = min(min(curve["second_error"]) for (name, _, _), curve in of.items() if name in METHODS)

    def needed(name: str, rate: float) -> float:
        curve = of.get((name, rate, 0))
        found = [] if curve is None else zip(curve["step"], curve["second_error"], strict=True)
        return next((step for step, error in found if error <= (plain + lowest) / 2), math.nan)

    return {name: [needed(name, rate) for rate in RATES] for name in METHODS}


def figures(rows: list[dict[str, Any]], measured: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Steps needed by the step size of λ, a panel for each dataset; cosines and norms by outer step."""
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))

    def steps(axes: Any) -> None:
        for axis, dataset in zip(axes, datasets, strict=True):
            lines = {name: (RATES, ys) for name, ys in steps_needed(rows, dataset).items()}
            plots.curves(axis, lines, "step size of λ", "outer steps to half of the gain", log_x=True, log_y=True)
            axis.set_title(dataset, fontsize=9)

    def exactness(axes: Any) -> None:
        for i, row in enumerate(measured):
            for axis, what in zip(axes[2 * i :], ("cosines", "norms"), strict=False):
                lines = {name: (row["looks"], ys) for name, ys in row[what].items()}
                text = {"cosines": "cosine with", "norms": "norm relative to"}[what]
                plots.curves(axis, lines, "outer step", f"{text} the converged one", log_y=what == "norms")
                axis.set_title(row["dataset"], fontsize=9)

    made = [plots.draw(folder / "encoder-steps.svg", len(datasets), steps)]
    return [*made, plots.draw(folder / "encoder-cosines.svg", 2 * len(measured), exactness)] if measured else made


def main(arguments: list[str] | None = None) -> None:
    """Measure the cosines that are not recorded yet, or draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", action="store_true", help="draw the figures of what is recorded")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the cosines; recorded ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder of the datasets and encoders")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--datasets", nargs="+", default=["trec"])
    parser.add_argument("--steps", type=int, default=1000, help="outer steps of the schedule; default: 1000")
    options = parser.parse_args(arguments)
    lines = Lines(options.out)
    if options.figures:
        folder = records.PAGES / "figures" / "paper"
        print(*figures(Lines(encoder_length.RESULT).rows, lines.rows, folder), sep="\n")
        return
    case = TextCase(steps=options.steps, tokens=100)
    source = Source(options.encoder, options.data, torch.device(options.device), case.tokens)
    for dataset in options.datasets:
        if dataset not in {row["dataset"] for row in lines.rows}:
            lines.append(cosines(source, dataset, case, 0))
            print(lines.rows[-1], flush=True)


if __name__ == "__main__":
    main()
