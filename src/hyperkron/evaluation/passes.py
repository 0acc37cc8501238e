"""A pass: a part of a hypergradient that evaluates the model, as an object that can be recorded as a CUDA graph."""

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
    """A part of a hypergradient that evaluates the model and can be recorded as a CUDA graph.

    Attributes:
        name: the name of the part, such as ``"cross term"``.
        work: a function of the point and of ``given`` that returns the results; it reads nothing from the device.
        given: the vectors that the results depend on, besides the point. ``work`` may empty this dictionary if
            :attr:`~hyperkron.evaluation.point.Point.consumes_vectors` is true.
        key: returns what else the results depend on; a recording is valid for one key.
        temporary: returns those results that the caller no longer needs when the next pass begins.
        generators: random generators that it draws from, besides the global ones.
    """

    name: str
    work: Callable[[Any, Tree], T]
    given: Tree = field(default_factory=dict)
    key: Callable[[], object] = lambda: None
    temporary: Callable[[T], Sequence[Tensor]] = lambda found: ()
    generators: Sequence[torch.Generator] = ()


Passes = Callable[[Any, Pass[Any]], Any]
"""A function that runs a pass at a point and returns its results."""
