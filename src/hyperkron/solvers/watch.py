"""How a solver decides by numbers of the device: at once, or, in a recording, without reading them.

A solver looks at a few numbers on its way: has it converged, does it diverge? Each decision is written once. In the
ordinary way its numbers are Python's: they are read once in each iteration, and a solve that ends spends nothing more.
While a CUDA graph is recorded nothing can be read: the numbers are float64 tensors of no dimension, all iterations are
done, and from the end of the solve on its value and what is told of it are held. The status is read after each replay.
What only the ordinary way can deal with, such as a NaN, has the replay done again.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.solution import Solution, Status
from hyperkron.trees import Tree

Number = Any
"""A float, or a float64 tensor of no dimension; the operators of Python do the same with both."""
Flag = Any
"""A bool, or such a tensor of bools, to be joined by ``&`` and ``|``."""

_STATUSES = (
    Status.BUDGET,  # so far
    Status.CONVERGED,
    Status.NONPOSITIVE_CURVATURE,
    Status.DIVERGED,
    Status.NON_FINITE,
)
"""How a solve may end; its code is the position of its status."""


def either(condition: Flag, a: Number, b: Number) -> Number:
    """``a`` where ``condition`` holds, else ``b``.

    Example:
        >>> either(False, 1.0, 2.0), either(torch.tensor(True), 1.0, torch.tensor(2.0))
        (2.0, tensor(1.))
    """
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def root(x: Number) -> Number:
    """√x."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def ratio(a: Number, b: Number) -> Number:
    """a / b, or 0 where b is not positive."""
    return torch.where(b > 0.0, a / b, 0.0) if isinstance(b, Tensor) else a / b if b > 0.0 else 0.0


def strange(*numbers: Number) -> Flag:
    """Whether any of ``numbers`` is NaN or infinite."""
    if isinstance(numbers[0], Tensor):
        return ~torch.stack(numbers).isfinite().all()
    return not all(map(math.isfinite, numbers))


def first(*events: tuple[Status, Flag]) -> Number:
    """The code of the first status whose condition holds; 0 where none does.

    Example:
        >>> first((Status.NON_FINITE, False), (Status.CONVERGED, True), (Status.DIVERGED, True))
        1
    """
    code: Number = 0
    for status, condition in reversed(events):
        code = either(condition, _STATUSES.index(status), code)
    return code


def among(code: Number, *statuses: Status) -> Flag:
    """Whether ``code`` is that of one of ``statuses``."""
    return functools.reduce(operator.or_, [code == _STATUSES.index(status) for status in statuses])


class Course:
    """Where an iterative solve is, as far as numbers tell.

    Attributes:
        size: ‖b‖.
        code: of the status; 0 while nothing has ended the solve.
        iterations: that led to the value as it would be now.
        residual: of that value; not finite where it is not known.
    """

    code: Number
    iterations: Number

    def __init__(self, sizes: Sequence[Number]) -> None:
        """From ‖b‖ and, from a start v₀, ‖b − Av₀‖."""
        self.size = sizes[0]
        self.residual = sizes[-1] / self.size


class Watch:
    """What one solve looks at, and what came of it.

    Attributes:
        recording: nothing is read.
        alive: whether the solve goes on, as far as it has been told.

    Example:
        >>> watch, tree = Watch(), {"w": torch.tensor([3.0, 4.0])}
        >>> course = Course(watch.look(trees.norm(tree), torch.tensor(0.5)))
        >>> course.code, course.iterations = first((Status.CONVERGED, course.residual <= 0.1)), 0
        >>> watch.ends(course)
        True
        >>> watch.solution(tree, products=1).status is Status.CONVERGED
        True
    """

    def __init__(self, *, recording: bool = False) -> None:
        self.recording = recording
        self.alive: Flag = True
        self._refused: list[Tensor] = []
        self._told: Any = None  # code, iterations and residual: numbers, or one tensor

    def look(self, *numbers: Tensor) -> list[Number]:
        """A few numbers to decide by: read in one piece, or, while recording, where they are."""
        found = torch.stack(numbers).detach()
        return list(found.double().unbind()) if self.recording else found.tolist()

    def refuses(self, condition: Flag) -> bool:
        """Whether something is up that a recording cannot deal with: it assumes not, and is told after a replay."""
        if self.recording:
            self._refused.append(condition)
        return not self.recording and condition

    def may(self, condition: Flag) -> bool:
        """Whether ``condition`` may hold, which while recording it always may."""
        return self.recording or condition

    def choose(self, condition: Flag, a: Tree, b: Tree) -> Tree:
        """``a`` where ``condition`` holds, else ``b``; while recording, whatever the other holds."""
        if self.recording:
            return a if a is b else trees.where(condition, a, b)
        return a if condition else b

    def ends(self, course: Course) -> bool:
        """Take note of a solve's course, unless it has ended before, and say whether to leave: while recording, no."""
        now: Any = course.code, course.iterations, course.residual
        if self.recording:
            like = course.residual
            now = torch.stack([x.to(like) if isinstance(x, Tensor) else like.new_full((), x) for x in now])
            if self._told is not None:
                now = torch.where(self.alive, now, self._told)
        self._told, self.alive = now, now[0] == 0
        return not self.recording and not self.alive

    def ended(self, *statuses: Status) -> Flag:
        """Whether the solve has ended by one of ``statuses``."""
        return among(self._told[0], *statuses)

    def solution(self, value: Tree, products: int) -> Solution:
        """The solution of a solve whose course was told; a recording's lacks what only a replay can tell."""
        return (
            Solution(value, Status.BUDGET, products=products) if self.recording else _made(value, products, self._told)
        )

    @property
    def unread(self) -> list[Tensor]:
        """What a replay has to read, for :meth:`replayed`."""
        return self._refused if self._told is None else [*self._refused, self._told]

    def replayed(self, recorded: Solution, numbers: Sequence[float]) -> Solution | None:
        """The solution of a replay whose :attr:`unread` hold ``numbers``; ``None``: only the ordinary way can tell."""
        refused, told = numbers[: len(self._refused)], numbers[len(self._refused) :]
        if any(refused):
            return None
        solution = _made(recorded.value, recorded.products, told) if told else recorded
        return None if solution.status is Status.NON_FINITE else solution


def _made(value: Tree, products: int, told: Sequence[float]) -> Solution:
    code, iterations, residual = told
    known = residual if math.isfinite(residual) else None
    return Solution(value, _STATUSES[int(code)], int(iterations), products, known)
