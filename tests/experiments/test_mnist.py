"""MNIST hypercleaning's benchmark: its plans, the end-to-end run with workers, and that it goes on where it stopped."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import records
from experiments.mnist import compare as cleaning
from experiments.mnist import tuning
from inline_workers import use_threads

COUNTS = (500, 200, 200)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A dataset of MNIST's form: ten noisy patterns of 8 × 8 pixels."""
    random = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 150, (10, 64), generator=random)
    for part, count in (("train", sum(COUNTS)), ("t10k", 100)):
        labels = torch.randint(10, (count,), generator=random)
        images = patterns[labels] + torch.randint(0, 100, (count, 64), generator=random)
        for kind, shape, values in (("images-idx3", (count, 8, 8), images), ("labels-idx1", (count,), labels)):
            header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(header + bytes(values.flatten().tolist()))
    return str(tmp_path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The paper's plan, but tiny; two trials for a method."""
    for name, (what, values) in list(cleaning.SOLVER.items()):
        monkeypatch.setitem(cleaning.SOLVER, name, (what, values[1:2]))
    return cleaning.PaperPlan(
        COUNTS,
        batch=100,
        iterations=4,
        single_loop_iterations=4,
        inner=(0.1,),
        outer=(10.0, 100.0),
        seeds=(4,),
        block=2,
    )


def test_the_paper_plan_is_the_one_that_was_run() -> None:
    """So a run with it has nothing left to do."""
    plan, name = cleaning.PLANS["paper"]
    record = cleaning.recorded(records.RESULTS / name, cleaning.settings_of(plan, "cuda"))
    assert set(record["tuned"]) == set(cleaning.SOLVER)
    assert record["diagnosis"] and cleaning.complete(record, plan)
    assert len(record["curves"]) == len(cleaning.PAIRS) * len(plan.seeds)


def test_the_paper_plan_has_its_split_and_its_batches() -> None:
    plan = cleaning.PaperPlan()
    assert plan.counts == (50_000, 5_000, 5_000)
    for name in cleaning.SOLVER:
        stochastic = name.startswith("MRBO")
        assert plan.batches(name) == ((2_000, 2_000) if stochastic else (50_000, 5_000))
        assert plan.steps(name) == (320 if stochastic else 200)
        assert tuning.trials(name, plan) == 32
    settings = cleaning.settings_of(plan, "cuda:0")
    assert settings["device"] == "cuda" and settings["stochastic"] == ("MRBO",)


def test_a_full_batch_is_not_copied(small: Any, folder: str) -> None:
    split = cleaning.noisy_mnist(folder, COUNTS).to("cpu")
    whole, parts = (
        cleaning.Trial(name, cleaning.Setting(0.1, 10.0, 0.1), split, small, 0) for name in ("AID-CG", "MRBO")
    )
    for _ in range(2):
        (x, y, index), (others, _) = whole.run.batches.inner(), whole.run.batches.outer()
        assert (x.data_ptr(), len(x), len(y)) == (split.train[0].data_ptr(), 500, 500)
        assert torch.equal(index, torch.arange(500))
        assert (others.data_ptr(), len(others)) == (split.validation[0].data_ptr(), 200)
    assert [len(x) for x in parts.run.batches.inner()] == [100, 100, 100]
    assert torch.equal(whole.run.state.model.weight, parts.run.state.model.weight)  # all methods start at one point


@pytest.mark.long
def test_a_run_stops_at_the_limit_and_goes_on_from_there(
    small: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    file = tmp_path / "x.json"
    said: list[str] = []

    def go_on(until: int | None, workers: int = 1) -> dict[str, Any]:
        """Until so many pieces have been finished."""
        said.clear()
        job = cleaning.job_of(folder, small, file, "cpu")

        def say(line: str) -> None:
            said.append(line)
            job.deadline = -math.inf if until is not None and len(said) >= until else math.inf

        job.say = say
        cleaning.main(job, file, workers)
        found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return found

    tuned = 2 * (len(cleaning.SOLVER) - 1)  # AmIGO-KFAC is AID-KFAC
    assert go_on(5, workers=2) == {} and "goes on from here" in said[-1]
    trials = sum(line.startswith("tune ") for line in said)
    assert trials in (5, 6)  # the other worker may have been busy
    cells = [json.loads(line) for line in file.with_suffix(".cells.jsonl").open()]
    first = {(row["key"][2], row["key"][3]["outer"]): row["value"]["loss"] for row in cells}
    second = go_on(tuned - trials + 2)  # the other trials, the diagnosis, the first pair
    assert sum(line.startswith("tune ") for line in said) == tuned - trials and "goes on from here" in said[-1]
    assert list(second["tuned"]) == list(cleaning.SOLVER) and len(second["curves"]) == 1
    assert second["tuned"]["AmIGO-KFAC"] == second["tuned"]["AID-KFAC"]
    for (method, outer), loss in first.items():
        assert {x["outer"]: x["second_loss"] for x in second["tuned"][method]["trials"]}[outer] == loss
    last = go_on(None)
    assert len(said) == len(cleaning.PAIRS) - 1 and not any("tune" in line for line in said)
    assert {k: last[k] for k in ("tuned", "diagnosis")} == {k: second[k] for k in ("tuned", "diagnosis")}
    assert last["curves"].items() >= second["curves"].items() and len(last["curves"]) == len(cleaning.PAIRS)
    assert all(max(curve["test_loss"]) < 1e3 for pair in last["curves"].values() for curve in pair.values())
    assert "| AmIGO, AmIGO-PCG | 4 |" in cleaning.table(last)
    assert go_on(None) == last and not said


def test_a_file_of_another_plan_is_left_alone(small: Any, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"settings": {"counts": [1, 2, 3]}}), "utf-8")
    with pytest.raises(SystemExit, match="other settings"):
        cleaning.main(cleaning.job_of(folder, small, file, "cpu"), file)
    assert json.loads(file.read_text("utf-8")) == {"settings": {"counts": [1, 2, 3]}}


def test_a_comparison_on_a_gpu_goes_by_the_wall() -> None:
    assert cleaning.clock(torch.device("cpu")) == "cpu"
    assert cleaning.clock(torch.device("cuda", 0)) == "seconds"
    row = {"step": 2, "seconds": 6.0, "cpu": 4.0, "test_loss": 0.5, "test_error": 0.1}
    found = {
        kind: cleaning.verdict(("AID-CG", "AID-KFAC"), {"AID-CG": [row], "AID-KFAC": [row]}, kind)
        for kind in ("cpu", "seconds")
    }
    assert found["cpu"]["milliseconds_a_step"] == 2000.0
    assert found["seconds"]["milliseconds_a_step"] == 3000.0
