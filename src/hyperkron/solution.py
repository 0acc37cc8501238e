"""What a solver and a hypergradient return, and what they raise.

A status's value is the sentence a person reads: ``print(result.status.value)`` says what happened and, where
the answer is not the one asked for, what to do about it.
"""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from hyperkron.trees import Tree


class HyperkronError(ValueError):
    """An argument or a state that hyperkron refuses; the message names it, its value and the remedy."""


class NonFiniteError(HyperkronError):
    """A NaN or an infinity where a finite number is needed."""


class CoverageError(HyperkronError):
    """A parameter to which the chosen curvature does not apply, under ``strict=True``."""


class FactorizationError(HyperkronError):
    """A curvature matrix that could not be factorised by any of the fallbacks: what happened, and the remedy."""

    def __init__(self, what: str, remedy: str = "raise damping") -> None:
        super().__init__(f"{what}; {remedy}.")
        self.what = what


class HyperkronWarning(UserWarning):
    """Something a user should know that does not stop the computation."""


class Status(enum.Enum):
    """How a linear system or a hypergradient was obtained, from best to worst; the value is what a person reads.

    Example:
        >>> Status.CONVERGED.ok
        True
        >>> print(Status.CONVERGED.value)
        The solver reached the tolerance asked for, or the precision of the numbers.
    """

    DIRECT = "The system was solved directly from its factorisation."
    CONVERGED = "The solver reached the tolerance asked for, or the precision of the numbers."
    BUDGET = "The solver did the number of iterations asked for and returned its last iterate."
    MORE_DAMPING = (
        "The factorisation succeeded only in float64 or with more damping than asked for; "
        "raise the damping to make this the normal case."
    )
    STALE = (
        "The inverse in use is older than allowed, or refreshing it has failed several times; "
        "raise the damping, refresh more often, or check the batches for extreme values."
    )
    KEPT_PREVIOUS = (
        "The new curvature could not be factorised, so the previous inverse was used; "
        "raise the damping, or check the batch for extreme values."
    )
    COLLAPSED = (
        "The weights of the examples have collapsed: all are zero, or a few carry nearly everything; "
        "lower the step size of λ, bound it with a projection, or use more validation data."
    )
    NONPOSITIVE_CURVATURE = (
        "The solver met a direction of zero or negative curvature and returned its last iterate before it "
        "(the right-hand side, scaled or preconditioned, if that was its first direction); "
        "raise the damping, or use a positive semi-definite curvature such as GGN or KFAC."
    )
    DIVERGED = (
        "The iteration grew instead of shrinking and was stopped, returning its best iterate; "
        "lower the step (without a preconditioner step=None picks a safe one), or raise the damping."
    )
    SKIPPED = (
        "A NaN or an infinity appeared in the step or its curvature could not be factorised, so θ and λ were put back "
        "where they were and the step was left out; check the batches named in the file beside the run."
    )
    NON_FINITE = (
        "A NaN or an infinity appeared in the solve, and the last finite iterate was returned; "
        "check the batch and the parameters, raise the damping, or use float64."
    )

    @property
    def ok(self) -> bool:
        """Whether the value is the one asked for; if not, it is a fallback that the sentence explains."""
        return self in (Status.DIRECT, Status.CONVERGED, Status.BUDGET)


@dataclass(frozen=True)
class Solution:
    """An (approximate) solution v of (A + δI) v = b.

    Attributes:
        value: v, with the names of b.
        status: how it was obtained.
        iterations: iterations done (0 for a direct solve).
        products: matrix-vector products spent, including those that found a step size; where a CUDA graph was
            replayed, those of all iterations, also if the solve ended before.
        residual: ‖b − (A + δI)v‖ / ‖b‖ where it is known without a further product; for a fixed-step solver
            that of the iterate before, which it knows, with a preconditioner in its norm; else ``None``.
    """

    value: Tree
    status: Status
    iterations: int = 0
    products: int = 0
    residual: float | None = None


def worst(statuses: Iterable[Status]) -> Status:
    """The status of several solves together: that of the one that went worst."""
    return max(statuses, key=list(Status).index)


@dataclass(frozen=True)
class HypergradientResult:
    """A hypergradient dΦ/dλ and how it was obtained.

    Attributes:
        grads: dΦ/dλ, one tensor for each parameter of λ.
        status: the status of the linear solve, or of the method as a whole where there is none.
        outer_loss: the value of J_out.
        solution: the linear solve, or ``None`` for methods without one.
        stats: figures worth logging (products, ages, times), by name.
    """

    grads: Tree
    status: Status
    outer_loss: float
    solution: Solution | None = None
    stats: dict[str, float | int | str] = field(default_factory=dict)


_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Issue a :class:`HyperkronWarning` the first time ``key`` is seen in this process.

    The warning points at the first line outside hyperkron, which is the line a user can change. Under a
    filter that turns warnings into errors it is raised every time.
    """
    if key in _warned:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "hyperkron":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, HyperkronWarning, stacklevel=level)
    _warned.add(key)
