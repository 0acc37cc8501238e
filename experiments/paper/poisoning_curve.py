"""How the accuracy of table 5's networks without poison changes while they are trained: are they trained for too long?

python -m experiments.paper.poisoning_curve --model CNN --device cuda --out curve.jsonl     # 10 seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import trial
from experiments.paper import poisoning
from experiments.paper import poisoning_problem as base
from experiments.pieces import Lines
from hyperkron import losses

EVERY = 5
"""Epochs between two looks."""


def curve(case: base.Case, split: base.Split, seed: int) -> dict[str, Any]:
    """Held-out accuracy in per cent every :data:`EVERY` epochs, and that on training and test rows at the end.

    The network is the one that clean rows are judged by.
    """
    model, batches = base.network(case, split.clean, seed + 100), base.Shuffled(split.clean, case.batch, seed + 100)
    sgd = torch.optim.SGD(model.parameters(), lr=case.rate)
    steps = batches.epochs(EVERY)
    with poisoning.precision(case):
        run = trial.train(model, lambda m, b: losses.cross_entropy(m(b[0]), b[1]), batches, sgd, steps, graph=True)
        found = [base.accuracy(model, split.held_out)]
        while len(found) < case.epochs // EVERY:
            run.advance(steps)
            found.append(base.accuracy(model, split.held_out))
    ends = {name: base.accuracy(model, part) for name, part in (("train", split.clean), ("test", split.test))}
    return {"network": case.network, "seed": seed, "every": EVERY, "held_out": found, **ends}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train one network and write its curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=poisoning.SETTINGS["small"].cases, default="CNN")
    parser.add_argument("--toy", action="store_true", help="scikit-learn's digits in place of the real data")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/poisoning-curve.jsonl"))
    args = parser.parse_args(arguments)
    case = poisoning.SETTINGS["smoke" if args.toy else "small"].cases[args.model]
    split = base.split_of(case, base.load(case, args.data), args.seed, args.device)
    print(Lines(args.out).append(curve(case, split, args.seed)))


if __name__ == "__main__":
    main()
