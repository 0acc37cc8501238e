"""What all solvers of (A + δI) v = b share: the interface, and the checks of arguments."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.kernels.execution import Execution, Pending, read
from hyperkron.solution import HyperkronError, NonFiniteError, Solution, Status, worst
from hyperkron.trees import Tree

_SMALLEST, _LARGEST = 1e-6, 1e6  # range for the largest entry of b without scaling, far from the limits of float32


@dataclass(frozen=True)
class LinearSystem:
    """(A + δI) v = b, with an optional start and preconditioner.

    Attributes:
        operator: A + δI, symmetric, with its damping inside.
        b: the right-hand side.
        start: v₀, such as the previous solution; ``None`` starts from zero without spending a product.
        preconditioner: M ≈ A + δI, positive definite, whose inverse is applied to residuals.
    """

    operator: Operator
    b: Tree
    start: Tree | None = None
    preconditioner: Invertible | None = None

    @property
    def epsilon(self) -> float:
        """The unit roundoff of products with A: the largest of the dtypes in b and of the model."""
        return max(self.operator.roundoff, *(torch.finfo(x.dtype).eps for x in self.b.values()))

    def residual(self) -> tuple[Tree, int]:
        """r₀ = b − Av₀, and the products spent on it."""
        if self.start is None:
            return self.b, 0
        return trees.subtract(self.b, self.operator.matvec(self.start)), 1

    def preconditioned(self, r: Tree) -> Tree:
        """z = M⁻¹r; r itself without a preconditioner."""
        return r if self.preconditioner is None else self.preconditioner.solve(r)


class Solver(ABC):
    """A way to solve (A + δI) v = b for one right-hand side, given A + δI as an operator.

    A solver is configuration only: a frozen dataclass that can be shared between threads and problems. A new solver
    implements :meth:`_solve` and declares the three flags, with which callers refuse unsupported combinations early. A
    solver that also implements :meth:`_record` can be recorded as a CUDA graph.

    Attributes:
        needs_products: whether it multiplies by the operator rather than by its inverse.
        uses_start: whether it takes a start v₀.
        uses_preconditioner: whether it takes a preconditioner.
    """

    needs_products: ClassVar[bool] = True
    uses_start: ClassVar[bool] = False
    uses_preconditioner: ClassVar[bool] = False

    def solve(
        self, operator: Operator, b: Tree, *, start: Tree | None = None, preconditioner: Invertible | None = None
    ) -> Solution:
        """Solve (A + δI) v = b.

        Args:
            operator, b, start, preconditioner: see :class:`LinearSystem`.

        Returns:
            The solution with its status. If ``b`` is in half precision, all arithmetic except the model's is float32,
            and the value is rounded to the dtype of ``b`` at the end. For ``b = 0`` the solution is zero, at no cost.

        Raises:
            HyperkronError: for an argument that this solver cannot use.
            NonFiniteError: for NaN or infinity in ``b`` or ``start``.
        """
        return self.solve_system(LinearSystem(operator, b, start, preconditioner))

    def solve_system(self, system: LinearSystem) -> Solution:
        """:meth:`solve`, with its arguments as one object."""
        self._check(system)
        b, start = _prepared(system.b), None if system.start is None else _prepared(system.start)
        (peak,) = read(trees.largest(b))
        if not math.isfinite(peak):
            raise NonFiniteError(_non_finite("b", b, "the outer loss and its batch"))
        if start is not None and not math.isfinite(*read(trees.largest(start))):
            raise NonFiniteError(_non_finite("start", start, "the previous solve, or pass start=None"))
        if peak == 0.0:
            return Solution(trees.zeros_like(system.b), Status.CONVERGED, residual=0.0)
        unit = 1.0
        if not _SMALLEST <= peak <= _LARGEST:
            least = max(torch.finfo(x.dtype).tiny for x in b.values())  # whose inverse is finite
            unit = max(2.0 ** math.frexp(peak)[1], least)  # a power of two, so that scaling does not round
            b, start = trees.scale(b, 1.0 / unit), None if start is None else trees.scale(start, 1.0 / unit)
        solution = self._solve(replace(system, b=b, start=start))
        value = solution.value if unit == 1.0 else trees.scale(solution.value, unit)
        return replace(solution, value=trees.cast(value, system.b))

    def solve_stacked(self, operator: Operator, b: Tree, *, preconditioner: Invertible | None = None) -> Solution:
        """:meth:`solve` for each of many right-hand sides, along the leading dimension of ``b``.

        Returns:
            All solutions, stacked; the worst status, all iterations and products, and the largest residual.
        """
        found = [self.solve(operator, one, preconditioner=preconditioner) for one in trees.unstacked(b)]
        residuals = [x.residual for x in found if x.residual is not None]
        return Solution(
            trees.stacked([x.value for x in found]),
            worst(x.status for x in found),
            sum(x.iterations for x in found),
            sum(x.products for x in found),
            max(residuals, default=None),
        )

    @abstractmethod
    def _solve(self, system: LinearSystem) -> Solution:
        """Solve a checked system with a finite, detached, non-zero right-hand side."""

    def record(self, system: LinearSystem, execution: Execution) -> tuple[Tree, Pending[Solution]]:
        """Solve while a CUDA graph is recorded: all iterations are done, and nothing is read.

        Args:
            system: as for :meth:`solve`.
            execution: the recording; a replay fails if its ``b`` or ``start`` needs the special cases of :meth:`solve`.

        Returns:
            v, in memory that every replay overwrites, and the solution of the last replay.
        """
        self._check(system)
        b, start = _prepared(system.b), system.start
        peak = trees.largest(b).double()
        execution.read_flags(~((peak >= _SMALLEST) & (peak <= _LARGEST)).reshape(1))
        if start is not None:
            start = _prepared(start)
            execution.read_flags(~trees.largest(start).isfinite().reshape(1))
        value, solution = self._record(replace(system, b=b, start=start), execution)
        value = trees.cast(value, system.b)
        return value, solution.then(lambda found: replace(found, value=value))

    def _record(self, system: LinearSystem, execution: Execution) -> tuple[Tree, Pending[Solution]]:
        """:meth:`record` for a checked system; see ``iteration.py``."""
        raise NotImplementedError

    def check_graph(self) -> None:
        """Raise an error if this solver cannot be recorded as a CUDA graph."""
        if type(self)._record is Solver._record:
            raise HyperkronError(
                f"graph=True does not work with solver={self!r}, which may read from the device on its way; use "
                "Direct, CG or Neumann, or graph=False."
            )

    def _check(self, system: LinearSystem) -> None:
        """Refuse arguments that this solver cannot use."""
        name, preconditioner = type(self).__name__, system.preconditioner
        if not isinstance(system.operator, Operator):
            raise HyperkronError(
                f"operator is a {type(system.operator).__name__}, not a curvature operator; "
                "pass an instance of hyperkron.curvature.base.Operator"
            )
        if system.start is not None and not self.uses_start:
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


def _prepared(tree: Tree) -> Tree:
    return trees.widened(trees.map(Tensor.detach, tree))


def signed_square(r: Tree, z: Tree) -> Tensor:
    """rᵀz for z = M⁻¹r; negative if M is not positive definite, infinite if r is not finite, NaN if only z is NaN."""
    rz = trees.dot(r, z)
    if z is r:
        return rz
    rr = trees.dot(r, r)
    return torch.where(rr.isfinite(), torch.where(rz <= 0.0, -rr, rz), math.inf)


def signed_norm(r: Tree, z: Tree) -> Tensor:
    """The root of :func:`signed_square`, with its sign."""
    if z is r:
        return trees.norm(r)
    square = signed_square(r, z)
    return square.sign() * square.abs().sqrt()
