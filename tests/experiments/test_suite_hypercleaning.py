"""Hypercleaning with the suite's own settings: the loops make the library's steps, verdicts and tables follow rules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import records
from experiments.paper.datasets import Images
from experiments.suite import problems
from experiments.suite import published_hypercleaning as published

PAGE = records.PAGES / "suite-hypercleaning.md"


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A small problem; the last batches of both levels are smaller."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(500, 12, generator=generator), torch.randint(10, (500,), generator=generator)
    images[:, 0] = (torch.rand(500, generator=generator) < 0.01).float()  # a pixel that is seldom there
    data = Images((images, labels), (images[:50], labels[:50]))
    monkeypatch.setattr(problems, "read_mnist", lambda folder: data)
    return published.cleaning(tmp_path, 0.5, 300, 200, clip=math.inf, dtype=torch.float64)


@pytest.mark.parametrize("name", ["SABA", "SOBA", "AmIGO", "MRBO", "FSLA", "stocBiO", "F2SA"])
def test_the_fast_loops_make_the_steps_of_the_library(case: Any, name: str) -> None:
    slow = published.suite.by_library(case, name, 0.1, 1e-3, 3)
    fast = published.suite.by_loop(case, name, 0.1, 1e-3, 3, chunk=12, kind=published.Weights)
    for _ in range(12):
        slow.advance()
    fast.advance()
    start = case.start()
    for i, (a, b) in enumerate(zip(slow.place(slow.here()), fast.place(fast.here()), strict=True)):
        (x,), (y,), (z,) = a.parameters(), b.parameters(), start[i].parameters()
        assert float((x - z).detach().norm()) > 1e-3
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)


def test_a_doubled_series_is_the_power_that_it_says(case: Any) -> None:
    """v = η (2 (I − ηH))¹⁰ b, and without doubling η Σ (I − ηH)^k b, against the dense Hessian of one batch."""
    o, step = published.Weights(case, 0, batch=1000), 0.05
    generator = np.random.default_rng(0)
    theta, hyper = generator.normal(size=o.theta.shape), generator.normal(size=300)
    columns = [o.product(theta, hyper, e.reshape(theta.shape), 0).ravel() for e in np.eye(theta.size)]
    hessian, b = np.stack(columns, axis=1), o.b(theta, 0).ravel()
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-12)
    rest = np.eye(len(b)) - step * hessian
    for series, v in (
        (published.Doubled(case, 0, batch=1000).series, step * np.linalg.matrix_power(2 * rest, 10) @ b),
        (o.series, step * sum(np.linalg.matrix_power(rest, k) for k in range(11)) @ b),
    ):
        expected = -o.cross(theta, hyper, v.reshape(theta.shape), 0)
        np.testing.assert_allclose(series(theta, hyper, [0] * 11, 0, step), expected, rtol=1e-9, atol=1e-15)


def test_versions_have_their_series_and_the_others_their_own(case: Any) -> None:
    for name in published.names("paper", "50%"):
        kind, _ = published.LOOPS[name]
        assert kind is (published.Doubled if name.endswith("doubled") else published.Weights)


def test_pixels_of_the_published_size_are_not_cut_off(case: Any) -> None:
    assert float(case.inner[0].abs().max()) > 8.0


# --- verdicts ----------------------------------------------------------------------------------------------

LEVELS = {"SABA": 0.13, "SOBA": 0.14, "AmIGO": 0.15, "MRBO": 0.16, "FSLA": 0.17, "stocBiO": 0.18}


def _record(**changed: list[float]) -> dict[str, Any]:
    """SABA is at its level at once, the others at the last mark; ``changed`` is by algorithm and problem."""
    runs = {}
    for task in published.tasks():
        level = LEVELS.get(task[2].split(",")[0], 0.2)
        values = [0.5, *[level if task[2] == "SABA" else 0.4] * 39, level]
        values = changed.get(f"{task[2]} {task[1]}", values)
        curve = {"seconds": [0.0, *published.MARKS], "calls": range(41), "test error": values}
        curve["validation loss"] = values
        runs[published.key(task)] = {"failed": False, **{k: json.dumps(list(v)) for k, v in curve.items()}}
    return {"runs": runs}


def test_everything_as_stated_but_mrbo_agrees() -> None:
    found = published.verdicts(_record(), "paper")
    assert found == [(True, True), (True, True), (True,), (True, True), (False, False)]
    assert [published.tables.word(x) for x in found] == ["agrees"] * 4 + ["**differs**"]
    assert published.tables.word((True, False)) == "**partly**" and published.tables.word(None) == "–"


@pytest.mark.parametrize(
    ("changed", "index", "expected"),
    [
        ({"AmIGO 50%": [0.5] * 40 + [0.12]}, 0, (False, False)),
        ({"AmIGO 50%": [0.5, 0.12] + [0.14] * 39}, 0, (True, False)),
        ({"FSLA 50%": [0.5] + [0.17] * 40, "SABA 50%": [0.5, 0.4] + [0.13] * 39}, 1, (False, True)),
        ({"stocBiO 50%": [0.5] + [0.139] * 40}, 2, (False,)),
        ({"FSLA 90%": [0.5] + [0.17] * 40, "SABA 90%": [0.5, 0.4] + [0.13] * 39}, 3, (True, False)),
        ({"MRBO 90%": [0.5, 0.12] + [0.14] * 39}, 4, (False, True)),
        ({"MRBO 70%": [0.5] * 40 + [0.12]}, 4, (True, True)),
    ],
)
def test_verdicts_follow_the_rules(changed: dict[str, list[float]], index: int, expected: tuple[bool, ...]) -> None:
    assert published.verdicts(_record(**changed), "later")[index] == expected


def test_the_versions_of_the_suite_can_stand_in_for_mrbo_and_stocbio() -> None:
    changed = {"MRBO, doubled 90%": [0.5] + [0.12] * 40, "stocBiO, doubled 50%": [0.5] * 40 + [0.135]}
    record = _record(**changed)
    assert published.verdicts(record, "paper")[2:] == [(True,), (True, True), (False, False)]
    assert published.verdicts(record, "paper", doubled=True)[2:] == [(False,), (True, False), (True, True)]


def test_nothing_is_said_of_an_algorithm_that_diverged() -> None:
    record = _record()
    for seed in published.SEEDS:
        record["runs"][published.key(("paper", "70%", "FSLA", seed))]["failed"] = True
    found = published.verdicts(record, "paper")
    assert [x is None for x in found] == [False, False, False, True, False]
    assert "| 8 | FSLA | failed | – |" in published.table(record)


def test_a_row_says_when_saba_is_at_the_others_lowest_error() -> None:
    record = _record()
    rows = {row["name"]: row for row in published.rows(record, "paper", "50%")}
    assert published.arrival(rows["SABA"], rows["SOBA"]["least"]) == published.MARKS[0]
    assert published.arrival(rows["SOBA"], 0.14) == pytest.approx(120.0)
    assert published.arrival(rows["SOBA"], 0.13) == math.inf
    assert "| SOBA | 14.00% (14.00% – 14.00%) | 14.00% | 120 | 0.1 v. 120 |" in published.table(record)


# --- what is run and what is shown -------------------------------------------------------------------------


def test_a_run_is_recorded_with_its_machine(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_case", lambda folder, problem: case)
    monkeypatch.setattr(published, "SECONDS", 0.05)
    monkeypatch.setattr(published, "MARKS", [0.02, 0.05])
    task, found = published.one("data", ("paper", "50%", "MRBO, doubled", 1))
    assert task == ("paper", "50%", "MRBO, doubled", 1) and not found["failed"] and "numpy" in found["machine"]
    assert json.loads(found["calls"])[-1] % (4 * published.tables.CALLS["MRBO"]) == 0
    assert len(json.loads(found["test error"])) == 3


def test_what_is_recorded_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    settings = {"seconds": published.SECONDS, "seeds": published.SEEDS, "batch": 64, "runs": published.RUNS}
    (tmp_path / published.RESULT).parent.mkdir()
    (tmp_path / published.RESULT).write_text(json.dumps({"settings": settings, **_record()}), "utf-8")
    published.main(str(tmp_path), 1, 60.0)
    assert capsys.readouterr().out == "0 runs to make\n"


def test_every_algorithm_has_a_setting_for_each_problem_of_its_file() -> None:
    assert {name: len(x) for name, x in published.PAPER.items()} == dict.fromkeys(published.PAPER, 3)
    assert {name: len(x) for name, x in published.LATER.items()} == {**dict.fromkeys(published.LATER, 3), "F2SA": 1}
    assert set(published.SIX) <= set(published.PAPER) and set(published.SIX) <= set(published.LATER)


def test_the_page_has_the_tables() -> None:
    record = json.loads((records.RESULTS / published.RESULT).read_text("utf-8"))
    text = PAGE.read_text("utf-8")
    for block in published.overview(record).split("\n\n"):
        assert block in text, (
            f"run `python -m experiments.suite.published_hypercleaning --overview`, put it into {PAGE.name}"
        )
