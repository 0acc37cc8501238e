"""Direct solves with curvatures that can apply their own inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.kernels.execution import Execution, Pending
from hyperkron.solution import HyperkronError, NonFiniteError, Solution
from hyperkron.solvers.base import LinearSystem, Solver
from hyperkron.trees import Tree


@dataclass(frozen=True)
class Direct(Solver):
    """v = (A + δI)⁻¹ b from the curvature's own factorisation; no product, no iteration.

    For KFAC this is one multiplication from each side for each layer (Martens & Grosse, 2015). The status is that of
    the operator: ``DIRECT``, or ``MORE_DAMPING`` or ``KEPT_PREVIOUS`` if the factorisation needed a fallback.
    """

    needs_products: ClassVar[bool] = False

    def solve_system(self, system: LinearSystem) -> Solution:
        """As for every solver, but on a GPU nothing is read back: the caller must check that the value is finite."""
        return self._unchecked(system) if next(iter(system.b.values())).is_cuda else super().solve_system(system)

    def solve_stacked(self, operator: Operator, b: Tree, *, preconditioner: Invertible | None = None) -> Solution:
        """Apply the inverse once to all right-hand sides."""
        self._check(LinearSystem(operator, b, None, preconditioner))
        if not trees.is_finite(b):
            raise NonFiniteError("b holds NaN or infinity; check the outer loss and its batch")
        inverse = _inverse_of(operator)
        value = inverse.solve_stacked(trees.widened({name: x.detach() for name, x in b.items()}))
        return Solution(trees.cast(_finite(operator, value), b), inverse.status)

    def record(self, system: LinearSystem, execution: Execution) -> tuple[Tree, Pending[Solution]]:
        """The same as on a GPU: nothing is read."""
        solution = self._unchecked(system)
        return solution.value, Pending.ready(solution)

    def check_graph(self) -> None:
        """Nothing to check: a direct solve can be recorded."""

    def _unchecked(self, system: LinearSystem) -> Solution:
        self._check(system)
        inverse = _inverse_of(system.operator)
        detached = {name: x.detach() if x.requires_grad else x for name, x in system.b.items()}
        value = inverse.solve(trees.widened(detached))
        return Solution(trees.cast(value, system.b), inverse.status)

    def _solve(self, system: LinearSystem) -> Solution:
        inverse = _inverse_of(system.operator)
        return Solution(_finite(inverse, inverse.solve(system.b)), inverse.status)


def _finite(operator: Operator, value: Tree) -> Tree:
    if not trees.is_finite(value):
        raise NonFiniteError(
            f"{type(operator).__name__} turned a finite right-hand side into NaN or infinity; "
            "raise the damping, or check the curvature batch"
        )
    return value


def _inverse_of(operator: Operator) -> Invertible:
    if not isinstance(operator, Invertible):
        raise HyperkronError(
            f"solver is Direct but {type(operator).__name__} has no inverse of its own; "
            "use CG, or an invertible curvature such as KFAC"
        )
    return operator
