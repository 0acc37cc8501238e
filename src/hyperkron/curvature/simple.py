"""A = I and the diagonal of an Adam step: curvature that costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hyperkron.curvature.base import Curvature, CurvatureState, Invertible
from hyperkron.point import Point
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree


@dataclass
class DiagonalOperator(Invertible):
    """A = diag(1/inverse): ``solve`` multiplies by ``inverse``, ``matvec`` divides."""

    inverse: dict[str, Tensor | float]
    products: int = 0

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        return {name: x / self.inverse[name] for name, x in v.items()}

    def solve(self, b: Tree) -> Tree:
        return {name: x * self.inverse[name] for name, x in b.items()}


@dataclass(frozen=True)
class Identity(Curvature):
    """A = I / scale, so that A⁻¹b = scale·b: no curvature at all.

    This is the choice of DARTS (Liu et al., 2019) and of one-step unrolling with learning rate ``scale``.

    Args:
        scale: the number that stands for A⁻¹.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise HyperkronError(f"scale={self.scale!r} must be positive; 1.0 gives v = b.")

    def operator(self, point: Point, state: CurvatureState) -> Invertible:
        """The identity, scaled."""
        return DiagonalOperator(dict.fromkeys(point.params, self.scale))


@dataclass(frozen=True)
class AdamDiagonal(Curvature):
    """The Jacobian of one Adam step in the gradient, as SAMA uses it: A⁻¹b = lr·D⊙b.

    With g the last gradient, m and s the moments after it and m⁻, s⁻ those before it,

        D = [(1−β₁) β₂ s⁻ − β₁ (1−β₂) g m⁻] / (√s + ϵ)³ ,

    the derivative of m/(√s+ϵ) in g, leaving out ϵ against √s in the numerator and the bias correction, as published.
    For optimizers without second moments D = 1. Before the first step there are no moments and D = 1 as well.

    Args:
        optimizer: the optimizer of the inner level, after its last step and before its gradients are cleared.

    Reference: Choe et al., "Making scalable meta learning practical" (NeurIPS 2023).
    """

    optimizer: torch.optim.Optimizer

    def operator(self, point: Point, state: CurvatureState) -> Invertible:
        """The diagonal read from the optimizer's state."""
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in point.params.items() if id(p) not in groups]
        if missing:
            raise HyperkronError(
                f"optimizer does not hold the model's parameter {missing[0]} (and {len(missing) - 1} others); "
                "pass the optimizer that trains this model, or freeze that parameter."
            )
        inverse: dict[str, Tensor | float] = {}
        for name, p in point.params.items():
            group = groups[id(p)]
            inverse[name] = group["lr"] * _adam_jacobian(p, group, self.optimizer.state.get(p, {}))
        return DiagonalOperator(inverse)


def _adam_jacobian(p: Tensor, group: dict[str, object], memory: dict[str, Tensor]) -> Tensor | float:
    m, s, g = memory.get("exp_avg"), memory.get("exp_avg_sq"), p.grad
    if m is None or s is None or g is None:
        return 1.0
    beta1, beta2 = group["betas"]  # type: ignore[misc]
    eps: float = group["eps"]  # type: ignore[assignment]
    previous_m = (m - (1 - beta1) * g) / beta1  # type: ignore[has-type]
    previous_s = (s - (1 - beta2) * g.square()) / beta2  # type: ignore[has-type]
    top = (1 - beta1) * beta2 * previous_s - beta1 * (1 - beta2) * g * previous_m  # type: ignore[has-type]
    return top / (s.sqrt() + eps).pow(3)
