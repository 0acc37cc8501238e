"""The cross term ∂²_λθ J_in · v: how the inner gradient along v changes with λ.

Three ways to the same vector, X(v) = ∂_λ ⟨∂_θ J_in(λ, θ), v⟩:

- ``reverse``: differentiate the gradient's graph again; exact, the most memory;
- ``forward``: one forward pass with tangent v on θ, then ∂_λ of the tangent; exact, and cheap where λ only weights
  examples, for then nothing is propagated back through the model;
- ``difference``: [∂_λ J_in(θ + εv) − ∂_λ J_in(θ − εv)] / 2ε with ε = radius/‖v‖ and θ detached: two plain forward passes
  where λ only weights examples. Works with every model; its error is O(radius²) plus rounding/radius.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import Operator
from hyperkron.curvature.products import HessianOperator
from hyperkron.point import Point
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.trees import Tree

Mode = Literal["auto", "reverse", "forward", "difference"]


RECHECK = 100
"""``auto`` looks again after so many calls, for a model in training changes."""


@dataclass
class CrossState:
    """What ``auto`` decided, so that a resumed run decides the same."""

    mode: str = ""
    radius: float = 0.0
    error: float = 0.0
    calls: int = 0

    def state_dict(self) -> dict[str, Any]:
        """The decision as plain values."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with an earlier decision."""
        self.mode, self.radius = state["mode"], state["radius"]
        self.error, self.calls = state["error"], state["calls"]


@dataclass(frozen=True)
class Cross:
    """How the cross term is computed.

    Args:
        mode: ``auto`` tries the finite difference first, at two radii: by how much the two answers differ tells its
            error. Where that is above ``tolerance`` at every radius it takes forward mode, then double backward,
            whichever the model allows. It decides on the first call and again after every 100.
        radius: ε‖v‖ of the finite difference; ``None`` tries 1e-2, 3e-3 and 1e-3 (float64: 1e-4 and 1e-5).
        tolerance: relative error at which a finite difference is exact enough; ``None`` means 5 %, an angle of 3°
            (float64: 1e-6). Models of smooth activations stay far below, those of ReLU and batch norm come close.
    """

    mode: Mode = "auto"
    radius: float | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "reverse", "forward", "difference"):
            raise HyperkronError(f"cross={self.mode!r} is unknown; choose auto, reverse, forward or difference.")
        if self.radius is not None and not self.radius > 0:
            raise HyperkronError(f"radius={self.radius!r} must be positive, or None for a choice by dtype.")

    def term(self, point: Point, v: Tree, operator: Operator | None, state: CrossState) -> Tree:
        """∂²_λθ J_in · v, one tensor for each parameter of λ."""
        same_batch = point.curvature_batch is point.inner_batch
        if self.mode in ("auto", "reverse") and isinstance(operator, HessianOperator) and same_batch:
            state.mode = "reverse"
            return _filled(point, operator.cross(v, point.hypers))
        due = state.calls % RECHECK == 0 or not state.mode  # a first call that failed has decided nothing
        state.calls += 1
        if self.mode == "auto" and due:
            return self._decide(point, v, state)
        if self.mode != "auto":
            state.mode, state.radius = self.mode, self._radii(point)[0]
        if state.mode == "difference":
            return difference(point, v, state.radius)
        return forward(point, v) if state.mode == "forward" else reverse(point, v)

    def _radii(self, point: Point) -> tuple[float, ...]:
        if self.radius is not None:
            return (self.radius, self.radius / 3)
        return (1e-4, 1e-5, 1e-6) if point.dtype == torch.float64 else (1e-2, 3e-3, 1e-3, 3e-4)

    def _decide(self, point: Point, v: Tree, state: CrossState) -> Tree:
        tolerance = self.tolerance or (1e-6 if point.dtype == torch.float64 else 0.05)
        radii = self._radii(point)
        wide, best = difference(point, v, radii[0]), (float("inf"), radii[0])
        first = wide
        for radius, next_radius in itertools.pairwise(radii):
            narrow = difference(point, v, next_radius)
            size = float(trees.norm(narrow))
            gap = float(trees.norm(trees.add(wide, narrow, alpha=-1.0)))
            error = 1.5 * gap / size if size > 0 else 0.0  # exact for an error that grows linearly with the radius
            if error <= tolerance:
                state.mode, state.radius, state.error = "difference", radius, error
                return wide
            best = min(best, (error, radius))
            wide = narrow
        reasons = []
        for mode, method in (("forward", forward), ("reverse", reverse)):
            try:
                exact = method(point, v)
            except (NotImplementedError, RuntimeError) as failure:
                if isinstance(failure, torch.OutOfMemoryError):
                    raise
                reasons.append(f"{mode}: {str(failure).splitlines()[0]}")
                continue
            state.mode, state.error = mode, 0.0
            return exact
        state.mode, (state.error, state.radius) = "difference", best
        warn_once(
            "cross-inexact",
            f"the finite-difference cross term has an error of about {state.error:.1%}, and no exact way works with "
            f"this model ({'; '.join(reasons)}); set radius, or use float64.",
        )
        return first if state.radius == radii[0] else difference(point, v, state.radius)


def reverse(point: Point, v: Tree) -> Tree:
    """X(v) by double backward: ∂_λ of ⟨∂_θ J_in, v⟩ with the gradient's graph kept."""
    loss = point.inner(differentiable=True)
    gradients = torch.autograd.grad(loss.value, list(point.params.values()), create_graph=True, allow_unused=True)
    pairs = [(g, v[n]) for n, g in zip(point.params, gradients, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return _filled(point, dict.fromkeys(point.hypers))
    live, vectors = zip(*pairs, strict=True)
    found = torch.autograd.grad(live, list(point.hypers.values()), vectors, allow_unused=True)
    return _filled(point, dict(zip(point.hypers, found, strict=True)))


def forward(point: Point, v: Tree) -> Tree:
    """X(v) by forward mode: J_in's tangent along v, then its gradient in λ."""
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p.detach(), v[name]) for name, p in point.params.items()}
        loss = point.substituted("inner", duals, point.inner_batch, draw=0, differentiable=True, where="along v")
        tangent = forward_ad.unpack_dual(loss.value).tangent
        if tangent is None or not tangent.requires_grad:
            return _filled(point, dict.fromkeys(point.hypers))
        found = torch.autograd.grad(tangent, list(point.hypers.values()), allow_unused=True)
    return _filled(point, dict(zip(point.hypers, found, strict=True)))


def difference(point: Point, v: Tree, radius: float) -> Tree:
    """X(v) by a central difference of ∂_λ J_in along v; the graph reaches λ only, never θ."""
    length = trees.norm(v)
    epsilon = torch.where(length > 0, radius / length, torch.ones_like(length))
    params = trees.map(Tensor.detach, point.params)
    sides: list[tuple[Tensor | None, ...]] = []
    for sign in (1.0, -1.0):
        with point.moved(trees.add(params, v, alpha=(sign * epsilon).to(point.dtype))):
            value = point.inner().value
            if not value.requires_grad:
                return _filled(point, dict.fromkeys(point.hypers))
            sides.append(torch.autograd.grad(value, list(point.hypers.values()), allow_unused=True))
    found = {
        name: None if up is None or down is None else (up - down) / (2 * epsilon).to(up.dtype)
        for name, up, down in zip(point.hypers, *sides, strict=True)
    }
    return _filled(point, found)


def _filled(point: Point, found: dict[str, Tensor | None]) -> Tree:
    """Zeros for the parameters of λ that J_in does not see; an error when it sees none of them."""
    if all(x is None for x in found.values()):
        raise HyperkronError(
            f"hyper does not influence the inner loss: none of {', '.join(list(found)[:5])} reaches it; "
            "use hyper inside inner(model, hyper, batch), without detach()."
        )
    return {n: torch.zeros_like(point.hypers[n]) if x is None else x.detach() for n, x in found.items()}
