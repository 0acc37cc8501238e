"""Votes of several sources: expectation maximisation against hand-computed, brute-force and simulated cases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hyperkron.cleaning.annotators import error_correlation, weigh_votes

PLAIN = {"strength": 0.0, "shrinkage": 0.0, "correlation": 0.0}


def _opinion(rows: int, classes: int, seed: int = 0, sure: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (sure * torch.randn(rows, classes, generator=random, dtype=torch.float64)).softmax(1)


def _crowd(rows: int, confusion: Tensor, votes: int, seed: int) -> tuple[Tensor, Tensor]:
    """True classes, and ``votes`` votes on each row by sources drawn at random."""
    random = torch.Generator().manual_seed(seed)
    sources, classes = confusion.shape[:2]
    truth = torch.randint(classes, (rows,), generator=random)
    said = torch.stack([torch.multinomial(t[truth], 1, generator=random)[:, 0] for t in confusion], dim=1)
    speaks = torch.rand(rows, sources, generator=random).argsort(1) < votes
    return truth, torch.where(speaks, said, -1)


def test_one_step_by_hand() -> None:
    opinion = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.5, 0.5]], dtype=torch.float64)
    votes = torch.tensor([[0, 0], [1, 0], [1, -1]])
    found = weigh_votes(opinion, votes, iterations=1, **PLAIN)
    # class 0 has 1.7 rows and class 1 has 1.3; the first source says 0 on the first row, 1 on the others
    first = torch.tensor([[0.8 / 1.7, 0.9 / 1.7], [0.2 / 1.3, 1.1 / 1.3]], dtype=torch.float64)
    second = torch.tensor([[1.2 / 1.7, 0.0], [0.8 / 1.3, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found.confusion, torch.stack([first, second]))
    by_hand = 0.8 * first[0, 0] * second[0, 0], 0.2 * first[1, 0] * second[1, 0]
    assert math.isclose(float(found.posterior[0, 0]), by_hand[0] / sum(by_hand), rel_tol=1e-12)
    assert math.isclose(float(found.posterior[2, 1]), first[1, 1] / (first[0, 1] + first[1, 1]), rel_tol=1e-12)


def test_shrinkage_and_smoothing_by_hand() -> None:
    opinion = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    votes = torch.tensor([[0, 0], [1, -1]])
    found = weigh_votes(opinion, votes, iterations=1, strength=1.0, shrinkage=4.0, correlation=0.0)
    right = (0.9 + 0.8 + 0.9) / 3  # of all votes
    usual = right + (1 - right) * 1.1 / 2  # class 0 among those that say 0, were the others unknown
    others = (0.9 + 4 * usual) / (1 + 4)  # the first source, seen by the second
    meant = (0.9 + 4 * others) / (1 + 4)
    assert math.isclose(float(found.confusion[1, 0, 0]), (meant + 1 / 2) / (1.1 + 1), rel_tol=1e-12)


def test_expectation_maximisation_climbs_to_the_maximum_of_the_likelihood() -> None:
    """Against gradient ascent from the same start, where all sources vote on all rows."""
    confusion = torch.tensor([[[0.8, 0.2], [0.3, 0.7]], [[0.6, 0.4], [0.1, 0.9]]])
    truth, votes = _crowd(60, confusion, 2, 1)
    opinion = (2 * torch.nn.functional.one_hot(truth, 2) + _opinion(60, 2, 2)).double().softmax(1)

    def likelihood(t: Tensor) -> Tensor:
        told = torch.stack([t[s][:, votes[:, s]].T for s in range(2)]).log().sum(0)
        return torch.logsumexp(opinion.log() + told, 1).sum()

    found = weigh_votes(opinion, votes, iterations=1000, **PLAIN)
    free = weigh_votes(opinion, votes, iterations=3, **PLAIN).confusion.log().requires_grad_()
    optimizer = torch.optim.LBFGS([free], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -likelihood(free.softmax(2))
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(found.confusion, free.detach().softmax(2), atol=1e-3, rtol=0)
    assert abs(float(likelihood(found.confusion) - likelihood(free.detach().softmax(2)))) < 1e-4


def test_the_confusion_of_simulated_annotators_is_recovered() -> None:
    random = torch.Generator().manual_seed(3)
    noise = torch.rand(6, 3, 3, generator=random)
    confusion = 0.6 * torch.eye(3) + 0.4 * noise / noise.sum(2, keepdim=True)
    truth, votes = _crowd(6000, confusion, 3, 4)
    opinion = (1.5 * torch.nn.functional.one_hot(truth, 3) + torch.randn(6000, 3, generator=random)).softmax(1)
    found = weigh_votes(opinion, votes, shrinkage=0.0)
    given = found.confusion / found.confusion.sum(2, keepdim=True)  # half of the annotators vote on a row
    # 1000 votes in each line: a deviation of at most 0.016, more as the true class is not known
    assert float((given - confusion).abs().max()) < 4 * 0.016
    assert found.correlation < 0.05
    assert float((found.posterior.argmax(1) == truth).float().mean()) > 0.93


def test_a_source_with_few_votes_is_like_the_others() -> None:
    truth, votes = _crowd(800, torch.tensor([[[0.9, 0.1], [0.1, 0.9]]] * 3), 3, 5)
    opinion = (2.0 * torch.nn.functional.one_hot(truth, 2)).softmax(1)
    votes[2:, 2] = -1
    votes[:2, 2] = 1 - truth[:2]  # the third has two votes, both wrong
    found = weigh_votes(opinion, votes)
    alone = weigh_votes(opinion, votes, shrinkage=0.0)
    said = int(votes[0, 2])
    assert found.confusion[2, said, said] > 2 * found.confusion[2, 1 - said, said]  # it is still believed
    assert alone.confusion[2, said, said] < alone.confusion[2, 1 - said, said]


def test_the_order_of_sources_does_not_matter() -> None:
    _, votes = _crowd(200, torch.tensor([[[0.8, 0.2], [0.4, 0.6]]] * 4), 2, 6)
    opinion, order = _opinion(200, 2), torch.tensor([2, 0, 3, 1])
    one, other = weigh_votes(opinion, votes), weigh_votes(opinion, votes[:, order])
    torch.testing.assert_close(one.confusion[order], other.confusion)
    torch.testing.assert_close(one.posterior, other.posterior)


def test_silence_is_no_evidence() -> None:
    opinion = _opinion(50, 3)
    _, votes = _crowd(50, torch.eye(3)[None].repeat(4, 1, 1), 2, 7)
    votes[10:20] = -1
    found = weigh_votes(opinion, votes)
    assert torch.equal(found.log_likelihood[10:20], torch.zeros(10, 3, dtype=torch.float64))
    torch.testing.assert_close(found.posterior[10:20], opinion[10:20])
    silent = weigh_votes(opinion, torch.full((50, 4), -1))
    torch.testing.assert_close(silent.posterior, opinion)
    dropped = torch.cat([torch.arange(10), torch.arange(20, 50)])  # and silent rows tell nothing of the sources
    torch.testing.assert_close(weigh_votes(opinion[dropped], votes[dropped]).confusion, found.confusion)


@pytest.mark.parametrize("copies", [1, 3])
def test_copies_of_a_source_do_not_make_rows_certain(copies: int) -> None:
    """Three copies of every vote: the posterior stays calibrated, which it does not if they count as independent."""
    truth, votes = _crowd(3000, torch.tensor([[[0.75, 0.25], [0.25, 0.75]]] * 5), 2, 9)
    random = torch.Generator().manual_seed(10)
    logits = torch.nn.functional.one_hot(truth, 2) * 2.0 + torch.randn(3000, 2, generator=random) * 2**0.5
    opinion = logits.softmax(1)  # calibrated: log-odds of normal variables with this mean and variance
    surplus = {}
    for name, r in (("naive", 0.0), ("estimated", None)):
        found = weigh_votes(opinion, votes.repeat(1, copies), correlation=r)
        best = found.posterior.max(1)
        surplus[name] = float(best.values.mean() - (best.indices == truth).float().mean())
    assert abs(surplus["estimated"]) < 0.03
    assert (surplus["naive"] > 0.05) == (copies == 3)


def test_the_correlation_of_errors() -> None:
    known = torch.eye(2, dtype=torch.float64)[torch.tensor([0, 0, 0, 0])]
    twice = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    assert error_correlation(known, twice) == 1.0  # always right or wrong together
    mixed = torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert error_correlation(known, mixed) == 0.0  # as often as by chance
    assert error_correlation(known, known) == 0.0  # of single votes there are no pairs
