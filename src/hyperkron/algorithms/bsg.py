"""BSG-1: the Hessian replaced by an outer product of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Positive, State, StepReport
from hyperkron.batches import BatchSources


@dataclass(frozen=True)
class BSG1(Algorithm):
    r"""Second derivatives replaced by rank-one products: H ≈ ∂_θg ∂_θgᵀ and ∂²_λθ g ≈ ∂_λg ∂_θgᵀ.

        θ ← θ − α ∂_θ g      T times
        λ ← λ − γ ( ∂_λ f − ⟨∂_θ f, ∂_θ g⟩ / (‖∂_θ g‖² + ϵ) · ∂_λ g )

    It is exact where g = ½r² with a single residual r ≠ 0. At an inner minimum ∂_θ g = 0 and only ∂_λ f is left: its
    points of rest are those of ∂_λ f = 0, whatever the bilevel optimum is, and what it finds on the way there depends
    on T and on the noise. IGA is the same update.

    Reference: Giovannelli, Kent & Vicente, "Inexact bilevel stochastic gradient methods for constrained and
    unconstrained lower-level problems" (2021).

    Args:
        inner_steps: T.
        epsilon: ϵ.
    """

    inner_steps: Count = 10
    epsilon: Positive = 1e-4

    def step(self, state: State, batches: BatchSources) -> StepReport:
        derivatives.descend(state, batches, self.inner_steps)
        g = derivatives.gradients(state, "inner", batches.inner())
        f = derivatives.gradients(state, "outer", batches.outer())
        ratio = trees.dot(f.theta, g.theta) / (trees.dot(g.theta, g.theta) + self.epsilon)
        direction = trees.add(f.hyper, g.hyper, alpha=-ratio)
        state.outer.step(direction)
        return state.finish(f.value, direction, g.value)
