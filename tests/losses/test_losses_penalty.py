"""The penalty α‖p‖²: its value, and the record from which a curvature adds 2α."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from hyperkron.losses import l2, penalty

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


class Operations(TorchDispatchMode):
    """Counts the operations that compute something, by name: views are left out."""

    VIEWS = ("view", "slice", "expand", "select", "detach", "permute", "_unsafe_view", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.names += [name] if name not in self.VIEWS else []
        return func(*args, **(kwargs or {}))


def _apart(parameters: Sequence[Tensor], coefficients: Sequence[float | Tensor]) -> Tensor:
    """Σ_p α_p ‖p‖², parameter by parameter."""
    values = [(a * p.to(DOUBLE).square()).sum() for a, p in zip(coefficients, parameters, strict=True)]
    return torch.stack([x.to(DOUBLE) for x in values]).sum()


def _many() -> list[Tensor]:
    """Of several shapes, one of them in another order of memory, one of zeros, one empty and one a number."""
    torch.manual_seed(1)
    made = [torch.randn(s, dtype=DOUBLE) for s in ((3, 2), (4,), (), (2, 3, 2, 2), (0, 3))] + [torch.zeros(3).double()]
    made[3] = made[3].to(memory_format=torch.channels_last)
    made[0] = made[0].t()
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("small", [0, 5, 2**18])
@pytest.mark.parametrize("several", [False, True])
def test_derivatives_of_every_order_do_not_depend_on_what_is_joined(
    small: int, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients with respect to parameters and λ, double backward, forward mode, both together, and vmap."""
    monkeypatch.setattr(penalty, "SMALL", small)
    every = [*_many(), torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)]

    def coefficients(a: Tensor) -> list[float | Tensor]:
        return [a, 0.2, a, a, 0.2, 2 * a] if several else [a] * 6

    def value(*xs: Tensor) -> Tensor:
        *ps, a = xs
        return l2(ps, coefficients(a) if several else a).value

    ours, truth = value(*every), _apart(every[:-1], coefficients(every[-1]))
    torch.testing.assert_close(ours, truth)
    first, expected = (torch.autograd.grad(x, every, create_graph=True) for x in (ours, truth))
    torch.testing.assert_close(first, expected)
    assert [g.stride() for g in first[:4]] == [p.stride() for p in every[:4]]
    v = [torch.randn_like(p) for p in every]
    second = torch.autograd.grad(first, every, v)
    torch.testing.assert_close(second, torch.autograd.grad(expected, every, v))

    points, tangents = tuple(p.detach() for p in every), tuple(v)
    _, along = torch.func.jvp(value, points, tangents)
    torch.testing.assert_close(along, sum((g * t).sum() for g, t in zip(expected, v, strict=True)).detach())
    _, product = torch.func.jvp(torch.func.grad(value, argnums=tuple(range(7))), points, tangents)
    torch.testing.assert_close(product, tuple(second))
    batched = tuple(torch.stack([x, 2 * x]) for x in points)
    torch.testing.assert_close(
        torch.func.vmap(value)(*batched), torch.stack([value(*[x[i] for x in batched]) for i in (0, 1)])
    )


def test_forward_mode_over_a_backward_pass() -> None:
    """As a Hessian product of the library is computed: dual numbers of autograd, not of torch.func."""
    parameters = _many()
    v = [torch.randn_like(p) for p in parameters]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(parameters, v, strict=True)]
        gradients = torch.autograd.grad(l2(duals, 0.3).value, duals)
        tangents = [forward_ad.unpack_dual(g).tangent for g in gradients]
    torch.testing.assert_close(tangents, [0.6 * t for t in v])


def test_kinds_of_parameters_are_kept_apart() -> None:
    """Half precision is squared in float32; no gradient goes to a frozen tensor; a tensor given twice counts twice."""
    kept, frozen = torch.full((2,), 3.0, requires_grad=True), torch.full((2,), 5.0)
    half = [
        torch.full((3,), 300.0, dtype=x, requires_grad=True) for x in (torch.float16, torch.bfloat16, torch.float16)
    ]
    loss = l2([kept, frozen, kept, *half], 0.5)
    assert loss.value.dtype == torch.float32
    expected = 0.5 * (2 * 18 + 50) + 0.5 * sum(float(x.detach().float().square().sum()) for x in half)
    assert float(loss) == pytest.approx(expected)
    loss.backward()
    torch.testing.assert_close(kept.grad, torch.full((2,), 6.0))
    assert frozen.grad is None and all(torch.equal(x.grad, x.detach()) for x in half)


def test_few_operations_for_many_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)), nn.Linear(512, 513))
    with Operations() as seen:
        torch.autograd.grad(l2(model, 1e-3).value, list(model.parameters()))
    assert len(seen.names) < 30, seen.names
