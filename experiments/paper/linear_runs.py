"""One run of the linear model on MNIST at the paper's length: its set-up, and what is kept of it.

The printed set-up: 50 000 noisy rows, half of them with a label drawn at random, 5000 trusted and 5000 held-out ones,
ten inner steps, momentum 0.9 on θ and λ, weights within [0, 1], pixels scaled by one mean and one deviation. Steps are
recorded as CUDA graphs. A batch of all rows is never copied: the objective reads the rows where they are.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from experiments import trial
from experiments.paper import cleaning, references
from experiments.paper.cleaning import Case, Split
from experiments.paper.methods import Rates, methods
from experiments.paper.tuning import Setting
from hyperkron.training import Callback, Run

DECAY = 1e-3
STUDIED = ("batch", "decay", "refresh", "ema")
"""What a setting may hold besides step sizes and damping: rows of a batch (all), α (1e-3), τ (1), β (0)."""


Found = tuple[list[dict[str, Any]], Tensor, bool]
"""Evaluations, weights, and whether the run failed."""


class Task(NamedTuple):
    """A run: of a method with a setting, for a number of outer steps, perhaps with the test part looked at."""

    name: str
    setting: Setting
    seed: int
    steps: int
    test: bool


def key(task: Task) -> str:
    """A run by its name, setting, seed and length."""
    return json.dumps([task.name, dict(sorted(task.setting.items())), task.seed, task.steps, task.test])


def task_of(row: dict[str, Any]) -> Task:
    """The task of a recorded run."""
    return Task(row["method"], row["setting"], row["seed"], row["wanted"], row["test"])


def loss_of(row: dict[str, Any]) -> float:
    """What a run is judged by; a diverged one is the worst."""
    found = row["best"]["second_loss"]
    return math.inf if found is None else float(found)


def order_of(row: dict[str, Any]) -> tuple[float, float]:
    """By what trials are ranked: where none is better than the model they began with, by the loss at their end."""
    last = row.get("last_loss")
    return loss_of(row), math.inf if last is None else float(last)


def run(task: Task, split: Split) -> dict[str, Any]:
    """One run; its curve, and how well its weights find the right labels."""
    rows, weights, failed = _line(task, split) if task.name in references.KINDS else _method(task, split)
    found = {
        **_named(task),
        "failed": failed,
        "best": min(rows, key=lambda row: row["second_loss"]),
        "last_loss": rows[-1]["second_loss"],
        "f1": cleaning.f1(weights.expand(len(split.clean)), split.clean),
        "moved": float((weights - 0.5).abs().mean()),
        **({"curve": {name: [float(f"{row[name]:.5g}") for row in rows] for name in rows[0]}} if task.test else {}),
    }
    gc.collect()  # the memory of CUDA graphs goes with them
    if split.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _named(task: Task) -> dict[str, Any]:
    return dict(zip(("method", "setting", "seed", "wanted", "test"), task, strict=True))


def broken(task: Task, error: Exception) -> dict[str, Any]:
    """The record of a run that ended in an error other than a divergence; it counts as the worst."""
    return {
        **_named(task),
        "failed": True,
        "error": f"{type(error).__name__}: {error!s:.300}",
        "best": {"second_loss": None},
    }


def looks(task: Task, split: Split, unit: int = 1) -> trial.Looks:
    """Evaluations at the beginning, five in the first 100 steps, then at every 25th of the run.

    ``unit``: steps of ``hk.fit`` in an outer step.
    """
    at = {*range(20, min(100, task.steps), 20), *range(0, task.steps, max(20, task.steps // 25)), task.steps} - {0}
    parts = {"second": split.second} | ({"test": split.test} if task.test else {})
    return trial.Looks(parts, cleaning.loss_and_error, at={unit * step for step in at}, start=True)


def _line(task: Task, split: Split) -> Found:
    """Plain training on all rows of a reference line at once; an outer step holds ten of its steps."""
    case, name = Case(batch=len(split.clean) + len(split.validation[1])), cast(references.Kind, task.name)
    rows = references.train(case, split, name, task.setting, task.steps, task.seed, looks(task, split, 10))
    return rows, torch.full((), 0.5, device=split.device), not math.isfinite(rows[-1]["second_loss"])


def _method(task: Task, split: Split) -> Found:
    seen = looks(task, split)
    made = prepare(task.name, task.setting, split, task.seed, [seen])
    made.advance(task.steps, seconds=math.inf)
    return seen.of(made), next(made.state.hyper.parameters()).detach(), made.failure is not None


def prepare(name: str, asked: Setting, split: Split, seed: int, callbacks: Sequence[Callback] = ()) -> Run:
    """A run of a method that has taken no step yet."""
    case = Case(batch=int(asked.get("batch", len(split.clean))), decay=asked.get("decay", DECAY))
    ema = asked.get("ema", 0.0)  # moving averages cannot be recorded
    every = methods(Rates(), refresh=int(asked.get("refresh", 1)), ema=ema, graph=not ema)
    setting = {name: value for name, value in asked.items() if name not in STUDIED}
    setting["outer_momentum"] = setting.get("momentum", 0.0)
    return cleaning.prepare(case, split, every[name], setting, seed, callbacks, graph=True)
