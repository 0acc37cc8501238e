"""What the two kinds of recordings share: the requested step, and whether recordings can be used for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from hyperkron.cross.state import CrossState
from hyperkron.curvature import Curvature, CurvatureState
from hyperkron.evaluation.point import Point
from hyperkron.kernels.execution import Pending
from hyperkron.kernels.graphs import GeneratorCopies, memory_key
from hyperkron.problem import BilevelProblem
from hyperkron.solution import Solution, warn_once
from hyperkron.trees import Tree

MAX_MISMATCHES = 3
"""Make new recordings after this many batches in a row of other shapes."""
MAX_WASTED = 4
"""Stop recording after this many recordings if most of them were replayed only once."""


class Answer(NamedTuple):
    """The results of a step: J_out, dΦ/dλ, the solution, and notes for ``result.stats``."""

    value: Pending[list[float]]
    grads: Tree
    solution: Pending[Solution]
    notes: dict[str, str]


class Request(NamedTuple):
    """A requested step: the function to run, the point, the batches, and the states it uses."""

    work: Callable[[Point, Tree | None], Answer]  # the formula; the solve starts from the tree, or from zero
    problem: BilevelProblem
    model: nn.Module
    hyper: nn.Module
    batches: tuple[Any, Any, Any, Tree | None]  # inner, outer, curvature (or None), and the start of the solve
    method: Curvature
    curvature: CurvatureState
    cross: CrossState
    refreshing: bool  # whether the curvature is measured again
    plain: bool = False  # whether the objectives are evaluated without autocast

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the ``torch.autocast`` that the model runs under, or ``None``."""
        kind = next(self.model.parameters()).device.type
        enabled = torch.is_autocast_enabled(kind) and not self.plain
        return torch.get_autocast_dtype(kind) if enabled else None

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators that the curvature draws random numbers from."""
        return self.curvature.generators(next(self.model.parameters()).device)

    def recording_point(self, batches: Sequence[Any], generator_copies: GeneratorCopies) -> Point:
        """The point at which this step is recorded, on static ``batches`` (inner, outer, curvature)."""
        inner, outer, curvature = batches
        at = self.problem, self.model, self.hyper, inner, outer
        options: dict[str, Any] = {"recording": True, "generator_copies": generator_copies, "plain": self.plain}
        return Point(*at, curvature_batch=curvature, **options)

    def surroundings(self) -> object:
        """Everything except batches that must be the same when a pass is recorded and when it is replayed."""
        modes = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, self.autocast)
        objectives = self.problem.inner, self.problem.outer, self.plain
        return objectives, memory_key(self.model, self.hyper), modes

    def key(self) -> object:
        """The same for a whole step."""
        return self.surroundings(), self.method.constants(self.curvature)


class Recordings(ABC):
    """The recordings of one hypergradient; dropped if they no longer fit, given up if they do not pay off."""

    no_effect: ClassVar[str]
    """What the warning says before its reason."""

    def __init__(self) -> None:
        self._key: object = None
        self._served = self._mismatches = 0
        self._given_up = False

    @abstractmethod
    def _drop(self) -> None:
        """Forget all recordings."""

    def _refuse_kept_casts(self, wanted: Request) -> None:
        """Give up if autocast would reuse the cast weights of an earlier step."""
        if wanted.autocast is not None and torch.is_autocast_cache_enabled() and not self._given_up:
            self._give_up("autocast keeps casts of earlier weights; use torch.autocast(..., cache_enabled=False)")

    def _refuse_draws_on_host(self, point: Point) -> None:
        """Give up if a replay would use the same random numbers in every step."""
        if point.drew_on_host and not self._given_up:
            self._give_up("evaluations draw random numbers on the CPU, which would be the same in every step")

    def _refuse_waste(self, made: int) -> None:
        """Give up if most of the ``made`` recordings were replayed only once."""
        if made > MAX_WASTED and self._served < 2 * made:
            changing = "memory, true or false attributes or hooks of model and hyper"
            self._give_up(f"the objectives, or {changing}, change in every step")

    def _hold(self, key: object, fit: Callable[[], bool]) -> bool:
        """Whether existing recordings can be used for a step; drops those that no longer can."""
        if key != self._key:
            self._key = key
            self._drop()
        if fit():
            self._mismatches = 0
            return True
        self._mismatches += 1
        if self._mismatches >= MAX_MISMATCHES:
            self._drop()
        return False

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._drop()
        warn_once(self.no_effect, f"{self.no_effect}: {reason}.")
