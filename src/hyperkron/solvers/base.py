"""What all solvers of (A + δI) v = b share: the interface, and the checks at the door."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.solution import HyperkronError, NonFiniteError, Solution, Status
from hyperkron.solvers.watch import Watch, strange
from hyperkron.trees import Tree
from hyperkron.validation import check_positive

_SAFE_RANGE = 1e-6, 1e6  # of the largest entry of b: float32 squares and products stay far from its limits


class Solver(ABC):
    """A way to solve (A + δI) v = b for one right-hand side, given A + δI as an operator.

    A solver is configuration only: a frozen dataclass that can be shared between threads and problems. A new
    one implements :meth:`_solve` and declares the three flags, by which a caller refuses combinations that
    make no sense before any work is done. To be recorded as a CUDA graph it must decide by what its ``watch`` looks at,
    as :class:`~hyperkron.solvers.watch.Watch` says, and have a :meth:`check_graph` that refuses nothing.

    Attributes:
        needs_products: whether it multiplies by the operator rather than by its inverse.
        uses_start: whether it takes a start v₀.
        uses_preconditioner: whether it takes a preconditioner.
    """

    needs_products: ClassVar[bool] = True
    uses_start: ClassVar[bool] = False
    uses_preconditioner: ClassVar[bool] = False

    def solve(
        self,
        operator: Operator,
        b: Tree,
        *,
        start: Tree | None = None,
        preconditioner: Invertible | None = None,
        watch: Watch | None = None,
    ) -> Solution:
        """Solve (A + δI) v = b.

        Args:
            operator: A + δI, symmetric, with its damping inside.
            b: the right-hand side.
            start: v₀, such as the previous solution; ``None`` starts from zero without spending a product.
            preconditioner: M ≈ A + δI, positive definite, whose inverse is applied to residuals.
            watch: one of its own for this solve, by which it is recorded or not; ``None``: it is not.

        Returns:
            The solution with its status; for a ``b`` in half precision all arithmetic but the model's own is float32,
            and the value is rounded to the dtype of ``b`` at the end. A right-hand side of zeros has the solution
            zero, at no cost.

        Raises:
            HyperkronError: for an argument that this solver cannot use.
            NonFiniteError: for NaN or infinity in ``b`` or ``start``.
        """
        self._check(operator, start, preconditioner)
        watch = Watch() if watch is None else watch
        given, b = b, trees.widened(trees.map(torch.Tensor.detach, b))
        (peak,) = watch.look(trees.largest(b))
        extreme = watch.refuses(strange(peak) | (peak < _SAFE_RANGE[0]) | (peak > _SAFE_RANGE[1]))
        if extreme and not math.isfinite(peak):
            raise NonFiniteError(_non_finite("b", b, "the outer loss and its batch"))
        if start is not None:
            start = trees.widened(trees.map(torch.Tensor.detach, start))
            if watch.refuses(strange(*watch.look(trees.largest(start)))):
                raise NonFiniteError(_non_finite("start", start, "the previous solve, or pass start=None"))
        if not extreme:
            return _in_dtype_of(given, self._solve(operator, b, start, preconditioner, watch))
        if peak == 0.0:
            return Solution(trees.zeros_like(given), Status.CONVERGED, residual=0.0)
        unit = 2.0 ** math.frexp(peak)[1]  # a power of two, so that scaling does not round
        start = None if start is None else trees.scale(start, 1.0 / unit)
        solution = self._solve(operator, trees.scale(b, 1.0 / unit), start, preconditioner, watch)
        return _in_dtype_of(given, dataclasses.replace(solution, value=trees.scale(solution.value, unit)))

    @abstractmethod
    def _solve(
        self, operator: Operator, b: Tree, start: Tree | None, preconditioner: Invertible | None, watch: Watch
    ) -> Solution:
        """Solve for a finite, detached, non-zero ``b``, with arguments that :meth:`solve` has checked.

        ``watch`` may be left alone by a solver that cannot be recorded as a CUDA graph.
        """

    def check_graph(self) -> None:
        """Refuse to be recorded as a CUDA graph, unless all it decides by is looked at by the watch."""
        raise HyperkronError(
            f"graph=True does not work with solver={self!r}, which may read from the device on its way; use Direct, CG "
            "or Neumann, or graph=False."
        )

    def _check(self, operator: Operator, start: Tree | None, preconditioner: Invertible | None) -> None:
        """Refuse arguments that this solver cannot use."""
        name = type(self).__name__
        if not isinstance(operator, Operator):
            raise HyperkronError(
                f"operator is a {type(operator).__name__}, not a curvature operator; "
                "pass an instance of hyperkron.curvature.base.Operator"
            )
        if start is not None and not self.uses_start:
            raise HyperkronError(f"start was given to {name}, which uses none; pass start=None, or use CG")
        if preconditioner is None:
            return
        if not self.uses_preconditioner:
            raise HyperkronError(f"preconditioner was given to {name}, which uses none; use CG or GradientDescent")
        if not isinstance(preconditioner, Invertible):
            raise HyperkronError(
                f"preconditioner is a {type(preconditioner).__name__}, which has no inverse to apply; "
                "use an invertible curvature such as KFAC"
            )


def _non_finite(argument: str, tree: Tree, look: str) -> str:
    names = [name for name, x in tree.items() if not trees.is_finite({name: x})]
    return f"{argument} holds NaN or infinity in {names}; check {look}"


def _in_dtype_of(b: Tree, solution: Solution) -> Solution:
    value = trees.cast(solution.value, b)
    return solution if value is solution.value else dataclasses.replace(solution, value=value)


def epsilon(tree: Tree, operator: Operator) -> float:
    """The unit roundoff of products with ``operator``: of the coarsest dtype in ``tree``, or of the model's."""
    return max(operator.roundoff, *(torch.finfo(x.dtype).eps for x in tree.values()))


def check_step(step: float | None) -> None:
    """Refuse a step that is neither ``None`` nor positive and finite."""
    if step is not None:
        check_positive("step", step, "pass one below 2/λmax, or None to have a safe one found")
