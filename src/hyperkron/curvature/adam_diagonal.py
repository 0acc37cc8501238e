"""A = the diagonal of an Adam step, read from the optimizer at no cost."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import Curvature, CurvatureState, DiagonalOperator, Invertible
from hyperkron.evaluation.point import Point
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.trees import HALF_TYPES
from hyperkron.validation import first_of

OTHER_STEPS = (torch.optim.NAdam, torch.optim.RAdam)
"""Optimizers with Adam's moments that take another step."""


@dataclass(frozen=True)
class AdamDiagonal(Curvature):
    """The Jacobian of one Adam step in the gradient, as SAMA uses it: A⁻¹b = lr·D⊙b.

    With g the last gradient (with ``weight_decay·θ`` where Adam adds that), m and s the moments after it and m⁻, s⁻
    those before it,

        D = [(1−β₁) β₂ s⁻ − β₁ (1−β₂) g m⁻] / (√s + ϵ)³ ,

    the derivative of m/(√s+ϵ) in g, leaving out ϵ against √s in the numerator and the bias correction, as published.
    With ``amsgrad`` D = (1−β₁)/(√ŝ+ϵ) where the largest s so far, ŝ, is not the last one.
    For optimizers without second moments D = 1. Before the first step there are no moments and D = 1 as well.

    Args:
        optimizer: the optimizer of the inner level, after its last step and before its gradients are cleared.

    Reference: Choe et al., "Making scalable meta learning practical" (NeurIPS 2023).
    """

    optimizer: torch.optim.Optimizer

    uses_data: ClassVar[bool] = False
    invertible: ClassVar[bool] = True
    records_inverse: ClassVar[bool] = True

    def operator(self, point: Point, state: CurvatureState) -> Invertible:
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in point.params.items() if id(p) not in groups]
        if missing:
            raise HyperkronError(
                f"optimizer does not hold the model's parameter {first_of(missing)}; "
                "pass the optimizer that trains this model, or freeze that parameter."
            )
        if any(group.get("maximize") for group in groups.values()):
            raise HyperkronError(
                "optimizer has maximize=True, but J_in is minimised; return the negative of the loss from inner, with "
                "maximize=False."
            )
        if any("lr" not in group for group in groups.values()):
            raise HyperkronError(
                f"optimizer={type(self.optimizer).__name__} has no learning rate 'lr' in its parameter groups, which "
                "SAMA needs; use one that has, or a hypergradient that asks for no optimizer, such as hk.kfac()."
            )
        inverse: dict[str, Tensor | float] = {}
        adaptive: dict[int, list[str]] = {}
        for name, p in point.params.items():
            group = groups[id(p)]
            inverse[name] = float(group["lr"])
            if p.grad is not None and {"exp_avg", "exp_avg_sq"} <= self.optimizer.state.get(p, {}).keys():
                adaptive.setdefault(id(group), []).append(name)
        moments = any("exp_avg_sq" in self.optimizer.state.get(p, {}) for p in point.params.values())
        gradients = {n: _wide(p.grad) for n, p in point.params.items() if p.grad is not None}
        if moments and float(trees.norm(gradients)) == 0:
            warn_once(
                "sama-gradients",
                "optimizer has Adam's moments but the model's gradients are cleared, so D is not that of its last "
                "step; compute the hypergradient after optimizer.step() and before zero_grad().",
            )
        if adaptive and isinstance(self.optimizer, OTHER_STEPS):
            name = type(self.optimizer).__name__
            warn_once(
                f"sama-{name}",
                f"optimizer is {name}, but D is that of Adam, whose step is another one; train with Adam or AdamW, or "
                "use a hypergradient that asks for no optimizer, such as hk.kfac().",
            )
        for names in adaptive.values():
            members = [point.params[name] for name in names]
            memory = [self.optimizer.state[p] for p in members]
            inverse.update(zip(names, _adam_jacobian(members, memory, groups[id(members[0])]), strict=True))
        return DiagonalOperator(inverse)

    def constants(self, state: CurvatureState) -> Hashable | None:
        """The learning rates; ``None`` with moments: D then depends on gradients, whose memory changes every step."""
        if any("exp_avg_sq" in memory for memory in self.optimizer.state.values()):
            return None
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)


def _wide(x: Tensor) -> Tensor:
    """``x``, dense, in at least float32: in half precision the difference in D would be mostly rounding."""
    x = x.to_dense() if x.is_sparse else x
    return x.float() if x.dtype in HALF_TYPES else x


def _adam_jacobian(members: list[Tensor], memory: list[dict[str, Tensor]], group: dict[str, Any]) -> list[Tensor]:
    """lr·D for the parameters of one group, in a few launches.

    After inserting β₁m⁻ = m − (1−β₁)g and β₂s⁻ = s − (1−β₂)g², the g² terms of D's numerator cancel, and
    (1−β₁)s − (1−β₂)g·m is left.
    """
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    gradients = [_wide(p.grad) for p in members if p.grad is not None]
    if group.get("weight_decay") and group.get("decoupled_weight_decay") is False:  # it is in the moments, too
        now = [_wide(p.detach()) for p in members]  # one step after θ of the moments
        gradients = list(torch._foreach_add(gradients, now, alpha=float(group["weight_decay"])))
    first, second = [_wide(x["exp_avg"]) for x in memory], [_wide(x["exp_avg_sq"]) for x in memory]
    top = torch._foreach_mul(second, rate * (1 - beta1))
    torch._foreach_addcmul_(top, gradients, first, value=-rate * (1 - beta2))
    bottom = torch._foreach_sqrt(second)
    torch._foreach_add_(bottom, group["eps"])
    torch._foreach_pow_(bottom, 3.0)
    torch._foreach_div_(top, bottom)
    if not group.get("amsgrad"):
        return list(top)
    largest = [_wide(x["max_exp_avg_sq"]) for x in memory]
    held = (rate * (1 - beta1) / (x.sqrt() + group["eps"]) for x in largest)  # ŝ does not depend on g there
    return [torch.where(s < x, h, d) for s, x, h, d in zip(second, largest, held, top, strict=True)]
