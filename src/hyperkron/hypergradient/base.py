"""What every hypergradient can do: compute dΦ/dλ, or add it to λ's ``.grad`` like a backward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hyperkron.evaluation.point import trainable
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HypergradientResult
from hyperkron.solvers import Solver


class Hypergradient(ABC):
    """A way to compute dΦ/dλ at the current (λ, θ).

    Its caches (factors, ages, warm starts, random state) live in ``self.state`` and nowhere else;
    ``state_dict`` and ``load_state_dict`` move them to and from nested dictionaries of tensors and numbers.

    Attributes:
        inner_batches: how many inner batches a call uses; if more than one, they are given as ``Batches``.
        measures_curvature: whether A is measured on data; ``compute`` then takes a ``curvature_batch``.
        solver: the solver of the linear system with A; ``None`` for methods without one.
        warm_start: whether each solve begins at the previous solution.
    """

    solver: Solver | None = None
    warm_start: bool = False

    @property
    def inner_batches(self) -> int:
        return 1

    @property
    def measures_curvature(self) -> bool:
        return False

    @abstractmethod
    def fresh(self) -> Hypergradient:
        """A copy of the configuration with an empty state, so that one configuration can be used for many runs."""

    @abstractmethod
    def compute(
        self,
        problem: BilevelProblem,
        model: nn.Module,
        hyper: nn.Module,
        inner_batch: Any,
        outer_batch: Any,
    ) -> HypergradientResult:
        """dΦ/dλ by parameter name of ``hyper``; model, hyper and random states are left as they were."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything the next call depends on, as nested dictionaries of tensors, numbers and strings."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict` as if never interrupted."""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Inside this block, :meth:`state_dict` of the first process includes the parts of the others; all enter it."""
        yield

    def backward(
        self,
        problem: BilevelProblem,
        model: nn.Module,
        hyper: nn.Module,
        inner_batch: Any,
        outer_batch: Any,
        **batches: Any,
    ) -> HypergradientResult:
        """Compute the hypergradient and add it to the ``.grad`` of ``hyper``'s parameters, as autograd would."""
        result = self.compute(problem, model, hyper, inner_batch, outer_batch, **batches)
        with torch.inference_mode(False), torch.no_grad():
            for name, p in trainable(hyper, "hyper").items():
                gradient = result.grads[name]
                p.grad = gradient.detach().clone() if p.grad is None else p.grad + gradient
        return result
