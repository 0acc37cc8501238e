"""DARTS and Meta-Weight-Net: λ first, through one virtual step of θ; then θ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Facts, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import one_step
from hyperkron.solution import Status
from hyperkron.validation import check_nonnegative


@dataclass(frozen=True)
class DARTS(Algorithm):
    r"""λ moves along the exact gradient through one virtual inner step; then θ takes a real one.

        θ' = θ − ξ ∂_θ g(λ, θ) ,    λ ← λ − γ d/dλ f(λ, θ') = λ − γ (∂_λ f(θ') − ξ X(∂_θ f(θ')))
        θ ← θ − α ∂_θ g(λ, θ)       on the same inner batch, with the new λ

    With λ a :class:`~hyperkron.MetaWeightNet` this is Meta-Weight-Net (Shu et al., 2019). ``lookahead=0`` is
    first-order DARTS: λ ← λ − γ ∂_λ f, of use only where f itself depends on λ. The published DARTS code
    approximates X by a finite difference and adds the momentum and weight decay of the inner optimizer to θ'; here
    the derivative is exact and θ' a plain gradient step.

    Reference: Liu, Simonyan & Yang, "DARTS: differentiable architecture search" (ICLR 2019); Shu et al.,
    "Meta-Weight-Net: learning an explicit mapping for sample weighting" (NeurIPS 2019).

    Args:
        lookahead: ξ; ``None`` for the inner learning rate.
    """

    lookahead: float | None = None

    facts: ClassVar[Facts] = Facts(
        name="DARTS (and MWN)",
        reference="Liu et al., ICLR 2019; Shu et al., NeurIPS 2019",
        calls="2 ∂g, 1 ∂f, 1 X",
        memory="nothing",
        accuracy="the optimum where ξ·H = I; elsewhere biased",
        use="architecture search, meta-learned weighting networks",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookahead is not None:
            check_nonnegative("lookahead", self.lookahead, "0 is first-order DARTS")

    def step(self, state: State, batches: BatchSources) -> StepReport:
        """One step on λ, one on θ."""
        batch, outer_batch = batches.inner(), batches.outer()
        ahead = state.inner.lr if self.lookahead is None else self.lookahead
        status: Status | None = None
        if ahead > 0:
            method = one_step(ahead)
            result = method.compute(state.problem, state.model, state.hyper, batch, outer_batch)
            outer_loss, direction, status = result.outer_loss, result.grads, result.status
        else:
            found = derivatives.gradients(state, "outer", outer_batch)
            outer_loss, direction = float(found.value), found.hyper
        state.outer.step(direction)
        inner = derivatives.gradients(state, "inner", batch, live=True, hyper=False)
        state.inner.step(inner.theta)
        return state.finish(outer_loss, direction, inner.value, status=status)
