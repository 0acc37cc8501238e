"""Cross terms of models that cannot do everything: no forward mode, no second derivatives, attention, norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Mean, make, random_weights
from crossing import KINDS, X, Y, everything, perturbation, setting, weights
from hyperkron import solution
from hyperkron.cross import Cross, CrossState, difference, forward, reverse
from tests.curvature.test_curvature_products import Attention, Once


class Cube(torch.autograd.Function):
    """x³ with a derivative that can be differentiated, but no forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * 3 * x**2


class Opaque(torch.autograd.Function):
    """sin, whose backward pass runs outside autograd without saying so, as a custom kernel's would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.from_numpy(g.detach().numpy() * x.detach().cos().numpy())


class Tangent(torch.autograd.Function):
    """sin with forward mode, whose backward pass cannot be differentiated."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # type: ignore[override]
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        return dx * ctx.saved_tensors[0].cos()


class Apply(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)  # type: ignore[no-any-return]


def bent(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 3)).to(DOUBLE)


COARSE = Cross(radius=0.5)
"""A radius at which no finite difference is exact enough, so that ``auto`` looks for another way."""


@pytest.mark.parametrize(
    ("middle", "mode"),
    [
        (nn.Tanh(), "reverse"),
        (Apply(Cube), "reverse"),
        (Apply(Tangent), "forward"),
        (Once(), "difference"),
        (Apply(Opaque), "difference"),
    ],
    ids=["smooth", "no forward mode", "no second backward", "once differentiable", "opaque backward"],
)
def test_auto_takes_the_first_way_that_works(middle: nn.Module, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", set())
    model, hyper = bent(middle), KINDS["everything"][1]()
    point, v = setting(everything, hyper, model)
    state = CrossState()
    with point:
        if mode == "difference":
            with pytest.warns(hk.HyperkronWarning, match="no exact way works"):
                found = COARSE.term(point, v, None, state)
        else:
            found = COARSE.term(point, v, None, state)
        again = COARSE.term(point, v, None, state)
        fine = difference(point, v, 1e-4)
    assert state.mode == mode
    assert oracles.relative(again, found) < 1e-12
    assert oracles.relative(found, fine) < (0.5 if mode == "difference" else 1e-6)
    assert (state.error > 0) == (mode == "difference")


@pytest.mark.parametrize("function", [Once, lambda: Apply(Opaque), lambda: Apply(Cube), nn.ReLU])
def test_auto_and_kfac_work_with_such_models(function: Callable[[], nn.Module]) -> None:
    """The finite difference is exact enough for all of them, and nothing else is asked of the model."""
    model, hyper = bent(function()), KINDS["weights"][1]()
    point, v = setting(weights, hyper, model)
    with point:
        wanted = difference(point, v, 1e-5)
    problem = hk.BilevelProblem(weights, lambda m, h, b: hk.losses.cross_entropy(m(X), Y))
    result = hk.kfac(0.1).compute(problem, model, hyper, None, None)
    assert result.stats["cross"] == "difference"
    with point:
        found = Cross().term(point, v, None, CrossState())
    assert oracles.relative(found, wanted) < 1e-6


def test_reverse_refuses_what_cannot_be_differentiated_twice() -> None:
    model, hyper = bent(Once()), KINDS["weights"][1]()
    point, v = setting(weights, hyper, model)
    with point, pytest.raises(hk.HyperkronError, match="cannot be differentiated twice"):
        reverse(point, v)


@pytest.mark.parametrize("mode", ["auto", "reverse", "forward", "difference"])
@pytest.mark.parametrize("eval_mode", [True, False])
def test_fused_attention_works_in_every_mode(mode: str, eval_mode: bool) -> None:
    """F.scaled_dot_product_attention picks kernels without second derivatives unless told otherwise."""
    model = nn.Sequential(Attention(), Mean()).train(not eval_mode)
    case = make(model, (4, 3), loss="cross_entropy", hyper=random_weights(5))
    wanted = oracles.implicit(case, torch.eye(sum(p.numel() for p in case.params.values()), dtype=DOUBLE))
    for made in (hk.identity(cross=mode),):  # type: ignore[arg-type]
        assert oracles.relative(made.compute(*case.arguments).grads, wanted) < 1e-6


def test_fused_attention_with_every_curvature() -> None:
    case = make(nn.Sequential(Attention(), Mean()), (4, 3), loss="cross_entropy", hyper=random_weights(5))
    convex = 1.0 - float(torch.linalg.eigvalsh(case.hessian())[0])
    hessian = oracles.implicit(case, case.hessian(), damping=convex)
    ggn = oracles.implicit(case, case.ggn(), damping=1.0)
    assert oracles.relative(hk.cg(200, convex, tolerance=1e-12).compute(*case.arguments).grads, hessian) < 1e-6
    assert oracles.relative(hk.pcg(200, 1.0, tolerance=1e-12).compute(*case.arguments).grads, ggn) < 1e-6
    for made in (hk.kfac(1.0), hk.ekfac(1.0)):
        assert made.compute(*case.arguments).status is hk.Status.DIRECT


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.InstanceNorm1d(2)])
def test_forward_mode_refuses_norms_whose_tangents_cannot_be_differentiated(norm: nn.Module) -> None:
    """torch's tangents of these norms are wrong in λ inside the model, in silence; ``auto`` takes double backward."""
    shaped = nn.Sequential(nn.Unflatten(1, (2, 2)), norm, nn.Flatten()) if isinstance(norm, nn.InstanceNorm1d) else norm
    model, hyper = bent(shaped), KINDS["perturbation"][1]()
    point, v = setting(perturbation, hyper, model)
    state = CrossState()
    with point:
        with pytest.raises(hk.HyperkronError, match="forward mode and then λ"):
            forward(point, v)
        found, wanted = Cross(radius=1e-2).term(point, v, None, state), reverse(point, v)
    assert state.mode == "reverse"
    assert oracles.relative(found, wanted) < 1e-12
    point, v = setting(weights, KINDS["weights"][1](), model)
    with point:  # where λ only weights examples nothing passes through the norm
        assert oracles.relative(forward(point, v), reverse(point, v)) < 1e-12


def test_encoder_layer_of_torch_works_in_every_mode() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, Mean(), nn.Linear(4, 2))
    case = make(model.eval(), (3, 4), loss="cross_entropy", hyper=random_weights(5))
    found = [hk.identity(cross=m).compute(*case.arguments).grads for m in ("reverse", "forward", "difference", "auto")]
    for other in found[1:]:
        assert oracles.relative(other, found[0]) < 1e-6


def test_dropout_draws_the_same_mask_on_both_sides() -> None:
    model = nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 3)).to(DOUBLE)
    hyper = KINDS["weights"][1]()
    point, v = setting(weights, hyper, model)
    with point:
        found = [reverse(point, v), forward(point, v), difference(point, v, 1e-4)]
    assert oracles.relative(found[1], found[0]) < 1e-12
    assert oracles.relative(found[2], found[0]) < 1e-6
