"""The frozen-encoder experiment: what its weights are asked, and every verdict its rule can give."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import paper
from experiments.paper import frozen_head, texts
from experiments.paper.frozen_head import SAME_RATE, FrozenCase, Settings, again, head
from experiments.paper.recipe import Result, Verdict
from hyperkron import losses
from hyperkron.cleaning.models.encoder_head import mean_pool
from hyperkron.hyper import SampleWeights

CASE = FrozenCase(batch=16, inner_steps=2, tokens=16)
SETTINGS = Settings(texts.MADE_UP, (texts.MADE_UP,), CASE, stops=(2, 4), again=60)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> texts.TextSplit:
    recipe = paper.recipes()["encoder-frozen"]
    job = recipe.job("smoke", 1, torch.device("cpu"), tmp_path_factory.mktemp("cells"))
    return frozen_head.split_of(job, texts.MADE_UP, 1)


def test_a_text_is_one_state_and_training_rows_are_standardised(split: texts.TextSplit) -> None:
    values = torch.cat([split.train.hidden.values, split.second.hidden.values])
    assert len(values) == len(split.train) + len(split.second) and values.dim() == 2
    torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(values.std(0), torch.ones(values.shape[1]), atol=1e-2, rtol=0)


def test_the_penalty_joins_the_inner_loss_and_not_the_outer_one(split: texts.TextSplit) -> None:
    model, weights = head(split, 0), SampleWeights(len(split.train))
    rows = torch.arange(8)
    batch = (*split.train.batch(rows), split.train.labels[rows], rows)
    plain, penalised = CASE.problem(), FrozenCase(decay=0.5).problem()
    gap = penalised.inner(model, weights, batch).value - plain.inner(model, weights, batch).value
    torch.testing.assert_close(gap, losses.l2(model, 0.5).value)
    assert torch.equal(penalised.outer(model, weights, batch).value, plain.outer(model, weights, batch).value)


def test_training_again_listens_to_the_weights(split: texts.TextSplit) -> None:
    right = split.clean.float()
    kept, spoilt = (again(SETTINGS, split, split.train, w, CASE, 1) for w in (right, 1 - right))
    assert kept > spoilt + 20
    assert again(SETTINGS, split, split.train, right, CASE, 1) == kept  # the same seed


def test_a_dataset_is_encoded_once_and_sama_takes_the_step_size_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    encoder = texts.encoder
    monkeypatch.setattr(texts, "encoder", lambda name, *rest: (made.append(name), encoder(name, *rest))[1])
    frozen_head._pooled.cache_clear()
    result = paper.run("encoder-frozen", "smoke", 2, folder=tmp_path)
    assert made == [texts.MADE_UP]
    runs = result.figures["cases"][f"{texts.MADE_UP}/0"]
    assert runs[SAME_RATE][0]["rate"] == runs["KFAC"][0]["rate"] != runs["SAMA"][0]["rate"]
    assert set(runs["KFAC"][0]["stops"]) == {"2", "4"} and not runs["KFAC"][0]["failed"]
    titles = [table.title for table in frozen_head.tables(result)]
    assert titles == ["made-up without penalty: accuracy on test rows", "made-up, α = 0.001: accuracy on test rows"]
    assert frozen_head.plot(result, tmp_path)[0].name == "encoder-frozen.svg" and frozen_head.tables(None) == []


def _result(*kfac: float) -> Result:
    """Two cases at one stop; SAMA is at 60 and KFAC at the given accuracies."""

    def runs(value: float) -> list[dict[str, Any]]:
        at = {"along": value - 5, "again": value, "order": 0.8, "right": 0.6, "wrong": 0.3, "trusted_loss": 1.0}
        return [{"stops": {"10": dict(at)}, "failed": False, "rate": 1.0} for _ in range(2)]

    cases = {
        key: {"trusted only": [{"again": 70.0}], "SAMA": runs(60.0), "KFAC": runs(value), SAME_RATE: runs(51.0)}
        for key, value in zip(("trec/0", "trec/0.001"), kfac, strict=True)
    }
    return Result("encoder-frozen", "small", (1,), {"cases": cases, "stops": [10]})


@pytest.mark.parametrize(
    ("kfac", "expected"),
    [((61.0, 62.0), Verdict.REPRODUCED), ((61.0, 60.0), Verdict.FAILED), ((59.0, 60.0), Verdict.FAILED)],
)
def test_verdicts(kfac: tuple[float, float], expected: Verdict) -> None:
    assert frozen_head.verdict(_result(*kfac)).verdict is expected


def test_most_cases_make_a_trend_and_only_the_last_step_counts() -> None:
    result = _result(61.0, 62.0)
    result.figures["cases"]["youtube/0"] = copy.deepcopy(result.figures["cases"]["trec/0"])
    result.figures["stops"] = [10, 20]
    for runs in result.figures["cases"].values():
        for name in ("SAMA", "KFAC", SAME_RATE):
            for run in runs[name]:
                run["stops"]["20"] = dict(run["stops"]["10"])
    result.figures["cases"]["trec/0"]["KFAC"][0]["stops"]["10"]["again"] = 10.0
    assert frozen_head.verdict(result).verdict is Verdict.REPRODUCED
    result.figures["cases"]["trec/0"]["KFAC"][0]["stops"]["20"]["again"] = 60.0
    found = frozen_head.verdict(result)
    assert found.verdict is Verdict.TREND and "2 of 3 cases" in found.because
    assert "youtube without penalty, 20 steps +1.0" in found.because


def test_the_answer_holds_the_figures_after_the_last_step() -> None:
    result = _result(61.0, 62.0)
    result.figures["cases"]["trec/0"]["SAMA"][0]["rate"] = 8.0
    gap, rates, trusted = frozen_head.answer(result)
    assert "after 10 steps: trec without penalty +1.0 ± 0.0 (2 seeds); trec, α = 0.001 +2.0" in gap
    assert "SAMA needs 1 to 8 times" in rates and "trec without penalty +9.0 ± 0.0 (2 seeds)" in rates
    assert "trec, α = 0.001 70.0 % against 62.0 % with the best weights (KFAC)" in trusted


def test_rows_of_one_state_are_what_padding_would_give(split: texts.TextSplit) -> None:
    rows = torch.tensor([3, 0, 7])
    states, mask = split.train.batch(rows)
    expected = texts.Rows(split.train.hidden, split.train.labels).batch(rows)
    assert torch.equal(states, expected[0]) and torch.equal(mask, expected[1]) and mask.all()
    model = head(split, 0)
    torch.testing.assert_close(model(states, mask), model.linear(mean_pool(states, mask)))
