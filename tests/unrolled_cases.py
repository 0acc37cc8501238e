"""Small regressions for the tests of unrolling, and unrolling in one graph as their oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperkron import trees
from hyperkron.hypergradient.steps import SGD, Adam, AdamW, Step
from hyperkron.hypergradient.unrolled import Batches
from hyperkron.problem import BilevelProblem

DOUBLE = torch.float64
STEPS: dict[str, tuple[Step, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SGD(0.3), lambda p: torch.optim.SGD(p, 0.3)),
    "momentum": (
        SGD(0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    ),
    "nesterov": (
        SGD(0.1, momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True),
    ),
    "adam": (
        Adam(0.05, weight_decay=0.02, eps=1e-3),
        lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.02, eps=1e-3),
    ),
    "adamw": (
        AdamW(0.05, weight_decay=0.1, eps=1e-3),
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1, eps=1e-3),
    ),
}
every_step = pytest.mark.parametrize("name", STEPS)


class Lambda(nn.Module):
    """λ: a logit for each example, and a log-decay."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.linspace(-1.0, 1.0, size, dtype=DOUBLE))
        self.decay = nn.Parameter(torch.tensor(-2.0, dtype=DOUBLE))


def inner(model: nn.Module, hyper: Any, batch: Any) -> Tensor:
    x, y = batch
    losses = (model(x) - y).square().sum(-1)
    penalty = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
    return (hyper.logits.sigmoid() * losses).mean() + hyper.decay.exp() * penalty


def outer(model: nn.Module, hyper: Any, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) - y).abs().pow(1.5).mean() + 0.1 * hyper.decay.square()  # with a direct term


PROBLEM = BilevelProblem(inner, outer)


def make(*layers: nn.Module, size: int = 6, width: int = 3, seed: int = 0) -> tuple[nn.Module, Lambda, Any, Any]:
    """A small regression: the model, λ, an inner and an outer batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(layers or (nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 2)))).to(DOUBLE)
    for m in model.modules():
        if isinstance(m, nn.Linear):
            m.reset_parameters()  # in float64, from the seed
    batches = [(torch.randn(size, width, dtype=DOUBLE), torch.randn(size, 2, dtype=DOUBLE)) for _ in range(2)]
    return model, Lambda(size), batches[0], batches[1]


def naive(
    problem: BilevelProblem,
    model: nn.Module,
    hyper: nn.Module,
    inner_batch: Any,
    outer_batch: Any,
    steps: int,
    step: Step,
    constant: int = 0,
) -> dict[str, Tensor]:
    """dΦ_T/dλ with all T steps in one graph; θ and the state before step ``constant`` are held constant."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, function: Any, batch: Any) -> Tensor:
            return function(self.model, hyper, batch)

    def at(function: Any, params: dict[str, Tensor], batch: Any) -> Tensor:
        return functional_call(Holder(), {f"model.{n}": p for n, p in params.items()}, (function, batch))

    params = {n: p.detach().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    state = step.init(params)
    for t in range(steps):
        if t == constant:
            params = {n: p.detach().requires_grad_() for n, p in params.items()}
            state = state.map(Tensor.detach)
        batch = inner_batch[t] if isinstance(inner_batch, Batches) else inner_batch
        loss = at(problem.inner, params, batch)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params, state = step.step(params, dict(zip(params, grads, strict=True)), state)
    hypers = dict(hyper.named_parameters())
    found = torch.autograd.grad(at(problem.outer, params, outer_batch), list(hypers.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(hypers.items(), found, strict=True)}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Equality relative to the norm of the whole vector."""
    error = trees.norm(trees.add(ours, theirs, alpha=-1.0)) / trees.norm(theirs)
    assert float(error) < tolerance, f"relative error {float(error):.2e}"
