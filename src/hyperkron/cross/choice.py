"""Chooses how to compute the cross term: a way that is correct for the inner loss, decided once and kept.

Double backward is the reference: whatever the inner loss stops (``detach()``, ``no_grad``, straight-through estimators)
is a constant. So a way that moves θ is used only if the structure of the loss makes it correct, and it is checked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.cross import weighting
from hyperkron.cross.adjoint import NoAdjointError, adjoint, example_losses, mixes_examples
from hyperkron.cross.precision import FLOAT32, FLOAT64, HALF, precision, tf32
from hyperkron.cross.state import CrossState, Way, inner_key
from hyperkron.cross.ways import difference, filled, forward_and_slope, half, moves_as_its_gradient, reverse, slope
from hyperkron.cross.weighting import ChangedError, Found
from hyperkron.curvature.base import Operator
from hyperkron.curvature.matrix_free import lowered
from hyperkron.evaluation.differentiation import UndifferentiableError, in_half_precision
from hyperkron.evaluation.passes import Pass
from hyperkron.evaluation.point import Point
from hyperkron.losses import Loss
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.trees import Tree
from hyperkron.validation import check_one_of, check_positive

Mode = Literal["auto", "reverse", "forward", "difference"]

WARN_ABOVE = 0.05
"""A finite difference with a given radius (SAMA) warns above this relative error, which is an angle of 3°."""
ADJOINT_AGREEMENT = 0.1
"""The largest difference that rounding explains between changes by :mod:`~hyperkron.cross.adjoint` and by gradients."""


@dataclass(frozen=True)
class Cross:
    """How the cross term is computed.

    ``auto`` decides on the first call, and again if the inner loss changes its function or structure. After every 100
    calls it checks its decision and may change to a more exact way, never back.

    - If λ only weights examples or penalties (:mod:`hyperkron.cross.weighting`): a finite difference of the row losses.
      The difference between two radii is its error estimate. If the error is too large at every radius: forward mode,
      and for models in TF32 the difference in full float32. A backward pass checks whether the row losses change as
      their gradients say. If not, the next way is tried, and finally double backward.
    - The same if the model runs in half precision or under autocast: a difference would be mostly rounding. So the
      changes come from the gradients at the layers (:mod:`hyperkron.cross.adjoint`), if these agree with the gradients
      of the weights; otherwise from forward mode.
    - If λ does more than weight: double backward; if that is impossible, forward mode; finally a difference, with a
      warning.
    - θ in half precision cannot represent a small step. A difference then uses a float32 copy of θ; θ itself is moved
      only if nothing else works, with a warning. The same holds for ``difference``.

    ``difference`` and ``forward`` are compared with the gradients in the same way. If stopped gradients make them
    wrong, double backward is used instead, with a warning.

    Args:
        mode: ``auto``, ``reverse``, ``forward`` or ``difference``.
        radius: ε‖v‖ of the finite difference; ``None`` tries those of the model's precision (:class:`Precision`).
    """

    mode: Mode = "auto"
    radius: float | None = None

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
                state.way, state.calls = replace(state.way, mode="reverse"), state.calls + 1
                return filled(point, found)
        inner = inner_key(point.problem, point.model, point.hyper)
        decided = state.decided(inner)
        state.see(inner)
        if decided:
            try:
                return _by_pass(point, v, state.way)
            except (ChangedError, NoAdjointError) as error:
                if point.recording or (isinstance(error, NoAdjointError) and point.problem.group.size > 1):
                    raise  # the other processes may have none
                state.forget()
        return self._decide(point, v, state)

    def accepts(self, state: CrossState) -> bool:
        """Whether a saved decision is one that this configuration could have made."""
        if self.mode in ("auto", "reverse"):
            return self.mode == "auto" or state.mode == "reverse"
        if self.mode == "difference" and state.mode == "difference":
            return state.way.full or self.radius in (None, state.way.radius)
        return state.mode in (self.mode, "reverse")

    def _decide(self, point: Point, v: Tree, state: CrossState) -> Tree:
        if self.mode == "reverse" or state.mode == "reverse":  # exact, so there is nothing to check
            crossed = reverse(point, v)
            state.way, state.error = Way("reverse"), 0.0
            return crossed
        state.warn_of_changes()
        search = _Search(point, v, self.mode, self.radius)
        if float(trees.norm(v)) == 0:
            mode = state.mode or ("forward" if self.mode == "forward" else "difference")
            crossed = difference(point, v, 1.0)
            state.way, state.error = replace(state.way, mode=mode, radius=search.radii()[0]), 0.0
            state.calls = 0  # v = 0 gives no information: the next call decides
            return crossed
        found = search.best(state.way)
        state.way, state.error = found.way, found.error
        return found.cross


class _Search:
    """Tries ways to compute the cross term at ``point`` along ``v``; ``reasons`` says why some are impossible."""

    def __init__(self, point: Point, v: Tree, mode: Mode, radius: float | None) -> None:
        self.point, self.v, self.mode, self.radius = point, v, mode, radius
        self.reasons: list[str] = []

    def best(self, before: Way) -> Found:
        """The cheapest way that is correct; ``before`` is the last decision."""
        point = self.point
        loss = point.inner()
        form = weighting.structure(point, loss)
        form = form if point.problem.group.all(bool(form)) else ""  # all processes, or none
        coarse = half(point) or in_half_precision(loss.value)
        if form and self.mode != "forward":
            unmoved = half(point) or (coarse and self.mode == "auto")  # the ways that will be tried do not move θ
            moves = unmoved or before.form == f"{form}m"  # weights that moved once are expected to move again
            form = f"{form}m" if moves else weighting.with_motion(point, self.v, self.radii()[0], form)
        if self.mode == "forward" or (self.mode == "difference" and not half(point)):
            return self._requested(loss, form)
        if half(point):  # a given radius may be lost in rounding
            self.radius = None
        if form:
            return self._cheapest(loss, self._weighted_ways(form, before, coarse))
        del loss  # frees its graph
        return self._exact_if_possible()

    # --- auto ------------------------------------------------------------------------------------------------------

    def _weighted_ways(self, form: str, before: Way, coarse: bool) -> list[Way]:
        """The ways to try if λ only weights, cheapest first, starting with the last decision.

        If the inner loss is ``coarse`` (partly in half precision), a difference is mostly rounding.
        """
        plain, exact, full = Way("difference", form), Way("forward", form), Way("difference", form, full=True)
        finer = [full] if tf32(self.point) else []
        if coarse:
            ways = [Way("adjoint", form), exact, full if half(self.point) else plain]
        else:  # forward mode costs more Python time
            ways = [plain, *finer, exact] if self.point.small else [plain, exact, *finer]
        kinds, last = [(way.mode, way.full) for way in ways], (before.mode, before.full)
        return ways[kinds.index(last) :] if last in kinds else ways

    def _cheapest(self, loss: Loss, ways: list[Way]) -> Found:
        """If λ only weights: the first of ``ways`` that is accurate and correct; else double backward."""
        best: Found | None = None
        stopped = False
        for way in ways:
            found = self._tried(way)
            if found is None:
                continue
            best = found if best is None or found.error < best.error else best
            if found.error <= precision(self.point).tolerance:
                stopped = not self._moves_by_gradient(loss, found)  # or at a kink, where forward mode may work
                if not stopped:
                    return found
        exact = self._tried(Way("reverse"))
        if exact is not None:
            return exact
        best = best or self._searched(Way("difference", ways[0].form))
        self._warn_stopped() if stopped else self._warn_inexact(best.error)
        return best

    def _exact_if_possible(self) -> Found:
        """If λ does more than weight: an exact way if there is one, else a difference with a warning."""
        point = self.point
        for mode in ("reverse", "forward") if self.mode == "auto" else ("forward", "reverse"):
            exact = self._tried(Way(mode))
            if exact is not None and (mode == "reverse" or self._tangent_is_slope(exact.changes)):
                return exact
            if exact is not None:
                self.reasons.append("forward: gradients are stopped by no_grad")
        best, tolerance = None, precision(point).tolerance
        for full in (True, False) if half(point) else (False, True) if tf32(point) else (False,):
            way = Way("difference", full=full)
            near = self._tried(way) if full else self._searched(way)  # the last resort
            best = near if best is None or (near is not None and near.error < best.error) else best
            if best is not None and best.error <= tolerance:
                break
        assert best is not None
        if not moves_as_its_gradient(point, self.v, self.radii()[0]):
            self._warn_stopped()
        elif best.error > tolerance or (half(point) and not best.way.full):
            self._warn_inexact(best.error)
        return best

    # --- forward and difference ------------------------------------------------------------------------------------

    def _requested(self, loss: Loss, form: str) -> Found:
        """The requested way if its tangents, or a difference with a small radius, are right; else double backward."""
        point, v, forward = self.point, self.v, self.mode == "forward"
        fine = self if forward else _Search(point, v, "auto", None)
        exact: Found | None = None
        try:
            found = fine._searched(Way(self.mode, form))
        except RuntimeError as failure:  # the inner loss needs gradients in θ, or is different without
            known = isinstance(failure, ChangedError) or "not require grad" in str(failure)
            exact = self._tried(Way("reverse")) if known else None
            if exact is None:
                raise
            right = False
        else:
            if form:
                right = self._moves_by_gradient(loss, found)
            elif forward:
                right = self._tangent_is_slope(found.changes)
            elif (exact := self._tried(Way("reverse"), needed=False)) is None:
                right = moves_as_its_gradient(point, v, fine.radii()[0])
            else:
                right = _distance(found.cross, exact.cross) <= max(5 * found.error, precision(point).exact)
            if not right and (form or forward):
                exact = self._tried(Way("reverse"))
        if not right and exact is None:
            self._warn_stopped()
        elif not right and exact is not None:
            warn_once(
                f"cross-stopped-{self.mode}",
                f"cross='{self.mode}' would be wrong: the inner loss holds something constant that moves with θ "
                "(through detach(), no_grad or a straight-through estimator), or needs gradients in θ itself. Double "
                "backward was used instead; write cross='reverse', or let λ weight the losses of hyperkron.losses.",
            )
            return exact
        return found if forward else self._at_radius(loss, found)

    def _at_radius(self, loss: Loss, near: Found) -> Found:
        """The difference with the given radius, with a warning if it is far from ``near``, that with a small one."""
        way = replace(near.way, radius=self.radii()[0])
        cross = _computed(self.point, self.v, way).cross
        away = _distance(cross, near.cross)
        error = max(away, near.error)
        if error > WARN_ABOVE and way.form and in_half_precision(loss.value):  # perhaps only the small step was wrong
            exact = self._tried(Way("adjoint", way.form), needed=False)
            error = error if exact is None else _distance(cross, exact.cross)
        if error > WARN_ABOVE:
            warn_once(
                "cross-radius",
                f"the finite-difference cross term at radius {way.radius:g} has an error of about {error:.0%}; "
                f"{'lower' if away > near.error else 'change'} radius (for SAMA: alpha), or use another cross.",
            )
        return replace(near, way=way, cross=cross, error=error)

    # --- one way ---------------------------------------------------------------------------------------------------

    def radii(self, full: bool = False) -> tuple[float, ...]:
        """The radii of finite differences, in the order they are tried."""
        if self.radius is not None:
            return (self.radius, self.radius / 3)
        usual = precision(self.point)
        return (FLOAT32 if full and usual is not FLOAT64 else usual).radii

    def _tried(self, way: Way, *, needed: bool = True) -> Found | None:
        """X(v) by ``way``; if that is impossible, ``None``, with the reason added to ``reasons``.

        Memory errors are raised if the way is ``needed``.
        """
        refusals = (UndifferentiableError if way.mode == "reverse" else HyperkronError, RuntimeError)
        try:
            return self._searched(way)
        except refusals as failure:
            if needed and isinstance(failure, torch.OutOfMemoryError):
                raise
            first_line = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
            self.reasons.append(f"{way.mode}: {first_line}")
            return None

    def _searched(self, way: Way) -> Found:
        """X(v) by ``way``; a difference uses the first radius that agrees with the next one, or else the best one."""
        if way.mode != "difference":
            return replace(_computed(self.point, self.v, way), way=way)
        best: Found | None = None
        ways = [replace(way, radius=radius) for radius in self.radii(way.full)]
        wide = _computed(self.point, self.v, ways[0])
        for at, next_way in itertools.pairwise(ways):
            narrow = _computed(self.point, self.v, next_way)
            error = 1.5 * _distance(wide.cross, narrow.cross)  # exact for an error that grows linearly with the radius
            if best is None or error < best.error:
                spread = 1.5 * _distance({"": wide.changes}, {"": narrow.changes}) if wide.parts else 0.0
                best = replace(wide, way=at, error=error, spread=spread)
            if error <= precision(self.point).tolerance:
                break
            wide = narrow
        assert best is not None
        return best

    def _moves_by_gradient(self, loss: Loss, found: Found) -> bool:
        """Whether the row losses change along v as their gradients say, beyond rounding and their own error."""
        point = self.point
        if found.changes.numel() == 0:
            return True
        if found.way.mode == "forward" and point.drawn():  # kernels with tangents draw other dropout masks
            loss = point.inner(differentiable=True)
        by_example = found.way.mode == "adjoint"
        rows = (example_losses if by_example else weighting.row_losses)(loss, found.way.form)
        usual = HALF if in_half_precision(loss.value) else precision(point)
        agreement = ADJOINT_AGREEMENT if by_example else usual.agreement
        gap = weighting.disagreement(point, rows, self.v, found.changes)
        right = gap <= max(5 * found.spread, agreement)
        if by_example and right:
            right = not mixes_examples(point, self.v, found.way.form, found.changes)
        return point.problem.group.all(right)

    def _tangent_is_slope(self, tangent: Tensor) -> bool:
        """Whether J_in's tangent along v is ⟨∂_θ J_in, v⟩; ``no_grad`` stops gradients, but not tangents."""
        expected, size, _ = slope(self.point, self.v)
        gap, scale = abs(float(tangent) - float(expected)), max(abs(float(tangent)), abs(float(expected)))
        rounding = weighting.rounding(self.point) * float(size * trees.norm(self.v))
        return gap <= precision(self.point).agreement * scale + rounding

    def _warn_stopped(self) -> None:
        warn_once(
            "cross-stopped",
            "the inner loss does not change along v as its gradient says (because of detach(), no_grad or "
            "requires_grad inside it), so only cross='reverse' would be right, but an operation of the model "
            f"cannot be differentiated twice ({'; '.join(self.reasons)}); use an eager implementation.",
        )

    def _warn_inexact(self, error: float) -> None:
        warn_once(
            "cross-inexact",
            f"the finite-difference cross term has an error of about {error:.1%}, and no exact way works "
            f"with this model ({'; '.join(self.reasons)}); set radius, or use float64.",
        )


def _by_pass(point: Point, v: Tree, way: Way) -> Tree:
    """X(v) by the chosen way, as a pass that can be recorded; a :class:`ChangedError` if weights begin to move."""

    def work(at: Point, given: Tree) -> Tree:
        found = _computed(at, given, way)
        if found.moved:
            raise ChangedError("the weights of the inner loss move with θ, which they did not when it was decided")
        return found.cross

    return point.run(Pass("cross term", work, v, key=lambda: way))


def _computed(point: Point, v: Tree, way: Way) -> Found:
    """X(v) by ``way``, and the changes along v it was computed from."""
    if way.mode == "reverse":
        return Found(reverse(point, v))
    if way.mode == "adjoint":
        return adjoint(point, v, way.form)
    if way.mode == "forward" and way.form:
        return weighting.forward(point, v, way.form)
    if way.mode == "forward":
        found, tangent = forward_and_slope(point, v)
        return Found(found, [tangent])
    if way.form:
        return weighting.difference(point, v, way.radius, way.form, way.full)
    return Found(difference(point, v, way.radius, way.full))


def _distance(found: Tree, wanted: Tree) -> float:
    """‖found − wanted‖ / ‖wanted‖; 0 where ``wanted`` is zero."""
    size = float(trees.norm(wanted))
    return float(trees.norm(trees.subtract(found, wanted))) / size if size > 0 else 0.0
