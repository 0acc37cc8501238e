"""The functional optimizer steps against ``torch.optim`` and against their own derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperkron.hypergradient.steps import SGD, Adam, AdamW, Step, StepState
from hyperkron.solution import HyperkronError

CASES: dict[str, tuple[Step, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (SGD(0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "dampening": (
        SGD(0.1, momentum=0.8, dampening=0.3),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, dampening=0.3),
    ),
    "nesterov": (
        SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.02),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.02),
    ),
    "decay": (SGD(0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    "adam": (Adam(), lambda p: torch.optim.Adam(p)),
    "adam-decay": (
        Adam(0.05, betas=(0.7, 0.95), eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.05, betas=(0.7, 0.95), eps=1e-3, weight_decay=0.1),
    ),
    "adamw": (AdamW(), lambda p: torch.optim.AdamW(p)),
    "adamw-decay": (
        AdamW(0.05, betas=(0.8, 0.9), weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, 0.05, betas=(0.8, 0.9), weight_decay=0.3),
    ),
}
every_step = pytest.mark.parametrize("name", CASES)


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(3, 4, dtype=torch.float64, generator=generator),
        "b": torch.randn(4, dtype=torch.float64, generator=generator),
    }


def gradients(params: dict[str, Tensor], turn: int) -> dict[str, Tensor]:
    """A gradient field that depends on θ and on time."""
    return {name: p.sin() + 0.3 * p**3 + 0.1 * math.cos(turn) for name, p in params.items()}


def follow(step: Step, turns: int, missing: Callable[[str, int], bool]) -> tuple[dict[str, Tensor], StepState]:
    params = start()
    state = step.init(params)
    for turn in range(turns):
        grads = {n: g for n, g in gradients(params, turn).items() if not missing(n, turn)}
        params, state = step.step(params, grads, state)
    return params, state


def follow_torch(
    make: Callable[[Any], torch.optim.Optimizer], turns: int, missing: Callable[[str, int], bool]
) -> dict[str, Tensor]:
    params = {name: torch.nn.Parameter(p) for name, p in start().items()}
    optimizer = make(params.values())
    for turn in range(turns):
        for name, g in gradients({n: p.detach() for n, p in params.items()}, turn).items():
            params[name].grad = None if missing(name, turn) else g
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


@every_step
@pytest.mark.parametrize("pattern", ["always", "sometimes"])
def test_twenty_steps_equal_torch_optim(name: str, pattern: str) -> None:
    step, make = CASES[name]

    def missing(parameter: str, turn: int) -> bool:  # a parameter without gradient, at the start and later
        return pattern == "sometimes" and parameter == "b" and turn in (0, 1, 7)

    ours, state = follow(step, 20, missing)
    theirs = follow_torch(make, 20, missing)
    assert list(ours) == list(theirs)
    for parameter in ours:
        torch.testing.assert_close(ours[parameter], theirs[parameter], rtol=1e-12, atol=1e-12)
    assert state.taken == {"w": 20, "b": 17 if pattern == "sometimes" else 20}


@every_step
def test_a_step_leaves_its_arguments_alone(name: str) -> None:
    step, _ = CASES[name]
    params, state = follow(step, 2, lambda parameter, turn: False)
    grads = gradients(params, 2)
    arguments = [*params.values(), *grads.values(), *state.tensors()]
    copies = [x.clone() for x in arguments]
    taken = dict(state.taken)
    step.step(params, grads, state)
    assert all(torch.equal(x, y) for x, y in zip(arguments, copies, strict=True))
    assert state.taken == taken


@every_step
def test_three_steps_are_differentiable(name: str) -> None:
    step, _ = CASES[name]

    def trajectory(w: Tensor, scale: Tensor) -> Tensor:
        params = {"w": w}
        state = step.init(params)
        for turn in range(3):
            params, state = step.step(params, {"w": scale * gradients(params, turn)["w"]}, state)
        return params["w"]

    w = start()["w"].requires_grad_()
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(trajectory, (w, scale))


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_derivative_where_the_gradient_is_zero(kind: type[Adam] | type[AdamW]) -> None:
    """At g = 0 the first step −lr·g/(|g| + eps) has the derivative −lr/eps; √v alone would give NaN."""
    step = kind(lr=0.3, eps=0.2, weight_decay=0.0)
    g = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    params = {"w": torch.ones(2, dtype=torch.float64)}
    moved, _ = step.step(params, {"w": g}, step.init(params))
    (derivative,) = torch.autograd.grad(moved["w"].sum(), g)
    torch.testing.assert_close(derivative, torch.full_like(g, -0.3 / 0.2), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_passes_nan_on(kind: type[Adam] | type[AdamW]) -> None:
    step = kind()
    params = {"w": torch.ones(2)}
    moved, _ = step.step(params, {"w": torch.tensor([math.nan, 1.0])}, step.init(params))
    assert moved["w"].isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(0.0), "lr=0.0 must be a positive number"),
        (lambda: SGD(math.nan), "lr=nan"),
        (lambda: SGD(0.1, momentum=-0.5), "momentum=-0.5"),
        (lambda: SGD(0.1, dampening=math.inf), "dampening=inf"),
        (lambda: SGD(0.1, weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: SGD(0.1, nesterov=True), "nesterov=True with momentum=0.0"),
        (lambda: SGD(0.1, momentum=0.9, dampening=0.1, nesterov=True), "dampening=0.1"),
        (lambda: Adam(lr=-1.0), "lr=-1.0"),
        (lambda: Adam(betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
        (lambda: Adam(eps=0.0), "eps=0.0"),
        (lambda: AdamW(weight_decay=-0.1), "weight_decay=-0.1"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Step], message: str) -> None:
    with pytest.raises(HyperkronError, match=message):
        make()
