"""Random forests of a cleaning run: two of its experts, and the model that comes out where trees do better.

A forest answers for each row it learns from by the trees that did not see the row, so one forest of all noisy rows is
asked about them out of sample.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hyperkron.cleaning.models.trees import TreeEnsemble, forest
from hyperkron.cleaning.stages import Tensors
from hyperkron.cleaning.trainer import Dense, predict
from hyperkron.cleaning.work import Work

NAME = "forest expert"


def vectors(work: Work, rows: Tensor) -> Tensor:
    """The inputs of rows as trees take them (n, d)."""
    assert isinstance(work.inputs, Dense)
    return work.inputs.values[rows].flatten(1)


def noisy_forest(work: Work) -> Tensor:
    """What a forest of the noisy rows, with the labels as they are, says of all rows (rows, C), out of sample.

    It looks at no trusted label, so all views share it.
    """

    def compute() -> Tensors:
        work.tick(NAME, 0)
        labels = one_hot(work.given[work.noisy], work.classes).float()
        trees, answers = forest(vectors(work, work.noisy), labels, seed=work.config.seed)
        asked = predict(trees, work.inputs, torch.arange(len(work.given), device=work.device))
        asked[work.noisy] = answers
        return {"asked": asked}

    return work.stages("forest-expert", compute)["asked"]


def evidence_forest(
    work: Work, noisy: Tensor, trusted: Tensor, posterior: Tensor, weight: Tensor
) -> tuple[TreeEnsemble, Tensor]:
    """A forest of noisy rows with soft labels q and of trusted rows, and its out-of-bag answers for them (n, C).

    Args:
        work: the view.
        noisy, trusted: numbers of rows.
        posterior, weight: q of those noisy rows (n, C), and how much each counts (n,).
    """
    work.tick(NAME, 0)
    q = torch.cat([posterior, one_hot(work.given[trusted], work.classes).to(posterior)])
    weight = torch.cat([weight, torch.ones(len(trusted), device=work.device)])
    return forest(vectors(work, torch.cat([noisy, trusted])), q, weight, seed=work.config.seed)


def cleaned_forest(work: Work, whole: tuple[Tensor, Tensor], halved: tuple[Tensor, Tensor]) -> Tensors:
    """What forests of the posterior q say of all rows of a view, out of sample (``asked``).

    Of noisy rows the trees of a forest of all rows that did not see them; of the trusted rows of half h a forest that,
    as the fold models, learnt from the noisy rows of half h and the trusted rows of the other half, with a posterior in
    which no trusted label of half h has a part.

    Args:
        work: the view.
        whole: q of the noisy rows (N, C), and how much each counts (N,).
        halved: the same from experts that saw nothing of the trusted rows in the half of the row.
    """
    asked = torch.zeros(len(work.given), work.classes, device=work.device)
    _, answers = evidence_forest(work, work.noisy, work.trusted, *whole)
    asked[work.noisy] = answers[: len(work.noisy)]
    for half in (0, 1):
        mine = work.fold[work.noisy] == half
        learn = work.noisy[mine], work.side(1 - half, work.trusted)
        trees, _ = evidence_forest(work, *learn, halved[0][mine], halved[1][mine])
        ask = work.side(half, work.trusted)
        asked[ask] = predict(trees, work.inputs, ask)
    return {"asked": asked}
