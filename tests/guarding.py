"""Runs that fail where a test says so, and what a failed step must leave as it was."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import hyperkron as hk
from resuming import CLASSES, EXAMPLES, FEATURES, inner, outer


class Poison(hk.algorithms.Source):
    """Batches whose draws number ``bad`` hold a NaN (or another value)."""

    def __init__(self, bad: set[int], seed: int = 1, value: float = math.nan) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(EXAMPLES, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
        self.bad, self.value, self.drawn = bad, value, 0

    def next(self) -> tuple[Tensor, ...]:
        index = (torch.arange(8) + 5 * self.drawn) % EXAMPLES
        x = self.x[index]
        if self.drawn in self.bad:
            x[3, 1] = self.value
        self.drawn += 1
        return x, self.y[index], index

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, CLASSES))


def prepare(algorithm: Any, inner_data: Any, outer_data: Any, callbacks: Any, steps: int = 0, **options: Any) -> hk.Run:
    model, weights = options.pop("model", None) or network(), hk.SampleWeights(EXAMPLES)
    weights.to(next(model.parameters()).dtype)
    problem = options.pop("problem", hk.BilevelProblem(inner, outer))
    if "rates" not in options:
        options["inner_optimizer"] = torch.optim.Adam(model.parameters(), lr=0.02)
        options["outer_optimizer"] = torch.optim.SGD(weights.parameters(), lr=0.1, momentum=0.9)
    options.pop("rates", None)
    return hk.fit(
        problem, model, weights, algorithm, inner_data, outer_data, steps=steps, callbacks=callbacks, **options
    )


def memory(run: hk.Run) -> dict[str, Any]:
    """What a skipped step must leave as it was: all but the counter, the data and the random states."""
    return {key: value for key, value in run.state.state_dict().items() if key != "step"}
