"""DARTS and Meta-Weight-Net: λ first, through one virtual step of θ; then θ."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Nonnegative, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import one_step


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

    lookahead: Nonnegative | None = None

    def step(self, state: State, batches: BatchSources) -> StepReport:
        batch, outer_batch = batches.inner(), batches.outer()
        ahead = state.inner.lr if self.lookahead is None else self.lookahead
        if ahead > 0:
            result = one_step(ahead).compute(state.problem, state.model, state.hyper, batch, outer_batch)
            outer_loss, direction, status = result.outer_loss, result.grads, result.status
        else:
            found = derivatives.gradients(state, "outer", outer_batch)
            outer_loss, direction, status = float(found.value), found.hyper, None
        state.outer.step(direction)
        inner = derivatives.gradients(state, "inner", batch, live=True, hyper=False)
        state.inner.step(inner.theta)
        return state.finish(outer_loss, direction, inner.value, status=status)
