"""Runs of a recipe shared by several processes: the same cells as one after the other."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import paper
from experiments.paper import encoder_cleaning, side_by_side
from experiments.paper.entries import Entry, Stage, Task, carry_out, missing
from experiments.paper.recipe import Cells, Job
from hyperkron.solution import HyperkronError

CPU = torch.device("cpu")


def _stage(name: str, entries: Sequence[str], seeds: int | None = None) -> Stage:
    """Entries whose best setting is the second of two."""
    made = [
        Entry(x, {"rate": (1.0, 2.0)}, lambda s: 5 - s["rate"], lambda s, seed, x=x: {"run": f"{x} {seed}"})
        for x in entries
    ]
    return Stage(name, made, seeds)


def _job(folder: Path) -> Job:
    return Job("smoke", None, (1, 2), CPU, Cells(folder / "x.jsonl", {}))


def test_what_is_missing_comes_in_order_and_only_when_it_can_be_computed(tmp_path: Path) -> None:
    job, stages = _job(tmp_path), [_stage("first", ["a", "b"]), _stage("second", ["c"], seeds=1)]
    done: list[str] = []
    while found := list(missing(job, stages, trials=2)):
        key, task = found[0]
        job.cells.put(key, carry_out(stages, task), 0.0)
        done.append(f"{key[1]} {key[2]} {task.setting['rate']:g}" if task.seed is None else f"{key[1]} run {task.seed}")
        tuned = {name for name in "abc" if sum(x.startswith(("first " + name, "second " + name)) for x in done) == 2}
        assert {k[1] for k, t in missing(job, stages, trials=2) if t.seed is not None} <= tuned
    assert done == [
        *("first a 1", "first a 2", "first b 1", "first b 2"),
        *("a run 1", "b run 1", "a run 2", "b run 2"),
        *("second c 1", "second c 2", "c run 1"),
    ]
    assert job.cells.get(["first", "a", {"rate": 2.0}, 1]) == {"run": "a 1"}


def test_a_process_stays_with_its_stage() -> None:
    tasks: list[tuple[list[Any], Task]] = [([], Task(stage, 0, {}, None)) for stage in (3, 4, 4)]
    assert side_by_side._nearest(tasks, 4) == 1
    assert side_by_side._nearest(tasks, 7) == side_by_side._nearest(tasks, None) == 0


def _cells(folder: Path) -> dict[str, dict[str, Any]]:
    """The cells in a folder, but for what is measured."""
    (path,) = folder.glob("*.cells.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return {json.dumps(row["key"]): row["value"] for row in rows if row["key"][0] not in ("price", "encoder")}


def _alone(folder: Path) -> None:
    torch.set_num_threads(1)
    paper.run("encoder-base", "smoke", seeds=1, device="cpu", folder=folder)


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    """That one a fresh process, too: what ran before in this one may have changed the kernels that torch takes."""
    said: list[str] = []
    process = multiprocessing.get_context("spawn").Process(target=_alone, args=(tmp_path / "alone",))
    process.start()
    process.join()
    assert process.exitcode == 0
    shared = paper.run(
        "encoder-base", "smoke", seeds=1, device="cpu", folder=tmp_path / "b", workers=2, say=said.append
    )
    assert _cells(tmp_path / "b") == _cells(tmp_path / "alone")
    alone = paper.Result.read(tmp_path / "alone" / "encoder-base-smoke.json")
    assert shared.complete and shared.seeds == alone.seeds
    assert shared.figures["stages"].keys() == alone.figures["stages"].keys()
    assert any("KFAC" in line and line.endswith(" s") for line in said)


def _failing(job: Job) -> tuple[list[Stage], int]:
    stages, trials = encoder_cleaning.stages_of(job)

    def ends(setting: Any) -> float:
        raise RuntimeError("out of luck")

    return [replace(s, entries=[replace(e, score=ends) for e in s.entries]) for s in stages], trials


def test_a_failure_is_named_and_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker runs in this process, on queues of this process."""
    import queue
    import threading

    class Thread(threading.Thread):
        pid: int | None = None
        exitcode = None

        def start(self) -> None:
            self.pid = os.getpid()
            super().start()

        def kill(self) -> None:
            pass

    class Context:
        Queue = queue.Queue

        @staticmethod
        def Process(target: Any, args: Any, daemon: bool) -> Thread:
            return Thread(target=target, args=args, daemon=True)

    recipe = replace(paper.recipes()["encoder-base"], stages=_failing)
    monkeypatch.setattr(paper, "recipes", lambda: {"encoder-base": recipe})
    monkeypatch.setattr(side_by_side.multiprocessing, "get_context", lambda kind: Context)
    monkeypatch.setattr(side_by_side.signal, "signal", lambda *args: None)
    with pytest.raises(HyperkronError, match=r"tune made-up/1/all/weak .* failed: RuntimeError: out of luck"):
        recipe.run("smoke", 1, "cpu", tmp_path, workers=2)


def test_who_cannot_share_says_so(tmp_path: Path) -> None:
    with pytest.raises(HyperkronError, match=r"workers=2: diagnostic measures times while it runs.*workers=1"):
        paper.run("diagnostic", "smoke", folder=tmp_path, workers=2)
    with pytest.raises(HyperkronError, match=r"workers=0 must be a whole number"):
        paper.run("encoder", "smoke", folder=tmp_path, workers=0)
