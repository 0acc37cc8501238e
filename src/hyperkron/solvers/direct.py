"""Direct solves, by a curvature that knows its own inverse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.kernels.execution import Execution, Pending
from hyperkron.solution import HyperkronError, NonFiniteError, Solution
from hyperkron.solvers.base import Solver
from hyperkron.trees import Tree


@dataclass(frozen=True)
class Direct(Solver):
    """v = (A + δI)⁻¹ b from the curvature's own factorisation; no product, no iteration.

    For KFAC this is one multiplication from each side for each layer (Martens & Grosse, 2015). The status is the
    operator's: ``DIRECT``, or ``MORE_DAMPING`` or ``KEPT_PREVIOUS`` where its factorisation needed a fallback.
    """

    needs_products: ClassVar[bool] = False

    def solve(
        self, operator: Operator, b: Tree, *, start: Tree | None = None, preconditioner: Invertible | None = None
    ) -> Solution:
        """As for every solver; on a GPU nothing is read back, and a non-finite value is left for the caller to find."""
        if next(iter(b.values())).is_cuda and isinstance(operator, Invertible):
            return self._unchecked(operator, b, start, preconditioner)
        return super().solve(operator, b, start=start, preconditioner=preconditioner)

    def solve_stacked(self, operator: Operator, b: Tree, *, preconditioner: Invertible | None = None) -> Solution:
        """By one application of the inverse to all right-hand sides."""
        self._check(operator, None, preconditioner)
        if not trees.is_finite(b):
            raise NonFiniteError("b holds NaN or infinity; check the outer loss and its batch")
        given = trees.widened({name: x.detach() for name, x in b.items()})
        value = _inverse_of(operator).solve_stacked(given)
        return Solution(trees.cast(_finite(operator, value), b), _inverse_of(operator).status)

    def record(
        self,
        operator: Operator,
        b: Tree,
        execution: Execution,
        *,
        start: Tree | None = None,
        preconditioner: Invertible | None = None,
    ) -> tuple[Tree, Pending[Solution]]:
        """As on a GPU: nothing is read."""
        solution = self._unchecked(operator, b, start, preconditioner)
        return solution.value, Pending.ready(solution)

    def check_graph(self) -> None:
        """It can be recorded."""

    def _unchecked(
        self, operator: Operator, b: Tree, start: Tree | None, preconditioner: Invertible | None
    ) -> Solution:
        self._check(operator, start, preconditioner)
        detached = {name: x.detach() if x.requires_grad else x for name, x in b.items()}
        solution = _applied(operator, trees.widened(detached))
        return replace(solution, value=trees.cast(solution.value, b))

    def _solve(self, operator: Operator, b: Tree, start: Tree | None, preconditioner: Invertible | None) -> Solution:
        solution = _applied(operator, b)
        _finite(operator, solution.value)
        return solution


def _finite(operator: Operator, value: Tree) -> Tree:
    if not trees.is_finite(value):
        raise NonFiniteError(
            f"{type(operator).__name__} turned a finite right-hand side into NaN or infinity; "
            "raise the damping, or check the curvature batch"
        )
    return value


def _applied(operator: Operator, b: Tree) -> Solution:
    inverse = _inverse_of(operator)
    return Solution(inverse.solve(b), inverse.status)


def _inverse_of(operator: Operator) -> Invertible:
    if not isinstance(operator, Invertible):
        raise HyperkronError(
            f"solver is Direct but {type(operator).__name__} has no inverse of its own; "
            "use CG, or an invertible curvature such as KFAC"
        )
    return operator
