"""Made-up contests of networks on CIFAR-10, in which everything has been run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.paper.image_contest import Contest, Plan, Task

PLAN = Plan(steps=20, seeds=3, inner=0.05, rate=0.0)
"""With trials, as the first runs had them."""
FAST = {"AID-KFAC": 1.0, "MRBO-KFAC": 1.0}
PAIRED = {"AID-KFAC": 1.2, "AID-CG-3": 1.5, "AmIGO": 1.5, "MRBO": 1.6, "MRBO-KFAC": 1.4, "trusted only": 1.1}


def row(task: Task, loss: float, *, at: int = 900, failed: bool = False) -> dict[str, Any]:
    """A finished run whose held-out loss was lowest ``at`` a step."""
    best = {"second_loss": loss, "test_loss": loss, "test_error": 0.5, "step": at}
    named = {"method": task.name, "setting": task.setting, "seed": task.seed, "wanted": task.steps}
    named |= {"steps": task.steps, "seconds": 2.0, "step_ms": 100.0}
    weights = {"f1": 0.8, "visits": 12.0, "mean_right": 0.7, "mean_wrong": 0.3}
    curve = {"step": [0, 20], "test_loss": [2.3, loss], "test_error": [0.9, 0.5]}
    return {**named, **weights, "failed": failed, "best": best, "last": best, "curve": curve}


def played(
    names: list[str], loss: Callable[[Task], float], plan: Plan = PLAN, **more: Any
) -> tuple[Contest, list[Task]]:
    """A contest in which everything was run, and in which order."""
    rows: list[dict[str, Any]] = []
    order: list[Task] = []
    while todo := [task for _, task in Contest(rows, plan, names).missing()]:
        order += todo
        rows += [row(task, loss(task), **more) for task in todo]
    return Contest(rows, plan, names), order


def judged(level: dict[str, float], plan: Plan = PLAN, **more: Any) -> Contest:
    """A contest whose methods have these losses, with a little noise by seed."""
    names = list(level)

    def loss(task: Task) -> float:
        return level[task.name] + 0.01 * task.seed * (1 + 0.1 * len(task.name) % 7)

    return played(names, loss, plan, **more)[0]
