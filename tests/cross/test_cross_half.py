"""The cross term of a model held in half precision: θ is too coarse to be moved by a small step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import solution

HALF = [torch.bfloat16, torch.float16]
ROWS, WIDTH = 12, 48


class _Doubled(torch.autograd.Function):
    """2x without forward mode; where ``once``, its gradient cannot be differentiated either."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, once: bool) -> Tensor:
        ctx.once = once
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (2 * grads[0].detach() if ctx.once else 2 * grads[0]), None


class Model(nn.Module):
    """A network that may refuse forward mode, double backward, and inputs in another dtype than ``fixed``.

    With ``bare`` it has a parameter outside of layers, for which there are no gradients at the output of a layer.
    """

    def __init__(
        self, forward: bool = True, twice: bool = True, fixed: torch.dtype | None = None, bare: bool = False
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if bare else 1.0
        self.tells_forward, self.twice, self.fixed = forward, twice, fixed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.fixed or self.first.weight.dtype))
        if not (self.tells_forward and self.twice):
            x = _Doubled.apply(x, not self.twice) / 2
        return self.last(torch.tanh(self.scale * x))


class Correction(nn.Module):
    """λ does more than weight: it is added to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-0.5, 0.5, ROWS * 3).reshape(ROWS, 3))


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(0.5, 1.0, ROWS))


def inner(model: nn.Module, hyper: Any, batch: Any) -> Any:
    if isinstance(hyper, Weights):
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=hyper.a)
    return hk.losses.cross_entropy(model(batch[0]) + hyper.a, batch[1])


def outer(model: nn.Module, hyper: Any, batch: Any) -> Any:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


PROBLEM = hk.BilevelProblem(inner, outer)


def batches() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in (ROWS, 8)]
    return made[0], made[1]


def trained(optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """A model in ``dtype`` with its optimizer after some steps, its last gradients kept."""
    torch.manual_seed(0)
    model = Model(**options).to(dtype)
    made = optimizer(model.parameters())
    (x, y), _ = batches()
    for _ in range(3):
        made.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        made.step()
    return model, made


def off(result: hk.HypergradientResult, model: nn.Module, hyper: nn.Module) -> float:
    """1 − cosine of −grads and of X(v) by double backward in float64, at the v of the result."""
    twin, double = copy.deepcopy(model).double(), copy.deepcopy(hyper).double()
    twin.fixed, twin.twice = None, True  # type: ignore[assignment]
    batch = (batches()[0][0].to(next(model.parameters()).dtype).double(), batches()[0][1])
    value = inner(twin, double, batch).value
    slopes = torch.autograd.grad(value, list(twin.parameters()), create_graph=True)
    assert result.solution is not None
    v = [result.solution.value[name].double() for name, _ in twin.named_parameters()]
    (wanted,) = torch.autograd.grad(slopes, list(double.parameters()), v)
    return 1 - float(torch.cosine_similarity(-result.grads["a"].double().flatten(), wanted.flatten(), dim=0))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, 0.01, eps=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, 0.3),
}


@pytest.fixture(autouse=True)
def _every_warning() -> Iterator[None]:
    solution._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", hk.HyperkronWarning)
        yield


@pytest.mark.parametrize("kind", [Weights, Correction])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALF)
def test_sama_is_right_in_half_precision(dtype: torch.dtype, name: str, kind: type[nn.Module]) -> None:
    model, optimizer = trained(OPTIMIZERS[name], dtype)
    for alpha in (0.1, 1e-3):
        hyper = kind()
        result = hk.sama(optimizer, alpha=alpha).compute(PROBLEM, model, hyper, *batches())
        assert off(result, model, hyper) < 1e-4


@pytest.mark.parametrize("kind", [Weights, Correction])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"forward": False, "fixed": True}, "adjoint"),
        ({"bare": True}, "forward"),
        ({"forward": False, "bare": True}, "difference"),  # with θ in float32
        ({"forward": False, "fixed": True, "bare": True}, "reverse"),
        ({"twice": False, "bare": True}, "difference"),
    ],
)
def test_the_next_way_that_works_is_taken(
    options: dict[str, Any], mode: str, dtype: torch.dtype, kind: type[nn.Module]
) -> None:
    options = {**options, "fixed": dtype if options.get("fixed") else None}
    model, _ = trained(OPTIMIZERS["sgd"], dtype, **options)
    for cross in ("auto", "difference"):
        method, hyper = hk.identity(cross=cross), kind()  # type: ignore[arg-type]
        result = method.compute(PROBLEM, model, hyper, *batches())
        if kind is Weights:
            assert (result.stats["cross"], method.state.cross.way.full) == (mode, mode == "difference")
        assert off(result, model, hyper) < 1e-4


@pytest.mark.parametrize("kind", [Weights, Correction])
@pytest.mark.parametrize("dtype", HALF)
def test_where_theta_itself_must_be_moved_a_warning_tells_the_error(dtype: torch.dtype, kind: type[nn.Module]) -> None:
    model, optimizer = trained(OPTIMIZERS["sgd"], dtype, twice=False, fixed=dtype, bare=True)
    for method in (hk.sama(optimizer), hk.identity()):
        solution._warned.clear()
        with pytest.warns(hk.HyperkronWarning, match="has an error of about .*%"):
            method.compute(PROBLEM, model, kind(), *batches())


@pytest.mark.parametrize("dtype", HALF)
def test_sama_in_micro_batches_which_have_no_forward_mode(dtype: torch.dtype) -> None:
    model, optimizer = trained(OPTIMIZERS["adam"], dtype)

    def indexed(model: nn.Module, hyper: Any, batch: Any) -> Any:
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=hyper.a[batch[2]])

    problem, (first, second) = hk.BilevelProblem(indexed, outer), batches()
    hyper, first = Weights(), (*first, torch.arange(ROWS))
    result = hk.sama(optimizer).compute(hk.training.Accumulated(problem, 5), model, hyper, first, second)
    assert off(result, model, hyper) < 1e-4


@pytest.mark.parametrize("build", [hk.sama, lambda o: hk.Implicit(hk.curvature.AdamDiagonal(o), hk.solvers.Direct())])
def test_a_v_outside_the_range_of_float16_has_a_cross_term(build: Any) -> None:
    """v = 1e-9·∂θJ_out would be zero in float16."""
    found = []
    for rate in (1.0, 1e-9):
        model, _ = trained(OPTIMIZERS["sgd"], torch.float16)
        method = build(torch.optim.SGD(model.parameters(), rate))
        found.append(method.compute(PROBLEM, model, Weights(), *batches()).grads["a"] / rate)
    assert float((found[1] - found[0]).norm()) < 5e-3 * float(found[0].norm())


def test_a_graph_through_the_model_outlives_a_difference_in_float32() -> None:
    model, _ = trained(OPTIMIZERS["sgd"], torch.bfloat16, forward=False, bare=True)
    value = outer(model, None, batches()[1]).value
    method = hk.identity(cross="difference")
    method.compute(PROBLEM, model, Weights(), *batches())
    assert method.state.cross.way.full
    model.zero_grad()
    value.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


class Adapted(nn.Module):
    """A frozen base in bfloat16 with adapters in float32, as peft makes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).bfloat16().requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.base[0].weight.dtype)
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x.to(down.weight.dtype))).to(x.dtype))
        return x[:, :3]


def test_sama_is_not_blamed_for_the_rounding_of_smaller_steps() -> None:
    """Its own step is large enough; a smaller one, to compare with, is lost in the rounding of a frozen base."""
    made = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    data = [(x, batches()[0][1]) for x in made]
    found, wanted = (
        hk.sama().compute(PROBLEM, model, Weights(), *data).grads["a"] for model in (Adapted(), Adapted().double())
    )
    assert float((found - wanted).norm()) < 0.05 * float(wanted.norm())
