"""How labels go wrong, against simulated labels and one step by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperkron.cleaning.label_noise import (
    FIRST_RATE,
    FIRST_SHARE,
    corrected_frequencies,
    label_noise,
    under_frequencies,
)
from hyperkron.cleaning.method import opinion

DOUBLE = torch.float64
EVEN = torch.full((3,), 1 / 3, dtype=DOUBLE)


def _redrawn(true: Tensor, share: float, random: torch.Generator) -> Tensor:
    hit = torch.rand(len(true), generator=random) < share
    return torch.where(hit, torch.randint(3, (len(true),), generator=random), true)


def _normal(true: Tensor, random: torch.Generator) -> Tensor:
    """Inputs of unit variance around 1.5 e_k."""
    return 1.5 * F.one_hot(true, 3) + torch.randn(len(true), 3, generator=random)


def test_the_noise_matrix_is_recovered_from_exact_opinions() -> None:
    wanted = torch.tensor([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05], [0.3, 0.3, 0.4]], dtype=DOUBLE)
    true, random = torch.arange(60000) % 3, torch.Generator().manual_seed(0)
    given = torch.multinomial(wanted[true].float(), 1, generator=random)[:, 0]
    found = label_noise((F.one_hot(true, 3).double() + 1e-12).log(), EVEN, given)
    assert float((found.matrix - wanted).abs().max()) < 0.01 and torch.equal(found.posterior.argmax(1), true)
    assert found.explained == 0


def test_a_label_drawn_again_alike_in_all_classes_is_found_from_an_unsure_opinion() -> None:
    """That is what the prior assumes; T has 0.7 on its diagonal and 0.15 beside it."""
    random, true = torch.Generator().manual_seed(0), torch.arange(6000) % 3
    given, shown = _redrawn(true, 0.45, random), _redrawn(true, 0.2, random)
    found = label_noise((F.one_hot(shown, 3).double() * 0.8 + 0.2 / 3).log(), EVEN, given)
    assert float((found.matrix.diagonal() - 0.7).abs().max()) < 0.03
    assert torch.allclose(found.posterior.sum(1), torch.ones(6000, dtype=DOUBLE))


def test_classes_that_the_experts_confuse_do_not_make_labels_wrong() -> None:
    """Between classes 1 and 2 the opinion is overconfident chance; their labels are as right as those of class 0."""
    random, true = torch.Generator().manual_seed(0), torch.arange(1200) % 3
    given = _redrawn(true, 0.15, random)
    opinion = F.one_hot(true, 3).double() * 0.9 + 0.1 / 3
    guess = 0.25 + 0.5 * torch.rand(1200, generator=random).double()
    for k, share in ((1, guess), (2, 1 - guess)):
        opinion[true > 0, k] = (0.96 * share)[true > 0]
    opinion[true > 0, 0] = 0.04
    found = label_noise(opinion.log(), EVEN, given)
    doubt = 1 - found.posterior.gather(1, given[:, None])[:, 0]
    assert abs(float(doubt.mean()) - float((given != true).double().mean())) < 0.03
    assert float(found.matrix.diagonal().min()) > 0.75


def test_frequencies_of_rare_classes_come_from_the_labels_where_the_opinion_is_of_balanced_rows() -> None:
    random, wanted = torch.Generator().manual_seed(0), torch.tensor([0.85, 0.1, 0.05], dtype=DOUBLE)
    true = torch.multinomial(wanted, 20000, replacement=True, generator=random)
    given = _redrawn(true, 0.3, random)
    balanced = (1.5 * _normal(true, random).double()).log_softmax(1)  # Bayes' rule where classes are as frequent
    found = label_noise(balanced, EVEN, given)
    assert float((found.frequent - wanted).abs().max()) < 0.02
    doubt = 1 - found.posterior.gather(1, given[:, None])[:, 0]
    assert abs(float(doubt.mean()) - float((given != true).double().mean())) < 0.02


@pytest.mark.long
def test_labels_that_go_by_the_input_are_not_taken_for_evidence_and_others_are() -> None:
    random, true = torch.Generator().manual_seed(0), torch.arange(6000) % 3
    x = _normal(true, random).double()
    log_p = (1.5 * x).log_softmax(1)
    other = torch.randint(3, (6000,), generator=random)
    rule = torch.where(torch.rand(6000, generator=random) < 0.3, other, x.argmax(1))
    said = 0.97 * F.one_hot(rule, 3).double() + 0.01  # the inputs tell the label, so it tells nothing of the class
    found, blind = label_noise(log_p, EVEN, rule, said), label_noise(log_p, EVEN, rule)
    assert found.explained > 0.9 and blind.explained == 0
    right, rows = (rule == true).double(), torch.arange(6000)
    off = [abs(float((one.posterior[rows, rule] - right).mean())) for one in (found, blind)]
    assert off[0] < 0.02 < off[1]
    assert F.nll_loss(found.posterior.log(), true) < F.nll_loss(blind.posterior.log(), true) - 0.05
    given = _redrawn(true, 0.5, random)  # noise of the class: a model of the labels, here too sure, knows nothing more
    said = (2 * (0.5 * log_p.exp() + 0.5 / 3).log()).softmax(1)
    assert label_noise(log_p, EVEN, given, said).explained < FIRST_SHARE / 2  # and goes on falling
    assert label_noise(log_p, EVEN, given, said, iterations=600).explained < 0.005


def test_rows_without_a_label_keep_the_opinion_and_count_for_the_frequencies() -> None:
    random, true = torch.Generator().manual_seed(0), torch.arange(300) % 3
    log_p, given = (1.5 * _normal(true, random).double()).log_softmax(1), _redrawn(true, 0.3, random)
    given[:40] = -1
    found = label_noise(log_p, EVEN, given, log_p.exp())
    assert torch.equal(found.log_likelihood[:40], torch.zeros(40, 3, dtype=DOUBLE))
    assert torch.allclose(found.posterior[:40], found.log_p[:40].exp())
    assert torch.allclose(found.log_p, (log_p + (found.frequent / EVEN).log()).log_softmax(1))


def test_one_step_is_the_closed_form() -> None:
    log_p, given = torch.randn(9, 3, dtype=DOUBLE).log_softmax(1), torch.arange(9) % 3
    said = torch.rand(9, 3, dtype=DOUBLE).softmax(1)
    found = label_noise(log_p, EVEN, given, said, iterations=1)
    rows = torch.arange(9)
    first = (1 - FIRST_RATE) * torch.eye(3, dtype=DOUBLE) + FIRST_RATE / 3
    p, direct = log_p.exp(), said[rows, given][:, None]  # labels are as frequent, so π begins as π⁰
    by_class, by_input = (1 - FIRST_SHARE) * p * first[:, given].T, FIRST_SHARE * p * direct
    both = (by_class + by_input).sum(1, keepdim=True)
    assert abs(found.explained - float((by_input / both).sum() / (9 + 5))) < 1e-12
    counts = (by_class / both).T @ F.one_hot(given, 3).double()
    doubt = (by_class / both * (1 - p)).sum(0)
    back = counts.diagonal() * (FIRST_RATE / 3) / (1 - FIRST_RATE + FIRST_RATE / 3)
    drawn = counts.sum(0) - counts.diagonal() + back
    rate = (drawn.sum() + 0.3 * doubt.sum() * FIRST_RATE) / (counts.sum() + 0.3 * doubt.sum())
    again = drawn + rate * doubt.sum() / 3 + 1
    prior = (1 - rate) * torch.eye(3, dtype=DOUBLE) + rate * again / again.sum()
    counts = counts + (1 + 0.7 * doubt)[:, None] * prior
    assert torch.allclose(found.matrix, counts / counts.sum(1, keepdim=True))
    joint = found.log_p.exp() * ((1 - found.explained) * found.matrix[:, given].T + found.explained * direct)
    assert torch.allclose(found.posterior, joint / joint.sum(1, keepdim=True), atol=1e-5)


def test_experts_of_noisy_rows_are_put_under_the_frequencies_of_the_trusted_ones() -> None:
    random, frequent = torch.Generator().manual_seed(0), torch.tensor([0.8, 0.15, 0.05], dtype=DOUBLE)
    true = torch.multinomial(frequent, 20000, replacement=True, generator=random)
    x = 1.5 * _normal(true, random).double()
    balanced, own = x.log_softmax(1), (x + frequent.log()).log_softmax(1)
    noisy = torch.arange(20000)
    found = under_frequencies(torch.stack([balanced, own]), noisy, EVEN)
    assert torch.equal(found[0], balanced)
    assert float((found[1].exp() - balanced.exp()).abs().max()) < 0.03


def test_frequencies_that_are_known_stay_as_they_are() -> None:
    true, wanted = torch.arange(600) % 3, torch.tensor([0.6, 0.3, 0.1], dtype=DOUBLE)
    log_p = (F.one_hot(true, 3).double() + 0.1).log().log_softmax(1)
    assert torch.equal(label_noise(log_p, EVEN, true, frequent=wanted).frequent, wanted)


def test_frequencies_follow_the_mistakes_on_many_trusted_rows_and_the_labels_where_there_are_few() -> None:
    """The opinion answers 0 for 40 % of the rows of class 1, so that 0 seems twice as frequent as it is."""
    answers, prior = torch.where(torch.arange(1000) < 700, 0, 1), torch.tensor([0.6, 0.4], dtype=DOUBLE)

    def found(rows: int) -> Tensor:
        labels = torch.arange(10 * rows) // 5 % 2
        tested = torch.where(torch.arange(10 * rows) % 5 < 2, 0, labels)
        return corrected_frequencies(answers, tested, labels, prior)

    assert float(found(200)[0]) == pytest.approx(0.5, abs=0.01)
    assert 0.5 < float(found(2)[0]) < 0.6


def test_a_label_given_too_often_does_not_make_its_class_frequent() -> None:
    """Three classes are as frequent, 60 % of the labels become 0, experts are weak, 30 rows a class are trusted."""
    frequent, off = [], []
    for seed in range(5):
        random, true = torch.Generator().manual_seed(seed), torch.arange(1590) % 3
        given = torch.where(torch.rand(1590, generator=random) < 0.6, 0, true)
        given[1500:] = true[1500:]
        signals = [0.8 * F.one_hot(true, 3) + torch.randn(1590, 3, generator=random) for _ in range(2)]
        experts = [(0.8 * signal).softmax(1) for signal in signals]
        said = 0.6 * F.one_hot(torch.zeros(1590, dtype=torch.long), 3) + 0.4 * experts[1]
        rows = torch.arange(1590).split([1500, 90])
        work = SimpleNamespace(given=given, noisy=rows[0], trusted=rows[1], classes=3, votes=None)
        found = opinion(cast(Any, work), experts, said)
        frequent.append(float(found.shift.exp()[0]) / 3)
        right = found.posterior.gather(1, given[:1500, None]).mean()
        off.append(float(1 - right) - float((given != true).float().mean()) * 1590 / 1500)
    assert sum(frequent) / 5 < 0.45
    assert abs(sum(off) / 5) < 0.04
