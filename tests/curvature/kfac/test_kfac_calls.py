"""Inner losses that call the model several times, or compute gradients themselves: only what J depends on counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import Case, make

Given = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Inputs and targets made by the model itself, without a gradient to it."""


def adversarial(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    [g] = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
    return x.detach() + 0.5 * g.sign(), y


def second_order(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    [g] = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x, create_graph=True)
    return x.detach() + 0.5 * g.detach().sign(), y


def by_backward(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(2):
        x = x.detach().requires_grad_()
        F.cross_entropy(model(x), y, reduction="sum").backward(inputs=[x])
        x = x + 0.5 * x.grad.sign()  # type: ignore[union-attr]
    return x.detach(), y


def teacher(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + 0.3, model(3 * x).softmax(-1).detach()


def for_nothing(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    model(7 * x)
    return x, y


def case_of(given: Given, constant: bool) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    case = make(model, (3,), loss="cross_entropy")
    known = given(case.model, *case.inner_batch)

    def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        x, y = known if constant else given(model, *batch)
        return hk.losses.cross_entropy(model(x), y, weight=hyper())

    case.inner = inner  # type: ignore[method-assign]
    return case


@pytest.mark.parametrize("given", [adversarial, second_order, by_backward, teacher, for_nothing])
def test_calls_that_the_loss_does_not_depend_on_are_not_measured(given: Given) -> None:
    found, wanted = (case_of(given, constant).measured("type-2") for constant in (False, True))
    for name in ("0", "3"):
        assert oracles.relative(found.a[name], wanted.a[name]) < 1e-14
        assert oracles.relative(found.b[name], wanted.b[name]) < 1e-14
    assert oracles.relative(found.diagonal["1.weight"], wanted.diagonal["1.weight"]) < 1e-14


@pytest.mark.parametrize("given", [adversarial, teacher])
@pytest.mark.parametrize("made", [hk.kfac, hk.ekfac])
def test_the_hypergradient_is_that_of_constant_inputs(given: Given, made: Any) -> None:
    results = [made(0.1, cross="reverse").compute(*case_of(given, constant).arguments) for constant in (False, True)]
    assert oracles.relative(results[0].grads, results[1].grads) < 1e-12
    assert results[0].stats["coverage"] == results[1].stats["coverage"]
    assert not any("used elsewhere" in result.stats for result in results)


@pytest.mark.parametrize("made", [hk.kfac, hk.ekfac])
def test_what_the_loss_depends_on_is_found_by_one_more_pass_only_when_it_changes(made: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()
    hyper, passes, chosen = hk.as_hyper(torch.rand(6, dtype=torch.float64)), 0, 0

    def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        nonlocal passes
        passes += 1
        outputs = [model(scale * batch[0]) for scale in (1, 3)]
        return hk.losses.cross_entropy(outputs[chosen], batch[1], weight=hyper())

    def outer(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    batch, problem = (torch.randn(6, 3).double(), torch.arange(6) % 3), hk.BilevelProblem(inner, outer)
    method, counts = made(0.1, cross="reverse", fisher="type-2"), []
    for now in (1, 1, 0, 0):
        chosen, passes = now, 0
        found = method.compute(problem, model, hyper, batch, batch)
        counts.append(passes)
        wanted = made(0.1, cross="reverse", fisher="type-2").compute(problem, model, hyper, batch, batch)
        assert oracles.relative(found.grads, wanted.grads) < 1e-12
    assert counts[2] == counts[1] + 1
    assert counts[3] == counts[1]


def by_autograd(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = model(x)
    [slope] = torch.autograd.grad(u.sum(), x, create_graph=True)
    return u + slope.sum(1, keepdim=True)


def by_functions(model: nn.Module, x: Tensor) -> Tensor:
    slope = torch.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
    return model(x) + slope.sum(1, keepdim=True)


@pytest.mark.parametrize("output", [by_autograd, by_functions])
@pytest.mark.parametrize("depth", [1, 2])
def test_gradients_of_the_model_in_the_loss_are_said(output: Any, depth: int) -> None:
    """As in physics-informed networks: KFAC does not see how they depend on the weights."""
    layers = [nn.Linear(2, 1)] if depth == 1 else [nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)]
    case = make(nn.Sequential(*layers), (2,))

    def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.mse(output(model, batch[0]), batch[1], weight=hyper())

    case.inner = inner  # type: ignore[method-assign]
    weights = [name for name in case.params if name.endswith("weight")]
    said = str(hk.kfac(0.1).compute(*case.arguments).stats["used elsewhere"])
    assert set(weights) <= {*said.split(", ")}


class Experts(nn.Module):
    """A mixture of experts, of which the last gets no token: it is called on none of them, or not at all."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(3))
        self.head, self.calls = nn.Linear(3, 2), calls

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0] > 0) == number
            if self.calls or rows.any():
                out = out.masked_scatter(rows[:, None].expand_as(x), expert(x[rows]))
        return self.head(out.tanh())


@pytest.mark.parametrize("method", [hk.kfac, hk.ekfac])
def test_a_layer_called_without_rows_is_as_one_not_called(method: Any) -> None:
    cases = [make(Experts(calls), (3,), loss="cross_entropy", count=8) for calls in (False, True)]
    cases[1].model.load_state_dict(cases[0].model.state_dict())
    wanted, found = (method(0.1, fisher="type-2").compute(*case.arguments) for case in cases)
    assert oracles.relative(found.grads, wanted.grads) < 1e-12
    assert found.stats["coverage"] == wanted.stats["coverage"] < 1


def test_a_layer_that_only_a_later_piece_of_a_batch_calls_is_covered() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.tensor([[1.0]] * 4 + [[-1.0]] * 4), torch.randn(8, 2)], 1)  # the first expert has the last
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    batch = x, torch.arange(8) % 2, torch.arange(8)
    given = Experts(False), hk.SampleWeights(8), batch, batch
    whole, pieces = (hk.kfac(0.1).compute(p, *given) for p in (problem, hk.training.Accumulated(problem, 4)))
    assert whole.stats["coverage"] == pieces.stats["coverage"] > 0.5
    assert ("uncalled" in whole.stats) == ("uncalled" in pieces.stats)
