"""What recordings of a hypergradient have in common: the step that is wanted, and whether they hold for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from hyperkron.cross.state import CrossState
from hyperkron.curvature import Curvature, CurvatureState
from hyperkron.evaluation.point import Point
from hyperkron.kernels.execution import Pending
from hyperkron.kernels.graphs import places
from hyperkron.problem import BilevelProblem
from hyperkron.solution import Solution, warn_once
from hyperkron.trees import Tree

MISFITS = 3
"""After this many batches in a row of other shapes, new recordings are made."""
WASTED = 4
"""After this many recordings of which most served one step only, no more are made."""


class Answer(NamedTuple):
    """What a step found: J_out, dΦ/dλ, the solve, and notes."""

    value: Pending[list[float]]
    grads: Tree
    solution: Pending[Solution]
    notes: dict[str, str]


class Request(NamedTuple):
    """A step that is wanted: what it does, at which point and on which batches, and the states it uses."""

    work: Callable[[Point, Tree | None], Answer]  # the formula, its solve begun at a tree or at zero
    problem: BilevelProblem
    model: nn.Module
    hyper: nn.Module
    batches: tuple[Any, Any, Any, Tree | None]  # inner, outer, the curvature's or None; where the solve begins
    method: Curvature
    curvature: CurvatureState
    cross: CrossState
    refreshing: bool  # whether the curvature is measured again
    plain: bool = False  # whether the objectives are evaluated without autocast

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype under which the model runs by ``torch.autocast``."""
        kind = next(self.model.parameters()).device.type
        enabled = torch.is_autocast_enabled(kind) and not self.plain
        return torch.get_autocast_dtype(kind) if enabled else None

    @property
    def generators(self) -> list[torch.Generator]:
        """What the curvature draws random numbers from."""
        return self.curvature.generators(next(self.model.parameters()).device)

    def surroundings(self) -> object:
        """What must not change between the recording of a pass and its replay, but for batches."""
        modes = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, self.autocast)
        objectives = self.problem.inner, self.problem.outer, self.plain
        return objectives, places(self.model, self.hyper), modes

    def key(self) -> object:
        """The same for that of a whole step."""
        return self.surroundings(), self.method.constants(self.curvature)


class Recordings(ABC):
    """The recordings of one hypergradient: dropped where they no longer fit, given up where they are of no use."""

    no_effect: ClassVar[str]
    """What the warning says before its reason."""

    def __init__(self) -> None:
        self._key: object = None
        self._served = self._misfits = 0
        self._given_up = False

    @abstractmethod
    def _drop(self) -> None:
        """Forget all recordings."""

    def _refuse_kept_casts(self, wanted: Request) -> None:
        """Give up where autocast would hand the casts of one step to the next."""
        if wanted.autocast is not None and torch.is_autocast_cache_enabled() and not self._given_up:
            self._give_up("autocast keeps casts of earlier weights; use torch.autocast(..., cache_enabled=False)")

    def _refuse_draws_on_host(self, point: Point) -> None:
        """Give up where a recording would draw the same numbers in every step."""
        if point.drew_on_host and not self._given_up:
            self._give_up("evaluations draw random numbers on the CPU, which would be the same ones in every step")

    def _refuse_waste(self, made: int) -> None:
        """Give up where most of the recordings ``made`` served one step only."""
        if made > WASTED and self._served < 2 * made:
            self._give_up("the objectives, or the memory of model and hyper, are others in every step")

    def _hold(self, key: object, fit: Callable[[], bool]) -> bool:
        """Whether recordings, if there are any, hold for a step; those that never will again are dropped."""
        if key != self._key:
            self._key = key
            self._drop()
        if fit():
            self._misfits = 0
            return True
        self._misfits += 1
        if self._misfits >= MISFITS:
            self._drop()
        return False

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._drop()
        warn_once(self.no_effect, f"{self.no_effect}: {reason}.")
