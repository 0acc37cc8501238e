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
        noisy = work.labelled(work.noisy)
        labels = one_hot(work.given[noisy], work.classes).float()
        trees, answers = forest(vectors(work, noisy), labels, seed=work.config.seed)
        asked = predict(trees, work.inputs, torch.arange(len(work.given), device=work.device))
        asked[noisy] = answers
        return {"asked": asked}

    return work.stages("forest-expert", compute)["asked"]


def evidence_forest(work: Work, posterior: Tensor, weight: Tensor) -> tuple[TreeEnsemble, Tensor]:
    """A forest of the noisy rows with soft labels q and of the trusted rows, and what it says of all rows (rows, C).

    Its answers for rows that it learnt from are out of bag: no label of the row itself has a part in them, though q of
    other rows rests on all trusted labels of the view. ``weight`` is how much each noisy row counts (N,).
    """
    work.tick(NAME, 0)
    rows = torch.cat([work.noisy, work.trusted])
    q = torch.cat([posterior, one_hot(work.given[work.trusted], work.classes).to(posterior)])
    weight = torch.cat([weight, torch.ones(len(work.trusted), device=work.device)])
    trees, answers = forest(vectors(work, rows), q, weight, seed=work.config.seed + work.shift)
    asked = torch.zeros(len(work.given), work.classes, device=work.device)
    asked[rows] = answers
    return trees, asked
