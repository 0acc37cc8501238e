"""The penalty α‖p‖²: its value, and the record from which a curvature adds 2α."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperkron.losses import l2

DOUBLE = torch.float64


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()


@pytest.mark.parametrize(
    "coefficient",
    [
        0.3,
        torch.tensor(0.3, dtype=DOUBLE),
        torch.tensor([0.3], dtype=DOUBLE),
        [0.1, torch.tensor(0.2), torch.tensor([[0.3, 0.4]]), 0],
    ],
)
def test_value_and_curvature(coefficient: Any) -> None:
    model = _model()
    loss = l2(model, coefficient)
    each = coefficient if isinstance(coefficient, list) else [coefficient] * 4
    expected = sum((a * p**2).sum() for a, p in zip(each, model.parameters(), strict=True))
    torch.testing.assert_close(loss.value, expected)
    assert [e.parameter for e in loss.l2] == list(model.parameters()) and not loss.opaque and not loss.terms
    for entry in (0.5 * loss).l2:
        p = entry.parameter
        (gradient,) = torch.autograd.grad(0.5 * loss.value, p, create_graph=True)
        (curvature,) = torch.autograd.grad(gradient.sum(), p)
        torch.testing.assert_close((2 * entry.coefficient * torch.ones_like(p)).to(DOUBLE), curvature)


def test_records_the_very_parameters_and_skips_frozen_ones() -> None:
    model = _model()
    model[0].requires_grad_(False)
    loss = l2(model, [1.0, 2.0, 3.0, 4.0])
    assert [e.coefficient for e in loss.l2] == [3.0, 4.0]
    assert loss.l2[0].parameter is model[1].weight and loss.l2[1].parameter is model[1].bias
    assert len(l2(list(model.parameters()), 1.0).l2) == 4


def test_a_module_detached_as_a_whole_is_still_penalised() -> None:
    model = _model()
    value = l2(model, 0.5).item()
    model.requires_grad_(False)
    assert l2(model, 0.5).item() == value > 0


def test_record_is_detached_but_value_reaches_the_coefficient() -> None:
    model, decay = _model(), torch.tensor(0.2, dtype=DOUBLE, requires_grad=True)
    loss = l2(model, decay)
    assert isinstance(loss.l2[0].coefficient, Tensor) and not loss.l2[0].coefficient.requires_grad
    loss.backward()
    torch.testing.assert_close(decay.grad, sum(p.detach().square().sum() for p in model.parameters()))
