"""The learner that comes out: a network, a forest or boosted trees, all fitted to the same cleaned labels.

Each is fitted to the noisy rows of one half, with the posterior q as soft labels, and to the trusted rows of the other
half, and asked about the rest. What counts is how well the answers explain labels that the learner has not seen,

    S(f) = max_τ  Σ_n log Σ_k f_τ(k | x_n) P(y_n | k, x_n)  +  Σ_m log f_τ(y_m | x_m) ,      f_τ ∝ f^τ ,

over the noisy rows n and the trusted rows m. The best trees are fitted to all rows where their lead over the network is
more than MARGIN standard errors of the difference, else a network. Trusted rows are few; the given labels of the noisy
rows are many, and through the noise they say the same about f, less clearly. How sure a learner is of itself does not
count: τ takes it away.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hyperkron.cleaning.config import BOOSTED, FOREST, NETWORK
from hyperkron.cleaning.evidence import logs
from hyperkron.cleaning.method import Outcome, soft_labels
from hyperkron.cleaning.models import trees
from hyperkron.cleaning.models.trees import TreeEnsemble
from hyperkron.cleaning.own import EstimatorModel
from hyperkron.cleaning.work import Work

TEMPERATURES = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0)
"""τ, of which each learner has the one that suits it best."""
MARGIN = 3.0
"""Standard errors by which trees must lead: two models of each kind were asked, and all rows share their luck."""


def name_of(model: nn.Module) -> str:
    """What kind of learner a fitted model is."""
    if isinstance(model, TreeEnsemble):
        return BOOSTED if len(model.base) else FOREST
    return type(model.estimator).__name__ if isinstance(model, EstimatorModel) else NETWORK


def grow(kind: str, work: Work, rows: Tensor, posterior: Tensor) -> TreeEnsemble:
    """Trees of rows of a view: noisy ones with soft labels q, weighted by how sure q is, and trusted ones."""
    work.fitting(f"{kind} of cleaned labels", kind, len(rows))
    q, weight = soft_labels(work, posterior)
    x, seed = work.vectors(rows), work.config.seed + work.shift
    if kind == FOREST:
        return trees.forest(x, q[rows], weight[rows], seed=seed)[0].eval()
    return trees.soft_boosted(x, q[rows], weight[rows], seed=seed).eval()


def half_answers(kind: str, work: Work, posterior: Tensor) -> Tensor:
    """What trees of one half of the noisy rows and the other half of the trusted rows say of the rest (rows, C)."""
    first, second = work.crossed(0), work.crossed(1)  # as the fold models
    return work.answers((grow(kind, work, rows, posterior) for rows in (first, second)), (second, first))


def row_scores(work: Work, outcome: Outcome, answers: Tensor) -> Tensor:
    """The terms of S(f) for a learner's answers (rows, C), at its best τ: of the noisy rows, then of the trusted ones.

    Rows without a label have 0.
    """
    through = outcome.final.log_likelihood
    evidence = torch.cat([through - through.max(1, keepdim=True).values, work.known(work.trusted)])
    sharper = torch.tensor(TEMPERATURES, device=work.device)[:, None, None]
    found = ((sharper * logs(answers[work.every])).log_softmax(2) + evidence).logsumexp(2)
    return found[found.sum(1).argmax()]


def learner_scores(work: Work, outcome: Outcome) -> dict[str, Tensor]:
    """For each learner the terms of S(f), asked of models that had not seen the labels."""
    q = (outcome.half_opinion + outcome.first.log_likelihood).softmax(1)
    answers = {kind: half_answers(kind, work, q) for kind in (FOREST, BOOSTED)}
    return {
        kind: row_scores(work, outcome, asked)
        for kind, asked in {NETWORK: outcome.experts["fold models"], **answers}.items()
    }


def clearly_best(scores: dict[str, Tensor]) -> str:
    """The learner of the highest S(f), but a network where its lead is not clear."""

    def lead(kind: str) -> float:
        difference = (scores[kind] - scores[NETWORK]).double()
        return float(difference.sum() / (difference.std() * len(difference) ** 0.5).clamp(min=1e-12))

    ahead = [kind for kind in scores if kind != NETWORK and lead(kind) > MARGIN]
    return max(ahead, key=lambda kind: float(scores[kind].sum()), default=NETWORK)


def chosen_learner(work: Work, outcome: Outcome) -> str:
    """The learner of a view; nothing of it looks at the rows that are held out."""
    return clearly_best(learner_scores(work, outcome)) if work.trees and work.tree_model else NETWORK
