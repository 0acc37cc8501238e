"""A module that is registered under two names, as the shared embedding of an encoder and a decoder.

``torch.func.functional_call`` alone leaves what it has substituted in such a module.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hyperkron as hk
from cases import DOUBLE
from hyperkron.hypergradient.base import Hypergradient
from hyperkron.hypergradient.steps import SGD
from hyperkron.problem import call_with

N = 6


def shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(2, 3), layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(3, 3)).to(DOUBLE)


def inner(model: nn.Module, hyper: nn.Module, batch: tuple[torch.Tensor, ...]) -> hk.losses.Loss:
    x, y, index = batch
    return hk.losses.cross_entropy(model(x), y, weight=hyper(index)) + hk.losses.l2(model, 0.1)


def outer(model: nn.Module, hyper: nn.Module, batch: tuple[torch.Tensor, ...]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def problem() -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    batch = torch.randn(N, 2, dtype=DOUBLE), torch.randint(3, (N,)), torch.arange(N)
    return shared(), hk.SampleWeights(N).to(DOUBLE), batch


def places(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]


METHODS: dict[str, tuple[Callable[[], Hypergradient], bool]] = {
    "forward": (lambda: hk.cg(50, 5.0, cross="forward"), False),
    "unrolled": (lambda: hk.unrolled(3, SGD(lr=0.1)), False),
    "in pieces": (lambda: hk.cg(50, 5.0), True),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_module_under_two_names_keeps_its_parameters(name: str) -> None:
    model, hyper, batch = problem()
    before, bilevel = places(model), hk.BilevelProblem(inner, outer)
    make, pieces = METHODS[name]
    given = hk.training.Accumulated(bilevel, micro_batch=2) if pieces else bilevel
    found = make().compute(given, model, hyper, batch, batch).grads
    assert places(model) == before
    again = make().compute(given, model, hyper, batch, batch).grads
    torch.testing.assert_close(again, found, rtol=0, atol=0)


def test_forward_mode_agrees_with_double_backward_where_a_module_has_two_names() -> None:
    model, hyper, batch = problem()
    grads = [
        hk.cg(50, 5.0, cross=cross).compute(hk.BilevelProblem(inner, outer), model, hyper, batch, batch).grads
        for cross in ("reverse", "forward", "reverse")
    ]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(grads[2], grads[0], rtol=0, atol=0)


def test_attribution_in_forward_mode_keeps_a_module_under_two_names() -> None:
    model, _, (x, y, _) = problem()
    before = places(model)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    method = hk.Implicit(hk.curvature.GGN(0.1), hk.solvers.CG(50))
    scores = [
        hk.attribute(loss, model, (x, y), (x[:2], y[:2]), method=method, way=way).scores
        for way in ("layers", "forward", "layers")
    ]
    assert places(model) == before
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(scores[2], scores[0], rtol=0, atol=0)


def test_values_reach_every_use_of_a_weight() -> None:
    torch.manual_seed(0)
    model = shared()
    model.append(nn.Linear(3, 3).to(DOUBLE))
    model[6].weight = model[1].weight  # tied, in another module
    values = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    x, before = torch.randn(4, 2, dtype=DOUBLE), places(model)
    found = call_with(model, values, x)
    assert places(model) == before
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])
    assert torch.equal(found, model(x))
