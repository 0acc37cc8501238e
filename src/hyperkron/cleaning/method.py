"""The method: experts, their pooled opinion, the evidence, and the network that is trained on it.

1. *Experts*, each asked only about rows it has not seen: a network of the trusted rows, a network of the noisy rows as
   they are, and one of all rows, trained through the noise matrix that the second one shows on the trusted rows; for
   tables a random forest of the noisy rows; and a model of the user's, where there is one.
2. *Opinion*: their logarithmic pool, fitted to the trusted rows and carried over to the class frequencies of the noisy
   ones. These, the noise matrix, and the share of labels that the inputs explain come from the labels by EM; the
   frequencies are then corrected by the mistakes of the opinion on the trusted rows.
3. *Fold models*: networks of half of the rows, fitted to the evidence as the last network will be. Those of the preset
   (κ, β, γ) that predicts held-out trusted rows best are one more expert; so is a forest of the posterior q.
4. *Verdict on each row*: q(k) ∝ p̄(k | x) P(y | k, x). A row is as wrong as 1 − q(y), and its suggestion is argmax q.
   The verdict is that of the mean of q over the whole and the views that judge the candidates.
5. *The network*: fitted to log e = κ log p̄ + β log T[:, y] on the noisy rows, weighted by how sure q is of them, to
   their given labels as far as γ and q believe them, and to the trusted rows; at a higher learning rate where the fold
   models were not much surer of trusted rows than they were right.

Every function here takes several views of the work (``work.py``) and gives a result for each: the whole alone, or all
views without a fold of the trusted rows, whose networks are trained side by side. Nothing of a view depends on its
held-out rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hyperkron.cleaning.annotators import weigh_votes
from hyperkron.cleaning.config import FOREST
from hyperkron.cleaning.evidence import (
    Pool,
    frequencies,
    label_evidence,
    logs,
    noise_matrix_from_trusted,
    of_label,
    overconfidence,
    stack,
    with_unseen,
)
from hyperkron.cleaning.label_noise import corrected_frequencies, label_noise, under_frequencies
from hyperkron.cleaning.models.trees import forest
from hyperkron.cleaning.stages import Tensors
from hyperkron.cleaning.trainer import TrainingPlan, TrainingTargets, predict
from hyperkron.cleaning.work import Work, staged

PRESETS = ((0.35, 1.0, 0.3), (0.35, 1.0, 0.03), (0.35, 1.0, 1.0))
"""(κ, β, γ) of which held-out trusted rows pick one."""
LEARNING_RATE_BOOST = 3.0
"""Factor of its learning rate where the fold models were not trained enough."""
CONFIDENCE_MARGIN = 0.2
"""Nats by which a network that is trained enough is surer of new rows than it is right; with less it is too gentle."""
PRIOR_LOSS = 6.0
"""Nats added to the sum over the trusted rows, as if one more had been answered wrongly: few rows decide nothing."""
FOREST_EXPERT = "forest expert"
"""What the progress calls forests."""


# --- experts ------------------------------------------------------------------------------------------------


def cross_fitted(
    works: Sequence[Work], name: str, targets: Sequence[TrainingTargets], plan: TrainingPlan
) -> list[Tensor]:
    """Opinions (rows, C) on all rows of each view: on those of either half from a network of the other.

    ``targets`` are two for each view: of the network that is asked about half 0, then about half 1.
    """
    seeds = [work.shift + seed for work in works for seed in (1, 2)]
    networks = works[0].fit(targets, plan, name, seeds=seeds)
    halves = [[(work.fold == half).nonzero()[:, 0] for half in (0, 1)] for work in works]
    return [work.answers(networks[2 * i : 2 * i + 2], halves[i]) for i, work in enumerate(works)]


def trusted_expert(works: Sequence[Work]) -> list[Tensors]:
    """Networks of trusted rows alone: one of all, asked about noisy rows; one of each half, asked about the other.

    The halves answer for the trusted rows, and their opinion on the noisy rows of the other half is the fold models'.
    """

    def compute() -> list[Tensors]:
        first = works[0]
        targets = [work.as_given(work.trusted) for work in works]
        alone = first.fit(targets, first.alone, "trusted expert", seeds=[work.shift for work in works])
        halves = [(work, work.side(1 - half, work.trusted)) for work in works for half in (0, 1)]
        targets = [work.as_given(rows if len(rows) else work.trusted) for work, rows in halves]  # there may be one row
        halved = cross_fitted(works, "trusted expert", targets, first.brief)
        found = []
        for work, network, both in zip(works, alone, halved, strict=True):
            asked = both.clone()
            asked[work.noisy] = predict(network, work.inputs, work.noisy)
            found.append({"asked": asked, "halved": both})
        return found

    return staged(works, "trusted-expert", compute)


def noisy_expert(works: Sequence[Work]) -> list[Tensor]:
    """Networks of half of the noisy rows with the labels as they are: what the given label of a row would be.

    They look at no trusted label, so all views share them.
    """
    first = works[0]

    def compute() -> Tensors:
        learn = [first.side(1 - half, first.labelled(first.noisy)) for half in (0, 1)]
        targets = [first.as_given(rows) for rows in learn]
        networks = first.fit(targets, first.quick(max(map(len, learn))), "noisy expert", seeds=[1, 2])
        rows = torch.arange(len(first.given), device=first.device)
        return {"asked": torch.stack([predict(network, first.inputs, rows) for network in networks])}

    both = first.stages("noisy-expert", compute)["asked"]
    return [both[work.fold, torch.arange(len(work.given), device=work.device)] for work in works]


def matrix_expert(works: Sequence[Work], noisy: Sequence[Tensor]) -> list[Tensor]:
    """Networks of all rows, trained through the noise matrix that the noisy expert shows on the trusted rows."""

    def targets(work: Work, said: Tensor) -> Iterator[TrainingTargets]:
        matrix = noise_matrix_from_trusted(said[work.trusted], work.given[work.trusted], work.classes)
        for half in (1, 0):
            mine, sure = work.side(half, work.labelled(work.noisy)), work.side(half, work.trusted)
            evidence = torch.cat([label_evidence(matrix, work.given[mine]), work.known(sure)])
            yield TrainingTargets(torch.cat([mine, sure]), evidence)

    def compute() -> list[Tensors]:
        learnt = [one for view in zip(works, noisy, strict=True) for one in targets(*view)]
        plan = works[0].quick(-(-len(works[0].given) // 2))
        return [{"asked": p} for p in cross_fitted(works, "noise-matrix expert", learnt, plan)]

    return [found["asked"] for found in staged(works, "matrix-expert", compute)]


def noisy_forest(work: Work) -> Tensor:
    """What a forest of the noisy rows, with the labels as they are, says of all rows (rows, C), out of sample.

    It looks at no trusted label, so all views share it.
    """

    def compute() -> Tensors:
        noisy = work.labelled(work.noisy)
        work.fitting(FOREST_EXPERT, FOREST, len(noisy))
        labels = one_hot(work.given[noisy], work.classes).float()
        trees, answers = forest(work.vectors(noisy), labels, seed=work.config.seed)
        others = torch.ones(len(work.given), dtype=torch.bool, device=work.device).index_fill(0, noisy, False)
        asked = work.answers([trees], [others.nonzero()[:, 0]])
        asked[noisy] = answers
        return {"asked": asked}

    return work.stages("forest-expert", compute)["asked"]


def soft_labels(work: Work, posterior: Tensor) -> tuple[Tensor, Tensor]:
    """q of all rows (rows, C), that of a trusted row being its label, and how much each row counts (rows,)."""
    q = one_hot(work.given.clamp(min=0), work.classes).to(posterior)
    weight = torch.ones(len(q), device=work.device)
    q[work.noisy], weight[work.noisy] = posterior, certainty(posterior, work.given[work.noisy])
    return q, weight


def forest_answers(work: Work, posterior: Tensor) -> Tensor:
    """What a forest of soft labels q says of all rows (rows, C).

    Its answers are out of bag: no label of the row itself has a part in them, though q of other rows rests on all
    trusted labels of the view.
    """
    rows, (q, weight) = work.every, soft_labels(work, posterior)
    work.fitting(FOREST_EXPERT, FOREST, len(rows))
    answers = forest(work.vectors(rows), q[rows], weight[rows], seed=work.config.seed + work.shift)[1]
    asked = work.answers()
    asked[rows] = answers
    return asked


# --- opinion, fold models, verdict ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Opinion:
    """What the experts say.

    Attributes:
        experts: log-probabilities (J, rows, C), under the class frequencies of the trusted rows.
        pool: a and b.
        shift: log π/π⁰ (C,), from the class frequencies of the trusted rows to those of the noisy ones.
        log_p: log p̄ of the noisy rows, under their own class frequencies (N, C).
        log_likelihood: log L, what their labels say (N, C).
        posterior: q (N, C).
    """

    experts: Tensor
    pool: Pool
    shift: Tensor
    log_p: Tensor
    log_likelihood: Tensor
    posterior: Tensor


def opinion(work: Work, experts: Sequence[Tensor], said: Tensor) -> Opinion:
    """Pool the experts, of whom the trusted one is the first, on the trusted rows; T and q of the noisy rows.

    ``said`` is what the noisy expert says of the given label (rows, C).
    """
    labels, given = work.given[work.trusted], work.given[work.noisy]
    before = with_unseen(frequencies(labels, work.classes)[None], said[work.noisy].mean(0, keepdim=True), labels)[0]
    stacked = under_frequencies(torch.stack([logs(p) for p in experts]), work.noisy, before)
    pool = stack(stacked[:, work.trusted], labels)
    log_p, said = pool(stacked[:, work.noisy]), said[work.noisy]
    count = label_noise(log_p, before, given, said=said).posterior.sum(0) + 1
    tested = pool(stacked[:, work.trusted]).argmax(1)
    frequent = corrected_frequencies(log_p.argmax(1), tested, labels, count / count.sum())
    noise = label_noise(log_p, before, given, said=said, frequent=frequent)
    told = noise if work.votes is None else weigh_votes(noise.log_p.exp(), work.votes)
    shift = (noise.frequent / before).log()
    return Opinion(stacked, pool, shift, noise.log_p, told.log_likelihood, told.posterior)


def evidence_targets(
    work: Work, rows: Tensor, log_p: Tensor, through: Tensor, scale: Sequence[float]
) -> TrainingTargets:
    """What a network learns of these rows: (w L(e) + γ q(y) CE(y)) / (1 + γ), with w the certainty of q.

    ``log_p`` is log p̄ and ``through`` log L of the noisy rows (N, C); trusted rows are learnt as they are.
    """
    given, (kappa, beta, gamma) = work.given[work.noisy], scale
    posterior = (log_p + through).softmax(1)
    evidence = work.known(torch.arange(len(work.given), device=work.device))
    weight, belief = torch.ones(2, len(work.given), device=work.device)
    evidence[work.noisy] = kappa * log_p + beta * through
    weight[work.noisy] = certainty(posterior, given)
    belief[work.noisy] = of_label(posterior, given)
    believed = (work.given[rows].clamp(min=0), gamma / (1 + gamma) * belief[rows])
    return TrainingTargets(rows, evidence[rows], weight[rows] / (1 + gamma), believed)


def certainty(posterior: Tensor, given: Tensor) -> Tensor:
    """How much each noisy row counts: q(y), or 2 max q − 1 where another class is that much surer."""
    return torch.maximum(of_label(posterior, given), 2 * posterior.max(1).values - 1)


def error_probability(posterior: Tensor, given: Tensor) -> Tensor:
    """1 − q(y) of the noisy rows (N,); NaN where there is no label."""
    return torch.where(given >= 0, 1 - of_label(posterior, given), torch.nan)


def half_opinion(work: Work, first: Opinion, own: Tensor) -> Tensor:
    """log p̄ of the noisy rows (N, C), those of half h by experts that saw no trusted row of half h.

    ``own`` is what networks of half of the trusted rows say; only pool, π and T were fitted to all of the view.
    """
    log_p = first.pool(torch.cat([logs(own)[None], first.experts[1:]]))[work.noisy]
    return (log_p + first.shift).log_softmax(1)


def fold_models(works: Sequence[Work], firsts: Sequence[Opinion], halves: Sequence[Tensor]) -> list[Tensors]:
    """Networks of the noisy rows of one half and the trusted rows of the other, for every preset.

    Their opinion on rows they have not seen (``asked``) under the preset whose cross-entropy on the trusted rows,
    ``losses``, is lowest (``best``). The evidence on the noisy rows of half h comes from experts that saw neither those
    rows nor the trusted rows of half h; only the pool and T behind it were fitted to all trusted rows of the view.
    """

    def targets(work: Work, first: Opinion, log_p: Tensor) -> list[TrainingTargets]:
        told, rows = first.log_likelihood, [work.crossed(half) for half in (0, 1)]
        return [evidence_targets(work, mine, log_p, told, scale) for scale in PRESETS for mine in rows]

    def compute() -> list[Tensors]:
        learnt = [one for view in zip(works, firsts, halves, strict=True) for one in targets(*view)]
        plan = works[0].quick(-(-len(works[0].noisy) // 2))
        seeds = [work.shift + seed for work in works for _ in PRESETS for seed in (11, 12)]
        networks = iter(works[0].fit(learnt, plan, "fold models", seeds=seeds))
        found = []
        for work in works:
            ask = work.crossed(1), work.crossed(0)
            asked = torch.stack([work.answers((next(networks), next(networks)), ask) for _ in PRESETS])
            right = asked[:, work.trusted, work.given[work.trusted]]
            losses = -(right.double() + 1e-6).log().mean(1)
            found.append({"asked": asked[losses.argmin()], "losses": losses, "best": losses.argmin()})
        return found

    return staged(works, "fold-models", compute)


def cleaned_forests(works: Sequence[Work], firsts: Sequence[Opinion]) -> list[Tensors]:
    """The expert ``cleaned forest`` of each view, a forest of the posterior; none where there are no trees."""

    def compute() -> list[Tensors]:
        return [{"asked": forest_answers(w, first.posterior)} for w, first in zip(works, firsts, strict=True)]

    if not works[0].trees:
        return [{} for _ in works]
    return [{"cleaned forest": found["asked"]} for found in staged(works, "cleaned-forest", compute)]


@dataclass(frozen=True)
class Outcome:
    """The result of the method on a view, before the network is trained.

    Attributes:
        first, final: the opinions without and with the fold models.
        experts: opinions (rows, C) on rows that each had not seen: ``trusted``, ``noisy``, ``matrix``, ``fold models``;
            where there are trees ``forest`` and ``cleaned forest``; where the user gave some ``probabilities``.
        scale: κ, β and γ.
        half_opinion: log p̄ of the noisy rows that the fold models learnt from (N, C).
    """

    first: Opinion
    final: Opinion
    experts: Tensors
    scale: tuple[float, float, float]
    half_opinion: Tensor

    def targets(self, work: Work, rows: Tensor) -> TrainingTargets:
        """What the network learns of these rows."""
        return evidence_targets(work, rows, self.final.log_p, self.final.log_likelihood, self.scale)

    def paced(self, work: Work, plan: TrainingPlan) -> TrainingPlan:
        """``plan`` for a network trained on :meth:`targets`: at a higher rate where training was too gentle.

        The fold models tell, asked about the M trusted rows that they had not seen:

            Σ_m [CE_m − H_m] + PRIOR_LOSS < M · CONFIDENCE_MARGIN ,

        cross-entropy and entropy of what they predict. Where they are surer than they are right by more than that, more
        training would fit the noise.
        """
        told = self.experts["fold models"][work.trusted]
        surplus = overconfidence(told, work.given[work.trusted]) - CONFIDENCE_MARGIN
        return plan.faster(LEARNING_RATE_BOOST) if len(work.trusted) * surplus + PRIOR_LOSS < 0 else plan


def clean_labels(works: Sequence[Work]) -> list[Outcome]:
    """For each view everything up to the verdict on each row and the evidence for the network."""
    first, alone, noisy = works[0], trusted_expert(works), noisy_expert(works)
    matrices = matrix_expert(works, noisy)
    shared = {"forest": noisy_forest(first)} if first.trees else {}
    shared |= {} if first.probabilities is None else {"probabilities": first.probabilities}
    experts, firsts, halves = list[Tensors](), list[Opinion](), list[Tensor]()
    for work, a, said, matrix in zip(works, alone, noisy, matrices, strict=True):
        known, halved = (with_unseen(a[name], said, work.given[work.trusted]) for name in ("asked", "halved"))
        experts.append({"trusted": known, "noisy": said, "matrix": matrix, **shared})
        firsts.append(opinion(work, [*experts[-1].values()], said))
        halves.append(half_opinion(work, firsts[-1], halved))
    found = []
    learnt = zip(fold_models(works, firsts, halves), cleaned_forests(works, firsts), strict=True)
    for i, (own, grown) in enumerate(learnt):
        told = experts[i] | {"fold models": own["asked"]} | grown
        final = opinion(works[i], [*told.values()], told["noisy"])
        found.append(Outcome(firsts[i], final, told, PRESETS[int(own["best"])], halves[i]))
    return found
