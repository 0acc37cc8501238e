"""The linear model at the paper's length: which runs follow from which, that they run, and what is judged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from experiments import records
from experiments.paper import cleaning, linear_contest, linear_length, linear_page, linear_runs
from experiments.paper.cleaning import Case, Split
from experiments.paper.linear_contest import BATCHES, NAMES, ROWS, STUDIES, Contest, Line, Plan
from experiments.paper.linear_runs import Task, key
from experiments.paper.methods import Rates, methods
from experiments.paper.recipe import Verdict
from experiments.pieces import Lines
from experiments.seeds import Difference

LINES = {(line.study, line.title): line for study in STUDIES.values() for line in study(ROWS)}


def row(task: Task, loss: float) -> dict[str, Any]:
    """A finished run."""
    best = {"second_loss": loss, "test_loss": loss, "test_error": 0.5, "step": task.steps}
    named = {"method": task.name, "setting": task.setting, "seed": task.seed, "wanted": task.steps, "test": task.test}
    curve = {"test_loss": [loss, loss], "step": [0, task.steps]}
    return {**named, "best": best, "failed": False, "f1": 1.0, "moved": 0.1, "curve": curve}


def finished(lines: list[Line], loss: Callable[[Task], float], plan: Plan) -> Contest:
    """A contest in which all runs are done."""
    rows: list[dict[str, Any]] = []
    while todo := list(Contest(rows, plan, lines).missing()):
        rows += [row(task, loss(task)) for _, task in todo]
    return Contest(rows, plan, lines)


def split_of(rows: int = 80) -> Split:
    return cleaning.noisy_split(cleaning.made_up((20,), rows + 40, 40), (rows, 20, 20), 0, scaling="one")


def test_the_winner_is_the_best_of_those_that_ran_for_all_steps() -> None:
    """Trials first; then the best of them at full length; then the seeds of the winner in every variant."""
    plan, line = Plan(steps=20, tried=3, kept=2, seeds=2), LINES["averages", "batch 1000, damping 1e-05"]
    tried = [task.setting for task in Contest([], plan, [line]).trials(line)]

    def loss(task: Task) -> float:
        place = tried.index(task.setting) if task.setting in tried else 0
        return float(place if task.steps == plan.first else -place)

    rows: list[dict[str, Any]] = []
    lengths = []
    while todo := list(Contest(rows, plan, [line]).missing()):
        task = todo[0][1]
        lengths.append((task.steps, task.test))
        rows.append(row(task, loss(task)))
    assert lengths == [(2, False)] * 3 + [(20, False)] * 2 + [(20, True)] * 8
    contest = Contest(rows, plan, [line])
    assert contest.winner(line) == tried[1] and tried[1]["batch"] == 1000 and tried[1]["decay"] == 0
    assert [x["setting"]["ema"] for x in contest.results(line, {"ema": 0.9})] == [0.9, 0.9]


def test_the_full_batch_of_the_study_of_batches_is_a_line_of_figure_5() -> None:
    """So its runs are made once."""
    contest = Contest([], Plan())
    one, other = LINES["batches", "AID-CG-3, batch 50000"], LINES["figure 5", "AID-CG-3, as printed"]
    assert contest.trials(one) == contest.trials(other)
    assert len({key(task) for _, task in contest.missing()}) == len(list(contest.missing()))


def test_what_the_verdicts_need_comes_first() -> None:
    """Final runs of the printed pairs before the trials of other studies, and those before the other arm."""
    plan = Plan(tried=1, kept=1)
    near, far = LINES["figure 5", "MRBO, as printed"], LINES["figure 5", "MRBO, each its own"]
    between = LINES["batches", "AID-KFAC, batch 1000"]
    tuned = finished([near, far], lambda task: 0.5, plan).done.values()
    rows = [x for x in tuned if not x["test"]]
    order = [task for _, task in Contest(rows, plan, [far, between, near]).missing()]
    assert [(task.name, task.test) for task in order] == [("MRBO", True)] * 3 + [("AID-KFAC", False)] + [
        ("MRBO", True)
    ] * 3
    assert all(task.setting == Contest(rows, plan, [near]).winner(near) for task in order[:3])


def test_a_diverged_run_is_the_worst() -> None:
    assert linear_runs.loss_of({"best": {"second_loss": None}}) == math.inf
    task = Task("AID-KFAC", {}, 0, 10, False)
    ends = [row(task, 0.9) | {"last_loss": last} for last in (1.2, 1.1, None)]
    assert sorted(ends, key=linear_runs.order_of)[0]["last_loss"] == 1.1
    broken = json.loads(json.dumps(linear_runs.broken(task, RuntimeError("no"))))
    assert linear_runs.loss_of(broken) == math.inf and key(linear_runs.task_of(broken)) == key(task)


@pytest.mark.parametrize("name", ["AID-KFAC", "AmIGO", "trusted only"])
def test_a_run(name: str) -> None:
    split = split_of()
    assert abs(float(split.train[0].std()) - 1) < 0.02
    task = Contest([], Plan(steps=4, tried=2)).trials(LINES["figure 5", f"{name}, each its own"])[0]
    found = json.loads(json.dumps(linear_runs.run(task._replace(steps=8, test=True), split)))
    unit = 10 if name == "trusted only" else 1
    assert found["curve"]["step"] == [0, 8 * unit]
    assert key(linear_runs.task_of(found)) == key(task._replace(steps=8, test=True))
    assert (found["moved"] == 0) == (name == "trusted only")


@pytest.mark.parametrize("asked", [{"batch": 16.0, "ema": 0.9, "decay": 0.0}, {"batch": 16.0, "refresh": 5.0}])
def test_what_studies_change_reaches_the_run(asked: dict[str, float]) -> None:
    setting = {"inner": 0.1, "outer": 1.0, "momentum": 0.9, "damping": 0.1, **asked}
    made = linear_runs.prepare("AID-KFAC", setting, split_of(), 1).advance(1)
    curvature = made.state.hypergradient.curvature
    assert (curvature.ema, curvature.refresh_every) == (asked.get("ema", 0.0), asked.get("refresh", 1))
    assert int((next(made.state.hyper.parameters()) != 0.5).sum()) == 16
    assert made.state.outer.optimizer.param_groups[0]["momentum"] == 0.9


def test_with_the_full_batch_stocbio_is_aid_with_neumann_10() -> None:
    """So it is not run a second time."""
    split, setting = split_of(), {"inner": 0.1, "outer": 1.0, "momentum": 0.9, "step": 0.1}
    weights = []
    for name in ("stocBiO", "AID-Neumann-10"):
        made = cleaning.prepare(Case(batch=80), split, methods(Rates())[name], setting, 1).advance(5)
        weights.append(next(made.state.hyper.parameters()).detach())
    assert float((weights[0] - 0.5).abs().max()) > 0.01
    assert torch.allclose(*weights, atol=1e-6)


def test_a_whole_batch_is_not_copied_and_gives_the_same_run() -> None:
    """Row numbers take the place of the rows; the weights are those of a run on batches that hold all rows."""
    split, setting = split_of(), {"inner": 0.1, "outer": 1.0, "momentum": 0.9, "damping": 0.1}
    made = cleaning.prepare(Case(batch=80), split, methods(Rates())["AID-CG-3"], setting, 1)
    assert made.batches.inner().dtype == torch.long
    whole, batch = split.train, (*split.train, torch.arange(80))
    values = [
        cleaning.problem(1e-3, part).inner(made.state.model, made.state.hyper, given).value
        for part, given in ((whole, batch[2]), (None, batch))
    ]
    assert torch.equal(*values)


def study(name: str) -> list[Line]:
    return [line for (of, _), line in LINES.items() if of == name]


def judged(name: str, loss: Callable[[Task], float]) -> Verdict:
    return linear_page.judgement(name, finished(study(name), loss, Plan(tried=1, kept=1))).verdict


def noisy(task: Task, loss: float) -> float:
    return loss + 1e-4 * task.seed


def test_figure_5_is_judged_by_its_pairs() -> None:
    better = lambda task: noisy(task, 0.3 if "KFAC" in task.name else 0.4)  # noqa: E731
    assert judged("figure 5", better) is Verdict.REPRODUCED
    assert judged("figure 5", lambda task: noisy(task, 0.3)) is Verdict.FAILED
    rows = [x for x in study("figure 5") if x.method != "MRBO"]
    contest = finished(rows, better, Plan(tried=1, kept=1))
    assert linear_page.judgement("figure 5", Contest(list(contest.done.values()))).verdict is Verdict.REFUSED


def test_averages_help_where_factors_are_noisy() -> None:
    def loss(task: Task) -> float:
        hurt = task.setting.get("batch") == 1000 and task.setting["damping"] == 1e-10 and not task.setting.get("ema")
        return noisy(task, 0.5 if hurt else 0.4)

    assert judged("averages", loss) is Verdict.REPRODUCED
    assert judged("averages", lambda task: noisy(task, 0.4)) is Verdict.FAILED


def test_batches_are_refused_where_weights_are_unvisited() -> None:
    """At a batch of 128 the best look at step 1000 has 92 % of the weights updated; one at step 100 has 23 %."""

    def loss(task: Task) -> float:
        return noisy(task, 0.3 if "KFAC" in task.name else 0.4 + 1 / task.setting.get("batch", ROWS))

    assert judged("batches", loss) is Verdict.REPRODUCED
    contest = finished(study("batches"), loss, Plan(tried=1, kept=1))
    for found in contest.done.values():
        found["best"]["step"] = 100
    assert linear_page.judgement("batches", contest).verdict is Verdict.REFUSED


@pytest.mark.parametrize(("longest", "expected"), [(0.5, Verdict.REPRODUCED), (1.5, Verdict.FAILED)])
def test_intervals_must_save_time(longest: float, expected: Verdict) -> None:
    """Seconds of a run are shared by the runs beside it; those at the longest interval must be fewer."""

    def loss(task: Task) -> float:
        return noisy(task, 0.3 + 1e-3 * task.setting["refresh"] + 0.1 * (task.name == "AID-KFAC"))

    contest = finished(study("intervals"), loss, Plan(tried=1, kept=1))
    for found in contest.done.values():
        slow = longest if found["setting"]["refresh"] == 50 else 1.0
        found |= {"workers": 10, "seconds": 20.0 * slow * (1 + (found["method"] == "AID-EKFAC"))}
    assert linear_page.judgement("intervals", contest).verdict is expected
    assert linear_page.milliseconds(contest.results(study("intervals")[0], {"refresh": 1.0})) == 2.0


def test_the_page_has_the_recorded_tables(capsys: pytest.CaptureFixture[str]) -> None:
    linear_length.main(["--table"])
    assert capsys.readouterr().out.strip() in (records.PAGES / "linear-length.md").read_text("utf-8")


def test_what_the_page_says_of_the_runs() -> None:
    """KFAC's test loss less that of others, seed by seed."""
    contest = Contest(Lines(linear_contest.RESULT).rows)
    text = (records.PAGES / "linear-length.md").read_text("utf-8").replace("\n", " ")

    def less(study: str, one: str, other: str) -> Difference:
        pair = [linear_page.summary(contest.results(LINES[study, title]))["test_loss"] for title in (other, one)]
        found = Difference.of(*pair)
        assert found is not None and found.seeds == 3
        return found

    for name, said in (("CG-3", "+0.003 ± 0.004"), ("identity", "+0.003 ± 0.004")):
        assert f"{less('figure 5', 'AID-KFAC, as printed', f'AID-{name}, as printed'):.3f}".startswith(said)
    assert f"{less('figure 5', 'AID-KFAC, as printed', 'AmIGO, as printed'):.3f}".startswith("+0.005 ± 0.005")
    mrbo = less("figure 5", "MRBO-KFAC, as printed", "MRBO, as printed")
    assert f"{mrbo:.3f}".startswith("-0.077 ± 0.007") and "0.077 ± 0.007" in text
    gaps = {batch: less("batches", f"AID-KFAC, batch {batch}", f"AID-CG-3, batch {batch}") for batch in BATCHES}
    assert [batch for batch, gap in gaps.items() if gap.sign] == [128, 5000] and all(x.mean > 0 for x in gaps.values())
    assert f"{gaps[128]:.3f}".startswith("+0.033 ± 0.005") and f"{gaps[5000]:.3f}".startswith("+0.006 ± 0.002")
    held = [contest.kept(LINES["figure 5", f"{name}, each its own"]) for name in ("MRBO", "MRBO-KFAC")]
    lowest = [min(linear_runs.loss_of(contest.done[key(task)]) for task in tasks) for tasks in held]
    assert [f"{x:.3f}" for x in lowest] == ["0.339", "0.345"]
    assert linear_page.judgement("averages", contest).verdict is Verdict.REPRODUCED


def test_tables_of_all_studies() -> None:
    contest = finished(list(LINES.values()), lambda task: noisy(task, 0.3), Plan(tried=1, kept=1))
    text = linear_page.tables(contest)
    assert "Not run" not in text and all(f"| {name} |" in text for name in NAMES)
    assert text.count("β = ") == 4 and "| AID-CG-3, batch 128 |" in text and "| 50 |" in text
    assert "| at an edge |" in text and "| inner" in text and "nan" not in text
