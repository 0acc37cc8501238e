"""Which way to the cross term is taken: one that is right for the inner loss, decided once and kept.

The truth is what double backward gives: everything that the inner loss stops (``detach()``, ``no_grad``,
straight-through estimators) is a constant. So a way that moves θ is taken only where the structure of the loss makes it
right, and is looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.cross import weighting
from hyperkron.cross.state import CrossState, inner_key
from hyperkron.cross.ways import (
    difference,
    filled,
    forward,
    forward_and_slope,
    half,
    moves_as_its_gradient,
    reverse,
    slope,
)
from hyperkron.cross.weighting import ChangedError, Weighted
from hyperkron.curvature.base import Operator
from hyperkron.curvature.matrix_free import lowered
from hyperkron.evaluation.differentiation import UndifferentiableError
from hyperkron.evaluation.point import Point
from hyperkron.kernels.linalg import tf32_products
from hyperkron.losses import Loss
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.trees import Tree
from hyperkron.validation import check_one_of, check_positive

Mode = Literal["auto", "reverse", "forward", "difference"]

NOTICEABLE = 0.05
"""Relative error of a finite difference of a given radius (SAMA's) above which a warning says so: an angle of 3°."""


@dataclass(frozen=True)
class _Found:
    """The best of a search over radii: X(v), what it was made of, and by how much these change with the radius."""

    cross: Tree
    changes: Tensor | None
    radius: float
    error: float
    spread: float


@dataclass(frozen=True)
class Cross:
    """How the cross term is computed.

    Args:
        mode: ``auto`` reads from the inner loss what λ does. Where it only weights examples or penalties, it takes the
            finite difference of the row losses (:mod:`hyperkron.cross.weighting`), at two radii, whose distance tells
            its error; where that is above ``tolerance`` at every radius, forward mode, and, where the model runs in
            TF32, the finite difference in full float32 (before forward mode where a convolutional model has small
            tensors only). One backward pass tells whether the row losses move as their gradients say; where they do
            not, the next of these ways is tried. If none is right, and wherever λ does more, it takes double
            backward, where that is impossible forward mode, and last a finite difference with a warning. It decides
            on the first call and whenever the inner loss is another function or made otherwise. After every 100 calls
            it looks again, and may then move to a more exact way, never back. ``difference`` and ``forward`` are
            compared likewise with the gradients, and give way to double backward, with a warning, where gradients are
            stopped so that they would be wrong. A θ in half precision is too coarse to be moved by a small step, so
            ``auto`` and ``difference`` take forward mode first, then a difference with θ in float32, then double
            backward, and move θ itself only where none of them works, with a warning.
        radius: ε‖v‖ of the finite difference; ``None`` tries 1e-2, 3e-3 and 1e-3 (float64: 1e-4 and 1e-5; TF32:
            1e-1, 3e-2 and 1e-2).
        tolerance: relative error at which a finite difference is exact enough; ``None`` means 5 %, an angle of 3°
            (float64: 1e-6). Models of smooth activations stay far below, those of ReLU and batch norm come close.
    """

    mode: Mode = "auto"
    radius: float | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_one_of("cross", self.mode, ("auto", "reverse", "forward", "difference"))
        if self.radius is not None:
            check_positive("radius", self.radius, "None chooses it by dtype")

    def term(self, point: Point, v: Tree, operator: Operator | None, state: CrossState) -> Tree:
        """∂²_λθ J_in · v, one tensor for each parameter of λ; v in θ's dtype, or float32 where that is float16."""
        low, unit = lowered(v, point.params)
        found = self._term(point, low, operator, state)
        return found if unit is None else {name: (x * unit).to(x.dtype) for name, x in found.items()}

    def _term(self, point: Point, v: Tree, operator: Operator | None, state: CrossState) -> Tree:
        same_batch = point.curvature_batch is point.inner_batch
        if self.mode in ("auto", "reverse") and operator is not None and same_batch:
            found = operator.cross(v, point.hypers)
            if found is not None:
                state.mode, state.calls = "reverse", state.calls + 1
                return filled(point, found)
        inner = inner_key(point.problem, point.model, point.hyper)
        decided = state.decided(inner)
        if state.inner not in (None, inner):
            state.mode = ""  # nothing of it holds
        state.inner, state.calls = inner, state.calls + 1
        if decided:
            try:
                return _again(point, v, state)
            except ChangedError:
                if point.recording:
                    raise
                state.mode = ""
        return self._decide(point, v, state)

    def accepts(self, state: CrossState) -> bool:
        """Whether a saved decision is one that this configuration could have made."""
        if self.mode in ("auto", "reverse"):
            return self.mode == "auto" or state.mode == "reverse"
        if self.mode == "difference" and state.mode == "difference":
            return state.full or self.radius in (None, state.radius)
        return state.mode in (self.mode, "reverse")

    def _radii(self, point: Point, full: bool = False) -> tuple[float, ...]:
        if self.radius is not None:
            return (self.radius, self.radius / 3)
        return _fine_radii(point, full)

    def _decide(self, point: Point, v: Tree, state: CrossState) -> Tree:
        if self.mode == "reverse" or state.mode == "reverse":  # exact: there is nothing to look at again
            found = reverse(point, v)
            state.settle("reverse")
            return found
        if float(trees.norm(v)) == 0:
            found = difference(point, v, 1.0)
            mode = state.mode or ("forward" if self.mode == "forward" else "difference")
            state.settle(mode, state.weights, self._radii(point)[0], state.full)
            state.calls = 0  # zero tells nothing: the next call decides
            return found
        loss = point.inner()
        form = weighting.structure(point, loss)
        if form and self.mode != "forward":
            moves = half(point) or state.weights == f"{form}m"  # and will again, also if it does not here
            form = f"{form}m" if moves else weighting.with_motion(point, v, self._radii(point)[0], form)
        if self.mode == "forward":
            return self._forward(point, v, state, loss, form)
        if self.mode == "difference" and not half(point):
            return self._difference(point, v, state, loss, form)
        way = replace(self, radius=None) if half(point) else self  # a given one may be lost in rounding
        if form:
            return way._auto(point, v, state, loss, form)
        del loss  # and its graph
        return way._general(point, v, state)

    # --- auto ------------------------------------------------------------------------------------------------------

    def _auto(self, point: Point, v: Tree, state: CrossState, loss: Loss, form: str) -> Tree:
        """Where λ only weights: the cheapest way that is exact enough."""
        best: tuple[_Found, str, bool] | None = None
        tolerance, stopped, reasons = self._tolerance(point), False, []
        for mode, full in _rungs(point, state):
            try:
                found = self._weighted(point, v, form, mode, full)
            except (HyperkronError, RuntimeError) as failure:
                if (mode, full) == ("difference", False) or isinstance(failure, torch.OutOfMemoryError):
                    raise
                reasons.append(f"{mode}: {_first_line(failure)}")
                continue
            best = (found, mode, full) if best is None or found.error < best[0].error else best
            if found.error > tolerance:
                continue
            assert found.changes is not None
            stopped = weighting.disagreement(point, loss, v, form, found.changes) > _allowed(point, found.spread)
            if stopped:  # or at a kink: forward mode may be right
                continue
            state.settle(mode, form, found.radius, full, found.error)
            return found.cross
        exact = _reversed(point, v, state, reasons)
        if exact is not None:
            return exact
        found, mode, full = best or (self._weighted(point, v, form, "difference", False), "difference", False)
        _warn_stopped(reasons) if stopped else _warn_inexact(found.error, reasons)
        state.settle(mode, form, found.radius, full, found.error)
        return found.cross

    def _general(self, point: Point, v: Tree, state: CrossState) -> Tree:
        """Where λ does more than weight: an exact way if there is one."""
        reasons: list[str] = []
        ways = (_reversed, _forwarded) if self.mode == "auto" else (_forwarded, _reversed)
        for way in ways:
            exact = way(point, v, state, reasons)
            if exact is not None:
                return exact
        tolerance, best = self._tolerance(point), None
        for full in (True, False) if half(point) else (False, True) if _tf32(point) else (False,):
            try:
                near = self._search(point, lambda r, f=full: (difference(point, v, r, f), None), full)  # type: ignore[misc]
            except (HyperkronError, RuntimeError) as failure:
                if not full or isinstance(failure, torch.OutOfMemoryError):
                    raise
                reasons.append(f"difference: {_first_line(failure)}")
                continue
            if best is None or near.error < best.error:
                best = near
                state.settle("difference", "", near.radius, full, near.error)
            if best.error <= tolerance:
                break
        assert best is not None
        if not moves_as_its_gradient(point, v, self._radii(point)[0]):
            _warn_stopped(reasons)
        elif best.error > tolerance or (half(point) and not state.full):
            _warn_inexact(best.error, reasons)
        return best.cross

    # --- what was asked for ----------------------------------------------------------------------------------------

    def _difference(self, point: Point, v: Tree, state: CrossState, loss: Loss, form: str) -> Tree:
        """The finite difference of a given radius, where one of a small radius shows it to be right."""
        fine, radius = Cross(tolerance=self.tolerance), self._radii(point)[0]
        reasons: list[str] = []
        if form:
            near = fine._weighted(point, v, form, "difference", False)
            assert near.changes is not None
            right = weighting.disagreement(point, loss, v, form, near.changes) <= _allowed(point, near.spread)
            truth = None if right else _reversed(point, v, state, reasons)
        else:
            near = fine._search(point, lambda r: (difference(point, v, r), None), False)
            truth = _reversed(point, v, CrossState(), reasons, needed=False)
            if truth is None:
                right = moves_as_its_gradient(point, v, _fine_radii(point)[0])
            else:
                right = _distance(near.cross, truth) <= max(5 * near.error, _exact_enough(point))
        if not right and truth is not None:
            _warn_replaced("difference")
            state.settle("reverse")
            return truth
        if not right:
            _warn_stopped(reasons)
        found = weighting.difference(point, v, radius, form).cross if form else difference(point, v, radius)
        away = _distance(found, near.cross)
        error = max(away, near.error)
        if error > NOTICEABLE:
            warn_once(
                "cross-radius",
                f"the finite-difference cross term at radius {radius:g} has an error of about {error:.0%}; "
                f"{'lower' if away > near.error else 'change'} radius (for SAMA: alpha), or use another cross.",
            )
        state.settle("difference", form, radius, error=error)
        return found

    def _forward(self, point: Point, v: Tree, state: CrossState, loss: Loss, form: str) -> Tree:
        """Forward mode, where its tangents are what the gradients say."""
        if form:
            weighted = weighting.forward(point, v, form)
            found = weighted.cross
            right = weighting.disagreement(point, loss, v, form, weighted.changes) <= _allowed(point, 0.0)
        else:
            found, tangent = forward_and_slope(point, v)
            right = _tangent_is_slope(point, v, tangent)
        reasons: list[str] = []
        exact = None if right else _reversed(point, v, state, reasons)
        if exact is not None:
            _warn_replaced("forward")
            return exact
        if not right:
            _warn_stopped(reasons)
        state.settle("forward", form)
        return found

    # --- finite differences ----------------------------------------------------------------------------------------

    def _tolerance(self, point: Point) -> float:
        return self.tolerance or (1e-6 if point.dtype == torch.float64 else 0.05)

    def _weighted(self, point: Point, v: Tree, form: str, mode: str, full: bool) -> _Found:
        if mode == "forward":
            found = weighting.forward(point, v, form)
            return _Found(found.cross, found.changes, 0.0, 0.0, 0.0)

        def make(radius: float) -> tuple[Tree, Tensor]:
            found: Weighted = weighting.difference(point, v, radius, form, full)
            return found.cross, found.changes

        return self._search(point, make, full)

    def _search(self, point: Point, make: Callable[[float], tuple[Tree, Tensor | None]], full: bool) -> _Found:
        """The first radius whose answer agrees with that of the next, or else the best."""
        radii, best = self._radii(point, full), None
        wide, moved = make(radii[0])
        for radius, next_radius in itertools.pairwise(radii):
            narrow, shifted = make(next_radius)
            error = 1.5 * _distance(wide, narrow)  # exact for an error that grows linearly with the radius
            if best is None or error < best.error:
                spread = 0.0
                if moved is not None and shifted is not None and moved.numel():
                    spread = 1.5 * _distance({"": moved}, {"": shifted})
                best = _Found(wide, moved, radius, error, spread)
            if error <= self._tolerance(point):
                break
            wide, moved = narrow, shifted
        assert best is not None
        return best


def _again(point: Point, v: Tree, state: CrossState) -> Tree:
    """The cross term as it was decided."""
    if state.mode == "reverse":
        return reverse(point, v)
    if state.mode == "forward":
        return weighting.forward(point, v, state.weights).cross if state.weights else forward(point, v)
    if state.weights:
        return weighting.difference(point, v, state.radius, state.weights, state.full).cross
    return difference(point, v, state.radius, state.full)


def _rungs(point: Point, state: CrossState) -> list[tuple[str, bool]]:
    """The ways to try where λ only weights, the cheapest first, from the one that was last decided for."""
    finer = [("difference", True)] if _tf32(point) else []  # of small models it waits less for Python
    exact = [("forward", False)]
    if half(point):
        return [*exact, ("difference", True)]
    rungs = [("difference", False), *(finer + exact if point.small else exact + finer)]
    now = (state.mode, state.full)
    return rungs[rungs.index(now) :] if now in rungs else rungs


def _reversed(point: Point, v: Tree, state: CrossState, reasons: list[str], needed: bool = True) -> Tree | None:
    """X(v) by double backward, which is then decided for; ``None`` and the reason where that is impossible.

    Running out of memory is such a reason only where it is not ``needed``.
    """
    try:
        found = reverse(point, v)
    except (UndifferentiableError, RuntimeError) as failure:
        if needed:
            _reraise_out_of_memory(failure)
        reasons.append(f"reverse: {_first_line(failure)}")
        return None
    state.settle("reverse")
    return found


def _forwarded(point: Point, v: Tree, state: CrossState, reasons: list[str]) -> Tree | None:
    """X(v) by forward mode, which is then decided for; ``None`` and the reason where that is impossible or wrong."""
    try:
        found, tangent = forward_and_slope(point, v)
    except (HyperkronError, RuntimeError) as failure:
        _reraise_out_of_memory(failure)
        reasons.append(f"forward: {_first_line(failure)}")
        return None
    if not _tangent_is_slope(point, v, tangent):
        reasons.append("forward: gradients are stopped by no_grad")
        return None
    state.settle("forward")
    return found


def _tangent_is_slope(point: Point, v: Tree, tangent: Tensor) -> bool:
    """Whether J_in's tangent along v is ⟨∂_θ J_in, v⟩; ``no_grad`` stops gradients, but not tangents."""
    told, size, _ = slope(point, v)
    gap, scale = abs(float(tangent) - float(told)), max(abs(float(tangent)), abs(float(told)))
    return gap <= _allowed(point, 0.0) * scale + weighting.rounding(point) * float(size * trees.norm(v))


def _distance(found: Tree, wanted: Tree) -> float:
    """‖found − wanted‖ / ‖wanted‖; 0 where ``wanted`` is zero."""
    size = float(trees.norm(wanted))
    return float(trees.norm(trees.add(found, wanted, alpha=-1.0))) / size if size > 0 else 0.0


def _allowed(point: Point, spread: float) -> float:
    """By how much changes may differ from what gradients say: more than rounding, and than their own error."""
    if point.dtype == torch.float64:
        floor = 1e-6
    elif point.dtype != torch.float32 or point.autocast is not None:
        floor = 0.25
    else:
        floor = 0.06 if _tf32(point) else 0.03
    return max(5 * spread, floor)


def _exact_enough(point: Point) -> float:
    """How near a finite difference comes to an exact way where nothing is stopped."""
    return 1e-5 if point.dtype == torch.float64 else 0.1 if _rounds_coarsely(point) else 0.05


def _fine_radii(point: Point, full: bool = False) -> tuple[float, ...]:
    if point.dtype == torch.float64:
        return (1e-4, 1e-5, 1e-6)
    if not full and _rounds_coarsely(point):  # a small step is lost in the rounding of the weights themselves
        return (1e-1, 3e-2, 1e-2, 3e-3)
    return (1e-2, 3e-3, 1e-3, 3e-4)


def _tf32(point: Point) -> bool:
    """Whether float32 products may run in TF32, which costs time to avoid."""
    on_gpu = point.device.type == "cuda" and point.dtype == torch.float32
    return on_gpu and (tf32_products(point.device) or torch.backends.cudnn.allow_tf32)


def _rounds_coarsely(point: Point) -> bool:
    """Whether products run in less than float32: TF32, autocast, or a model in half precision."""
    return point.dtype != torch.float32 or point.autocast is not None or _tf32(point)


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]


def _reraise_out_of_memory(failure: BaseException) -> None:
    if isinstance(failure, torch.OutOfMemoryError):
        raise failure


def _warn_stopped(reasons: list[str]) -> None:
    warn_once(
        "cross-stopped",
        "the inner loss changes along v otherwise than its gradient says (through detach(), no_grad or "
        "requires_grad inside it), so only cross='reverse' would be right, but an operation of the model "
        f"cannot be differentiated twice ({'; '.join(reasons)}); use an eager implementation.",
    )


def _warn_inexact(error: float, reasons: list[str]) -> None:
    warn_once(
        "cross-inexact",
        f"the finite-difference cross term has an error of about {error:.1%}, and no exact way works "
        f"with this model ({'; '.join(reasons)}); set radius, or use float64.",
    )


def _warn_replaced(mode: str) -> None:
    warn_once(
        f"cross-stopped-{mode}",
        f"cross='{mode}' would be wrong: the inner loss holds something constant that moves with θ (through detach(), "
        "no_grad or a straight-through estimator). Double backward was used instead; write cross='reverse', or let λ "
        "weight the losses of hyperkron.losses.",
    )
