"""What an outer iteration of the four applications costs: toys of each task, on the CPU."""

from __future__ import annotations

import pytest
import torch

from experiments import records
from experiments.paper import application_costs as costs
from experiments.paper.costs import FOLLOWER
from experiments.paper.costs import alone as recorded
from experiments.paper.poisoning_page import paper_row


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


def test_pages_have_the_recorded_costs() -> None:
    pages = {
        name: (records.PAGES / f"{name}.md").read_text("utf-8") for name in ("poisoning", "long-tail", "unlearnable")
    }
    found = recorded("small", *costs.TASKS)
    for model in ("LR", "MLP", "CNN"):
        theta, other, own = (found[f"poisoning {model}"][name]["ms"] for name in (FOLLOWER, "TGDA-CG", "TGDA-KFAC-EMP"))
        ratios = f"{own / other:.2f} | {(own - theta) / (other - theta):.2f}"
        hours = paper_row(model)["tgda_kfac_h"] / paper_row(model)["tgda_hessian_h"]
        assert f"| {model} | {theta:.1f} | {other:.1f} | {own:.1f} | {ratios} | {hours:.2f} |" in pages["poisoning"]
    for task in ("long-tail", "unlearnable"):
        assert all(f"{x['ms']:.1f}" in pages[task] for x in found[task].values())
    times = {name: x["ms"] for name, x in found["unlearnable"].items()}
    ratios = [
        [(times["AID-KFAC"] - less) / (times[name] - less) for name in ("AID-CG", "AID-CG-16")]
        for less in (0.0, times[FOLLOWER])
    ]
    whole, alone = (f"{few:.2f} and {many:.2f}" for few, many in ratios)
    assert f"{whole} for KFAC ({alone} for the hypergradient alone" in pages["unlearnable"]
    assert f"{found['long-tail']['MWN + KFAC-emp']['relative']:.2f}" in pages["long-tail"]
