"""Networks that are not trained to the end: does unrolling their training foretell more than their last point?

    python -m experiments.attribution.early [--epochs 1 3 6 10 20 40 --subsets 60 --repeats 3]

Digits, MLP. Networks are retrained on random halves with as many steps as the scored one has had. The unrolled scores
use its training in one or three segments of equal time, with a copy from the middle of each; the others its last point.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hyperkron as hk
from experiments.attribution import lds
from experiments.attribution.peers import cosine, loss, ours
from experiments.attribution.settings import MOMENTUM, SETTINGS, Setting, train_many
from experiments.pieces import Lines
from hyperkron.attribution import attribute_unrolled, training_time
from hyperkron.curvature import EKFAC

RESULT = Path(__file__).parents[1] / "results" / "attribution" / "early.jsonl"
BASE = "EKFAC, δ=0.0001"
"""What the others are compared with."""


def rates(setting: Setting) -> list[float]:
    """The learning rate of every step."""
    total = setting.steps(len(setting.train[0]))
    return [setting.rate * (1 - step / total) for step in range(total)]


def ends(setting: Setting, count: int) -> list[int]:
    """The last steps of ``count`` segments of equal time."""
    passed = torch.tensor(rates(setting)).cumsum(0)
    return [int((passed < float(passed[-1]) * (i + 1) / count - 1e-9).sum()) + 1 for i in range(count)]


def unrolled(setting: Setting, count: int) -> Tensor:
    """Scores by ``count`` segments."""
    stops = ends(setting, count)
    starts = [0, *stops[:-1]]
    middles = [(a + b) // 2 for a, b in zip(starts, stops, strict=True)]
    *copies, model = train_many(setting, [torch.arange(len(setting.train[0]))], [0], middles)
    times = [training_time(rates(setting)[a:b], momentum=MOMENTUM) for a, b in zip(starts, stops, strict=True)]
    segments: list[tuple[nn.Module, float]] = list(zip(copies, times, strict=True))
    curvature = EKFAC(1e-8, fisher="type-2")
    return attribute_unrolled(loss, model, segments, setting.train, setting.queries, curvature=curvature).scores


def scores(setting: Setting) -> dict[str, Tensor]:
    """Of every method."""
    (model,) = train_many(setting, [torch.arange(len(setting.train[0]))], [0])
    rule = setting.damping
    found = {
        BASE: ours(hk.ekfac(1e-4, fisher="type-2"))(model, setting),
        "EKFAC, δ by the rule": ours(hk.ekfac(rule, fisher="type-2"))(model, setting),
        "PCG-10, δ by the rule": ours(hk.pcg(10, rule, preconditioner=EKFAC(rule, fisher="type-2")))(model, setting),
        "identity (gradient products)": ours(hk.identity())(model, setting),
        "gradient cosine": cosine(model, setting),
    }
    return found | {f"unrolled, segments: {count}": unrolled(setting, count) for count in (1, 3)}


def main(arguments: list[str] | None = None) -> None:
    """Retrain, score, print and record; each length of training is one row of the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 3, 6, 10, 20, 40])
    parser.add_argument("--subsets", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    masks, record = lds.halves(1200, options.subsets), Lines(options.out)
    for epochs in options.epochs:
        setting = replace(SETTINGS["digits_mlp"](None), epochs=epochs)
        halved = replace(setting, epochs=2 * epochs)  # as many steps on half of the rows
        losses = lds.losses_after_retraining(halved, masks, options.repeats, 60)
        each = {name: lds.correlations(found, masks, losses) for name, found in scores(setting).items()}
        row: dict[str, Any] = {"epochs": epochs, "subsets": options.subsets, "repeats": options.repeats}
        row["loss"] = round(float(losses.mean()), 4)
        row["methods"] = {
            name: {"lds": lds.summary(x), "gain": lds.summary(x - each[BASE])} for name, x in each.items()
        }
        record.append(row)
        print(f"{epochs} epochs, mean loss of the queries after retraining {row['loss']}")
        for name, x in each.items():
            told, gain = lds.summary(x), lds.summary(x - each[BASE])
            print(f"  {name:30} {told[0]:.3f} ± {told[1]:.3f}   {gain[0]:+.3f} ± {gain[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
