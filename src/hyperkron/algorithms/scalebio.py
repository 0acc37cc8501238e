"""ScaleBiO: a first-order penalty for data weights of large models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Positive, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.validation import check_interval


@dataclass(frozen=True)
class ScaleBiO(Algorithm):
    r"""min over (θ, λ), max over u of f(λ, θ) + α [g(λ, θ) − g(λ, u)], with α raised in rounds.

        u ← u − β ∂_θ g(λ, u) ,      θ ← θ − η (∂_θ f + α ∂_θ g(λ, θ))
        λ ← λ − γ (∂_λ f + α (∂_λ g(λ, θ) − ∂_λ g(λ, u)))
        after every ``round_steps``:  α ← τα, and the step sizes of θ and λ are divided by τ

    All three move once a step, from the same point. With λ a softmax over sources (:class:`~hyperkron.DomainWeights`)
    this is the paper's data reweighting. u has an optimizer of the kind θ has.

    Reference: Pan et al., "ScaleBiO: scalable bilevel optimization for LLM data reweighting" (2024).

    Args:
        penalty: α at the start.
        growth: τ.
        round_steps: steps between raises of α.
        most: α is not raised beyond this; the bias is O(1/α).
    """

    penalty: Positive = 1.0
    growth: float = 1.2
    round_steps: Count = 100
    most: float = 1e3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("growth", self.growth, 1, math.inf, brackets="[)", remedy="1 never raises the penalty")
        check_interval("most", self.most, self.penalty, math.inf, remedy="it is at least penalty")

    def prepare(self, state: State) -> None:
        state.twins["u"] = state.inner.twin()
        state.numbers["penalty"] = self.penalty

    def step(self, state: State, batches: BatchSources) -> StepReport:
        u, alpha = state.twins["u"], state.numbers["penalty"]
        batch = batches.inner()
        f = derivatives.gradients(state, "outer", batches.outer())
        g, g_u = derivatives.two_gradients(state, batch, u.params)
        direction = trees.add(f.hyper, trees.subtract(g.hyper, g_u.hyper), alpha=alpha)
        u.step(g_u.theta)
        state.inner.step(trees.add(f.theta, g.theta, alpha=alpha))
        state.outer.step(direction)
        raised = min(alpha * self.growth, self.most)
        if (state.step + 1) % self.round_steps == 0 and raised > alpha:
            state.numbers["penalty"] = raised
            for level_optimizer in (state.inner, state.outer):
                level_optimizer.rescale(alpha / raised)
        return state.finish(f.value, direction, g.value, stats={"penalty": alpha})
