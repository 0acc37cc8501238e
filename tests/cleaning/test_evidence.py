"""The evidence of cleaning against closed forms and dense oracles: likelihood, T, pool, folds."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
import oracles
from hyperkron.cleaning.evidence import (
    MIN_PROBABILITY,
    POOL_SUM,
    RULED_OUT,
    _fitted,
    certain,
    frequencies,
    likelihood,
    logs,
    noise_matrix_from_trusted,
    overconfidence,
    stack,
)
from hyperkron.cleaning.work import folds
from hyperkron.evaluation.point import Point

DOUBLE = torch.float64


def some(rows: int = 7, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Logits and log-evidence with its maximum anywhere."""
    return torch.randn(rows, classes, dtype=DOUBLE), 3 * torch.randn(rows, classes, dtype=DOUBLE) + 5


# --- the likelihood -----------------------------------------------------------------------------------------


def test_certain_evidence_is_cross_entropy() -> None:
    labels = torch.tensor([2, 0, 1, 1])
    sure = certain(labels, 3)
    assert torch.equal(sure.max(1).values, torch.zeros(4)) and torch.equal(sure.argmax(1), labels)
    assert torch.equal(sure.min(1).values, torch.full((4,), RULED_OUT))
    logits = torch.randn(4, 3, dtype=DOUBLE)
    found = likelihood(logits, torch.full((4, 3), -math.inf, dtype=DOUBLE).scatter(1, labels[:, None], 0.0))
    wanted = F.cross_entropy(logits, labels)
    assert torch.allclose(found.value, wanted, rtol=1e-14, atol=0)
    nearly = likelihood(logits, sure.double()).value
    assert 0 < float(wanted - nearly) < 1e-5  # the others are ruled out only up to e^RULED_OUT


def test_the_value_is_minus_log_of_the_sum_and_weights_count() -> None:
    logits, evidence = some()
    weight = torch.rand(7, dtype=DOUBLE)
    shifted = (evidence - evidence.max(1, keepdim=True).values).exp()
    rows = -(logits.softmax(1) * shifted).sum(1).log()
    assert torch.allclose(likelihood(logits, evidence).value, rows.mean(), rtol=1e-13)
    assert torch.allclose(likelihood(logits, evidence, weight).value, (weight * rows).mean(), rtol=1e-13)
    moved = likelihood(logits, evidence + torch.randn(7, 1, dtype=DOUBLE)).value  # no scale of the evidence counts
    assert torch.allclose(moved, rows.mean(), rtol=1e-12)


def test_the_gradient_is_that_of_the_soft_target_of_em() -> None:
    """d/dlogits −log Σ f e = f − q with q ∝ f e."""
    logits, evidence = some()
    logits.requires_grad_()
    likelihood(logits, evidence).backward()
    with torch.no_grad():
        f = logits.softmax(1)
        q = f * evidence.exp() / (f * evidence.exp()).sum(1, keepdim=True)
    assert logits.grad is not None
    assert oracles.relative(logits.grad, (f - q) / 7) < 1e-13
    soft = logits.detach().requires_grad_()
    F.cross_entropy(soft, q).backward()
    assert soft.grad is not None and oracles.relative(logits.grad, soft.grad) < 1e-13


def test_extreme_logits_stay_finite() -> None:
    for evidence in (certain(torch.tensor([0]), 3), torch.zeros(1, 3)):  # all seen: s = 1 in float32
        logits = torch.tensor([[60.0, -60.0, 0.0]], requires_grad=True)
        loss = likelihood(logits, evidence)
        loss.backward()
        assert math.isfinite(loss.item()) and logits.grad is not None and bool(logits.grad.isfinite().all())


def test_the_gauss_newton_matrix_is_the_information_of_two_outcomes() -> None:
    """Σ_n ∇s_n ∇s_nᵀ / (s_n (1 − s_n)) / N, and not the larger matrix of the soft target."""
    model, x = nn.Linear(3, 4, dtype=DOUBLE), torch.randn(7, 3, dtype=DOUBLE)
    _, evidence = some()
    problem = hk.BilevelProblem(lambda m, h, b: likelihood(m(x), evidence), lambda m, h, b: m(x).sum())
    with Point(problem, model, nn.Linear(1, 1, dtype=DOUBLE), None, None) as point:
        found = oracles.dense(
            hk.curvature.GGN().operator(point, hk.curvature.GGN().init()).matvec, oracles.trainable(model)
        )
    e = (evidence - evidence.max(1, keepdim=True).values).exp()
    s = (model(x).softmax(1) * e).sum(1)
    slopes = oracles.jacobian(s, list(model.parameters()))
    s = s.detach()
    wanted = torch.einsum("np,nq,n->pq", slopes, slopes, 1 / (s * (1 - s))) / 7
    assert oracles.relative(found, wanted) < 1e-12
    f = model(x).softmax(1).detach()
    logit_slopes = oracles.jacobian(model(x), list(model.parameters())).reshape(7, 4, -1)
    complete = torch.einsum(
        "ncp,ncd,ndq->pq", logit_slopes, torch.diag_embed(f) - f[:, :, None] * f[:, None], logit_slopes
    )
    assert float(torch.linalg.eigvalsh(complete / 7 - wanted).min()) > -1e-12  # missing labels only lose information


# --- the noise matrix, the pool, the folds ------------------------------------------------------------------


def test_the_noise_matrix_of_trusted_rows_is_their_mean_shrunk() -> None:
    predicted = torch.tensor([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]])
    found = noise_matrix_from_trusted(predicted, torch.tensor([0, 0, 1]), 3)
    kept = (0.7 + 0.5) / 2
    prior = torch.full((3, 3), (1 - kept) / 2).fill_diagonal_(kept)
    wanted = torch.stack(
        [(2 * torch.tensor([0.7, 0.2, 0.1]) + 2 * prior[0]) / 4, (predicted[2] + 2 * prior[1]) / 3, prior[2]]
    )
    assert torch.allclose(found, wanted) and torch.allclose(found.sum(1), torch.ones(3))  # class 2 has no trusted row


def test_a_useless_expert_counts_for_nothing_and_the_pool_beats_its_members() -> None:
    random = torch.Generator().manual_seed(0)
    true = torch.arange(900) % 3
    signal = F.one_hot(true, 3) * 1.5
    views = [(signal + torch.randn(900, 3, generator=random)).softmax(1) for _ in range(2)]
    useless = (2 * torch.randn(900, 3, generator=random)).softmax(1)
    experts = torch.stack([logs(p) for p in (*views, useless)])
    pool = stack(experts[:, :300], true[:300])
    exponents = pool.exponents
    assert float(exponents.min()) >= 0 and float(exponents[2]) < 0.1 < 0.5 < float(exponents[:2].min())
    pooled = pool(experts)[300:]
    assert torch.allclose(pooled.exp().sum(1), torch.ones(600), atol=1e-5)
    loss = F.nll_loss(pooled, true[300:])
    assert all(loss < F.nll_loss(e[300:].log_softmax(1), true[300:]) - 0.1 for e in experts)
    few = stack(experts[:, :3], true[:3]).exponents  # three rows move it little
    assert float((few - POOL_SUM / 3).abs().max()) < 0.25 < float((exponents - POOL_SUM / 3).abs().max())


def test_the_pools_are_the_minimisers_of_their_objectives() -> None:
    experts = torch.randn(4, 40, 3, dtype=DOUBLE).log_softmax(2)
    labels = (experts[0] - experts[1] + 0.5 * torch.randn(40, 3, dtype=DOUBLE)).argmax(1)  # the second is contrary
    seen, pull = torch.rand(3, 40) < 0.8, [1e6, 0.05, 0.005]
    both = [_fitted(experts, labels, seen, 0.02, r) for r in pull]
    a, b = (torch.stack([pair[i][k] for k, pair in enumerate(both)]).requires_grad_() for i in (0, 1))
    for k, rows in enumerate(seen):
        logits = torch.einsum("j,jmc->mc", a[k], experts)[rows] + b[k]
        loss = (
            F.cross_entropy(logits, labels[rows])
            + 0.02 * (a[k] - POOL_SUM / 4).square().sum()
            + pull[k] * b[k].square().sum()
        )
        of_a, of_b = (g[k] for g in torch.autograd.grad(loss, (a, b)))
        held = a[k].detach() == 0
        assert float(of_b.abs().max()) < 1e-5 and float(of_a[~held].abs().max()) < 1e-5
        assert bool(held[1]) and float(of_a[held].min()) > 0 and float(a[k].detach().min()) >= 0
    assert float(b[0].detach().abs().max()) < 1e-5 < 0.01 < float(b[2].detach().abs().max())


def test_a_bias_that_all_experts_share_is_taken_away_and_none_is_invented() -> None:
    random = torch.Generator().manual_seed(0)
    true = torch.arange(3000) % 3
    honest = (2 * F.one_hot(true, 3) + torch.randn(3000, 3, generator=random)).log_softmax(1)
    bias = torch.tensor([1.0, 0.0, -1.0])
    pool = stack((honest + bias).log_softmax(1)[None], true)
    left = pool.offsets + pool.exponents * bias  # what is left of it, up to a constant
    assert float((left - left.mean()).abs().max()) < 0.15  # of 1: the ridge keeps a little
    few = [stack(honest[i : i + 30][None], true[i : i + 30]).offsets.abs().max() for i in range(0, 300, 30)]
    assert sum(float(offset) < 1e-4 for offset in few) >= 7  # cross-validation leaves them out


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_pool_of_hardly_any_rows_is_near_the_mean(rows: int) -> None:
    experts = torch.randn(2, rows, 3).log_softmax(2)
    pool = stack(experts, torch.arange(rows) % 3)
    assert bool(pool.exponents.isfinite().all()) and bool(pool.offsets.isfinite().all())
    assert torch.allclose(pool(experts).exp().sum(1), torch.ones(rows), atol=1e-5)


# --- class frequencies --------------------------------------------------------------------------------------


def test_no_class_has_frequency_zero() -> None:
    assert torch.allclose(frequencies(torch.tensor([0, 0, 1]), 3), torch.tensor([3.0, 2.0, 1.0]) / 6)


def test_no_expert_is_surer_than_the_floor() -> None:
    assert torch.allclose(
        logs(torch.tensor([0.0, 1.0])),
        torch.tensor([math.log(MIN_PROBABILITY), math.log(1 + MIN_PROBABILITY)]),
        atol=1e-7,
    )


def test_overconfidence_is_the_slope_of_the_loss_of_sharpened_predictions() -> None:
    logits, labels = some(rows=30)[0], torch.arange(30) % 4
    sharpness = torch.ones((), dtype=torch.float64, requires_grad=True)
    log_p = (2 * logits.double()).log_softmax(1)
    (expected,) = torch.autograd.grad(F.cross_entropy(sharpness * log_p, labels), sharpness)
    assert overconfidence(log_p.exp(), labels) == pytest.approx(float(expected), abs=1e-12)


def test_overconfidence_is_finite_where_a_class_has_no_probability() -> None:
    p = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.25, 0.5]])
    assert overconfidence(p[:1], torch.tensor([0])) == 0
    assert math.isfinite(overconfidence(p, torch.tensor([1, 0]))) and overconfidence(p, torch.tensor([1, 0])) > 1
    assert overconfidence(p[1:], torch.tensor([2])) == pytest.approx(math.log(2) - 1.5 * math.log(2))


def test_folds_are_even_in_every_class_and_group_and_follow_the_seed() -> None:
    given = torch.tensor([0] * 7 + [1] * 5 + [2] + [0] * 3 + [2] * 3)
    groups = [torch.arange(13), torch.arange(13, 19)]
    found = folds(given, groups, 2, seed=4)
    for group in groups:
        assert abs(int((found[group] * 2 - 1).sum())) <= 1
        for label in range(3):
            part = found[group][given[group] == label]
            assert len(part) == 0 or abs(int((part * 2 - 1).sum())) <= 1
    assert torch.equal(found, folds(given, groups, 2, seed=4))
    assert not torch.equal(found, folds(given, groups, 2, seed=5))
    assert sorted(folds(given, [torch.tensor([0, 7])], 2, seed=0)[[0, 7]].tolist()) == [0, 1]  # one row a class: both
