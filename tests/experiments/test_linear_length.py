"""The linear model at the paper's length: which runs follow from which, and that they run."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from experiments.paper import cleaning, linear_length
from experiments.paper.linear_length import ARMS, Contest, Plan, Task, key


def row(task: Task, loss: float) -> dict[str, Any]:
    """A finished run."""
    best = {"second_loss": loss, "test_loss": loss, "test_error": 0.5}
    named = {"method": task.name, "setting": task.setting, "seed": task.seed, "wanted": task.steps, "test": task.test}
    return {**named, "best": best, "failed": False, "f1": 1.0, "moved": 0.1, "curve": {"test_loss": [loss]}}


def test_the_winner_is_the_best_of_those_that_ran_for_all_steps() -> None:
    """Trials first; then the best of them at full length; then the seeds of the winner of each arm."""
    plan, names, rows = Plan(steps=20, tried=3, kept=2, seeds=2), ["AID-KFAC"], []
    rank = {json.dumps(s): i for i, s in enumerate(sorted(map(json.dumps, _settings(plan))))}

    def loss(task: Task) -> float:
        place = rank[json.dumps(json.dumps(task.setting))]
        return float(place if task.steps == plan.first else -place)

    lengths = []
    while todo := list(Contest(rows, plan, names).missing()):
        task = todo[0][1]
        lengths.append((task.steps, task.test))
        rows.append(row(task, loss(task)))
    assert set(lengths[:3]) == {(2, False)} and lengths.count((20, True)) in (2, 4)
    contest = Contest(rows, plan, names)
    for arm, rates in ARMS.items():
        kept = contest.kept("AID-KFAC", arm)
        assert len(kept) == 2 and contest.winner("AID-KFAC", arm) == min(kept, key=loss).setting
        assert contest.winner("AID-KFAC", arm)["outer"] in rates.outer
    text = linear_length.table(contest)
    assert text.count("| AID-KFAC |") == 2 and "Not run" not in text


def _settings(plan: Plan) -> list[dict[str, float]]:
    contest = Contest([], plan)
    return [task.setting for arm in ARMS for task in contest.trials("AID-KFAC", arm)]


def test_a_diverged_run_is_the_worst() -> None:
    assert linear_length.loss_of({"best": {"second_loss": None}}) == math.inf


@pytest.mark.parametrize("name", ["AID-KFAC", "MRBO", "AmIGO", "trusted only"])
def test_a_run(name: str) -> None:
    split = cleaning.noisy_split(cleaning.made_up((20,), 120, 40), (80, 20, 20), 0, scaling="one")
    assert abs(float(split.train[0].std()) - 1) < 0.02
    task = Contest([], Plan(steps=4, tried=2)).trials(name, "each its own")[0]._replace(steps=4, test=True)
    found = json.loads(json.dumps(linear_length.run(task, split, 80)))
    assert len(found["curve"]["test_loss"]) >= 4 and key(linear_length._task(found)) == key(task)
    assert (found["moved"] == 0) == (name == "trusted only")
