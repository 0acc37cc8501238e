"""Figures 3 and 5 at the paper's length: batch sizes of ResNet-18, and the CNN."""

from __future__ import annotations

import pytest

from experiments import records
from experiments.paper import image_contest, resnet_batches, resnet_length, resnet_length_page, resnet_runs
from experiments.paper.image_contest import OWN, Contest, key
from experiments.paper.recipe import Verdict
from experiments.paper.resnet_runs import Size
from experiments.pieces import Lines
from image_contests import FAST, PAIRED, PLAN, judged


def test_figure_3_counts_the_sizes_at_which_weights_were_updated() -> None:
    """Below CG at all five sizes, at three of them, at none; two sizes that count are too few."""
    level = {"AID-KFAC": 1.2, "AID-CG-3": 1.5}
    every = {size: judged(level) for size in resnet_batches.SIZES}
    assert resnet_batches.verdict(every).verdict is Verdict.REPRODUCED
    early = judged(level, at=80)  # a batch is 1/80 of the rows
    three = {**every, 250: early, 500: early}
    found = resnet_batches.verdict(three)
    assert found.verdict is Verdict.TREND and "250 -0.3" in found.because and "(too few" in found.because
    worse = judged({"AID-KFAC": 1.5, "AID-CG-3": 1.2})
    assert resnet_batches.verdict({**three, 5000: worse}).verdict is Verdict.FAILED
    assert resnet_batches.verdict({**three, 1250: Contest([], PLAN)}).verdict is Verdict.REFUSED
    assert "| 250 | AID-CG-3 | 1.5" in resnet_batches.table(three)


def test_the_time_of_a_step_does_not_count_for_the_cnn() -> None:
    slow = judged(PAIRED)
    assert resnet_length_page.verdict(slow, FAST).verdict is Verdict.TREND
    assert resnet_length_page.verdict(slow, None).verdict is Verdict.REPRODUCED
    assert resnet_length_page.verdicts(slow, FAST, "cnn").keys() == {"Figure 5"}


def test_the_cnn_has_its_own_plan_records_and_times() -> None:
    assert image_contest.plan_of(1000, "cnn").steps == 1000 and image_contest.plan_of(2500, "cnn").steps == 400
    assert image_contest.result_of(1000, "cnn").name == "cnn-length.jsonl"
    assert image_contest.times_of("cnn") != image_contest.times_of("resnet18")
    layers = [type(x).__name__ for x in resnet_runs.network(0, Size(network="cnn")).modules()]
    assert layers.count("Conv2d") == 3 and layers.count("Linear") == 1


def test_the_pages_have_the_tables_of_figures_3_and_5(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, page in ((["--sizes"], "resnet-length.md"), (["--table", "--network", "cnn"], "cnn-length.md")):
        resnet_length.main(arguments)
        assert capsys.readouterr().out.strip() in (records.PAGES / page).read_text("utf-8")


def test_what_the_page_says_of_the_cnn() -> None:
    """θ's step size by the rule, winners inside their grids, every trial of the others below KFAC's best."""
    rows = Lines(image_contest.result_of(1000, "cnn")).rows
    contest = Contest(rows, image_contest.plan_of(1000, "cnn"))
    assert resnet_length_page.judgement("Figure 5", batch=1000, network="cnn").verdict is Verdict.FAILED
    names = ("AID-KFAC", "AID-CG-3", "AmIGO")
    trials = {name: [contest.done[key(task)] for task in contest.trials(name, OWN)] for name in names}
    held_out = {name: [image_contest.loss_of(x) for x in of] for name, of in trials.items()}
    assert max(held_out["AID-CG-3"] + held_out["AmIGO"]) < 1.11 < 1.13 < min(held_out["AID-KFAC"])
    for name, own in (("AID-KFAC", "damping"), ("AID-CG-3", "damping"), ("AmIGO", "step")):
        won = contest.winner(name, OWN)
        for which in ("outer", own):
            tried = [x["setting"][which] for x in trials[name]]
            assert won is not None and min(tried) < won[which] < max(tried), (name, which)
    pilot = Contest(rows, image_contest.LENGTHS["resnet18"]._replace(inner=0.1)).results("AID-KFAC")
    assert resnet_length_page.visits(pilot[0]).never < 0.11
