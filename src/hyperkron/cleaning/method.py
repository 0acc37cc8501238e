"""The method: experts, their pooled opinion, the learnt evidence, and the network that is trained on it.

1. *Experts*, each asked only about rows it has not seen: a network of the trusted rows, a network of all rows as they
   are, and one trained through the noise matrix that the second one shows on the trusted rows.
2. *Opinion*: their logarithmic pool, fitted to the trusted rows and carried over to the class frequencies of the noisy
   ones; the noise matrix by EM.
3. *Fold models*: κ, β and γ, learnt by KFAC hypergradients (``fold_models.py``). A fold model is then one more expert.
4. *Verdict on each row*: q(k) ∝ p̄(k | x) T[k, y]. A row is as wrong as 1 − q(y), and its suggestion is argmax q.
5. *The network*: fitted to log e = κ log p̄ + β log T[:, y] on the noisy rows, weighted by how sure q is of them, to
   their given labels as far as γ and q believe them, and to the trusted rows; for three quarters of the epochs of a
   plain training, before it begins to fit the noise that is left, and at a higher learning rate where the fold models
   were not much surer of trusted rows than they were right.

All other networks are trained on half of the rows or less, also for half as many epochs, so that the whole costs two to
three plain trainings. Where there are few rows, epochs are not what costs: perceptrons are then trained side by side
(``batched_training.py``), in fewer steps at a higher rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperkron.cleaning.annotators import Votes, weigh_votes
from hyperkron.cleaning.evidence import (
    Pool,
    frequencies,
    label_evidence,
    logs,
    noise_matrix_from_trusted,
    of_label,
    overconfidence,
    shifted,
    stack,
)
from hyperkron.cleaning.fold_models import Half, held_out, learn_evidence
from hyperkron.cleaning.stages import Tensors
from hyperkron.cleaning.trainer import TrainingPlan, TrainingTargets, predict
from hyperkron.cleaning.work import Work

LEARNING_RATE_BOOST = 3.0
"""Factor of its learning rate where the fold models were not trained enough."""
CONFIDENCE_MARGIN = 0.2
"""Nats by which a network that is trained enough is surer of new rows than it is right; with less it is too gentle."""
PRIOR_LOSS = 6.0
"""Nats added to the sum over the trusted rows, as if one more had been answered wrongly: few rows decide nothing."""


# --- experts ------------------------------------------------------------------------------------------------


def trusted_expert(work: Work) -> Tensors:
    """Networks of trusted rows alone: one of all, asked about noisy rows; one of each half, asked about the other.

    The halves answer for the trusted rows, and their opinion on the noisy rows of the other half is the fold models'.
    """

    def compute() -> Tensors:
        learn = [work.trusted, *(work.side(1 - half, work.trusted) for half in (0, 1))]
        targets = [TrainingTargets(rows, work.known(rows)) for rows in learn]
        first = 1 if work.many else 0  # then the one that counts most can be trained longer at little cost
        alone, *both = [
            network
            for some, plan in ((targets[:first], work.short), (targets[first:], work.brief))
            if some
            for network in work.fit(some, plan, "trusted expert", seeds=[0] * len(some))
        ]
        halved = torch.zeros(len(work.given), work.classes, device=work.device)
        for half, network in enumerate(both):
            ask = (work.fold == half).nonzero()[:, 0]
            halved[ask] = predict(network, work.inputs, ask)
        asked = halved.clone()
        asked[work.noisy] = predict(alone, work.inputs, work.noisy)
        return {"asked": asked, "halved": halved}

    return work.stages("trusted-expert", compute)


def across(work: Work, name: str, evidence: Callable[[Tensor], Tensor]) -> Tensor:
    """Opinions on all rows, each from a network trained on the other half of all rows."""
    found = torch.zeros(len(work.given), work.classes, device=work.device)
    everything = torch.cat([work.noisy, work.trusted])
    learn = [work.labelled(work.side(1 - half, everything)) for half in (0, 1)]
    targets = [TrainingTargets(rows, evidence(rows)) for rows in learn]
    networks = work.fit(targets, work.quick(max(map(len, learn))), name, seeds=[1, 2])
    for half, network in enumerate(networks):
        ask = work.side(half, everything)
        found[ask] = predict(network, work.inputs, ask)
    return found


def pooled_expert(work: Work) -> Tensor:
    """Networks of all rows with the labels as they are: what the given label of a row would be."""
    return work.stages("pooled-expert", lambda: {"asked": across(work, "pooled expert", work.known)})["asked"]


def matrix_expert(work: Work, pooled: Tensor) -> Tensor:
    """Networks trained through the noise matrix that the pooled expert shows on the trusted rows."""

    def compute() -> Tensors:
        matrix = noise_matrix_from_trusted(pooled[work.trusted], work.given[work.trusted], work.classes)

        def evidence(rows: Tensor) -> Tensor:
            through = label_evidence(matrix, work.given[rows])
            sure = torch.isin(rows, work.trusted)
            return torch.where(sure[:, None], work.known(rows), through)

        return {"asked": across(work, "noise-matrix expert", evidence)}

    return work.stages("matrix-expert", compute)["asked"]


# --- opinion, fold models, verdict ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Opinion:
    """What the experts say.

    Attributes:
        experts: log-probabilities (J, rows, C).
        pool: a and b.
        log_p: log p̄ of the noisy rows, under their own class frequencies (N, C).
        votes: what their labels say: T, log L and q (N, C).
    """

    experts: Tensor
    pool: Pool
    log_p: Tensor
    votes: Votes

    @property
    def posterior(self) -> Tensor:
        """q of the noisy rows (N, C)."""
        return self.votes.posterior


def opinion(work: Work, experts: list[Tensor]) -> Opinion:
    """Pool the experts on the trusted rows, and find T and the posterior of the noisy rows."""
    stacked, labels = torch.stack([logs(p) for p in experts]), work.given[work.trusted]
    pool = stack(stacked[:, work.trusted], labels)
    log_p = shifted(pool(stacked[:, work.noisy]), frequencies(labels, work.classes))
    votes = work.given[work.noisy][:, None] if work.votes is None else work.votes
    return Opinion(stacked, pool, log_p, weigh_votes(log_p.exp(), votes))


def unseen(first: Opinion, halved: Tensor) -> Tensor:
    """log p̄ of all rows from experts that saw nothing of the trusted rows in the half of the row."""
    return first.pool(torch.cat([logs(halved)[None], first.experts[1:]]))


def halves(work: Work, first: Opinion, halved: Tensor) -> list[Half]:
    """The two problems of the fold models, each with the opinion of experts that saw nothing of its held-out rows.

    The opinion keeps the class frequencies of the trusted rows, which the fold models are judged on.
    """
    log_p = unseen(first, halved)
    given = torch.zeros_like(log_p)
    given[work.noisy] = first.votes.log_likelihood
    found = []
    for h in (0, 1):
        noisy = work.side(h, work.noisy)
        kept, judged = work.side(1 - h, work.trusted), work.side(h, work.trusted)
        found.append(Half(noisy, kept, judged, log_p[noisy], given[noisy]))
    return found


def fold_models(work: Work, first: Opinion, halved: Tensor) -> Tensors:
    """Learn κ, β and γ: the fold models' opinion on all rows (``asked``), ``log_scale``, and how it went."""

    def compute() -> Tensors:
        both = halves(work, first, halved)
        found = learn_evidence(
            work.build,
            work.inputs,
            work.given,
            both,
            work.quick(max(len(half.noisy) for half in both)),
            seed=work.config.seed + 11,
            learn=work.config.hypergradient == "kfac",
            tick=work.ticker("fold models"),
        )
        path = [list(p.values()) for p in found.path]
        return {
            "asked": held_out(found, work.inputs, both, len(work.given), work.classes),
            "log_scale": found.evidence.log_scale.detach().clone(),
            "outer": torch.tensor(found.outer, dtype=torch.float64),
            "path": torch.tensor(path, dtype=torch.float64).reshape(-1, 3),
            "collapsed": torch.tensor(found.collapsed),
            "troubled": torch.tensor(found.troubled),
        }

    return work.stages("fold-models", compute)


@dataclass(frozen=True)
class Outcome:
    """The result of the method, before the network is trained.

    Attributes:
        first, final: the opinions without and with the fold models.
        fold_models: their held-out opinion on all rows.
        matrix_expert, pooled_expert, trusted_expert: those of the experts.
        scale: κ, β and γ.
        outer, path: the way of the held-out loss and of (κ, β, γ).
        collapsed: λ was put back.
        troubled: hypergradients whose solve did not end well.
    """

    first: Opinion
    final: Opinion
    fold_models: Tensor
    trusted_expert: Tensor
    halved: Tensor
    pooled_expert: Tensor
    matrix_expert: Tensor
    scale: tuple[float, float, float]
    outer: list[float]
    path: list[list[float]]
    collapsed: bool
    troubled: int

    def error_probability(self, given: Tensor) -> Tensor:
        """1 − q(y) of the noisy rows; NaN where there is no label."""
        return torch.where(given >= 0, 1 - of_label(self.final.posterior, given), torch.nan)

    def weight(self, given: Tensor) -> Tensor:
        """How much each noisy row counts: q(y), or 2 max q − 1 where another class is that much surer."""
        return _certainty(self.final.posterior, given)

    def targets(self, work: Work, rows: Tensor, half: int | None = None) -> TrainingTargets:
        """What the network learns of these rows: (w L(e) + γ q(y) CE(y)) / (1 + γ).

        For one half, whose trusted rows are going to judge the network, without the fold models and with experts that
        saw none of those rows.
        """
        given = work.given[work.noisy]
        log_p, through = self.final.log_p, self.final.votes.log_likelihood
        if half is not None:
            log_p, through = unseen(self.first, self.halved)[work.noisy], self.first.votes.log_likelihood
            log_p = shifted(log_p, frequencies(work.given[work.trusted], work.classes))
        posterior, (kappa, beta, gamma) = (log_p + through).softmax(1), self.scale
        evidence = work.known(torch.arange(len(work.given), device=work.device))
        weight, belief = torch.ones(2, len(work.given), device=work.device)
        evidence[work.noisy] = kappa * log_p + beta * through
        weight[work.noisy] = _certainty(posterior, given)
        belief[work.noisy] = of_label(posterior, given)
        believed = (work.given[rows].clamp(min=0), gamma / (1 + gamma) * belief[rows])
        return TrainingTargets(rows, evidence[rows], weight[rows] / (1 + gamma), believed)

    def paced(self, work: Work, plan: TrainingPlan) -> TrainingPlan:
        """``plan`` for a network trained on :meth:`targets`: at a higher rate where training was too gentle.

        The fold models tell, asked about the M trusted rows that they had not seen:

            Σ_m [CE_m − H_m] + PRIOR_LOSS < M · CONFIDENCE_MARGIN ,

        cross-entropy and entropy of what they predict. Where they are surer than they are right by more than that, more
        training would fit the noise.
        """
        surplus = overconfidence(self.fold_models[work.trusted], work.given[work.trusted]) - CONFIDENCE_MARGIN
        return plan.faster(LEARNING_RATE_BOOST) if len(work.trusted) * surplus + PRIOR_LOSS < 0 else plan


def _certainty(posterior: Tensor, given: Tensor) -> Tensor:
    return torch.maximum(of_label(posterior, given), 2 * posterior.max(1).values - 1)


def clean_labels(work: Work) -> Outcome:
    """Everything up to the verdict on each row and the evidence for the network."""
    alone, pooled = trusted_expert(work), pooled_expert(work)
    return conclude(work, alone, pooled, matrix_expert(work, pooled))


def conclude(work: Work, alone: Tensors, pooled: Tensor, matrix: Tensor) -> Outcome:
    """What follows from the three experts: the fold models, the verdict and the evidence."""
    first = opinion(work, [alone["asked"], pooled, matrix])
    learnt = fold_models(work, first, alone["halved"])
    final = opinion(work, [alone["asked"], pooled, matrix, learnt["asked"]])
    scale = learnt["log_scale"].exp()
    return Outcome(
        first,
        final,
        learnt["asked"],
        alone["asked"],
        alone["halved"],
        pooled,
        matrix,
        (float(scale[0]), float(scale[1]), float(scale[2])),
        learnt["outer"].tolist(),
        learnt["path"].tolist(),
        bool(learnt["collapsed"]),
        int(learnt["troubled"]),
    )
