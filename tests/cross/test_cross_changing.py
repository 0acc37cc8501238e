"""Cross terms of an inner loss that is not the same function with every batch, or without gradients of θ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import mlp
from crossing import Lambda, X, Y, dense_cross, setting
from hyperkron.cross import Cross, CrossState, Mode

MODES = ["auto", "forward", "difference"]
Inner = Callable[[nn.Module, Any, Any], hk.losses.Loss]


def both() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    return Lambda(a=torch.randn(5, generator=generator), b=torch.randn(5, 3, generator=generator))


def corrected(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    """The labels of some batches are λ's."""
    return hk.losses.cross_entropy(model(X), hyper.b.softmax(-1) if batch else Y, weight=hyper.a.sigmoid())


def penalised(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    """Some batches have a penalty, as a plain tensor."""
    loss = hk.losses.cross_entropy(model(X), Y, weight=hyper.a.sigmoid())
    return loss + hyper.b.sum() * sum(p.square().sum() for p in model.parameters()) if batch else loss


def shared(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    """The weights of some batches are part of their labels too."""
    weight = hyper.a.sigmoid()
    labels = torch.eye(3, dtype=torch.float64)[Y]
    return hk.losses.cross_entropy(model(X), labels * weight[:, None] if batch else labels, weight=weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inner", [corrected, penalised, shared])
def test_what_lambda_does_may_differ_from_batch_to_batch(inner: Inner, mode: Mode) -> None:
    model, hyper, state = mlp(3, 4, 3), both(), CrossState()
    for batch in (False, True, False, True):
        point, v = setting(inner, hyper, model)
        point.inner_batch = point.curvature_batch = batch
        with point:
            found = Cross(mode).term(point, v, None, state)
        wanted = dense_cross(lambda m, h, _, now=batch: inner(m, h, now), model, hyper, v)
        assert oracles.relative(found, wanted) < 1e-6


def one_by_one(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    loss = hk.losses.cross_entropy(model(X), Y, weight=hyper.a.sigmoid())
    for p in model.parameters():
        loss = loss + hk.losses.l2(p, hyper.b.mean().exp()) if p.requires_grad else loss
    return loss


def as_list(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    trained = [p for p in model.parameters() if p.requires_grad]
    return hk.losses.cross_entropy(model(X), Y, weight=hyper.a.sigmoid()) + hk.losses.l2(trained, 0.1)


def as_tensors(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    norms = torch.stack([p.square().sum() for p in model.parameters() if p.requires_grad])
    return hk.losses.cross_entropy(model(X), Y, weight=hyper.a.sigmoid()) + 0.1 * norms.sum()


@pytest.mark.parametrize("inner", [one_by_one, as_list, as_tensors])
def test_penalties_may_ask_which_parameters_require_a_gradient(inner: Inner) -> None:
    """None does where θ is moved, so that the loss is another there, or fails."""
    model, hyper, state = mlp(3, 4, 3), both(), CrossState()
    point, v = setting(inner, hyper, model)
    with point:
        found = Cross().term(point, v, None, state)
    assert state.mode == "reverse"
    assert oracles.relative(found, dense_cross(inner, model, hyper, v)) < 1e-12


@pytest.mark.parametrize("mode", ["forward", "difference"])
def test_a_way_asked_for_is_replaced_where_the_penalty_vanishes(mode: Mode) -> None:
    model, hyper, state = mlp(3, 4, 3), both(), CrossState()
    point, v = setting(one_by_one, hyper, model)
    with point:
        found = Cross(mode).term(point, v, None, state)
    assert state.mode == "reverse"
    assert oracles.relative(found, dense_cross(one_by_one, model, hyper, v)) < 1e-12


class Quantized(nn.Module):
    """Rounds, straight through, where it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        return rounded(x) if self.on else x


def rounded(x: Tensor) -> Tensor:
    return x + ((4 * x).round() / 4 - x).detach()


def switched_on(model: nn.Sequential) -> None:
    model[2].on = True


def hooked(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, given, output: rounded(output))


@pytest.mark.parametrize("change", [switched_on, hooked])
def test_a_model_that_is_switched_between_two_calls_is_decided_for_again(
    change: Callable[[nn.Sequential], None],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(X.shape[1], 4), nn.Tanh(), Quantized(), nn.Linear(4, 3)).double()
    problem = hk.BilevelProblem(
        lambda m, h, _: hk.losses.cross_entropy(m(X), Y, weight=h.a.sigmoid()),
        lambda m, h, _: hk.losses.cross_entropy(m(X + 0.1), Y),
    )
    hyper, method = Lambda(a=torch.randn(len(X))), hk.identity()
    assert method.compute(problem, model, hyper, None, None).stats["cross"] == "difference"
    change(model)
    found = method.compute(problem, model, hyper, None, None).grads
    wanted = hk.identity(cross="reverse").compute(problem, model, hyper, None, None).grads
    assert oracles.relative(found, wanted) < 1e-12


@pytest.mark.parametrize("build", [hk.identity, hk.sama], ids=["auto", "sama"])
def test_weights_that_begin_to_move_with_theta_are_noticed(build: Any) -> None:
    """The first batches have weights of their own, later ones weights of their detached losses."""
    hyper = nn.ModuleDict({"net": hk.MetaWeightNet(6), "own": hk.SampleWeights(5, "sigmoid")}).double()

    def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        output = model(X)
        seen = hk.losses.cross_entropy(output, Y).per_example
        weight = hyper["own"](torch.arange(5))
        return hk.losses.cross_entropy(output, Y, weight=weight * hyper["net"](seen) if batch else weight)

    torch.manual_seed(0)
    problem, model = hk.BilevelProblem(inner, lambda m, h, b: hk.losses.cross_entropy(m(X), Y.flip(0))), mlp(3, 4, 3)
    method = build()
    method.compute(problem, model, hyper, False, None)
    found, wanted = (one.compute(problem, model, hyper, True, None).grads for one in (method, build()))
    assert oracles.relative(found, wanted) < 1e-12
    assert method.state.cross.way.form == "wm"


class Routed(nn.Module):
    """Two experts; an example goes to the second if its first feature is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(3, 4) for _ in range(2)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        second = x[:, :1] > 0
        out = x.new_zeros(len(x), 4)
        for rows, expert in zip((~second, second), self.experts, strict=True):
            out = out.masked_scatter(rows.expand_as(out), expert(x[rows[:, 0]]))
        return self.head(out.tanh())


def test_experts_that_get_all_examples_of_one_batch_and_some_of_the_next() -> None:
    """In half precision gradients at layers are used, which belong to no example once an expert gets some of them."""
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(8, 3)
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0].to(m.head.weight.dtype)), b[1], weight=w(b[2])),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0].to(m.head.weight.dtype)), b[1]),
    )
    method, modes = hk.identity(), []
    for first in (x[:, :1].abs(), x[:, :1]):
        batch = (torch.cat([first, x[:, 1:]], 1), torch.arange(8) % 3, torch.arange(8))
        given = problem, model.bfloat16(), hk.SampleWeights(8), batch, batch
        result = method.compute(*given)
        modes.append(result.stats["cross"])
        wanted = hk.identity(cross="reverse").compute(problem, model.double(), *given[2:]).grads["weight"]
        assert float(torch.cosine_similarity(result.grads["weight"], wanted, dim=0)) > 0.999
    assert modes[0] == "adjoint" != modes[1]


class Shifted(nn.Module):
    """Weights that the losses move, or not."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.raw, self.by = nn.Parameter(torch.zeros(len(X), dtype=X.dtype)), by

    def forward(self, losses: Tensor) -> Tensor:
        return (self.raw + losses if self.by == "losses" else self.raw).sigmoid()


def test_another_lambda_of_the_same_class_is_decided_for_again() -> None:
    def inner(m: nn.Module, h: Any, _: Any) -> Tensor:
        losses = nn.functional.cross_entropy(m(X), Y, reduction="none")
        return (h(losses.detach()) * losses).mean()

    problem = hk.BilevelProblem(inner, lambda m, h, _: nn.functional.cross_entropy(m(X + 0.1), Y))
    torch.manual_seed(0)
    model, method = mlp(3, 4, 3), hk.identity(cross="difference")
    for hyper in (Shifted("nothing"), Shifted("losses")):
        found = method.compute(problem, model, hyper, None, None).grads
        wanted = hk.identity(cross="reverse").compute(problem, model, hyper, None, None).grads
        assert oracles.relative(found, wanted) < 1e-6
