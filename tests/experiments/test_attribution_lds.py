"""The experiment that judges attributions, at a size at which the answer is known."""

from __future__ import annotations

import torch
from torch import nn

from experiments.attribution import lds, peers, settings


def tiny() -> settings.Setting:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=random)
    y = (x[:, 0] > 0).long()
    return settings.Setting("tiny", lambda: nn.Linear(4, 2), (x[:32], y[:32]), (x[32:], y[32:]), 60, 0.5, batch=8)


def test_a_method_that_knows_the_losses_scores_one_and_a_random_one_nothing() -> None:
    masks = lds.halves(32, 20)
    assert masks.sum(1).tolist() == [16] * 20
    scores = torch.randn(5, 32)
    losses = -(masks.float() @ scores.T)
    assert lds.lds(scores, masks, losses)[0] > 0.999
    assert abs(lds.lds(torch.randn(5, 32), masks, losses)[0]) < 0.5


def test_curvature_foretells_the_losses_of_a_convex_model() -> None:
    setting, masks = tiny(), lds.halves(32, 16)
    losses = lds.losses_after_retraining(setting, masks, repeats=1, together=16)
    (model,) = settings.train_many(setting, [torch.arange(32)], [0])
    found = {
        name: lds.lds(peers.methods("small")[name](model, setting), masks, losses)[0]
        for name in peers.methods("small")
        if name in ("EKFAC, δ=0.001", "TRAK, one network", "gradient cosine")
    }
    assert len(found) == 3
    assert found["EKFAC, δ=0.001"] > 0.7
    assert found["EKFAC, δ=0.001"] > found["gradient cosine"]
