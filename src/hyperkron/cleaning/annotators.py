"""Labels from several annotators: how reliable each of them is, and what their votes say about the true class.

An annotator, a model or a labelling function is a *source*; on each row it votes for a class or is silent. With an
opinion p(k | x) that knows nothing of the votes, the confusion of every source and the posterior of every row follow
from each other by expectation maximisation:

    q_n(k) ∝ p(k | x_n) L_n(k) ,    log L_n(k) = w_n Σ_{s votes on n} log T_s[k, v_ns] ,    T_s[k, v] = P(s says v | k)

T_s counts silence as an answer, so Σ_v T_s[k, v] is how often the source votes on rows of class k: a rule that only
ever says "spam" still tells, because it speaks more often where there is spam. Silence itself is no evidence, and a row
on which every source is silent keeps its opinion: L = 1. One source that votes on every row has the noise matrix T of
single labels.

Sources may repeat each other. Votes on a row with m of them, whose errors have the correlation r, are worth
m / (1 + (m − 1) r) independent ones (the design effect), so w_n = 1 / (1 + (m_n − 1) r).

References:
    Dawid & Skene, 1979, "Maximum likelihood estimation of observer error-rates using the EM algorithm".
    Kish, 1965, "Survey sampling", on the design effect.
    Ratner et al., 2017, "Snorkel: rapid training data creation with weak supervision".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperkron.cleaning.choice import wilson
from hyperkron.cleaning.data.labelled import SILENT

ITERATIONS = 10
"""Of expectation maximisation."""
SHRINKAGE = 100.0
"""Votes' worth of the other sources, added to those of each source: one with few votes is taken for an average one."""


@dataclass(frozen=True)
class Votes:
    """What the sources said, and how it is read.

    Attributes:
        confusion: T (S, C, C), P(source s says v | true class k); a line adds up to how often the source votes.
        correlation: r, of the errors of two votes on one row.
        log_likelihood: log L (N, C); 0 on rows without a vote.
        posterior: q (N, C).
    """

    confusion: Tensor
    correlation: float
    log_likelihood: Tensor
    posterior: Tensor


def weigh_votes(
    opinion: Tensor,
    votes: Tensor,
    iterations: int = ITERATIONS,
    strength: float = 1.0,
    shrinkage: float = SHRINKAGE,
    correlation: float | None = None,
) -> Votes:
    """The confusion of every source and the posterior of every row, by expectation maximisation with the opinion fixed.

    Args:
        opinion: p(k | x), probabilities (N, C).
        votes: (N, S), classes, or −1 where a source is silent.
        iterations: of expectation maximisation.
        strength: rows of each class, added to T_s, on which the source votes as it does on all rows.
        shrinkage: votes, added for each answer of a source, that are as often right as those of the others.
        correlation: r; None estimates it.

    Example:
        >>> opinion = torch.tensor([[0.6, 0.4]] * 4)
        >>> votes = torch.tensor([[0, 0], [1, 1], [0, -1], [-1, -1]])
        >>> found = weigh_votes(opinion, votes)
        >>> found.posterior.argmax(1).tolist(), found.log_likelihood[3].tolist()
        ([0, 1, 0, 0], [0.0, 0.0])
    """
    p, said = opinion.detach().double().cpu(), votes.cpu()
    classes, sources = p.shape[1], said.shape[1]
    row, source = (said != SILENT).nonzero(as_tuple=True)
    answer = source * classes + said[row, source]  # of all that can be said by anybody
    voted = (said != SILENT).any(1)
    spoken = torch.bincount(answer, minlength=sources * classes).double().view(sources, classes)
    shares = torch.zeros_like(p).index_put_((row, said[row, source]), torch.ones(len(row)).double(), accumulate=True)
    q, r = p, 0.0 if correlation is None else correlation
    for step in range(iterations):
        meant = torch.zeros(sources * classes, classes).double().index_add_(0, answer, q[row])
        size = q[voted].sum(0)
        meant = _shrunk(meant.view(sources, classes, classes), spoken, size, shrinkage)
        meant = meant + strength * spoken[..., None] / max(1, int(voted.sum()))
        confusion = meant / (size + strength)
        if correlation is None and step > 0:  # the opinion alone knows too little about errors
            r = error_correlation(q, shares)
        told = confusion.clamp(min=1e-30).log().flatten(0, 1)
        summed = torch.zeros_like(p).index_add_(0, row, told[answer])
        log_likelihood = summed / (1 + (shares.sum(1, keepdim=True) - 1).clamp(min=0) * r)
        q = (p.clamp(min=1e-30).log() + log_likelihood).softmax(1)
    return Votes(confusion.mT.contiguous().to(opinion), r, log_likelihood.to(opinion), q.to(opinion))


def _shrunk(meant: Tensor, spoken: Tensor, size: Tensor, shrinkage: float) -> Tensor:
    """How often each class is meant (S, C of the answer, C), with votes of the other sources added to each answer.

    Where others hardly give that answer, their votes are as often right as all votes, and else of any class.
    """
    if shrinkage == 0:
        return meant
    right = meant.sum(0).diagonal().sum() / spoken.sum().clamp(min=1)
    usual = torch.diag(right.expand(len(size))) + (1 - right) * size / size.sum()
    others, heard = meant.sum(0) - meant, spoken.sum(0) - spoken
    mean = (others + shrinkage * usual) / (heard + shrinkage)[..., None]
    return (meant + shrinkage * mean) * (spoken / (spoken + shrinkage))[..., None]


def error_correlation(posterior: Tensor, shares: Tensor) -> float:
    """r: how much more often two votes on one row are both wrong than if one knew nothing of the other, 0 to 1.

        r = (P(both wrong) − e²) / (e − e²) ,      e = P(one is wrong) ,      over all pairs of votes on one row

    ``shares`` is how many votes each class has on each row (N, C).
    """
    count = shares.sum(1, keepdim=True)
    wrong = count - shares
    pairs = float((count * (count - 1)).sum())
    if pairs == 0:
        return 0.0
    both = float((posterior * wrong * (wrong - 1)).sum()) / pairs
    one = float((posterior * wrong * (count - 1)).sum()) / pairs
    return min(1.0, max(0.0, (both - one**2) / max(one - one**2, 1e-12)))


def label_matrix(posterior: Tensor, given: Tensor) -> Tensor:
    """P(given label | true class) (C, C) by the posterior; rows without a label, −1, do not count."""
    labelled = given != SILENT
    said = torch.nn.functional.one_hot(given[labelled], posterior.shape[1]).to(posterior)
    counts = posterior[labelled].T @ said + said.mean(0)
    return counts / counts.sum(1, keepdim=True)


def reliability(
    posterior: Tensor, votes: Tensor, annotators: Sequence[str], classes: Sequence[str]
) -> list[dict[str, Any]]:
    """How far each source can be relied on, those with most votes first.

    ``right`` is the share of its votes that are right by the posterior, with Wilson's 95 % interval; ``said`` and
    ``meant`` are its most frequent mistake, with how often it is expected to happen.

    Example:
        >>> votes = torch.tensor([[0, 1], [1, 1], [0, -1]])
        >>> known = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> [(s["name"], s["votes"], s["right"], s["said"]) for s in reliability(known, votes, "ab", ["no", "yes"])]
        [('a', 3, 1.0, None), ('b', 2, 0.5, 'yes')]
    """
    found = []
    for name, said in zip(annotators, votes.cpu().T, strict=True):
        spoke = said != SILENT
        count = int(spoke.sum())
        meant = torch.zeros(len(classes), len(classes)).double()
        meant.index_add_(0, said[spoke], posterior.cpu()[spoke].double())
        right = float(meant.diagonal().sum())
        low, high = wilson(min(1.0, right / count), count) if count else (0.0, 1.0)
        wrong = meant - torch.diag(meant.diagonal())
        v, k = divmod(int(wrong.argmax()), len(classes))
        often = float(wrong[v, k])
        some = often >= 0.5
        found.append(
            {
                "name": name,
                "votes": count,
                "right": round(right / count, 6) if count else None,
                "low": round(low, 6),
                "high": round(high, 6),
                "said": classes[v] if some else None,
                "meant": classes[k] if some else None,
                "mistakes": round(often, 1) if some else 0.0,
            }
        )
    return sorted(found, key=lambda source: -source["votes"])
