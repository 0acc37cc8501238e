"""Iterative solvers, each written once: executed eagerly, or recorded as a CUDA graph.

Only how numbers such as pᵀAp are read differs. Eagerly they are floats, and the solve stops where they say so. While a
graph is recorded nothing can be read: they are tensors on the device, so all iterations run, and ``where`` keeps the
value with which the eager solve stops. Its outcome is read after each replay.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.kernels.execution import Execution, Pending, read
from hyperkron.solution import Solution, Status
from hyperkron.solvers.base import LinearSystem, Solver
from hyperkron.trees import Tree

Read = Callable[..., Sequence[Any]]
"""From 0-dimensional tensors to numbers: floats, or tensors in float64."""


class Event(IntEnum):
    """A :class:`Status` as a number; ``BUDGET`` while the solve is still running."""

    BUDGET, CONVERGED, NONPOSITIVE_CURVATURE, DIVERGED, NON_FINITE = range(5)


class IterativeSolver(Solver):
    """A solver whose one :meth:`_iterate` serves both executions."""

    @abstractmethod
    def _iterate(self, system: LinearSystem, read: Read) -> tuple[Tree, int, Ending]:
        """The value, the number of products and the outcome of a solve whose numbers are ``read``."""

    def _solve(self, system: LinearSystem) -> Solution:
        value, products, end = self._iterate(system, read)
        return end.solution(value, products)

    def _record(self, system: LinearSystem, execution: Execution) -> tuple[Tree, Pending[Solution]]:
        value, products, end = self._iterate(system, _kept)
        numbers = torch.stack([x.double() for x in (end.status, end.iterations, end.residual)])
        return value, execution.later(numbers).then(lambda found: Ending(*found).solution(value, products))


class Ending:
    """Status, iterations and residual of a solve, which no longer change when it has ended."""

    def __init__(self, status: Any, iterations: Any, residual: Any) -> None:
        self.status, self.iterations, self.residual = status, iterations, residual

    @property
    def running(self) -> Any:
        """Whether the solve has not ended."""
        return self.status == Event.BUDGET

    @property
    def stopped(self) -> bool:
        """Whether it is known that the solve has ended."""
        return self.running is False

    def update(self, status: Any, iterations: Any, residual: Any) -> None:
        """Store the result of an iteration, unless the solve had ended before it."""
        running = self.running
        self.iterations = where(running, iterations, self.iterations)
        self.residual = where(running, residual, self.residual)
        self.status = where(running, status, self.status)

    def solution(self, value: Tree, products: int) -> Solution:
        """The solution, once all three are floats."""
        residual = self.residual if math.isfinite(self.residual) else None
        return Solution(value, Status[Event(self.status).name], int(self.iterations), products, residual)


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` if the condition holds, else ``b``: numbers, or trees."""
    if isinstance(condition, bool):
        return a if condition else b
    return trees.where(condition, a, b) if isinstance(a, dict) else torch.where(condition, a, b)


def possible(condition: Any) -> bool:
    """Whether the condition holds, or is not known."""
    return condition is not False


def first(*events: tuple[int, Any]) -> Any:
    """The first status whose condition holds; ``BUDGET`` if none does."""
    status: Any = Event.BUDGET
    for code, condition in reversed(events):
        if condition is not False:
            status = where(condition, code, status)
    return status


def non_finite(*numbers: Any) -> Any:
    """Whether any of the numbers is NaN or infinite."""
    if isinstance(numbers[0], Tensor):
        return ~torch.stack(numbers).isfinite().all()
    return not all(map(math.isfinite, numbers))


def sqrt(x: Any) -> Any:
    """√x; NaN if x is negative."""
    if isinstance(x, Tensor):
        return x.sqrt()
    return math.nan if x < 0.0 else math.sqrt(x)


def _kept(*numbers: Tensor) -> tuple[Tensor, ...]:
    """The numbers in float64, like Python's floats, but still on the device."""
    return torch.stack(numbers).double().unbind()
