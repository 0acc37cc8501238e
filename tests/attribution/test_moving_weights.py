"""Losses whose weights depend on the model, as a focal loss: their gradients count, their curvature does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
import oracles
from hyperkron.curvature import GGN

Batch = tuple[Tensor, Tensor]


def plain(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def focal(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    output = model(batch[0])
    right = output.softmax(-1).gather(1, batch[1][:, None])[:, 0]
    return hk.losses.cross_entropy(output, batch[1], weight=(1 - right) ** 2)


def stopped(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    weight = F.cross_entropy(model(batch[0]), batch[1], reduction="none").detach().exp()
    return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weight)


def made() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, (torch.randn(23, 5, dtype=torch.float64), torch.randint(0, 3, (23,)))


@pytest.mark.parametrize("loss", [focal, stopped])
@pytest.mark.parametrize("way", ["layers", "forward", "auto"])
@pytest.mark.parametrize("count", [1, 5])
def test_scores_are_products_of_the_whole_gradients(loss: Any, way: Any, count: int) -> None:
    model, (x, y) = made()

    def gradients(loss: Any) -> Tensor:
        values = (loss(model, (x[i : i + 1], y[i : i + 1])).value for i in range(23))
        return torch.stack([oracles.gradient(value, list(model.parameters())).detach() for value in values])

    examples, queries, options = gradients(loss), gradients(plain), {"method": hk.identity(), "way": way}
    few = x[:count], y[:count]
    found = hk.attribute(loss, model, (x, y), few, query_loss=plain, **options).scores
    torch.testing.assert_close(found, queries[:count] @ examples.T / 23, rtol=1e-9, atol=1e-14)
    found = hk.attribute(plain, model, (x, y), few, query_loss=loss, **options).scores
    torch.testing.assert_close(found, examples[:count] @ queries.T / 23, rtol=1e-9, atol=1e-14)
    found = hk.attribution.self_influence(loss, model, (x, y), method=hk.identity())
    torch.testing.assert_close(found, examples.square().sum(1) / 23, rtol=1e-9, atol=1e-14)


def consistency(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    """The target is an output of the model, too."""
    return hk.losses.cross_entropy(model(batch[0]), model(batch[0] + 0.1).softmax(-1))


@pytest.mark.parametrize("moving", [focal, consistency])
@pytest.mark.parametrize("method", [lambda: hk.kfac(0.1), lambda: hk.ekfac(0.1), lambda: hk.cg(5, curvature=GGN(0.1))])
def test_curvatures_that_take_them_for_constants_say_so(
    method: Callable[[], hk.Implicit], moving: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("hyperkron.solution._warned", set())
    model, batch = made()
    hyper = hk.as_hyper(torch.zeros(23, dtype=torch.float64))

    def problem(loss: Any) -> hk.BilevelProblem:
        def inner(model: nn.Module, hyper: Any, batch: Batch) -> hk.losses.Loss:
            weighted = hk.losses.cross_entropy(model(batch[0]), batch[1], weight=hyper().sigmoid())
            return weighted + loss(model, batch)

        return hk.BilevelProblem(inner, lambda model, _, batch: plain(model, batch))

    method().compute(problem(stopped), model, hyper, batch, batch)
    assert not [w for w in recwarn if issubclass(w.category, hk.HyperkronWarning)]
    with pytest.warns(hk.HyperkronWarning, match="weights or targets of the inner loss depend on the model's"):
        method().compute(problem(moving), model, hyper, batch, batch)
