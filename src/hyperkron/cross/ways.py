"""Three ways to compute the cross term X(v) = ∂_λ ⟨∂_θ J_in(λ, θ), v⟩ of any inner loss.

- ``reverse``: differentiate the gradient's graph again. Exact, but needs the most memory.
- ``forward``: one forward pass with tangent v on θ, then ∂_λ of the tangent. Exact, except that ``no_grad`` does not
  stop tangents.
- ``difference``: [∂_λ J_in(θ + εv) − ∂_λ J_in(θ − εv)] / 2ε with ε = radius/‖v‖ and θ detached. Works with every model.
  Its error is O(radius²) plus rounding/radius, and it also moves values that the inner loss treats as constants. Half
  precision cannot represent such small steps, so θ is moved in float32 if the model accepts that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, unpack_dual

from hyperkron import trees
from hyperkron.evaluation.differentiation import UndifferentiableError, gradients_of, graph_nodes
from hyperkron.evaluation.point import Point
from hyperkron.evaluation.sharded import dual
from hyperkron.kernels.split_products import full_precision
from hyperkron.losses import Loss
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError
from hyperkron.trees import HALF_TYPES, Tree

T = TypeVar("T")

_NO_FORWARD_MODE = (
    "forward AD", "forward mode", "forward gradient", "jvp", "functorch transform",
    "view size is not compatible",  # group norm of images with their channels last
)  # fmt: skip
"""What torch's errors say where an operation has no forward mode, or a broken one."""


class NoForwardModeError(UndifferentiableError):
    """An operation of the model has no forward mode."""

    def __init__(self, why: str) -> None:
        HyperkronError.__init__(
            self, f"cross='forward' does not pass through this model ({why}); use cross='reverse' or cross='auto'."
        )
        self.why = why


def reverse(point: Point, v: Tree) -> Tree:
    """X(v) by double backward: ∂_λ of ⟨∂_θ J_in, v⟩ with the gradient's graph kept."""
    loss = point.inner(differentiable=True)
    gradients = gradients_of(loss.value, list(point.params.values()), create_graph=True)
    pairs = [(g, v[n]) for n, g in zip(point.params, gradients, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return filled(point, dict.fromkeys(point.hypers))
    live, vectors = [g for g, _ in pairs], [x for _, x in pairs]
    found = gradients_of(live, list(point.hypers.values()), vectors)
    return filled(point, dict(zip(point.hypers, found, strict=True)))


def forward(point: Point, v: Tree) -> Tree:
    """X(v) by forward mode: J_in's tangent along v, then its gradient in λ."""
    return forward_and_slope(point, v)[0]


def forward_and_slope(point: Point, v: Tree) -> tuple[Tree, Tensor]:
    """X(v) by forward mode, and J_in's tangent along v.

    Dual numbers of ``torch.autograd`` cost less Python time than ``torch.func.jvp``, and use the kernels chosen for the
    model. But they compute the tangents of some functions (softmax) in place; if λ is inside the model, autograd then
    refuses their gradient. In this case ``torch.func`` is used, which computes them out of place. For parameters that
    are sharded, autograd does not notice it: tensors that are gathered again are not checked.
    """
    if any(map(is_sharded, point.params.values())):
        raise NoForwardModeError("its parameters are sharded, and λ does more than weight")
    with forward_mode():
        try:
            with dual_level():
                loss, _ = along(point, v)
                return _gradient_of_tangent(point, unpack_dual(loss.value).tangent)
        except RuntimeError as failure:
            if "inplace operation" not in str(failure):
                raise
        params = trees.map(Tensor.detach, point.params)
        return _gradient_of_tangent(point, torch.func.jvp(lambda p: _inner_at(point, p).value, (params,), (v,))[1])


@contextmanager
def forward_mode() -> Iterator[None]:
    """Turns errors of torch's forward mode into :class:`NoForwardModeError`."""
    try:
        yield
    except RuntimeError as failure:
        if not any(words in str(failure) for words in _NO_FORWARD_MODE):
            raise
        raise NoForwardModeError(str(failure).strip().splitlines()[0]) from failure


def along(point: Point, v: Tree, batch: Any = None) -> tuple[Loss, Tree]:
    """J_in with tangents along v, and the dual parameters; inside a ``dual_level``. ``None``: on the inner batch."""
    params = {name: dual(p, v[name]) for name, p in point.params.items()}
    return _inner_at(point, params, batch), params


def _inner_at(point: Point, params: Tree, batch: Any = None) -> Loss:
    batch = point.inner_batch if batch is None else batch
    return point.evaluate("inner", batch, params, differentiable=True, where="along v")


def _gradient_of_tangent(point: Point, tangent: Tensor | None) -> tuple[Tree, Tensor]:
    """The gradient of J_in's tangent in λ, and the tangent."""
    if tangent is None or not tangent.requires_grad:
        return filled(point, dict.fromkeys(point.hypers)), torch.zeros((), device=point.device)
    _refuse_normalisation(tangent)
    found = gradients_of(tangent, list(point.hypers.values()))
    (whole,) = point.problem.group.sum([tangent.detach()])
    return filled(point, dict(zip(point.hypers, found, strict=True))), whole


def _refuse_normalisation(tangent: Tensor) -> None:
    """Refuse a tangent whose gradient in λ passes through the statistics of a norm layer.

    torch computes the tangents of layer norm, and of batch norm in training mode, from saved statistics that it treats
    as constants. If λ is inside the model, their gradient in λ would be wrong without an error.
    """
    for node in graph_nodes([tangent]):
        kind = node.name()
        if "LayerNormBackward" in kind or ("BatchNormBackward" in kind and getattr(node, "_saved_training", True)):
            raise UndifferentiableError(f"forward mode and then λ, through {kind.removesuffix('Backward0')}")


def half(point: Point) -> bool:
    """Whether θ is held in half precision."""
    return point.dtype in HALF_TYPES


def step_of(v: Tree, radius: float) -> Tensor:
    """ε = radius/‖v‖, or 1 where v is zero."""
    length = trees.norm(v)
    return torch.where(length > 0, radius / length, torch.ones_like(length))


def sides(point: Point, v: Tree, epsilon: Tensor, full: bool, read: Callable[[Loss, Tree], T]) -> tuple[T, T]:
    """``read(J_in, θ)`` at θ + εv and at θ − εv, with θ detached.

    With ``full``, a model in TF32 or half precision runs in float32 here; otherwise a small step would be lost in
    rounding.
    """
    found = []
    for sign in (1.0, -1.0):
        if full and half(point):  # copies, because changing a parameter's dtype would cut graphs through it
            moved = {n: p.detach().float().addcmul_(v[n].float(), sign * epsilon) for n, p in point.params.items()}
            with full_precision():
                loss = point.evaluate("inner", point.inner_batch, moved, where="in float32")
            found.append(read(loss, moved))
            del moved, loss
            continue
        with torch.no_grad():
            moved = trees.add(point.params, v, alpha=(sign * epsilon).to(point.dtype))
        with point.moved(moved), full_precision() if full else nullcontext():
            del moved  # only the parameters refer to it now, so that it is freed before the other side is computed
            found.append(read(point.inner(), point.params))
    return found[0], found[1]


def difference(point: Point, v: Tree, radius: float, full: bool = False) -> Tree:
    """X(v) by a central difference of ∂_λ J_in along v; the graph reaches λ only, never θ."""
    epsilon, hypers = step_of(v, radius), list(point.hypers.values())

    def read(loss: Loss, _: Tree) -> tuple[Tensor | None, ...]:
        if not loss.value.requires_grad:
            return (None,) * len(hypers)
        return torch.autograd.grad(loss.value, hypers, allow_unused=True)

    pairs = zip(point.hypers, *sides(point, v, epsilon, full, read), strict=True)
    found = {
        name: None if up is None or down is None else (up - down) / (2 * epsilon).to(up.dtype)
        for name, up, down in pairs
    }
    return filled(point, found)


def slope(point: Point, v: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """⟨∂_θ J_in, v⟩ and ‖∂_θ J_in‖ by one backward pass, and J_in."""
    value = point.inner().value
    return *slope_of(point, value, v), value.detach()


def slope_of(point: Point, value: Tensor, v: Tree, *, retain_graph: bool = False) -> tuple[Tensor, Tensor]:
    """⟨∂_θ value, v⟩ and ‖∂_θ value‖ by one backward pass."""
    params = list(point.params.values())
    found = torch.autograd.grad(value, params, allow_unused=True, retain_graph=retain_graph)
    pairs = zip(point.params, found, strict=True)
    live = {name: g.to_dense() if g.is_sparse else g for name, g in pairs if g is not None}
    if not live:
        zero = torch.zeros((), device=point.device)
        return zero, zero
    return trees.dot(live, {name: v[name] for name in live}), trees.norm(live)


def moves_as_its_gradient(point: Point, v: Tree, radius: float) -> bool:
    """Whether J_in changes along v as its gradient says, as far as finite differences at three radii can tell.

    False if the slopes differ from ⟨∂_θ J_in, v⟩ by more than their own spread plus a hundredth of their size, or if
    the value of J_in depends on whether θ requires a gradient.
    """
    length = float(trees.norm(v))
    if length == 0:
        return True
    gradient_slope, _, value = slope(point, v)
    params = trees.map(Tensor.detach, point.params)
    values, radii = [value, gradient_slope / length], (radius, radius / 4, radius / 16)
    for step in (0.0, *(sign * r for r in radii for sign in (1, -1))):
        with point.moved(trees.add(params, v, alpha=step / length)):
            values.append(point.inner().value.detach())
    at, expected, still, *moved = torch.stack([x.double() for x in values]).tolist()
    slopes = [(up - down) / (2 * r) for r, up, down in zip(radii, moved[::2], moved[1::2], strict=True)]
    rounding = 10 * torch.finfo(point.dtype).eps * abs(at)
    allowed = 0.01 * max(map(abs, slopes)) + 3 * (max(slopes) - min(slopes)) + rounding / radii[-1]
    return abs(still - at) <= 100 * rounding and min(abs(x - expected) for x in slopes) <= allowed


def filled(point: Point, found: dict[str, Tensor | None]) -> Tree:
    """``found`` with zeros for parameters of λ that J_in does not depend on; an error if it depends on none."""
    if all(x is None for x in found.values()):
        raise HyperkronError(
            f"hyper does not influence the inner loss: none of {', '.join(list(found)[:5])} reaches it; "
            "use hyper inside inner(model, hyper, batch), without detach()."
        )
    return {n: torch.zeros_like(point.hypers[n]) if x is None else x.detach() for n, x in found.items()}
