"""The cross term ∂²_λθ J_in · v: how the inner gradient along v changes with λ.

Three ways to the same vector, X(v) = ∂_λ ⟨∂_θ J_in(λ, θ), v⟩:

- ``reverse``: differentiate the gradient's graph again; exact, the most memory;
- ``forward``: one forward pass with tangent v on θ, then ∂_λ of the tangent; exact, and cheap where λ only weights
  examples, for then nothing is propagated back through the model;
- ``difference``: [∂_λ J_in(θ + εv) − ∂_λ J_in(θ − εv)] / 2ε with ε = radius/‖v‖ and θ detached: two plain forward
  passes where λ only weights examples. Works with every model; its error is O(radius²) plus rounding/radius.

The last two move θ rather than differentiate by it. Where an inner loss stops gradients (``detach()``, ``no_grad``,
straight-through estimators) or asks parameters whether they require a gradient, its value moves otherwise than its
gradient says, and only ``reverse`` is right; ``auto`` finds that out.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from hyperkron import trees
from hyperkron.curvature.base import Operator, checked_positive
from hyperkron.curvature.products import HessianOperator, UndifferentiableError, gradients_of, graph_nodes
from hyperkron.linalg import full_precision, tf32_products
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
    full: bool = False  # whether the finite difference runs in full float32 where the model runs in TF32
    error: float = 0.0
    calls: int = 0
    inner: Any = field(default=None, repr=False)  # whose inner loss it was decided for; not saved

    def state_dict(self) -> dict[str, Any]:
        """The decision as plain values."""
        return {name: value for name, value in vars(self).items() if name != "inner"}

    def meets(self, inner: Any) -> bool:
        """Whether the decision was made for this inner loss; the first one after a resume is taken to be it."""
        inner = getattr(inner, "func", inner)  # of a functools.partial
        mark = getattr(inner, "__code__", None) or id(inner)  # a function defined anew in every step is the same one
        known, self.inner = self.inner in (None, mark), mark
        return known

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with an earlier decision."""
        self.mode, self.radius, self.full = state["mode"], state["radius"], state["full"]
        self.error, self.calls = state["error"], state["calls"]


@dataclass(frozen=True)
class Cross:
    """How the cross term is computed.

    Args:
        mode: ``auto`` tries the finite difference first, at two radii: by how much the two answers differ tells its
            error. Where that is above ``tolerance`` at every radius it takes forward mode, then, where the model runs
            in TF32, the finite difference in full float32 (before forward mode where a convolutional model has small
            tensors only), then double backward, whichever the model allows. Where J_in changes along v otherwise than
            its gradient says (gradients are stopped inside it), it takes double backward. It decides on the first
            call, again after every 100, and whenever the inner loss is another function.
        radius: ε‖v‖ of the finite difference; ``None`` tries 1e-2, 3e-3 and 1e-3 (float64: 1e-4 and 1e-5; TF32 and half
            precision: 1e-1, 3e-2 and 1e-2).
        tolerance: relative error at which a finite difference is exact enough; ``None`` means 5 %, an angle of 3°
            (float64: 1e-6). Models of smooth activations stay far below, those of ReLU and batch norm come close.
    """

    mode: Mode = "auto"
    radius: float | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "reverse", "forward", "difference"):
            raise HyperkronError(f"cross={self.mode!r} is unknown; choose auto, reverse, forward or difference.")
        if self.radius is not None:
            checked_positive("radius", self.radius, "None chooses it by dtype")

    def term(self, point: Point, v: Tree, operator: Operator | None, state: CrossState) -> Tree:
        """∂²_λθ J_in · v, one tensor for each parameter of λ."""
        same_batch = point.curvature_batch is point.inner_batch
        if self.mode in ("auto", "reverse") and isinstance(operator, HessianOperator) and same_batch:
            state.mode, state.calls = "reverse", state.calls + 1
            return _filled(point, operator.cross(v, point.hypers))
        same = state.meets(point.problem.inner)
        due = state.calls % RECHECK == 0 or not state.mode or not same  # a first call that failed has decided nothing
        state.calls += 1
        if self.mode == "auto" and due:
            return self._decide(point, v, state)
        if self.mode != "auto":
            state.mode, state.radius = self.mode, self._radii(point)[0]
        if state.mode == "difference":
            return difference(point, v, state.radius, state.full)
        return forward(point, v) if state.mode == "forward" else reverse(point, v)

    def _radii(self, point: Point, full: bool = False) -> tuple[float, ...]:
        if self.radius is not None:
            return (self.radius, self.radius / 3)
        if point.dtype == torch.float64:
            return (1e-4, 1e-5, 1e-6)
        if not full and _rounds_coarsely(point):  # a small step is lost in the rounding of the weights themselves
            return (1e-1, 3e-2, 1e-2, 3e-3)
        return (1e-2, 3e-3, 1e-3, 3e-4)

    def _decide(self, point: Point, v: Tree, state: CrossState) -> Tree:
        tolerance = self.tolerance or (1e-6 if point.dtype == torch.float64 else 0.05)
        stopped = None if _moves_as_its_gradient(point, v, self._radii(point)[0]) else self._stopped(point, v, state)
        if stopped is not None:
            return stopped
        state.mode, state.error = "difference", float("inf")
        best = self._search(point, v, state, tolerance, full=False)
        if state.error <= tolerance:
            return best
        reasons: list[str] = []
        finer = ["difference"] if _tf32(point) else []  # in full float32: of small models it waits less for Python
        for mode in ([*finer, "forward"] if point.small else ["forward", *finer]) + ["reverse"]:
            if mode != "difference":
                exact = self._exact(point, v, state, mode, best, reasons)
                if exact is not None:
                    return exact
                continue
            found = self._search(point, v, state, tolerance, full=True)
            best = found if state.full else best
            if state.error <= tolerance:
                return best
        warn_once(
            "cross-inexact",
            f"the finite-difference cross term has an error of about {state.error:.1%}, and no exact way works "
            f"with this model ({'; '.join(reasons)}); set radius, or use float64.",
        )
        return best

    def _stopped(self, point: Point, v: Tree, state: CrossState) -> Tree | None:
        """The cross term of an inner loss that stops gradients: by double backward, or ``None`` with a warning."""
        try:
            exact = reverse(point, v)
        except (UndifferentiableError, RuntimeError) as failure:
            if isinstance(failure, torch.OutOfMemoryError):
                raise
            warn_once(
                "cross-stopped",
                "the inner loss changes along v otherwise than its gradient says (through detach(), no_grad or "
                "requires_grad inside it), so only cross='reverse' would be right, but an operation of the model "
                f"cannot be differentiated twice ({str(failure).splitlines()[0]}); use an eager implementation.",
            )
            return None
        state.mode, state.error = "reverse", 0.0
        return exact

    def _exact(
        self, point: Point, v: Tree, state: CrossState, mode: str, near: Tree, reasons: list[str]
    ) -> Tree | None:
        """The cross term by an exact way, which is then decided for; ``None`` and the reason where that is impossible.

        ``near`` is a finite difference, which it must agree with as far as that one can be trusted.
        """
        try:
            exact = forward(point, v) if mode == "forward" else reverse(point, v)
        except (UndifferentiableError, RuntimeError) as failure:
            if isinstance(failure, torch.OutOfMemoryError):
                raise
            reasons.append(f"{mode}: {str(failure).splitlines()[0]}")
            return None
        gap = float(trees.norm(trees.add(exact, near, alpha=-1.0)) / trees.norm(near))
        if gap > 5 * state.error:  # a custom function whose backward pass records no graph
            reasons.append(f"{mode}: {gap:.1%} away from the finite difference")
            return None
        state.mode, state.error = mode, 0.0
        return exact

    def _search(self, point: Point, v: Tree, state: CrossState, tolerance: float, full: bool) -> Tree:
        """The first radius whose answer agrees with that of the next, or else the best; written into ``state``."""
        radii = self._radii(point, full)
        wide = best = difference(point, v, radii[0], full)
        for radius, next_radius in itertools.pairwise(radii):
            narrow = difference(point, v, next_radius, full)
            size = float(trees.norm(narrow))
            gap = float(trees.norm(trees.add(wide, narrow, alpha=-1.0)))
            error = 1.5 * gap / size if size > 0 else 0.0  # exact for an error that grows linearly with the radius
            if error < state.error:
                state.radius, state.error, state.full, best = radius, error, full, wide
            if error <= tolerance:
                break
            wide = narrow
        return best


def _tf32(point: Point) -> bool:
    """Whether float32 products may run in TF32, which can be had in full precision at a price."""
    on_gpu = point.device.type == "cuda" and point.dtype == torch.float32
    return on_gpu and (tf32_products(point.device) or torch.backends.cudnn.allow_tf32)


def _rounds_coarsely(point: Point) -> bool:
    """Whether products run in less than float32: TF32, autocast, or a model in half precision."""
    return point.dtype != torch.float32 or point.autocast is not None or _tf32(point)


def reverse(point: Point, v: Tree) -> Tree:
    """X(v) by double backward: ∂_λ of ⟨∂_θ J_in, v⟩ with the gradient's graph kept."""
    loss = point.inner(differentiable=True)
    gradients = gradients_of(loss.value, list(point.params.values()), create_graph=True)
    pairs = [(g, v[n]) for n, g in zip(point.params, gradients, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return _filled(point, dict.fromkeys(point.hypers))
    live, vectors = [g for g, _ in pairs], [x for _, x in pairs]
    found = gradients_of(live, list(point.hypers.values()), vectors)
    return _filled(point, dict(zip(point.hypers, found, strict=True)))


def forward(point: Point, v: Tree) -> Tree:
    """X(v) by forward mode: J_in's tangent along v, then its gradient in λ.

    Dual numbers of ``torch.autograd`` cost less Python than ``torch.func.jvp``, and take the kernels chosen for the
    model. But the tangents of some functions (softmax) are computed in place, and where λ is inside the model autograd
    then refuses their gradient; ``torch.func`` computes them out of place.
    """
    try:
        with dual_level():
            params = {name: make_dual(p.detach(), v[name]) for name, p in point.params.items()}
            return _gradient_of_tangent(point, unpack_dual(_inner_at(point, params)).tangent)
    except RuntimeError as failure:
        if "inplace operation" not in str(failure):
            raise
    params = trees.map(Tensor.detach, point.params)
    return _gradient_of_tangent(point, torch.func.jvp(lambda p: _inner_at(point, p), (params,), (v,))[1])


def _inner_at(point: Point, params: Tree) -> Tensor:
    return point.substituted("inner", params, point.inner_batch, draw=0, differentiable=True, where="along v").value


def _gradient_of_tangent(point: Point, tangent: Tensor | None) -> Tree:
    """Of J_in's tangent, in λ."""
    if tangent is None or not tangent.requires_grad:
        return _filled(point, dict.fromkeys(point.hypers))
    _refuse_normalisation(tangent)
    found = gradients_of(tangent, list(point.hypers.values()))
    return _filled(point, dict(zip(point.hypers, found, strict=True)))


def _refuse_normalisation(tangent: Tensor) -> None:
    """Refuse a tangent whose gradient in λ passes through the statistics of a norm layer.

    torch computes the tangents of layer norm, and of batch norm in training mode, from saved statistics that it takes
    for constants: differentiated once more, in λ inside the model, they would be wrong in silence.
    """
    for node in graph_nodes([tangent]):
        kind = node.name()
        if "LayerNormBackward" in kind or ("BatchNormBackward" in kind and getattr(node, "_saved_training", True)):
            raise UndifferentiableError(f"forward mode and then λ, through {kind.removesuffix('Backward0')}")


def difference(point: Point, v: Tree, radius: float, full: bool = False) -> Tree:
    """X(v) by a central difference of ∂_λ J_in along v; the graph reaches λ only, never θ.

    With ``full``, a model that runs in TF32 runs in float32 here: TF32 keeps so few digits of a weight that a small
    step is lost.
    """
    length = trees.norm(v)
    epsilon = torch.where(length > 0, radius / length, torch.ones_like(length))
    sides: list[tuple[Tensor | None, ...]] = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            moved = trees.add(point.params, v, alpha=(sign * epsilon).to(point.dtype))
        with point.moved(moved), full_precision() if full else nullcontext():
            del moved  # the parameters hold it now, and let go of it before the other side is made
            value = point.inner().value
            if not value.requires_grad:
                return _filled(point, dict.fromkeys(point.hypers))
            sides.append(torch.autograd.grad(value, list(point.hypers.values()), allow_unused=True))
    found = {
        name: None if up is None or down is None else (up - down) / (2 * epsilon).to(up.dtype)
        for name, up, down in zip(point.hypers, *sides, strict=True)
    }
    return _filled(point, found)


def _moves_as_its_gradient(point: Point, v: Tree, radius: float) -> bool:
    """Whether J_in changes along v as its gradient says, beyond what rounding and the radius explain.

    It does not where its slopes at three radii miss ⟨∂_θ J_in, v⟩/‖v‖ by more than a tenth of ‖∂_θ J_in‖ and more than
    they differ among themselves (as they do where J_in has kinks or is computed coarsely), or where its value depends
    on whether θ requires a gradient.
    """
    length = float(trees.norm(v))
    if length == 0:
        return True
    loss = point.inner()
    found = torch.autograd.grad(loss.value, list(point.params.values()), allow_unused=True)
    pairs = zip(point.params, found, strict=True)
    live = {name: g.to_dense() if g.is_sparse else g for name, g in pairs if g is not None}
    told = trees.dot(live, {name: v[name] for name in live}) / length
    params = trees.map(Tensor.detach, point.params)
    values = [loss.value.detach(), told]
    radii = (radius, radius / 4, radius / 16)
    for step in (0.0, *(sign * r for r in radii for sign in (1, -1))):
        with point.moved(trees.add(params, v, alpha=step / length)):
            values.append(point.inner().value.detach())
    value, slope, still, *moved = torch.stack([x.double() for x in values]).tolist()
    seen = [(up - down) / (2 * r) for r, up, down in zip(radii, moved[::2], moved[1::2], strict=True)]
    rounding = 10 * torch.finfo(point.dtype).eps * abs(value)
    allowed = 0.1 * float(trees.norm(live)) + 2 * (max(seen) - min(seen)) + rounding / radii[-1]
    return abs(still - value) <= 100 * rounding and min(abs(x - slope) for x in seen) <= allowed


def _filled(point: Point, found: dict[str, Tensor | None]) -> Tree:
    """Zeros for the parameters of λ that J_in does not see; an error when it sees none of them."""
    if all(x is None for x in found.values()):
        raise HyperkronError(
            f"hyper does not influence the inner loss: none of {', '.join(list(found)[:5])} reaches it; "
            "use hyper inside inner(model, hyper, batch), without detach()."
        )
    return {n: torch.zeros_like(point.hypers[n]) if x is None else x.detach() for n, x in found.items()}
