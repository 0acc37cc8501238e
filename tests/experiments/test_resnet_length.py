"""ResNet-18 at the paper's length: which runs follow from which, every verdict, and that a run works."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import records
from experiments.paper import (
    cleaning,
    image_contest,
    references,
    resnet_length,
    resnet_length_page,
    resnet_runs,
)
from experiments.paper.image_contest import OWN, PRINTED, Contest, Plan, Task, key
from experiments.paper.recipe import Verdict
from experiments.paper.resnet_runs import Shuffled, Size
from experiments.pieces import Lines
from experiments.trial import MEASURED
from hyperkron.solution import HyperkronError
from image_contests import FAST, PAIRED, PLAN, judged, played, row


def test_a_damping_that_wins_at_the_edge_is_not_the_last_one_tried() -> None:
    """Where the smallest damping is the best of all trials, a smaller one follows; where a step size of λ is better
    than it, nothing does.
    """

    def small(task: Task) -> float:
        return 1 + task.setting.get("damping", 1.0)

    won = played(["AID-KFAC"], small)[0].winner("AID-KFAC", OWN)
    assert won is not None and won["damping"] == min(image_contest.WIDER["damping"])

    def rather(task: Task) -> float:
        return small(task) - 2.0 * (task.setting.get("outer") == 0.3)

    tried = {task.setting["damping"] for task in played(["AID-KFAC"], rather)[1]}
    assert tried == {0.01, 0.1, 1.0}


def test_step_sizes_go_on_until_the_best_lies_inside() -> None:
    """λ's step sizes and the damping; further step sizes beyond an edge; then all seeds of the best."""

    def loss(task: Task) -> float:
        if "absolute" in task.setting:
            return 9.0
        far = abs(torch.tensor(task.setting["outer"]).log10().item())  # 1 is best
        return 1 + far + abs(task.setting["damping"] - 0.1)

    contest, order = played(["AID-KFAC"], loss)
    rates = [task.setting["outer"] for task in contest.rates("AID-KFAC", OWN)]
    assert rates == [0.03, 0.1, 0.3, 1.0, 3.0]
    best = {"outer": 1.0, "damping": 0.1, "inner": PLAN.inner}
    assert contest.winner("AID-KFAC", OWN) == best
    own = [task for task in order if "outer" in task.setting]
    assert [task.steps for task in own] == [2] * 7 + [20] * 3  # 5 step sizes, 2 dampings, 3 seeds
    assert [task.seed for task in own[7:]] == [0, 1, 2] and all(task.setting == best for task in own[7:])
    printed = {task.setting["absolute"] for task in order if "absolute" in task.setting}
    assert printed == set(image_contest.ABSOLUTE)


def test_the_best_damping_is_kept() -> None:
    def loss(task: Task) -> float:
        return abs(task.setting.get("outer", 50.0) - 0.1) + abs(task.setting["damping"] - 1.0)

    assert played(["MRBO-KFAC"], loss)[0].winner("MRBO-KFAC", OWN) == {"outer": 0.1, "damping": 1.0, "inner": 0.05}


def test_a_long_run_waits_for_the_trials_of_more_important_methods() -> None:
    names = ["AID-KFAC", "AID-identity"]
    trials = Contest([], PLAN, names).trials("AID-identity", OWN)
    begun = [task for _, task in Contest([row(task, 1.0) for task in trials], PLAN, names).missing()]
    assert {(task.name, task.steps) for task in begun if "outer" in task.setting} == {("AID-KFAC", 2)} | {
        ("AID-identity", 2)
    }


def test_the_other_seeds_of_reference_lines_come_last() -> None:
    order = [task for _, task in Contest([], PLAN, ["trusted + noisy", "AID-identity"]).missing()]
    assert order[0] == Task("trusted + noisy", {"inner": PLAN.inner}, 0, 20)
    own = [task for task in order if "absolute" not in task.setting]
    assert [(task.name, task.seed) for task in own[-2:]] == [("trusted + noisy", 1), ("trusted + noisy", 2)]


def test_a_run_that_was_cut_short_does_not_count() -> None:
    task = Task("AID-KFAC", {"outer": 0.1, "inner": PLAN.inner}, 0, 20)
    cut = Contest([row(task, 1.0) | {"steps": 19}], PLAN)
    assert not cut.done and len(cut.cut_short) == 1
    assert not Contest([row(task, 1.0) | {"steps": 19}, row(task, 1.0)], PLAN).cut_short
    assert Contest([row(task, 1.0, failed=True) | {"steps": 19}], PLAN).done


def test_a_run_that_would_end_too_late_is_known() -> None:
    task, contest = Task("AID-KFAC", {"outer": 0.1}, 0, 1000), Contest([], alone={"AID-KFAC": 60.0})
    assert contest.expected(task, 1.0) == 60.0 and contest.expected(task, 4.0) == 240.0
    assert contest.expected(task, 4.0, reached=750) == 60.0
    assert contest.expected(task._replace(name="MRBO"), 4.0) == 0.0
    assert Contest([], alone={"AID-Neumann-10": 140.0}).expected(task._replace(name="AmIGO"), 2.0) == 280.0


def test_a_diverged_run_is_the_worst() -> None:
    task = Task("MRBO", {"outer": 0.1}, 0, 2)
    assert image_contest.loss_of(row(task, 0.1, failed=True)) == float("inf")


def test_without_trials_all_methods_have_the_settled_values() -> None:
    plan = Plan(steps=20, inner=0.001, rate=0.3)
    contest = Contest([], plan, ["AID-KFAC", "AmIGO", "MRBO-KFAC"], arms=[OWN])
    tasks = [task for _, task in contest.missing()]
    assert [(task.name, task.seed) for task in tasks[:4]] == [("AID-KFAC", x) for x in range(3)] + [("AmIGO", 0)]
    assert tasks[0].setting == {"outer": 0.3, "damping": 0.1, "inner": 0.001}
    assert tasks[3].setting == {"outer": 0.3, "step": 0.01, "inner": 0.001}
    assert tasks[6].setting["inner"] == pytest.approx(0.01)  # θ without momentum takes longer steps
    assert all(task.steps == 20 for task in tasks) and len(tasks) == 9
    assert contest.winner("AID-EKFAC-τ5", OWN) == contest.winner("AID-KFAC", OWN)


def test_runs_are_shown_by_the_step_size_of_theta() -> None:
    first, _ = played(["AID-KFAC", "AID-identity"], lambda task: 1 + task.setting.get("outer", 9.0))
    plan = PLAN._replace(rate=0.3)
    more = [Contest([], plan._replace(inner=x), ["AID-identity"]).finals("AID-identity", OWN)[0] for x in (0.01, 0.001)]
    rows = [*first.done.values(), *(row(task, 1.5) for task in more)]
    text = resnet_length_page.tables(Contest(rows, plan._replace(inner=0.001), first.names), [])
    assert "| 0.05 | AID-identity | 1.003 |" in text
    assert "| 0.01 | AID-identity | 1.500 |" in text and "| 0.001 | AID-identity | 1.500 |" in text


SLOW = {"AID-CG-3": 2.0, "AmIGO": 2.0, "MRBO": 2.0}


@pytest.mark.parametrize(
    ("change", "times", "expected"),
    [
        ({}, SLOW, Verdict.REPRODUCED),
        ({}, {**SLOW, "MRBO": 0.5}, Verdict.TREND),
        ({"MRBO-KFAC": 1.7}, SLOW, Verdict.TREND),
        ({"BSG-1": 1.0}, SLOW, Verdict.TREND),
        ({"AID-KFAC": 1.6}, SLOW, Verdict.FAILED),
    ],
)
def test_the_verdict_on_figure_2(change: dict[str, float], times: dict[str, float], expected: Verdict) -> None:
    found = resnet_length_page.verdict(judged(PAIRED | change), {**FAST, **times})
    assert found.verdict is expected and "AID-CG-3 → AID-KFAC" in found.because


def test_no_verdict_without_two_pairs_or_with_unvisited_weights() -> None:
    few = {name: PAIRED[name] for name in ("AID-KFAC", "AID-CG-3", "MRBO")}
    assert resnet_length_page.verdict(judged(few), FAST).verdict is Verdict.REFUSED
    early = resnet_length_page.verdict(judged(PAIRED, at=80), FAST | SLOW)  # a batch is 1/80 of the rows
    assert early.verdict is Verdict.REFUSED and "had not been updated" in early.because
    one = row(Task("MRBO", {}, 0, 20), 1.0, at=82)
    assert resnet_length_page.visits(one).mean == 1.0
    assert resnet_length_page.visits({**one, "batch": 2500}).mean == 5.0


def test_the_verdict_on_figure_1() -> None:
    level = {"AID-KFAC": 1.2, **dict.fromkeys(resnet_length_page.SOLVERS, 1.5)}
    level.pop("AID-CG-10")
    times = FAST | dict.fromkeys(level, 2.0) | {"AID-KFAC": 1.0}
    judge = resnet_length_page.verdict_solvers
    assert judge(judged(level), times).verdict is Verdict.TREND  # one of five was not run
    assert judge(judged({**level, "AID-GGN-CG-3": 1.1, "AID-CG-3": 1.0}), times).verdict is Verdict.FAILED
    assert judge(judged({"AID-KFAC": 1.2, "AID-CG-3": 1.5}), times).verdict is Verdict.REFUSED


def test_the_verdict_on_table_2() -> None:
    """Its lines take the setting of AID-KFAC."""
    names = {name: 1.2 - 0.1 * ("EKFAC" in name) for name in image_contest.SHARED}
    contest = judged({"AID-KFAC": 1.2, **names})
    assert contest.winner("AID-EKFAC-τ5", OWN) == contest.winner("AID-KFAC", OWN)
    times = {"AID-KFAC": 3.0, "AID-KFAC-τ10": 1.0, "AID-EKFAC-τ1": 5.0, "AID-EKFAC-τ10": 2.0}
    judge = resnet_length_page.verdict_amortized
    assert judge(contest, times).verdict is Verdict.REPRODUCED
    assert judge(contest, {**times, "AID-EKFAC-τ10": 6.0}).verdict is Verdict.TREND
    assert judge(judged({"AID-KFAC": 1.2, **dict.fromkeys(names, 1.2)}), times).verdict is Verdict.FAILED
    assert judge(judged({"AID-KFAC": 1.2}), times).verdict is Verdict.REFUSED


def test_a_judgement_is_given_where_the_records_decide(tmp_path: Path) -> None:
    runs, timed = Lines(tmp_path / "runs.jsonl"), Lines(tmp_path / "times.jsonl")
    assert resnet_length_page.judgement("Figure 2", runs.path, timed.path).verdict is Verdict.REFUSED
    for found in judged(PAIRED, image_contest.plan_of(image_contest.LARGE)).done.values():
        runs.append(found)
    judge = resnet_length_page.judgement("Figure 2", runs.path, timed.path)
    assert judge is not None and judge.verdict is Verdict.TREND  # no times are known
    assert resnet_length_page.judgement("Table 2", runs.path, timed.path).verdict is Verdict.REFUSED


def test_the_tables_and_the_figure(tmp_path: Path) -> None:
    contest = judged(PAIRED)
    text = resnet_length_page.tables(contest, [{"method": "AID-KFAC", "mean": 51.0}])
    assert "Figure 2: **" in text and "| AID-KFAC | 1.2" in text and "| 51 |" in text and PRINTED in text
    assert resnet_length_page.tables(Contest([], PLAN), []) == ""
    pytest.importorskip("matplotlib")
    drawn = resnet_length_page.figure(contest, [{"method": "AID-KFAC", "mean": 51.0}], tmp_path / "x.svg")
    assert "seconds, alone" in drawn.read_text("utf-8")


def test_the_page_has_the_recorded_tables(capsys: pytest.CaptureFixture[str]) -> None:
    page = (records.PAGES / "resnet-length.md").read_text("utf-8")
    resnet_length.main(["--table", "--batch", "2500"])
    assert capsys.readouterr().out.strip() in page
    early, late = (
        Contest(Lines(image_contest.RESULT).rows, resnet_length_page.EARLIER),
        Contest(Lines(image_contest.RESULT).rows),
    )
    for contest, names in ((early, ("AID-KFAC", "AID-identity")), (late, ("AID-KFAC", "AID-CG-3"))):
        for name in names:
            cells = resnet_length_page.cells_of(contest, name, OWN, {})
            left = cells["not updated then"].replace("%", " %")
            assert f"| {cells['test loss']} | {cells['at step']} | {left} |" in page
    assert early.results("trusted + noisy") == []  # cut short


def test_what_the_page_says_of_the_runs() -> None:
    """All have their lowest held-out loss early, when many weights have not been updated, and end at a higher one."""
    contest = Contest(Lines(image_contest.RESULT).rows, resnet_length_page.EARLIER)
    rows = [x for name in ("AID-KFAC", "AID-identity") for x in contest.results(name)]
    assert len(rows) == 6 and all(40 <= x["best"]["step"] <= 80 and x["visits"] > 12 for x in rows)
    assert all(resnet_length_page.visits(x).never > 0.35 for x in rows)
    late = [
        e for x in rows for step, e in zip(x["curve"]["step"], x["curve"]["test_error"], strict=True) if step >= 200
    ]
    assert min(late) > 0.53 and 0.56 < sum(late) / len(late) < 0.58
    assert resnet_length_page.judgement("Figure 2", batch=500).verdict is Verdict.REFUSED


def test_what_the_page_says_of_smaller_steps_of_theta() -> None:
    """The lowest loss comes as early; KFAC's is below that of CG-3; no verdict, whatever is run besides."""
    rows = Lines(image_contest.RESULT).rows
    contest = Contest(rows)
    ours, theirs = (contest.results(name) for name in ("AID-KFAC", "AID-CG-3"))
    assert len(ours) == len(theirs) == 3 and all(26 <= x["best"]["step"] <= 80 for x in [*ours, *theirs])
    gaps = [b["best"]["test_loss"] - a["best"]["test_loss"] for a, b in zip(ours, theirs, strict=True)]
    assert min(gaps) > 0.06 and max(gaps) < 0.07
    faster = Contest(rows, image_contest.LENGTHS["resnet18"]._replace(inner=0.01)).results("AID-KFAC")
    assert [x["best"]["step"] for x in faster] == [26]
    assert all(resnet_length_page.visits(x).never > 0.37 for x in [*ours, *theirs, *faster])
    for place in ("Figure 2", "Figure 1, top", "Table 2"):
        assert "had not been updated" in resnet_length_page.judgement(place, batch=500).because


def test_theta_s_step_size_with_larger_batches_follows_from_the_pilot() -> None:
    """The largest printed one at which at least four fifths of the weights were updated when the loss was lowest."""
    rows = {x["setting"]["inner"]: x for x in Lines(image_contest.result_of(2500)).rows if x["wanted"] == 150}
    left = {inner: resnet_length_page.visits(x).never for inner, x in rows.items()}
    assert left[0.001] < 0.06 and left[0.01] > 0.4 and left[0.05] > 0.4
    assert image_contest.plan_of(2500).inner == 0.001


def test_what_the_page_says_of_larger_batches() -> None:
    """KFAC lowers the loss of AID and AmIGO; whatever λ's step size or the damping, CG-3 and the identity are above."""
    found = resnet_length_page.judgement("Figure 2")
    assert found.verdict is Verdict.TREND and "AID-CG-3 → AID-KFAC -0.134" in found.because
    tried = [x for x in Lines(image_contest.result_of(2500)).rows if x["wanted"] == 100]
    names = ("AID-KFAC", "AID-CG-3", "AID-identity")
    kfac, cg, identity = ([x["best"]["test_loss"] for x in tried if x["method"] == name] for name in names)
    assert len(tried) == 9 and min(cg) - max(kfac) > 0.09 and min(identity) - max(kfac) > 0.15
    assert max(identity) - min(identity) < 0.01
    assert resnet_length_page.judgement("Figure 1, top").verdict is Verdict.TREND
    assert resnet_length_page.judgement("Table 2").verdict is Verdict.FAILED


def test_batches_of_a_pass_have_every_row_once() -> None:
    source = Shuffled((torch.arange(12),), 4, seed=0)
    passes = [torch.cat([source.next()[0] for _ in range(3)]) for _ in range(2)]
    assert all(sorted(x.tolist()) == list(range(12)) for x in passes) and not passes[0].equal(passes[1])
    with pytest.raises(HyperkronError, match="does not divide"):
        Shuffled((torch.arange(10),), 4, seed=0)


def small(network: resnet_runs.Network = "cnn") -> tuple[Any, Size]:
    """Rows and sizes of a short run; ``test_every_method_runs`` trains ResNet-18 with every method."""
    size = replace(resnet_length.SMOKE, network=network)
    return cleaning.noisy_split(cleaning.made_up((3, 32, 32), 40, 10), size.counts, 0), size


@pytest.mark.parametrize("name", ["AID-KFAC", "AID-identity"])
def test_a_relative_step_means_the_same_for_every_method(name: str) -> None:
    """By how much the weights of a batch move in the first step that counts, as a root mean square."""
    split, size = small()
    setting = {"outer": 0.01, "damping": 0.1, "inner": 0.01}
    run = resnet_runs.prepare(name, setting, split, 0, size)
    weight = run.advance(MEASURED).state.hyper.weight
    torch.testing.assert_close(weight, torch.full((20,), 0.5))  # only measured so far
    run.advance(1)
    moved = float((weight.detach() - 0.5).norm() / math.sqrt(size.batch))
    assert 0.003 < moved < 0.03 and run.state.step == MEASURED + 1


@pytest.mark.parametrize(("name", "network"), [("AID-KFAC", "resnet18"), ("trusted + noisy", "cnn")])
def test_a_run(name: str, network: resnet_runs.Network) -> None:
    split, size = small(network)
    setting = {"outer": 0.1, "damping": 0.1, "inner": 0.1}
    found = json.loads(json.dumps(resnet_length.run(Task(name, setting, 0, 3), split, size, Plan(steps=3))))
    assert key(image_contest.task_of(found)) == key(Task(name, setting, 0, 3)) and not found["failed"]
    assert found["curve"]["step"] == [0, 1, 2, 3] and "test_loss" in found["best"]
    assert ("visits" in found) == (name == "AID-KFAC")
    if "visits" in found:  # the third step alone updates weights: of its batch, and by momentum of those before
        assert found["visits"] == 0.5 and found["never"] == pytest.approx(0.15)
        assert 0.02 < found["moved"] < 0.2 and found["rate"] > 1e-3


class Killed(Exception):
    """In place of the end of a process."""


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("AID-KFAC", "cnn"),
        pytest.param("AID-KFAC", "resnet18", marks=LONG),
        pytest.param("trusted + noisy", "resnet18", marks=LONG),
    ],
)
def test_a_run_that_was_killed_goes_on_bit_for_bit(
    name: str, network: resnet_runs.Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its fourth step, it continues from the third, in the middle of a pass over the rows."""
    split, size = small(network)
    task = Task(name, {"outer": 0.1, "damping": 0.1, "inner": 0.1}, 0, 6)
    plan, kept = Plan(steps=6), resnet_length.saved(task, tmp_path, resnet_length.SAVED_EVERY / 3)
    assert kept is not None and kept.every == 3
    whole = resnet_length.run(task, split, size, plan)

    def kill(self: resnet_runs.Until, run: Any, report: Any) -> None:
        if run.state.step == 4:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(resnet_runs.Until, "on_step", kill)
        with pytest.raises(Killed):
            resnet_length.run(task, split, size, plan, kept=kept)
    assert [x.name for x in kept.folder.glob("step-*")] == ["step-00000003"]
    assert resnet_length.reached(task, tmp_path) == 3 and resnet_length.reached(task._replace(seed=1), tmp_path) == 0
    begun: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(resnet_runs.Until, "on_start", lambda self, run: begun.append(run.state.step))
        again = resnet_length.run(task, split, size, plan, kept=kept)
    assert begun == [3] and not kept.folder.exists()
    timed = {"seconds", "step_ms"}
    assert {x: y for x, y in whole["curve"].items() if x not in timed} == {
        x: y for x, y in again["curve"].items() if x not in timed
    }
    assert all(whole[x] == again[x] for x in whole.keys() - {"curve", "best", "last"} - timed)


def test_a_run_that_the_deadline_cuts_short_goes_on(tmp_path: Path) -> None:
    split, size = small()
    task, plan = Task("AID-identity", {"outer": 0.1, "inner": 0.1}, 0, 3), Plan(steps=3)
    kept = resnet_length.saved(task, tmp_path, 1e9)
    cut = resnet_length.run(task, split, size, plan, deadline=0.0, kept=kept)
    assert cut["steps"] == 1 and resnet_length.run(task, split, size, plan, kept=kept)["steps"] == 3


@pytest.mark.long
@pytest.mark.parametrize("network", ["resnet18", "cnn"])
@pytest.mark.parametrize("name", [*resnet_runs.METHODS, *references.KINDS])
def test_every_method_runs(name: str, network: resnet_runs.Network) -> None:
    split, size = small(network)
    setting = {"outer": 0.1, "inner": 0.05, **{own: first for own, (first, _) in image_contest.OTHERS.items()}}
    assert not resnet_runs.run(name, setting, split, 0, 3, size, test=False)["failed"]


@pytest.mark.long
def test_times_are_measured_once(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "times.jsonl")
    for _ in range(2):
        resnet_length.times("cpu", ["AID-identity"], lines, Size((20, 10, 10), 10, 2))
    assert [x["method"] for x in lines.rows] == ["AID-identity"] and lines.rows[0]["median"] > 0


@pytest.mark.long
def test_the_command_runs_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    arguments = ["--smoke", "--methods", "AID-identity", "--steps", "2", "--seeds", "1", "--out", str(out)]
    for _ in range(2):  # the second finds nothing to do
        resnet_length.main(arguments)
        rows = Lines(out).rows
        assert not list(Contest(rows, Plan(steps=2, seeds=1), ["AID-identity"]).missing())
    trials = [x["setting"]["absolute"] for x in rows if x["wanted"] == 1]
    assert trials == list(image_contest.ABSOLUTE)
    assert len(rows) == len(trials) + 2  # the best of these, and its own step size, for longer
    assert len({key(image_contest.task_of(x)) for x in rows}) == len(rows)


def test_other_batches_have_records_checkpoints_and_times_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(resnet_length, "_run_all", lambda options, lines, contest: seen.append(options))
    for more in ([], ["--batch", "2500"]):
        resnet_length.main(["--checkpoints", str(tmp_path), *more])
    plain, large = seen
    assert (plain.checkpoints, large.checkpoints) == (tmp_path, tmp_path / "resnet-length-batch-2500")
    assert large.alone == {name: 5 * ms for name, ms in plain.alone.items()} != {}
    assert image_contest.result_of(500) == image_contest.RESULT != image_contest.result_of(2500)
    split, size = small()
    task = Task("AID-identity", {"outer": 0.1, "inner": 0.01}, 0, 1)
    assert resnet_length.run(task, split, size, Plan(steps=1))["batch"] == size.batch
