"""Models held in bfloat16 or float16: every hypergradient and loss, near the float32 answer, in the dtypes given."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import solution, trees
from hyperkron.curvature import hessian
from hyperkron.evaluation.point import Point
from hyperkron.hypergradient.steps import SGD
from hyperkron.hypergradient.unrolled import Batches

LEAST = {torch.bfloat16: 0.99, torch.float16: 0.999}
"""The cosine to the hypergradient in float32 that is asked for."""
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

Target = Callable[[Tensor, torch.Generator], Tensor]
LOSSES: dict[str, tuple[Any, Target]] = {
    "cross_entropy": (hk.losses.cross_entropy, lambda f, g: torch.randint(0, f.shape[-1], f.shape[:-1], generator=g)),
    "soft targets": (hk.losses.cross_entropy, lambda f, g: torch.rand(f.shape, generator=g).softmax(-1)),
    "mse": (hk.losses.mse, lambda f, g: torch.randn(f.shape, generator=g)),
    "binary": (hk.losses.binary_cross_entropy, lambda f, g: torch.rand(f.shape, generator=g)),
}
METHODS: dict[str, Callable[[torch.optim.Optimizer], hk.hypergradient.Hypergradient]] = {
    "kfac": lambda _: hk.kfac(0.1, fisher="type-2"),
    "kfac, exact": lambda _: hk.kfac(0.1, fisher="type-2", split="exact"),
    "kfac, mc": lambda _: hk.kfac(0.1),
    "ekfac": lambda _: hk.ekfac(0.1, fisher="type-2"),
    "cg": lambda _: hk.cg(6, damping=0.5),
    "cg, ggn": lambda _: hk.cg(6, damping=0.1, curvature=hk.curvature.GGN(0.1)),
    "pcg": lambda _: hk.pcg(4, damping=0.1),
    "neumann": lambda _: hk.neumann(6, damping=0.5),
    "gradient_descent": lambda _: hk.gradient_descent(6, damping=0.5),
    "identity": lambda _: hk.identity(),
    "sama": lambda optimizer: hk.sama(optimizer),
    "one_step": lambda _: hk.one_step(lr=0.1),
    "unrolled": lambda _: hk.unrolled(3),
    "truncated": lambda _: hk.truncated(3, 2),
}


class Weights(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.0, count))

    def forward(self) -> Tensor:
        return self.weight


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def answer(
    method: str, loss: str, dtype: torch.dtype, hyper_dtype: torch.dtype, device: str = "cpu"
) -> tuple[hk.HypergradientResult, nn.Module, nn.Module]:
    """The hypergradient at one and the same θ, rounded to ``dtype``."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model, hyper = network(), Weights(24).to(hyper_dtype)
    x, fresh = torch.randn(24, 6, generator=generator), torch.randn(8, 6, generator=generator)
    function, target = LOSSES[loss]
    y, fresh_y = target(model(x), generator), target(model(fresh), generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)
    for _ in range(6):
        optimizer.zero_grad()
        function(model(x), y).backward()
        optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    model = model.to(device, dtype)
    hyper = hyper.to(device)
    for p, gradient in zip(model.parameters(), gradients, strict=True):  # Adam's memory in the dtype of the parameters
        p.grad = None if gradient is None else gradient.to(p)
        optimizer.state[p] = {
            name: value.to(p) if name != "step" else value for name, value in optimizer.state[p].items()
        }

    def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> Any:
        output = model(batch[0].to(device, dtype))
        return function(output, batch[1].to(device), weight=hyper()) + hk.losses.l2(model, 1e-2)

    def outer(model: nn.Module, hyper: nn.Module, batch: Any) -> Any:
        return function(model(batch[0].to(device, dtype)), batch[1].to(device))

    problem = hk.BilevelProblem(inner, outer)
    return METHODS[method](optimizer).backward(problem, model, hyper, (x, y), (fresh, fresh_y)), model, hyper


@functools.cache
def reference(method: str, loss: str, device: str) -> Tensor:
    """In float32 on the same device, for each device draws other labels for KFAC."""
    return answer(method, loss, torch.float32, torch.float32, device)[0].grads["weight"]


LATER = [(loss, torch.float16) for loss in LOSSES if loss != "cross_entropy"]
"""By ``make long``; in bfloat16, and of cross-entropy in both, by ``make test``."""


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        pytest.param(loss, dtype, marks=pytest.mark.long if (loss, dtype) in LATER else ())
        for loss in LOSSES
        for dtype in LEAST
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_the_answer_is_near_that_of_float32(method: str, loss: str, dtype: torch.dtype) -> None:
    for device in DEVICES:
        wanted = reference(method, loss, device)
        for hyper_dtype in (torch.float32, dtype) if loss == "cross_entropy" else (torch.float32,):
            result, model, hyper = answer(method, loss, dtype, hyper_dtype, device)
            found = result.grads["weight"]
            assert found.dtype == hyper_dtype
            assert hyper.weight.grad is not None and hyper.weight.grad.dtype == hyper_dtype
            if result.solution is not None:
                assert all(result.solution.value[name].dtype == dtype for name, _ in model.named_parameters())
            cosine = torch.cosine_similarity(found.float(), wanted, dim=0)
            assert float(cosine) > LEAST[dtype], (device, hyper_dtype)


@pytest.mark.parametrize("dtype", LEAST)
def test_solvers_hold_their_vectors_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    true = hessian.HessianOperator.matvec

    def noted(self: Any, v: Any) -> Any:
        found = true(self, v)
        seen.extend(x.dtype for tree in (v, found) for x in tree.values())
        return found

    monkeypatch.setattr(hessian.HessianOperator, "matvec", noted)
    answer("cg", "cross_entropy", dtype, torch.float32)
    assert set(seen) == {torch.float32}


def test_vectors_far_outside_float16_are_scaled_into_it() -> None:
    """A v of 1e-9 or 1e9 would be lost in float16; the product is linear in it, so it is not."""
    torch.manual_seed(0)
    model = network().half()
    x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
    inner = lambda m, h, b: hk.losses.cross_entropy(m(b[0].half()), b[1], weight=h())  # noqa: E731
    problem = hk.BilevelProblem(inner, inner)
    with Point(problem, model, Weights(24), (x, y), (x, y)) as point:
        for kind in (hk.curvature.Hessian(), hk.curvature.GGN()):
            operator = kind.operator(point, kind.init())
            v = trees.map(lambda p: torch.randn(p.shape, generator=torch.Generator().manual_seed(2)), point.params)
            one = operator.matvec(v)
            for size in (1e-9, 1e9):
                found = operator.matvec(trees.scale(v, size))
                assert float(trees.norm(trees.add(trees.scale(found, 1 / size), one, alpha=-1.0))) < 2e-3 * float(
                    trees.norm(one)
                )


def test_a_moving_average_and_a_lasting_basis_in_bfloat16() -> None:
    torch.manual_seed(0)
    model, hyper = network().bfloat16(), Weights(24)
    x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
    inner = lambda m, h, b: hk.losses.cross_entropy(m(b[0].bfloat16()), b[1], weight=h())  # noqa: E731
    problem = hk.BilevelProblem(inner, inner)
    for method in (hk.kfac(0.1, ema=0.5), hk.ekfac(0.1, basis_every=2), hk.kfac(0.1, sharing="reduce")):
        for _ in range(3):
            result = method.compute(problem, model, hyper, (x, y), (x, y))
        resumed = copy.deepcopy(method)
        resumed.load_state_dict(method.state_dict())
        assert torch.isfinite(result.grads["weight"]).all()


@pytest.mark.parametrize("dtype", LEAST)
def test_unrolled_steps_whose_terms_cancel_are_told(dtype: torch.dtype) -> None:
    """After two steps θ − λ(θ − a_t)/2 from θ = 2 with λ = 1, dθ/dλ = (a₁ − 2)/4 + (a₂ − 1 − a₁/2)/2 = a₂/2 − 1."""

    class Scalar(nn.Module):
        def __init__(self, value: float, kind: torch.dtype) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([value], dtype=kind))

    def inner(model: Any, hyper: Any, batch: Tensor) -> Tensor:
        return 0.5 * (hyper.w.to(model.w) * (model.w - batch.to(model.w)).square()).sum()

    problem = hk.BilevelProblem(inner, lambda model, hyper, batch: model.w.sum())
    method = hk.unrolled(2, SGD(0.5))
    for second, cancels in ((5.0, False), (2 + 2**-6, True)):
        model, hyper = Scalar(2.0, dtype), Scalar(1.0, torch.float32)
        batches = Batches([torch.tensor([-1.0]), torch.tensor([second])])
        solution._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            method.compute(problem, model, hyper, batches, None)
        assert any("cancel" in str(w.message) for w in caught) == cancels
