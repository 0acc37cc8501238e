"""How a solver comes by the numbers that it decides by: at once, or, in a recording, after each replay.

A solver reads a few numbers from the device on its way: has it converged, does it diverge? While a CUDA graph is
recorded nothing can be read. The solver then takes the uneventful path, which ends when its iterations are done, and
its numbers are judged after each replay, by the code that would have decided by them on the way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from hyperkron.solution import Status


class Verdict(NamedTuple):
    """What numbers say about a solve.

    Attributes:
        event: what ends the uneventful path; ``None``: nothing does.
        residual: of the solution so far, where it is known.
    """

    event: Any = None
    residual: float | None = None


Judge = Callable[[list[float]], Verdict]
"""A decision by numbers alone. What it remembers begins anew with the first numbers of a solve."""


class Watch:
    """Reads the numbers of one solve and has them judged; while ``recording`` it keeps them for later.

    Attributes:
        residual: what the last judgement told; ``None`` while recording.

    Example:
        >>> import torch
        >>> def shrinks(numbers):
        ...     return Verdict(None if numbers[0] < 1.0 else "it grows", numbers[0])
        >>> Watch()(shrinks, torch.tensor(2.0))
        'it grows'
        >>> watch = Watch(recording=True)
        >>> watch(shrinks, torch.tensor(2.0))
        >>> watch.uneventful([2.0]), watch.uneventful([0.5]), watch.residual
        (False, True, 0.5)
    """

    def __init__(self, *, recording: bool = False) -> None:
        self.recording = recording
        self.residual: float | None = None
        self._asked: list[tuple[Judge, Tensor]] = []

    def __call__(self, judge: Judge, numbers: Tensor) -> Any:
        """The event that ``judge`` finds in a few numbers, read in one piece; none while recording."""
        numbers = numbers.detach().reshape(-1)
        if self.recording:
            self._asked.append((judge, numbers))
            return None
        return self._told(judge, numbers.tolist())

    @property
    def unread(self) -> list[Tensor]:
        """What was not read while recording, in order."""
        return [numbers for _, numbers in self._asked]

    def uneventful(self, numbers: list[float]) -> bool:
        """Whether a replay whose :attr:`unread` hold ``numbers`` has rightly taken the path that was recorded."""
        rest = iter(numbers)
        return all(self._told(judge, list(itertools.islice(rest, x.numel()))) is None for judge, x in self._asked)

    def _told(self, judge: Judge, numbers: list[float]) -> Any:
        event, self.residual = judge(numbers)
        return event


class Progress:
    """What an iterative solver knows of its course from numbers alone; :meth:`begin` forgets all that was before."""

    size: float
    residual: float

    def begin(self, numbers: list[float]) -> Verdict:
        """From ‖b‖ and, from a start v₀, ‖b − Av₀‖."""
        self.size = numbers[0]
        self.residual = numbers[-1] / self.size
        return Verdict(None, self.residual) if math.isfinite(self.residual) else Verdict(Status.NON_FINITE)
