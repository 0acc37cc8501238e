"""The page of cleaning results is what its result file says."""

from __future__ import annotations

import json

import pytest
import torch

from experiments import records
from experiments.cleaning import compare, datasets, page, tables


def test_the_page_is_up_to_date() -> None:
    assert page.PAGE.read_text("utf-8") == page.page()


def test_scores_of_a_ranking_agree_with_scikit_learn() -> None:
    from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

    random = torch.Generator().manual_seed(0)
    wrong = torch.rand(200, generator=random) < 0.3
    score = torch.rand(200, generator=random) + wrong.float() * 0.4
    assert compare.average_precision(wrong, score) == pytest.approx(average_precision_score(wrong, score), abs=1e-12)
    tied = (score * 10).round()
    assert compare.auroc(wrong, tied) == pytest.approx(roc_auc_score(wrong, tied), abs=1e-12)
    assert compare.f1(wrong, score > 0.7) == pytest.approx(f1_score(wrong, score > 0.7), abs=1e-6)


def test_noise_is_what_it_is_called() -> None:
    labels = torch.arange(10).repeat(2000)
    random = torch.Generator().manual_seed(0)
    moved = datasets.corrupt(labels, 10, "class-40", random)
    assert set(((moved - labels) % 10).tolist()) == {0, 1}
    assert float((moved != labels).float().mean()) == pytest.approx(0.4, abs=0.02)
    drawn = datasets.corrupt(labels, 10, "uniform-50", random)
    assert float((drawn != labels).float().mean()) == pytest.approx(0.45, abs=0.02)


def test_times_of_their_own_come_before_those_of_the_runs() -> None:
    records = [json.loads(line) for line in compare.RESULTS.open(encoding="utf-8")][:1]
    times = [{"setting": records[0]["setting"], "seconds": {"cleaning": c, "plain": 2.0}} for c in (3.0, 4.0)]
    usual, timed = tables.table(records), tables.table(records, times)
    assert usual != timed
    assert "1.8× on average, at most 1.8×; above 3× in 0 of 1" in timed  # the mean of 1.5 and 2
    assert usual == tables.table(records, [{**t, "setting": "another"} for t in times])


def test_the_short_page_has_the_figures_of_the_record() -> None:
    short = " ".join((records.ROOT / "docs" / "cleaning-results.md").read_text("utf-8").split())
    assert " ".join(tables.summary(*page.measured()).split()) in short, "run python -m experiments.cleaning.page"
    claims = page.page()
    assert "Above the best alternative with 10 per class: 15 of 17 settings; by more than the interval: 8." in claims
    assert "15 of 17 settings (by more than the interval in 8)" in short
    assert "cleanlab and above trusted confidence: 33 of 34" in claims and "33 of 34 settings" in short
    assert "Below the best alternative by more than the interval: 0 of 34" in claims and "none of all 34" in short
