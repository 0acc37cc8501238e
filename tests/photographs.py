"""A model and objectives in which all can go wrong, at any moment; and a photograph of all they could change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.hypergradient.steps import Adam

N, D, C = 6, 3, 3


class Boom(Exception):
    """What a user's code may throw at any moment."""


class Fuse:
    """Counts events by kind, and burns through at the n-th of one kind."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.kind, self.at = "", 0
        self.error: BaseException = Boom()

    def light(self, kind: str, at: int, error: BaseException) -> None:
        self.seen.clear()
        self.kind, self.at, self.error = kind, at, error

    def event(self, kind: str) -> None:
        self.seen[kind] += 1
        if kind == self.kind and self.seen[kind] == self.at:
            raise self.error


FUSE = Fuse()


class Fused(torch.autograd.Function):
    """The identity; its backward pass, and the backward pass of that, count as events."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        FUSE.event("backward")
        return Fused.apply(g)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


class Net(nn.Module):
    """All that can go wrong: modes mixed, a frozen layer, statistics, random numbers of three kinds, caches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.still = nn.BatchNorm1d(4).eval()
        self.dropout = nn.Dropout(0.3)
        self.layer_norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, C)
        self.average: Tensor | None
        self.cache: Tensor | None
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        x = self.still(self.frozen(x))
        if self.average is not None:
            x = x * (1 + self.average.mul_(0.9).add_(0.1 * x.detach().mean(0)))  # in place and in the graph
        self.cache = x.detach()
        if "lazy" not in self._buffers:
            self.register_buffer("lazy", torch.ones(1))
        FUSE.event("layer")
        x = Fused.apply(x) * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))
        return self.last(self.layer_norm(self.dropout(x)))


class Hyper(nn.Module):
    """λ with noise and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = hk.SampleWeights(N, "sigmoid")
        self.decay = nn.Parameter(torch.tensor(-3.0))
        self.unused = nn.Parameter(torch.zeros(2))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, index: Tensor) -> Tensor:
        self.calls += 1
        return self.weights(index)


def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    FUSE.event("inner")
    x, y, index = batch
    return hk.losses.cross_entropy(model(x), y, weight=hyper(index)) + hk.losses.l2(model, hyper.decay.exp())


def outer(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
    FUSE.event("outer")
    x, y, _ = batch
    return hk.losses.cross_entropy(model(x), y)


PROBLEM = hk.BilevelProblem(inner, outer)

IMPLICIT: dict[str, Callable[..., hk.Implicit]] = {
    "kfac-mc": lambda **k: hk.kfac(1e-2, **k),
    "kfac-type-2": lambda **k: hk.kfac(1e-2, fisher="type-2", **k),
    "kfac-empirical": lambda **k: hk.kfac(1e-2, fisher="empirical", ema=0.5, **k),
    "kfac-reduce": lambda **k: hk.kfac(1e-2, sharing="reduce", refresh_every=2, **k),
    "kfac-exact": lambda **k: hk.kfac(1e-2, split="exact", **k),
    "ekfac": lambda **k: hk.ekfac(1e-2, **k),
    "cg-hessian": lambda **k: hk.cg(3, 30.0, **k),
    "cg-ggn": lambda **k: hk.cg(3, curvature=hk.curvature.GGN(1e-2), warm_start=True, **k),
    "pcg": lambda **k: hk.pcg(3, 1e-2, **k),
    "pcg-hessian": lambda **k: hk.pcg(3, 1e-2, curvature=hk.curvature.Hessian(30.0), **k),
    "neumann": lambda **k: hk.neumann(3, 30.0, **k),
    "gradient-descent": lambda **k: hk.gradient_descent(2, 30.0, **k),
    "identity": lambda **k: hk.identity(0.1, **k),
}
METHODS: dict[str, Callable[[Net], hk.hypergradient.Hypergradient]] = {
    **{f"{name}/auto": lambda model, make=make: make() for name, make in IMPLICIT.items()},
    **{
        f"{name}/{mode}": lambda model, name=name, mode=mode: IMPLICIT[name](cross=mode)
        for name in ("kfac-mc", "ekfac", "cg-hessian", "pcg", "identity")
        for mode in ("reverse", "forward", "difference")
    },
    "sama": lambda model: hk.sama(),
    "sama-adamw": lambda model: hk.sama(stepped(model)),
    "unrolled": lambda model: hk.unrolled(3, Adam(1e-2), checkpoint_every=2),
    "truncated": lambda model: hk.truncated(3, 2),
    "one-step": lambda model: hk.one_step(0.1),
}
method_names = pytest.mark.parametrize("name", list(METHODS))


def stepped(model: Net) -> torch.optim.Optimizer:
    """AdamW after a step, with its gradients still there, as SAMA wants it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    optimizer.step()
    return optimizer


class Case:
    """A model, a λ, two batches, and a photograph of all of it."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model, self.hyper = Net().to(dtype), Hyper().to(dtype)
        self.model.last.weight.grad = torch.randn_like(self.model.last.weight)
        self.hyper.decay.grad = torch.randn_like(self.hyper.decay)
        x, y = torch.randn(2 * N, D, dtype=dtype), torch.arange(2 * N) % C
        self.inner = (x[:N], y[:N], torch.arange(N))
        self.outer = (x[N:], y[N:], torch.arange(N))
        FUSE.light("", 0, Boom())

    def arguments(self) -> tuple[Any, ...]:
        return PROBLEM, self.model, self.hyper, self.inner, self.outer

    def photograph(self, *, hyper_grads: bool = True) -> dict[str, Any]:
        """Everything the contract names, as comparable values; tensors by identity, memory, version and bits."""
        seen: dict[str, Any] = {}
        for label, module in (("model", self.model), ("hyper", self.hyper)):
            for name, part in module.named_modules():
                here = f"{label}.{name}"
                seen[f"{here} training"] = part.training
                seen[f"{here} buffers"] = [(n, bits(b)) for n, b in part._buffers.items()]
                seen[f"{here} unsaved"] = sorted(part._non_persistent_buffers_set)
                seen[f"{here} parameters"] = [(n, bits(p)) for n, p in part._parameters.items()]
                for attribute, value in vars(part).items():
                    if "hooks" in attribute:
                        seen[f"{here} {attribute}"] = list(value.items()) if isinstance(value, dict) else value
            for name, p in module.named_parameters():
                seen[f"{label}.{name} requires_grad"] = p.requires_grad
                seen[f"{label}.{name} is_leaf"] = p.is_leaf
                if label == "model" or hyper_grads:
                    seen[f"{label}.{name} grad"] = bits(p.grad)
        seen["batches"] = [bits(t) for t in (*self.inner, *self.outer)]
        seen["torch random"] = torch.get_rng_state().numpy().tobytes()
        seen["python random"] = random.getstate()
        name, keys, *rest = np.random.get_state()
        seen["numpy random"] = (name, keys.tobytes(), *rest)
        seen["modes"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
        seen["kernels"] = (
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        )
        return seen


def bits(x: Tensor | None) -> Any:
    if x is None:
        return None
    return id(x), x.data_ptr(), x._version, x.dtype, x.detach().numpy().tobytes()
