"""Second derivatives and forward mode through weight norm and spectral norm."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, make
from crossing import X, Y, setting
from hyperkron.cross import forward, reverse


def weighted(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X), Y, weight=hyper(torch.arange(5)))


def outer(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X), Y.flip(0))


def normalised(old: bool, norm: str) -> nn.Module:
    torch.manual_seed(2)
    make = getattr(nn.utils if old else nn.utils.parametrizations, norm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = make(nn.Linear(3, 4).to(DOUBLE))
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 3).to(DOUBLE))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def elementary(model: nn.Module, x: Tensor) -> Tensor:
    """The same function of the same parameters, without torch's weight norm."""
    g, v = sorted((p for n, p in model[0].named_parameters() if n != "bias"), key=lambda p: p.shape[1])  # type: ignore[operator, index]
    return model[2](torch.tanh(F.linear(x, v * (g / v.norm(dim=1, keepdim=True)), model[0].bias)))  # type: ignore[index, operator, no-any-return]


@pytest.mark.parametrize("old", [False, True])
def test_hessian_products_through_weight_norm_are_right(old: bool) -> None:
    model, hyper = normalised(old, "weight_norm"), hk.SampleWeights(5).to(DOUBLE)
    index = torch.arange(5)
    problem = hk.BilevelProblem(weighted, outer)
    params = list(oracles.trainable(model).values())
    hessian = oracles.hessian(
        lambda: hk.losses.cross_entropy(elementary(model, X), Y, weight=hyper(index)).value, params, params
    )
    damping = 1.0 - float(torch.linalg.eigvalsh(hessian)[0])
    for made in (hk.cg(200, damping, tolerance=1e-13), hk.identity(cross="reverse"), hk.identity(cross="forward")):
        result = made.compute(problem, model, hyper, None, None)
        assert result.solution is not None
        v = oracles.flat(result.solution.value)
        b = oracles.gradient(hk.losses.cross_entropy(elementary(model, X), Y.flip(0)).value, params)
        if isinstance(made.curvature, hk.curvature.Hessian):
            assert float((hessian @ v + damping * v - b).norm() / b.norm()) < 1e-10
        mixed = oracles.hessian(
            lambda: hk.losses.cross_entropy(elementary(model, X), Y, weight=hyper(index)).value, params, [hyper.weight]
        )
        assert float((result.grads["weight"] + mixed.T @ v).norm() / (mixed.T @ v).norm()) < 1e-10


def test_weight_norm_by_hand_is_refused_by_name() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.g = nn.Parameter(torch.randn(3, 3).to(DOUBLE)), nn.Parameter(torch.ones(3, 1).to(DOUBLE))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, torch._weight_norm(self.v, self.g, 0))

    hyper, problem = hk.SampleWeights(5).to(DOUBLE), hk.BilevelProblem(weighted, outer)
    for made in (hk.cg(3, 1.0), hk.identity(cross="reverse"), hk.pcg(3, 1.0)):
        with pytest.raises(hk.HyperkronError, match=r"torch\._weight_norm is wrong"):
            made.compute(problem, Layer(), hyper, None, None)
    assert hk.kfac().compute(problem, Layer(), hyper, None, None).stats["cross"] == "difference"


@pytest.mark.parametrize("old", [False, True])
def test_forward_through_spectral_norm_is_refused_with_a_remedy(old: bool) -> None:
    model, hyper = normalised(old, "spectral_norm"), hk.SampleWeights(5).to(DOUBLE)
    problem = hk.BilevelProblem(weighted, outer)
    with pytest.raises(
        hk.HyperkronError, match=r"cross='forward' does not pass .* use cross='reverse' or cross='auto'"
    ):
        hk.identity(cross="forward").compute(problem, model, hyper, None, None)
    model.eval()
    found = hk.identity(cross="forward").compute(problem, model, hyper, None, None).grads
    wanted = hk.identity(cross="reverse").compute(problem, model, hyper, None, None).grads
    assert oracles.relative(found, wanted) < 1e-12
    point, v = setting(weighted, hyper, model)
    with point:
        assert oracles.relative(forward(point, v), reverse(point, v)) < 1e-12


def test_weight_norm_in_micro_batches_and_in_hyper_is_right() -> None:
    """Pieces are differentiated after the objective has returned; λ may be a normalised network too."""
    model, hyper = normalised(False, "weight_norm"), hk.SampleWeights(5).to(DOUBLE)
    problem = hk.BilevelProblem(
        lambda m, h, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=h(b[2])),
        lambda m, h, b: hk.losses.cross_entropy(m(b[0]), (b[1] + 1) % 3),
    )
    batch = X, Y, torch.arange(5)
    made = [
        hk.cg(30, 3.0, tolerance=1e-13).compute(p, model, hyper, batch, batch).grads
        for p in (problem, hk.training.Accumulated(problem, 2))
    ]
    assert oracles.relative(made[1], made[0]) < 1e-8

    net = normalised(False, "weight_norm")
    problem = hk.BilevelProblem(
        lambda m, h, b: hk.losses.cross_entropy(m(X + h(X)), Y), lambda m, h, b: hk.losses.cross_entropy(m(X), Y)
    )
    found = hk.identity(cross="reverse").compute(problem, model, net, None, None).grads
    wanted = hk.identity(cross="difference").compute(problem, model, net, None, None).grads
    assert oracles.relative(found, wanted) < 1e-6


@pytest.mark.parametrize("kind", ["weight norm of all", "group norm, channels last"])
def test_where_forward_mode_of_torch_is_broken_the_error_says_what_to_do(kind: str) -> None:
    if kind == "weight norm of all":
        net, shape = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2), dim=None)), (3,)
    else:
        images = nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        net, shape = nn.Sequential(images, nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2)), (2, 3, 3)
    case = make(net, shape, loss="cross_entropy")
    x, y = case.inner_batch
    case.inner_batch = (x.contiguous(memory_format=torch.channels_last), y) if x.dim() == 4 else (x, y)
    method = hk.Implicit(hk.curvature.Identity(), hk.solvers.Direct(), cross="forward")
    with pytest.raises(hk.HyperkronError, match="use cross='reverse' or cross='auto'"):
        method.compute(*case.arguments)


def test_a_layer_norm_with_a_bias_alone_has_no_second_derivative_and_says_so() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.layer_norm(x @ self.weight.T, (self.out_features,), None, self.bias)

    model, hyper = Shifted(3, 4).to(DOUBLE), hk.SampleWeights(5).to(DOUBLE)
    batch = torch.randn(5, 3, dtype=DOUBLE), torch.randint(4, (5,)), torch.arange(5)

    def inner(model: nn.Module, hyper: nn.Module, batch: tuple[torch.Tensor, ...]) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=hyper(batch[2]))

    with pytest.raises(hk.HyperkronError, match="cannot be differentiated twice"):
        hk.cg(3).compute(hk.BilevelProblem(inner, inner), model, hyper, batch, batch)
