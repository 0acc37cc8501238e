"""Network, forest or boosted trees: which is fitted to the cleaned labels, decided by labels that it has not seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from blobs import quicken
from hyperkron.cleaning import OURS, CleanConfig, learners
from hyperkron.cleaning.alternatives import fitted
from hyperkron.cleaning.config import BOOSTED, FOREST, NETWORK
from hyperkron.cleaning.learners import (
    chosen_learner,
    clearly_best,
    grow,
    half_answers,
    name_of,
    row_scores,
)
from hyperkron.cleaning.method import Outcome, clean_labels
from hyperkron.cleaning.models import linear, trees
from hyperkron.cleaning.stages import Stages
from hyperkron.cleaning.trainer import Dense, TrainingPlan, predict
from hyperkron.cleaning.work import Work, folds

pytest.importorskip("sklearn")
ROWS, TRUSTED = 160, 24


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    monkeypatch.setattr(trees, "TREES", 20)
    monkeypatch.setattr(trees, "ROUNDS", 20)


def prepared(squares: bool) -> tuple[Work, Outcome]:
    """Two classes with a fifth of the labels swapped: squares of a chess board, or the two sides of a line."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand(ROWS + TRUSTED, 2 if squares else 8, generator=random) * 2 - 1
    y = ((x > 0).sum(1) % 2) if squares else (x.sum(1) > 0).long()
    given = y.clone()
    given[:ROWS:5] = 1 - given[:ROWS:5]
    rows = torch.arange(len(x))
    work = Work(
        Dense(x), given, rows[:ROWS], rows[ROWS:], 2, folds(given, [rows[:ROWS], rows[ROWS:]], 2, 0),
        partial(linear, x.shape[1], 2), TrainingPlan(least=200, epochs=1), CleanConfig(), Stages(None), lambda *_: None,
        trees=True, tree_model=True,
    )  # fmt: skip
    return work, clean_labels([work])[0]


def test_trees_where_a_line_cannot_tell_the_classes_apart_and_a_network_where_it_can() -> None:
    work, outcome = prepared(squares=True)
    assert chosen_learner(work, outcome) in (FOREST, BOOSTED)
    [model] = fitted(OURS, [work], [outcome], "stage")
    assert name_of(model) in (FOREST, BOOSTED)
    assert chosen_learner(replace(work, tree_model=False), outcome) == NETWORK  # somebody gave a network
    work, outcome = prepared(squares=False)
    assert chosen_learner(work, outcome) == NETWORK
    assert name_of(fitted(OURS, [work], [outcome], "stage")[0]) == NETWORK


def test_trees_need_a_clear_lead() -> None:
    random = torch.Generator().manual_seed(0)
    network, noise = -torch.rand(2, 100, generator=random)
    noise = (noise - noise.mean()) / noise.std()
    for lead, kind in ((2.9, NETWORK), (3.1, BOOSTED)):  # of a standard error of 10
        told = {NETWORK: network, FOREST: network - 0.1, BOOSTED: network + noise + lead / 10}
        assert clearly_best(told) == kind
    assert clearly_best({NETWORK: network, FOREST: network, BOOSTED: network}) == NETWORK
    assert clearly_best({NETWORK: network, FOREST: network + noise + 1, BOOSTED: network + noise + 0.9}) == FOREST


def test_both_kinds_of_trees_learn_the_posterior_and_not_the_labels() -> None:
    work, _ = prepared(squares=True)
    truth = (work.inputs.batch(work.noisy)[0] > 0).sum(1) % 2
    q = torch.nn.functional.one_hot(truth, 2).float()
    for kind in (FOREST, BOOSTED):
        model = grow(kind, work, torch.arange(ROWS + TRUSTED), q)
        assert name_of(model) == kind
        assert float((model(*work.inputs.batch(work.noisy)).argmax(1) == truth).float().mean()) > 0.95


def test_no_row_is_asked_of_trees_that_learnt_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work, outcome = prepared(squares=True)
    seen: list[Tensor] = []
    real = learners.grow
    monkeypatch.setattr(learners, "grow", lambda k, w, rows, q: seen.append(rows) or real(k, w, rows, q))
    asked: list[Tensor] = []
    monkeypatch.setattr("hyperkron.cleaning.work.predict", lambda m, x, rows: asked.append(rows) or predict(m, x, rows))
    half_answers(FOREST, work, outcome.first.posterior)
    assert sorted(torch.cat(asked).tolist()) == list(range(ROWS + TRUSTED))
    for learnt, ask in zip(seen, asked, strict=True):
        assert not set(learnt.tolist()) & set(ask.tolist())


def test_the_likelihood_of_labels_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    work, outcome = prepared(squares=False)
    flat = torch.full((ROWS + TRUSTED, 2), 0.5)
    through = outcome.final.log_likelihood
    top = through.max(1, keepdim=True).values
    expected = torch.cat([(0.5 * (through - top).exp()).sum(1).log(), torch.full((TRUSTED,), 0.5).log()])
    assert torch.allclose(row_scores(work, outcome, flat), expected, atol=1e-4)
    truth = torch.nn.functional.one_hot(work.given, 2).float()
    right = truth.clone()
    right[:ROWS:5] = right[:ROWS:5].flip(1)  # the true classes explain trusted rows, and noisy ones through the noise
    assert float(row_scores(work, outcome, right)[ROWS:].sum()) > float(row_scores(work, outcome, flat)[ROWS:].sum())
    worse = row_scores(work, outcome, 0.3 * right + 0.35)  # less sure of itself, but as right: τ takes that away
    monkeypatch.setattr(learners, "TEMPERATURES", (1.0,))
    assert float(worse.sum()) > float(row_scores(work, outcome, 0.3 * right + 0.35).sum())
