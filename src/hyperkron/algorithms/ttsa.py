"""TTSA and BSA: stochastic approximation on two timescales with the randomised inverse HIA."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Positive, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import Hypergradient
from hyperkron.hypergradient.stochastic_neumann import hia
from hyperkron.optimizers import Rate


@dataclass(frozen=True)
class TTSA(Algorithm):
    r"""One step on θ at a fast rate, one on λ at a slow one.

        θ ← θ − α_t ∂_θ g_B(λ, θ) ,   α_t ∝ t^{−2/5} ;      λ ← λ − γ_t (∂_λ f − X(v)) ,   γ_t ∝ t^{−3/5}
        v = Kη Π_{k≤p} (I − ηH_k) ∂_θ f ,   p uniform in {0, …, K−1}                        (HIA)

    Reference: Hong et al., "A two-timescale stochastic algorithm framework for bilevel optimization" (SIAM J. Optim.
    2023). For convex problems the paper has other exponents; give them as ``inner_rate`` and ``outer_rate``.

    Args:
        terms: K.
        step_size: η, below 2/λmax of every batch.
    """

    terms: int = 10
    step_size: Positive = 0.1
    inner_rate: Rate | float = field(default=Rate(0.1, 0.4), kw_only=True)
    outer_rate: Rate | float = field(default=Rate(0.1, 0.6), kw_only=True)

    def method(self) -> Hypergradient:
        return hia(self.terms, self.step_size, seed=self.seed)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        return derivatives.alternate(state, batches, 1)


@dataclass(frozen=True)
class BSA(TTSA):
    r"""Bilevel stochastic approximation: an outer step by HIA, then T steps on θ; both rates ∝ t^{−1/2}.

    Reference: Ghadimi & Wang, "Approximation methods for bilevel programming" (2018).

    Args:
        inner_steps: T.
    """

    inner_steps: Count = 10
    inner_rate: Rate | float = field(default=Rate(0.1, 0.5), kw_only=True)
    outer_rate: Rate | float = field(default=Rate(0.1, 0.5), kw_only=True)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        return derivatives.leader_first(state, batches, self.inner_steps)
