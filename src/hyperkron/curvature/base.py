"""What every curvature gives to a solver: a linear operator, and sometimes its inverse."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from hyperkron.evaluation.point import Point
from hyperkron.losses import Loss
from hyperkron.solution import HyperkronError, Status, warn_once
from hyperkron.trees import Tree


class Operator(ABC):
    """A symmetric linear operator v ↦ (A + δI) v on trees of parameters.

    A approximates the inner Hessian ∇²_θθ J_in and δ ≥ 0 is the damping. The damping is part of the operator
    and appears once: a solver never adds its own.

    An implementation evaluates the curvature at one fixed point, with the same parameters, batch and dropout
    masks every time, so that repeated products are products with one matrix. The products are detached from
    the graph.

    Attributes:
        products: how many matrix-vector products have been computed; every :meth:`matvec` adds one.
        roundoff: the unit roundoff of products where it is coarser than that of the vectors, for a model in half
            precision is; else 0.
    """

    products: int = 0
    roundoff: float = 0.0

    @abstractmethod
    def matvec(self, v: Tree) -> Tree:
        """(A + δI) v as a new tree with the names and dtypes of ``v``, which is not changed; adds 1 to ``products``."""

    def release(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """The solve is done: let go of memory that no later call needs."""


class Invertible(Operator):
    """An operator that also applies its inverse b ↦ (A + δI)⁻¹ b, usually from a factorisation made once.

    Any such operator serves as a direct solve. A positive definite one also serves as the preconditioner of
    conjugate gradients, or gradient descent, on another operator.

    Attributes:
        status: how the factorisation went: ``DIRECT``, or ``MORE_DAMPING`` or ``KEPT_PREVIOUS`` where a
            fallback was needed.
    """

    status: Status = Status.DIRECT

    @abstractmethod
    def solve(self, b: Tree) -> Tree:
        """(A + δI)⁻¹ b as a new tree with the names of ``b``, which is not changed; counts no product."""


class CurvatureState:
    """What a curvature remembers between calls; this one remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        """The state as nested dictionaries of tensors, numbers and strings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        if state:
            raise HyperkronError(f"this curvature keeps no state, but a state with {sorted(state)} was given.")


class Curvature(ABC):
    """A choice of A ≈ ∇²_θθ J_in: configuration only. Its memory is a :class:`CurvatureState` made by :meth:`init`."""

    def init(self) -> CurvatureState:
        """A fresh state."""
        return CurvatureState()

    @abstractmethod
    def operator(self, point: Point, state: CurvatureState) -> Operator:
        """A + δI at ``point``, refreshing ``state`` where it is due."""

    @property
    def lean(self) -> bool:
        """Whether memory counts more than launching work early."""
        return False

    def due(self, state: CurvatureState) -> bool:
        """Whether the next call measures the curvature again."""
        return True

    def constants(self, state: CurvatureState) -> Hashable | None:
        """What a CUDA graph of the next step would take for constant; ``None`` where it cannot be recorded."""
        return None


def checked_damping(damping: float) -> float:
    """``damping`` if it is a finite number ≥ 0, else an error that names it."""
    if not (isinstance(damping, (int, float)) and math.isfinite(damping) and damping >= 0):
        raise HyperkronError(f"damping={damping!r} is not a finite number ≥ 0; 1e-3 is a common choice.")
    return float(damping)


def checked_count(name: str, value: int, remedy: str = "") -> None:
    """Refuse what is not a whole number ≥ 1, by its name."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise HyperkronError(f"{name}={value!r} must be a whole number ≥ 1{remedy}.")


def checked_positive(name: str, value: float, remedy: str) -> float:
    """``value`` if it is a finite number > 0, else an error that names it."""
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise HyperkronError(f"{name}={value!r} is not a positive number; {remedy}.")
    return float(value)


def warn_opaque(who: str) -> None:
    """Say once that a plain tensor in the inner loss has a curvature that ``who`` cannot see."""
    warn_once(
        f"opaque {who}",
        f"the inner loss contains a plain tensor whose curvature {who} cannot see (harmless if it depends on λ only); "
        "write an L2 penalty as hyperkron.losses.l2(...) to have its curvature counted.",
    )


def l2_curvature(loss: Loss, params: Tree) -> dict[str, Tensor | float]:
    """2α for each parameter under a penalty α‖p‖² of the inner loss, by name (summed where there are several)."""
    names = {id(p): name for name, p in params.items()}
    found: dict[str, Tensor | float] = {}
    doubled: dict[tuple[object, ...], Tensor] = {}  # one coefficient of many parameters stays one tensor
    for penalty in loss.l2:
        name = names.get(id(penalty.parameter))
        if name is None and penalty.parameter.grad_fn is not None:
            warn_once(
                "l2-derived",
                "the inner loss has an l2 penalty on a tensor computed from parameters, whose curvature is not counted "
                "(harmless if it depends on λ only); penalise the parameters themselves: losses.l2(model, α).",
            )
        if name is not None:
            coefficient = penalty.coefficient
            value: Tensor | float
            if isinstance(coefficient, Tensor):
                key = (coefficient.data_ptr(), coefficient.device, coefficient.dtype, coefficient.shape)
                if key not in doubled:
                    doubled[key] = 2 * coefficient.detach()
                value = doubled[key]
            else:
                value = 2 * coefficient
            found[name] = found[name] + value if name in found else value
    return found
