"""Tuning of the paper's recipes: trials, edges of grids, intervals and clocks."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from experiments.paper.recipe import Job
from experiments.paper.tuning import Search, at_edge, settings_of, tune
from experiments.pieces import Cells
from experiments.seeds import interval, shown
from experiments.trial import clock_of
from hyperkron.solution import HyperkronError


def _job(tmp_path: Path) -> Job:
    return Job("smoke", None, (1,), torch.device("cpu"), Cells(tmp_path / "cells.jsonl", {}))


def test_every_method_gets_the_same_number_of_trials() -> None:
    small, large = {"a": (1.0, 2.0), "b": (3.0, 4.0)}, {"a": (1.0, 2.0, 3.0), "b": (1.0, 2.0, 3.0), "c": (0.0, 1.0)}
    for grid in (small, large):
        found = settings_of(grid, 4)
        assert len(found) == 4 == len({tuple(x.items()) for x in found})
        assert all(x[name] in grid[name] for x in found for name in grid)
    with pytest.raises(HyperkronError, match="trials=5 cannot be drawn from a grid of 4 settings"):
        settings_of(small, 5)


def test_tuning_takes_the_best_of_the_second_round_and_remembers(tmp_path: Path) -> None:
    asked: list[tuple[float, float]] = []

    def score(setting: dict[str, float], share: float) -> float:
        asked.append((setting["a"], share))
        if setting["a"] == 4.0:
            return math.inf
        return abs(setting["a"] - 1) if share < 1 else abs(setting["a"] - 3)  # the long run prefers another

    grid = {"a": (1.0, 2.0, 3.0, 4.0)}
    found = tune(_job(tmp_path), ["m"], grid, Search(4, 2, 0.25), score)
    assert found.setting == {"a": 2.0} and found.loss == 1.0  # of the two kept, 2 and 1, in the long run
    assert [share for _, share in asked] == [0.25] * 4 + [1.0] * 2 and len(found.trials) == 6
    count = len(asked)
    assert tune(_job(tmp_path), ["m"], grid, Search(4, 2, 0.25), score).setting == found.setting
    assert len(asked) == count  # all from the cache


def test_tuning_says_when_everything_failed(tmp_path: Path) -> None:
    with pytest.raises(HyperkronError, match="every trial of"):
        tune(_job(tmp_path), ["m"], {"a": (1.0, 2.0)}, Search(2, 1), lambda setting, share: math.nan)
    shares: list[float] = []
    tune(
        _job(tmp_path),
        ["one"],
        {"a": (1.0, 2.0)},
        Search(2, 1, 0.5),
        lambda setting, share: shares.append(share) or 1.0,
    )
    assert shares == [0.5, 0.5]  # a second round of one decides nothing


def test_the_edge_of_a_grid_is_named() -> None:
    grid = {"a": (1.0, 2.0, 3.0), "b": (1.0,), "c": (1.0, 2.0, 3.0)}
    assert at_edge({"a": 3.0, "b": 1.0, "c": 2.0}, grid) == ["a"]


def test_interval_against_a_table() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5 and half == pytest.approx(3.182 * 1.2909944 / 2, rel=1e-6)
    assert math.isnan(interval([1.0])[1]) and shown([]) == "–"


def test_a_trial_is_timed_by_the_processor_or_on_a_gpu_by_the_wall() -> None:
    assert clock_of(torch.device("cpu")) is time.process_time
    assert clock_of(torch.device("cuda", 0)) is time.perf_counter
