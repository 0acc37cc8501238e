"""The parts of a hypergradient that evaluate the model, as objects: so that one may record them as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hyperkron.trees import Tree

T = TypeVar("T")


@dataclass(frozen=True)
class Pass(Generic[T]):
    """A part of a hypergradient that evaluates the model, and that may be recorded as a CUDA graph by itself.

    Attributes:
        name: which part it is.
        work: the part, as a function of the point and of ``given``; it reads nothing from the device.
        given: the vectors that it depends on, besides the point; ``work`` may empty it where
            :attr:`~hyperkron.evaluation.point.Point.gives_vectors` says so.
        key: tells what else it depends on; a recording holds for one key.
        brief: those of its results that the caller is done with before the next pass begins.
        generators: what it draws from, besides the model's random numbers.
    """

    name: str
    work: Callable[[Any, Tree], T]
    given: Tree = field(default_factory=dict)
    key: Callable[[], object] = lambda: None
    brief: Callable[[T], Sequence[Tensor]] = lambda found: ()
    generators: Sequence[torch.Generator] = ()


Passes = Callable[[Any, Pass[Any]], Any]
"""What carries out a pass at a point."""
