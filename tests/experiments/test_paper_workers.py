"""Runs of a recipe shared by several processes: the same cells as one after the other."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import paper, workers
from experiments.paper import cleaning, encoder_cleaning, side_by_side
from experiments.paper.cleaning import Case
from experiments.paper.entries import Entry, Stage, carry_out, compete, missing
from experiments.paper.methods import Rates, methods
from experiments.paper.recipe import Job
from experiments.paper.tuning import Setting
from experiments.pieces import Cells
from hyperkron.solution import HyperkronError
from inline_workers import use_threads

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
    assert workers.nearest([3, 4, 4], 4, 3) == 1
    assert workers.nearest([3, 4, 4], 7, 3) == workers.nearest([3, 4, 4], None, 3) == 0


def test_near_tasks_do_not_get_ahead_of_more_important_ones() -> None:
    """Two processes: only the next two tasks can be chosen."""
    assert workers.nearest([3, 5, 4], 4, 2) == 0 and workers.nearest([3, 4, 5], 4, 2) == 1


# --- processes ---------------------------------------------------------------------------------------------


def _stages(seeds: int | None = None) -> list[Stage]:
    """Two methods on made-up vectors."""
    split = cleaning.noisy_split(cleaning.made_up((20,), 120, 30), (60, 30, 30), 0)
    rates = Rates(inner=(0.1,), outer=(10.0, 100.0), momentum=(0.0,), damping=(0.1,))

    def entry(name: str) -> Entry:
        method = methods(rates)[name]

        def final(setting: Setting, seed: int) -> dict[str, Any]:
            run = cleaning.prepare(Case(batch=20), split, method, setting, seed).advance(3)
            return {"loss": cleaning.loss_and_error(run.state.model, split.second)[0]}

        return Entry(name, method.grid, lambda setting: float(final(setting, 0)["loss"]), final)

    return [Stage("only", [entry("AID-CG-3"), entry("AID-identity")], seeds)]


def _worker() -> Any:
    return partial(carry_out, _stages())


@pytest.mark.long
def test_two_processes_find_what_this_one_finds(tmp_path: Path) -> None:
    """Up to rounding: what ran before in this process may have changed the kernels that torch takes."""
    said: list[str] = []
    jobs = [Job("smoke", None, (1,), CPU, Cells(tmp_path / name, {}), say=said.append) for name in ("one", "two")]
    side_by_side.fill_stages(jobs[1], _stages(), 2, 2, _worker)
    assert len(said) == 2 * (2 + 1) and all(line.endswith(" s") for line in said)
    jobs[1].deadline = -math.inf  # nothing is left to do, so nothing is out of time
    alone, shared = (compete(job, _stages(), 2) for job in jobs)
    assert not shared.cut_short and _untimed(shared.stages) == pytest.approx(_untimed(alone.stages), rel=1e-5)


def _untimed(value: Any, name: str = "") -> dict[str, Any]:
    """The figures by their names, but for what is measured."""
    if name.endswith(("/seconds", "/wall", "/step_seconds")):
        return {}
    if isinstance(value, dict):
        return {k: x for key, part in value.items() for k, x in _untimed(part, f"{name}/{key}").items()}
    if isinstance(value, list):
        return {k: x for i, part in enumerate(value) for k, x in _untimed(part, f"{name}/{i}").items()}
    return {f"{name}/{value}": True} if isinstance(value, str) else {name: value}


@pytest.mark.long
def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    def nothing(key: list[Any], value: Any, seconds: float, busy: float) -> None: ...

    with pytest.raises(HyperkronError, match=r"the process at a 1 ended with code 3.*use fewer workers"):
        workers.share(1, partial(os._exit, 3), lambda: [(["a", 1], 0)], nothing)


def _forever(folder: Path) -> Any:
    def carry_out(task: int) -> None:
        (folder / "at work").write_text(str(os.getpid()), "utf-8")
        time.sleep(600)

    return carry_out


def _sharing(folder: Path) -> None:
    workers.share(1, partial(_forever, folder), lambda: [(["a", 1], 0)], print)


@pytest.mark.long
def test_processes_end_with_the_one_that_started_them_even_if_it_is_killed(tmp_path: Path) -> None:
    parent = multiprocessing.get_context("spawn").Process(target=_sharing, args=(tmp_path,))
    parent.start()
    until(lambda: (tmp_path / "at work").exists() and (tmp_path / "at work").read_text("utf-8"))
    worker = int((tmp_path / "at work").read_text("utf-8"))
    os.kill(worker, 0)
    parent.kill()
    parent.join()
    until(lambda: not Path(f"/proc/{worker}/cmdline").exists() or not Path(f"/proc/{worker}/cmdline").read_bytes())


def until(true: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_recipe_of_another_process_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages are made again by its name, and the cells are written by the process that shares the work."""
    use_threads(monkeypatch)
    monkeypatch.setattr(encoder_cleaning, "_price", lambda *args: {"seconds": 1.0, "bytes": None})
    recipe = paper.recipes()["encoder-base"]

    def first(job: Job) -> tuple[list[Stage], int]:
        stages, trials = encoder_cleaning.stages_of(job)
        return [replace(stages[0], entries=stages[0].entries[:1])], trials

    job = recipe.job("smoke", 1, CPU, tmp_path)
    side_by_side.fill(job, replace(recipe, stages=first), 1)
    written = recipe.job("smoke", 1, CPU, tmp_path).cells
    job.cells, job.deadline = written, -math.inf
    assert list(compete(job, *first(job)).stages["made-up/1/all/weak"]) == ["SAMA"]


def test_recipes_that_share_their_work_can_be_sent_to_another_process() -> None:
    shared = [
        recipe for recipe in paper.recipes().values() if recipe.stages is not None or recipe.name == "unlearnable"
    ]
    assert len(shared) > 2
    for recipe in shared:
        ForkingPickler.dumps(recipe)  # what multiprocessing does with it


def _failing(job: Job) -> tuple[list[Stage], int]:
    stages, trials = encoder_cleaning.stages_of(job)

    def ends(setting: Any) -> float:
        raise RuntimeError("out of luck")

    return [replace(s, entries=[replace(e, score=ends) for e in s.entries]) for s in stages], trials


def test_a_failure_is_named_and_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    monkeypatch.setattr(encoder_cleaning, "_price", lambda *args: {"seconds": 1.0, "bytes": None})
    recipe = replace(paper.recipes()["encoder-base"], stages=_failing)
    monkeypatch.setattr(paper, "recipes", lambda: {"encoder-base": recipe})
    with pytest.raises(HyperkronError, match=r"tune made-up/1/all/weak .* failed: RuntimeError: out of luck"):
        recipe.run("smoke", 1, "cpu", tmp_path, workers=2)


def _once(folder: Path) -> Any:
    """Fails at task 1 where its file is missing, which it then writes; always at task 3; else the process's number."""

    def carry_out(task: int) -> int:
        file = folder / f"{task}"
        if task == 3 or (task == 1 and not file.exists()):
            file.write_text("tried", "utf-8")
            raise RuntimeError(f"out of luck at {task}")
        return threading.get_ident() if multiprocessing.parent_process() is None else os.getpid()

    return carry_out


def _tasks(found: dict[int, int], of: Sequence[int]) -> list[tuple[list[Any], int]]:
    return [(["task", i], i) for i in of if i not in found]


def test_a_task_that_fails_is_tried_in_a_new_process_and_others_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_threads(monkeypatch)
    found: dict[int, int] = {}

    def keep(key: list[Any], value: int, seconds: float, busy: float) -> None:
        found[key[1]] = value

    before = threading.enumerate()
    workers.share(1, partial(_once, tmp_path), lambda: _tasks(found, (0, 1, 2)), keep)
    for worker in threading.enumerate():
        if worker not in before:
            worker.join(10)  # the one that failed ends by itself, perhaps a little later
    assert set(threading.enumerate()) <= set(before)  # a process would leave semaphores
    assert list(found) == [0, 1, 2] and found[0] != found[1] == found[2]
    assert "task 1 failed: RuntimeError: out of luck at 1; it is tried once more." in capsys.readouterr().err
    found.clear()
    with pytest.raises(HyperkronError, match="task 3 failed: RuntimeError: out of luck at 3"):
        workers.share(2, partial(_once, tmp_path), lambda: _tasks(found, (3, 0, 1, 2)), keep)
    assert 0 in found and 3 not in found


def test_who_cannot_share_says_so(tmp_path: Path) -> None:
    with pytest.raises(HyperkronError, match=r"workers=2: diagnostic measures times while it runs.*workers=1"):
        paper.run("diagnostic", "smoke", folder=tmp_path, workers=2)
    with pytest.raises(HyperkronError, match=r"workers=0 must be a whole number"):
        paper.run("encoder", "smoke", folder=tmp_path, workers=0)
