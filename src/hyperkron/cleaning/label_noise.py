"""How labels go wrong: the noise matrix, the class frequencies and the part of the labels that the inputs explain.

With an opinion p(k | x) that holds where classes have the frequencies π⁰, a row's label y is taken to come about as

    P(y | k, x) = (1 − w) T[k, y] + w n(y | x) ,        P(k | x) ∝ p(k | x) π_k / π⁰_k

T is noise that depends on the class alone. n is a model of the *given* labels that has not seen the row: what it
predicts better than p and T together (rules that go by a word, an annotator's habit) does not come from the class, so
it says nothing about it. (Where labels follow both the class and the input, w takes a part of the first as well, and
too many labels seem wrong.) All of T, π and w follow from the labels by expectation maximisation. Where the opinion
cannot tell classes apart the labels look random to it; each of T, π and the error rate therefore has a prior that
counts as much as rows are in doubt:

    T⁰[k, y] = (1 − ε) [k = y] + ε r_y ,      π⁰⁰ ∝ frequency of y − ε r_y ,      ε around FIRST_RATE

a label drawn again with one probability ε for all classes, from frequencies r that are estimated and pulled to equal.

References:
    Dawid & Skene, 1979, "Maximum likelihood estimation of observer error-rates using the EM algorithm".
    Saerens, Latinne & Decaestecker, 2002, "Adjusting the outputs of a classifier to new a priori probabilities".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MATRIX_PRIOR, RATE_PRIOR, FIRST_RATE = 0.7, 0.3, 0.2
"""How much the priors of T and of ε count for each row in doubt, and the error rate to which ε is pulled."""
EXPLAINED_PRIOR = 5.0
"""Rows, added to those that T explains: w needs more than a chance gain."""
FIRST_SHARE = 0.1
"""w at the beginning."""
LEAST_SHARE = 0.1
"""Of its frequency among the labels, what a class keeps at least in the prior of π."""
ITERATIONS = 100
FREQUENCY_PRIOR = 6.0
"""Trusted rows a class that the frequencies told by the labels are worth, against those that the mistakes tell."""


@dataclass(frozen=True)
class LabelNoise:
    """What the given labels say.

    Attributes:
        matrix: T (C, C), of the labels that the class explains.
        explained: w, the share of labels that inputs explain; 0 without n.
        frequent: π (C,).
        log_p: the opinion under π (N, C).
        log_likelihood: log P(y | k, x) (N, C); 0 for rows without a label.
        posterior: q(k) ∝ P(k | x) P(y | k, x) (N, C).
    """

    matrix: Tensor
    explained: float
    frequent: Tensor
    log_p: Tensor
    log_likelihood: Tensor
    posterior: Tensor


def label_noise(
    log_p: Tensor,
    before: Tensor,
    given: Tensor,
    said: Tensor | None = None,
    iterations: int = ITERATIONS,
    frequent: Tensor | None = None,
) -> LabelNoise:
    """T, π, w and the posterior by expectation maximisation, with the opinion kept fixed.

    Args:
        log_p: log-opinion (N, C), where classes have the frequencies ``before``.
        before: π⁰ (C,), all positive.
        given: the labels (N,), −1 for none.
        said: n, probabilities of the given labels by a model that did not see the row (N, C); None for w = 0.
        iterations: of EM.
        frequent: π (C,), where it is known; None estimates it.

    Example:
        >>> true = torch.arange(300) % 3
        >>> given = torch.where(torch.arange(300) < 30, (true + 1) % 3, true)
        >>> found = label_noise((4.0 * F.one_hot(true, 3)).log_softmax(1), torch.full((3,), 1 / 3), given)
        >>> found.posterior.argmax(1).equal(true), bool((found.matrix.diagonal() - 0.9).abs().max() < 0.05)
        (True, True)
    """
    classes, told = log_p.shape[1], given >= 0
    labels = F.one_hot(given.clamp(min=0), classes).to(log_p) * told[:, None]
    rows, even = labels.sum().clamp(min=1), torch.full_like(before, 1 / classes)
    common, same = labels.sum(0) / rows, torch.eye(classes).to(log_p)
    direct = torch.zeros_like(log_p[:, :1]) if said is None else (said.to(log_p) * labels).sum(1, keepdim=True)
    rate, again, explained = log_p.new_tensor(FIRST_RATE), even, 0.0 if said is None else FIRST_SHARE
    matrix, known = (1 - rate) * same + rate * again, frequent
    frequent = _true_frequencies(common, rate, again) if known is None else known
    for _ in range(iterations):
        p = (log_p + (frequent / before).log()).softmax(1)
        by_class, by_input = (1 - explained) * p * matrix[:, given].T, explained * p * direct
        both = (by_class + by_input).sum(1, keepdim=True).clamp(min=1e-30)
        mine, posterior = by_class / both * told[:, None], torch.where(told[:, None], (by_class + by_input) / both, p)
        if said is not None:
            explained = float((by_input / both * told[:, None]).sum() / (rows + EXPLAINED_PRIOR))
        counts, doubt = mine.T @ labels, (mine * (1 - p)).sum(0)
        kept = counts.diagonal()
        drawn = counts.sum(0) - kept + kept * rate * again / (1 - rate + rate * again).clamp(min=1e-9)
        unsure = RATE_PRIOR * doubt.sum()
        rate = ((drawn.sum() + unsure * FIRST_RATE) / (counts.sum() + unsure).clamp(min=1)).clamp(0, 1)
        again = drawn + rate * doubt.sum() * even + 1
        again = again / again.sum()
        if known is None:
            pull = (1 - explained) * (posterior * (1 - p) * told[:, None]).sum()
            frequent = posterior.sum(0) + pull * _true_frequencies(common, rate, again) + 1
            frequent = frequent / frequent.sum()
        counts = counts + (1 + MATRIX_PRIOR * doubt)[:, None] * ((1 - rate) * same + rate * again)
        matrix = counts / counts.sum(1, keepdim=True)
    log_p = (log_p + (frequent / before).log()).log_softmax(1)
    likelihood = (1 - explained) * matrix[:, given].T + explained * direct
    through = (likelihood + 1e-6).log() * told[:, None]
    return LabelNoise(matrix, explained, frequent, log_p, through, (log_p + through).softmax(1))


def _true_frequencies(common: Tensor, rate: Tensor, again: Tensor) -> Tensor:
    """π of labels with the frequencies ``common``, were a share ``rate`` of them drawn again."""
    found = ((common - rate * again) / (1 - rate).clamp(min=0.05)).clamp(min=0) + LEAST_SHARE * common + 1e-6
    return found / found.sum()


def corrected_frequencies(answers: Tensor, tested: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    """Class frequencies π under which the mistakes seen on the trusted rows explain the answers on the noisy rows.

        max_π  Σ_j m_j log Σ_k π_k M[k, j]  +  FREQUENCY_PRIOR · C / rows · Σ_k prior_k log π_k

    m_j is the share of the noisy rows that are answered j, M[k, j] that of the trusted rows of class k, with one more
    right answer for each. An opinion that answers a class too often also makes it seem frequent; M shows by how much.

    ``answers`` are the classes answered for the noisy rows (N,), ``tested`` those for the trusted rows, whose classes
    are ``labels``, and ``prior`` the frequencies that the labels tell (C,), all positive.

    References:
        Lipton, Wang & Smola, 2018, "Detecting and correcting for label shift with black box predictors".

    Example:
        >>> true = torch.arange(100) % 2
        >>> tested = torch.where(torch.arange(100) < 40, 0, true)  # of class 1 20 of 50 are answered 0
        >>> even = torch.full((2,), 0.5)
        >>> corrected_frequencies(torch.tensor([0] * 7 + [1] * 3), tested, true, even).allclose(even, atol=0.01)
        True
    """
    classes = len(prior)
    mistakes = torch.eye(classes).to(prior).index_put_((labels, tested), torch.ones_like(prior[:1]), accumulate=True)
    mistakes = mistakes / mistakes.sum(1, keepdim=True)
    share = torch.bincount(answers, minlength=classes).to(prior) / max(1, len(answers))
    weight, found = FREQUENCY_PRIOR * classes / max(1, len(labels)), prior
    for _ in range(ITERATIONS):
        part = found[:, None] * mistakes
        found = (part / part.sum(0).clamp(min=1e-30) * share).sum(1) + weight * prior
        found = found / found.sum()
    return found


def under_frequencies(experts: Tensor, noisy: Tensor, before: Tensor) -> Tensor:
    """Log-opinions (J, rows, C) of experts as if classes had the frequencies ``before``, those of the trusted rows.

        log p_j(k | x) + log π⁰_k / π_j(k) ,      π_j = the mean of p_j over the noisy rows

    The first expert learnt from trusted rows and stays; the others learnt from noisy rows, where classes may be more or
    less frequent, so on trusted rows that are the same for each class they would seem biased against rare ones.
    """
    own = experts[1:, noisy].exp().mean(1, keepdim=True) + 1e-3
    own = own / own.sum(2, keepdim=True)
    return torch.cat([experts[:1], (experts[1:] + (before / own).log()).log_softmax(2)])
