"""What an outer iteration of the four applications costs: toys of each task, on the CPU."""

from __future__ import annotations

import pytest
import torch

from experiments.paper import application_costs as costs


@pytest.mark.parametrize(
    "task", [*costs.TASKS][:1] + [pytest.param(x, marks=pytest.mark.long) for x in [*costs.TASKS][1:]]
)
def test_every_method_of_a_task_is_measured_in_turns(task: str) -> None:
    runs = costs.warmed(task, "smoke", torch.device("cpu"), None, steps=1)
    lines = list(costs.measured(task, runs, blocks=2))
    assert [line["method"] for line in lines] == [*runs]
    assert {line["method"]: line["relative"] for line in lines}[costs.TASKS[task][0]] == 1.0
    assert all(len(line["blocks"]) == 2 and line["ms"] > 0 for line in lines)
    assert [run.state.step for run in runs.values()] == [2 + 2 * line["steps"] for line in lines]
