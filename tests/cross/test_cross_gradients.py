"""Cross terms of inner losses that compute gradients themselves, or put other values in the place of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune

import hyperkron as hk
import oracles
from cases import DOUBLE, mlp
from crossing import Lambda, X, Y, dense_cross, setting
from hyperkron import solution
from hyperkron.cross import weighting
from hyperkron.cross.adjoint import NoAdjointError, adjoint

Inner = Callable[..., hk.losses.Loss]


def adversarial(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    x = X.to(hyper.a.dtype, copy=True).requires_grad_()
    [g] = torch.autograd.grad(F.cross_entropy(model(x), Y, reduction="sum"), x)
    return hk.losses.cross_entropy(model(x.detach() + 0.1 * g.sign()), Y, weight=hyper.a.sigmoid())


def slopes(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    """The slopes of the model in its inputs are part of its output."""
    x = X.to(hyper.a.dtype, copy=True).requires_grad_()
    output = model(x)
    [g] = torch.autograd.grad(output.sum(), x, create_graph=True)
    return hk.losses.mse(output + 0.02 * g, torch.ones_like(output), weight=hyper.a.sigmoid())


def after_a_step(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    """The loss after a step of gradient descent, as in meta-learning."""
    x, params = X.to(hyper.a.dtype), dict(model.named_parameters())
    loss = F.cross_entropy(functional_call(model, params, (x,)), Y)
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    moved = {name: p - 0.5 * g for (name, p), g in zip(params.items(), grads, strict=True)}
    return hk.losses.cross_entropy(functional_call(model, moved, (x,)), Y, weight=hyper.a.sigmoid())


def masked(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    weight = dict(model.named_parameters())["0.weight"]
    mask = torch.ones_like(weight)
    mask[0, 0] = 0.0
    output = functional_call(model, {"0.weight": mask * weight}, (X.to(weight.dtype),))
    return hk.losses.cross_entropy(output, Y, weight=hyper.a.sigmoid())


def _frozen(layer: nn.Module, x: torch.Tensor, names: tuple[str, ...] = ("weight", "bias")) -> torch.Tensor:
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    output = layer(x)
    layer.requires_grad_(True)
    return output  # type: ignore[no-any-return]


def _with_other_leaves(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional_call(layer, {name: p.detach() for name, p in layer.named_parameters()}, (x,))  # type: ignore[no-any-return]


CONSTANT: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "frozen": _frozen,
    "half frozen": partial(_frozen, names=("weight",)),
    "other leaves": _with_other_leaves,
    "copied": lambda layer, x: copy.deepcopy(layer)(x),
}


def with_constants(constant: str, model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
    """The last layer is called a second time, with constants in the place of its parameters."""
    hidden = model[:-1](X.to(hyper.a.dtype))
    output = model[-1](hidden) + CONSTANT[constant](model[-1], hidden.sin())
    return hk.losses.cross_entropy(output, Y, weight=hyper.a.sigmoid())


def usual(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X), Y, weight=hyper.a.sigmoid())


def weights() -> nn.Module:
    return Lambda(a=torch.linspace(-1, 1, 5))


def pruned() -> nn.Module:
    model = mlp(3, 4, 3)
    prune.random_unstructured(model[0], "weight", 1)
    return model


@pytest.fixture(autouse=True)
def _no_warnings_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", set())


@pytest.mark.parametrize("inner", [adversarial, *(partial(with_constants, name) for name in CONSTANT)])
def test_the_gradients_at_the_layers_are_those_of_the_loss_and_of_theta_alone(inner: Inner) -> None:
    model, hyper = mlp(3, 4, 3), weights()
    point, v = setting(inner, hyper, model)
    with point:
        found = adjoint(point, v, weighting.structure(point, point.inner()))
    assert oracles.relative(found.cross, dense_cross(inner, model, hyper, v)) < 1e-12


@pytest.mark.parametrize(
    ("inner", "made", "reason"),
    [
        (slopes, lambda: mlp(3, 4, 3), "holds gradients of the model"),
        (after_a_step, lambda: mlp(3, 4, 3), "holds gradients of the model"),
        (masked, lambda: mlp(3, 4, 3), "with functions of its parameters"),
        (usual, pruned, "0.bias belongs to a Linear"),
    ],
)
def test_gradients_at_layers_that_are_not_those_of_the_parameters_are_refused(
    inner: Inner, made: Any, reason: str
) -> None:
    """Their error may be small enough to be taken for rounding in half precision."""
    point, v = setting(inner, weights(), made())
    with point:
        form = weighting.structure(point, point.inner())
        assert form == "w"
        with pytest.raises(NoAdjointError, match=reason):
            adjoint(point, v, form)


@pytest.mark.parametrize("inner", [adversarial, slopes, after_a_step])
def test_in_half_precision_the_hypergradient_is_near_that_of_float64(inner: Inner) -> None:
    def rounded(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(model, hyper, batch)

    def outer(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(X.to(hyper.a.dtype)), Y)

    model, hyper = mlp(3, 4, 3), weights()
    wanted = hk.identity(cross="reverse").compute(hk.BilevelProblem(inner, outer), model, hyper, None, None)
    problem = hk.BilevelProblem(rounded, outer, autocast=True)
    found = hk.identity().compute(problem, model.float(), hyper.float(), None, None)
    assert oracles.relative(oracles.flat(found.grads).to(DOUBLE), wanted.grads["a"]) < 0.05


@pytest.mark.parametrize(
    "method", [hk.sama, lambda: hk.identity(cross="difference"), lambda: hk.identity(cross="forward")]
)
def test_a_loss_that_needs_gradients_in_theta_is_differentiated_twice(method: Any) -> None:
    """With θ moved and detached it fails."""
    model, hyper = mlp(3, 4, 3), weights()
    problem = hk.BilevelProblem(after_a_step, lambda m, h, b: hk.losses.cross_entropy(m(X), Y))
    with pytest.warns(hk.HyperkronWarning, match="needs gradients in θ itself"):
        found = method().compute(problem, model, hyper, None, None)
    assert found.stats["cross"] == "reverse"
    assert found.solution is not None
    wanted = dense_cross(after_a_step, model, hyper, found.solution.value)
    assert oracles.relative(oracles.flat(found.grads), -oracles.flat(wanted)) < 1e-12
