"""Solves that are recorded without a GPU: every way to a number of a tensor is closed while they are."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dense_operator import DenseInvertible, DenseOperator, random_spd, random_vector, unflatten
from hyperkron import trees
from hyperkron.curvature.base import Invertible
from hyperkron.kernels.execution import Execution, Pending
from hyperkron.solution import Solution, Status
from hyperkron.solvers import LinearSystem, Solver
from hyperkron.trees import Tree

N = 12
A = random_spd(N, condition=10.0, seed=0)
B = random_vector(N, seed=1)
START = random_vector(N, seed=2)
EYE = torch.eye(N, dtype=torch.float64)


class _NoReads(TorchDispatchMode):
    """Refuses what waits for the device below Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2")
        assert func.overloadpacket.__name__ not in waits, func
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def nothing_read() -> Iterator[None]:
    """Every way to a number of a tensor fails."""

    def fail(*args: Any) -> None:
        raise AssertionError("read from the device")

    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__"):
            stack.enter_context(patch.object(Tensor, name, fail))
        stack.enter_context(patch.object(trees, "_of_any_size", lambda found, _: found))  # a CPU's norms are read
        stack.enter_context(_NoReads())
        yield


class Turning(DenseOperator):
    """A dense operator of which, after ``good`` products, ``bad`` ones are ``then`` times too large."""

    def __init__(self, matrix: Tensor, good: int, then: float, bad: int) -> None:
        super().__init__(matrix)
        self.then, self.wrong = then, range(good + 1, good + bad + 1)

    def matvec(self, v: Tree) -> Tree:
        product = super().matvec(v)
        return {k: x * self.then for k, x in product.items()} if self.products in self.wrong else product


@dataclass
class System:
    """One solve, done at once or recorded, with an operator that may turn after ``good`` products."""

    solver: Solver
    matrix: Tensor = A
    b: Tensor = B
    start: Tensor | None = None
    good: int = 1000
    then: float = math.nan
    bad: int = 1000
    preconditioner: Tensor | None = None
    dtype: torch.dtype = torch.float64

    def solve(self) -> Solution:
        operator, b, options = self._arguments()
        solution = self.solver.solve(operator, b, **options)
        assert solution.products == operator.products
        return solution

    def _arguments(self) -> tuple[DenseOperator, Tree, dict[str, Any]]:
        start = None if self.start is None else unflatten(self.start.to(self.dtype))
        second: Invertible | None = None
        if self.preconditioner is not None:
            second = DenseInvertible(self.preconditioner.to(self.dtype))
        operator = Turning(self.matrix.to(self.dtype), self.good, self.then, self.bad)
        return operator, unflatten(self.b.to(self.dtype)), {"start": start, "preconditioner": second}

    def recorded(self) -> Recorded:
        """A recording of the solve, during which nothing is read."""
        operator, b, options = self._arguments()
        execution = Execution(torch.device("cpu"), recorded=True)
        with nothing_read():
            value, solution = self.solver.record(LinearSystem(operator, b, **options), execution)
            unread = execution.unread()
        return Recorded(execution, value, solution, unread, operator.products)

    def replayed(self) -> Solution | None:
        """What a replay makes of the recording."""
        return self.recorded().replayed()


@dataclass
class Recorded:
    """A recorded solve, and what a replay would read."""

    execution: Execution
    value: Tree
    solution: Pending[Solution]
    unread: Tensor
    products: int

    def replayed(self, unread: Tensor | None = None) -> Solution | None:
        """The solution of a replay that left ``unread``; ``None`` where it is refused."""
        if not self.execution.replayed(self.unread if unread is None else unread):
            return None
        solution = self.solution.wait()
        assert solution.value is self.value and solution.products == self.products
        return None if solution.status is Status.NON_FINITE else solution


def alike(found: Solution, expected: Solution) -> bool:
    """Whether two solves tell the same, their values and products aside.

    Roots that torch takes on a CPU are off by a bit on some processors, math.sqrt's never; so residuals may be.
    """
    told, wanted = (dataclasses.replace(x, value={}, products=0, residual=None) for x in (found, expected))
    return told == wanted and found.residual == to_a_bit(expected.residual)


def to_a_bit(residual: float | None) -> Any:
    """What equals ``residual`` but for its last bit."""
    return None if residual is None else pytest.approx(residual, rel=4e-16)
