"""What the network that comes out learns: the evidence, and the given labels as far as they are believed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blobs import Watch, blobs, quicken
from hyperkron.cleaning import OURS, CleanConfig, clean
from hyperkron.cleaning.alternatives import fitted, judged
from hyperkron.cleaning.batched_training import train_batched
from hyperkron.cleaning.evidence import likelihood
from hyperkron.cleaning.method import Opinion, Outcome, certainty, clean_labels
from hyperkron.cleaning.models import linear
from hyperkron.cleaning.stages import Stages
from hyperkron.cleaning.trainer import Dense, TrainingPlan, TrainingTargets, train
from hyperkron.cleaning.work import Work, folds
from hyperkron.training.contents import Contents

ALONE = ("noisy", "trusted", "pooled", "small-loss", "trusted-confidence", "gold-loss", "neighbours", "sama")
NOISY = torch.arange(8)
TRUSTED = torch.arange(8, 12)
GIVEN = torch.arange(12) % 3
MATRIX = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.6, 0.2], [0.1, 0.3, 0.6]])
THROUGH = (MATRIX + 1e-6).log()[:, GIVEN[NOISY]].T


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def work_of() -> Work:
    fold, stages = torch.arange(12) % 2, Stages(None)
    values, build = Dense(torch.zeros(12, 4)), partial(linear, 4, 3)
    return Work(values, GIVEN, NOISY, TRUSTED, 3, fold, build, TrainingPlan(), CleanConfig(), stages, lambda *_: None)


def opinion_of(log_p: Tensor) -> Opinion:
    nothing: Any = None
    return Opinion(nothing, nothing, nothing, log_p, THROUGH, (log_p + THROUGH).softmax(1))


def outcome_of(log_p: Tensor, gamma: float = 1.0, fold_models: Tensor | None = None) -> Outcome:
    even = torch.full((12, 3), 1 / 3)
    first, final = opinion_of(log_p.flip(0)), opinion_of(log_p)
    experts = {"noisy": even, "fold models": even if fold_models is None else fold_models}
    return Outcome(first, final, experts, (0.5, 0.8, gamma), half_opinion=first.log_p)


def test_the_loss_is_the_weighted_sum_of_both_terms() -> None:
    output, evidence = drawn(5, 3), drawn(5, 3, seed=1)
    weight, belief = drawn(2, 5, seed=2).sigmoid()
    label, part = torch.tensor([0, 2, 1, 1, 0]), torch.tensor([3, 0, 4])
    one = TrainingTargets(torch.arange(5), evidence, weight, (label, belief))
    f = output[part].softmax(1)
    scaled = evidence[part] - evidence[part].max(1, keepdim=True).values  # a row's scale does not matter
    expected = -weight[part] * (f * scaled.exp()).sum(1).log()
    expected = expected - belief[part] * f[torch.arange(3), label[part]].log()
    assert torch.allclose(one.objective(output[part], part).value, expected.mean(), atol=1e-12)
    without = TrainingTargets(one.rows, evidence, None, (label, torch.zeros(5).double()))
    through = likelihood(output[part], evidence[part]).value
    assert torch.allclose(without.objective(output[part], part).value, through, atol=1e-12)


@pytest.mark.parametrize("gamma", [0.2, 1.0])
def test_rows_count_as_the_posterior_says(gamma: float) -> None:
    posterior = (3 * drawn(8, 3, seed=3)).softmax(1)
    posterior[0] = torch.tensor([0.1, 0.85, 0.05])  # given 0: another class is surer
    posterior[1] = torch.tensor([0.3, 0.3, 0.4])  # given 1: no class is sure
    log_p = posterior.float().log() - THROUGH
    work, rows = work_of(), torch.cat([TRUSTED, NOISY])
    outcome = outcome_of(log_p, gamma)
    found = outcome.targets(work, rows)
    assert torch.allclose(found.evidence[4:], 0.5 * log_p + 0.8 * THROUGH, atol=1e-6)
    assert torch.allclose(found.weight[4:] * (1 + gamma), certainty(posterior.float(), GIVEN[NOISY]), atol=1e-6)  # type: ignore[index]
    assert found.weight is not None and found.believed is not None
    label, belief = found.believed
    assert torch.equal(label, GIVEN[rows])
    assert torch.allclose(found.weight[4] * (1 + gamma), torch.tensor(0.7))
    assert torch.allclose(found.weight[5] * (1 + gamma), torch.tensor(0.3))
    assert torch.allclose(belief[4:] * (1 + gamma) / gamma, posterior[torch.arange(8), GIVEN[:8]].float(), atol=1e-6)
    assert torch.allclose(found.weight[:4] + belief[:4], torch.ones(4))  # a trusted row counts once
    output = drawn(12, 3, seed=4).float()
    plain = F.cross_entropy(output[:4], GIVEN[TRUSTED])
    assert torch.allclose(found.objective(output[:4], torch.arange(4)).value, plain, atol=1e-4)


@pytest.mark.parametrize(
    ("right", "sure", "prior_loss", "more", "boost"),
    [
        (3, 0.74, 0.0, 0.0, 3.0),
        (3, 0.76, 0.0, 0.0, 1.0),
        (4, 0.6, 1.75, 0.0, 3.0),  # 4 · 0.4 · log 3 = 1.758
        (4, 0.6, 1.77, 0.0, 1.0),
        (4, 0.6, 1.77, 0.01, 3.0),
        (4, 0.6, None, None, 1.0),  # four rows are too few
    ],
)
def test_the_rate_is_higher_where_training_was_too_gentle_for_the_fold_models(
    right: int, sure: float, prior_loss: float | None, more: float | None, boost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right answers m of M = 4 with confidence s, r for each other class: Σ (CE − H) = (s − m/M) M log(s/r)."""
    for name, value in (("PRIOR_LOSS", prior_loss), ("CONFIDENCE_MARGIN", more)):
        if value is not None:
            monkeypatch.setattr(f"hyperkron.cleaning.method.{name}", value)
    answers = GIVEN.clone()
    answers[TRUSTED[right:]] = (answers[TRUSTED[right:]] + 1) % 3
    fold_models = torch.full((12, 3), (1 - sure) / 2).scatter_(1, answers[:, None], sure)
    fold_models[NOISY] = torch.tensor([0.0, 0.0, 1.0])
    one = outcome_of(drawn(8, 3, seed=3).float().log_softmax(1), 1.0, fold_models)
    work, asked = work_of(), []

    def fit(self: Work, targets: Any, plan: TrainingPlan, stage: str, seeds: Any) -> Any:
        asked.append(plan)
        return [linear(4, 3) for _ in targets]

    monkeypatch.setattr(Work, "fit", fit)
    for name in (OURS, "small-loss"):
        fitted(name, [work, work], [one, one], "stage")
    assert asked == [work.last.faster(boost), work.last]  # alternatives are plain trainings
    assert one.paced(work, work.last) == work.last.faster(boost)


def test_faster_multiplies_the_rates_of_the_plan() -> None:
    values, build, plan = Dense(drawn(12, 4).float()), partial(linear, 4, 3), TrainingPlan(epochs=1, least=20)
    told = TrainingTargets(torch.arange(12), 3 * drawn(12, 3, seed=1).float())
    assert plan.faster(1) == plan
    assert (plan.faster(2).rate, plan.faster(2).fine_rate, plan.faster(2).decay) == (4e-3, 1e-4, 1e-2)

    def weights(network: Any) -> Tensor:
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    slow, fast = (weights(train(build, values, told, plan.faster(k), seed=3)) for k in (1, 2))
    assert not torch.allclose(slow, fast, atol=1e-3)
    for k, expected in ((1, slow), (2, fast)):  # side by side too
        found = train_batched(build, values, (told, told), plan.faster(k), seeds=(3, 3))
        assert all(torch.allclose(weights(n), expected, atol=1e-6) for n in found)


def test_nothing_that_is_judged_has_seen_the_labels_that_judge_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of a fold stay the same bit for bit when its labels are changed."""
    pytest.importorskip("sklearn")
    quicken(monkeypatch)
    monkeypatch.setattr("hyperkron.cleaning.work.JUDGING_FOLDS", 2)
    data = blobs(rows=60, trusted=12)
    values = Dense(torch.cat([data.x, data.trusted[0]]))
    rows, labels = torch.arange(72), torch.cat([data.noisy, data.trusted[1]])

    def answers(given: Tensor, kept: list[Work] | None) -> tuple[list[Work], dict[str, Tensor]]:
        fold = folds(given, [rows[:60], rows[60:]], 2, 0)
        plan, stages, build = TrainingPlan(epochs=0.1, least=4), Stages(None), partial(linear, 2, 3)
        work = Work(values, given, rows[:60], rows[60:], 3, fold, build, plan, CleanConfig(), stages, lambda *_: None)
        work = replace(work, trees=True, tree_model=True)
        views = work.views() if kept is None else [replace(view, given=given, stages=stages) for view in kept]
        outcomes = clean_labels(views)
        return views, {name: judged(name, views, outcomes) for name in (OURS, *ALONE)}

    views, before = answers(labels, None)
    assert sorted(torch.cat([view.held_out for view in views]).tolist()) == rows[60:].tolist()
    for view in views:
        assert not set(view.held_out.tolist()) & set(view.trusted.tolist())
    mine, changed = views[1].held_out, labels.clone()
    changed[mine] = (changed[mine] + 1) % 3
    after = answers(changed, views)[1]
    for name, answer in before.items():
        assert torch.equal(after[name][mine], answer[mine]), name
        assert name == "noisy" or not torch.equal(after[name][views[0].held_out], answer[views[0].held_out])


@pytest.mark.long
def test_every_candidate_is_delivered_as_it_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan, from all noisy rows; ours at its own rate."""
    quicken(monkeypatch)
    monkeypatch.setattr("hyperkron.cleaning.models.trees.installed", lambda: False)
    monkeypatch.setattr("hyperkron.cleaning.method.PRIOR_LOSS", -1e9)  # always too gentle
    data, seen = blobs(rows=120, trusted=24), dict[str, list[Any]]()
    true = Work.fit

    def fit(self: Work, targets: Any, plan: TrainingPlan, stage: str, *, seeds: Any) -> Any:
        if stage.startswith(("judging ", "training ")):
            seen[stage] = [plan, *(int((t.rows < 120).sum()) for t in targets)]
        return true(self, targets, plan, stage, seeds=seeds)

    monkeypatch.setattr(Work, "fit", fit)
    config, build = CleanConfig(epochs=3, compare=("pooled",)), partial(linear, 2, 3)  # whose model is never a forest
    found = clean(data.train, data.trusted, test=data.test, model=build, config=config)
    assert found.candidates[0]["rows"] == 24
    for name, rate in ((OURS, 3.0), ("pooled", 1.0)):
        (plan, *rows), (delivered, all_rows) = seen[f"judging {name}"], seen[f"training {name}"]
        assert plan == delivered and plan.rate == rate * TrainingPlan().rate
        assert rows == [all_rows] * 5 == [120] * 5


def test_the_last_network_is_trained_longer_only_where_there_are_many_rows() -> None:
    work = work_of()
    for rows, last, short in ((1000, 240, 240), (5000, 440, 293), (20000, 1758, 1172)):
        assert (work.last.steps(rows), work.short.steps(rows)) == (last, short)


@pytest.mark.parametrize("dropout", [False, True], ids=["side by side", "one after the other"])
def test_fit_describes_the_networks_and_not_the_rows(dropout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of ``fit`` takes a SHA-256 of what it can see; all rows in each of dozens of trainings would be slow."""
    seen: list[tuple[int, ...]] = []
    described = Contents.__call__

    def watched(self: Contents, x: Any, room: int | None = None) -> str:
        seen.append(tuple(x.shape))
        return described(self, x, room)

    monkeypatch.setattr(Contents, "__call__", watched)
    quicken(monkeypatch, least=8)
    data = blobs(rows=150)
    model = (lambda: nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.1), nn.Linear(8, 3))) if dropout else None
    clean(data.train, data.trusted, model=model, config=CleanConfig(epochs=1, compare=("sama",)), progress=Watch())
    assert all(shape == () or shape[0] < 24 for shape in seen)
