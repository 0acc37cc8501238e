"""TGDA: total gradient descent ascent, the leader first."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import Hypergradient, cg
from hyperkron.optimizers import Rate


@dataclass(frozen=True)
class TGDA(Algorithm):
    r"""The leader λ moves along the total derivative of its loss, then the follower θ takes T steps.

        λ ← λ − η (∂_λ L − X(H⁻¹ ∂_θ L)) ;       θ ← θ − α ∂_θ g(λ, θ)    T times

    For data poisoning L = −CE on validation data, λ makes the poisoned examples and θ is trained on them too. It is
    AID with the leader moving first; the linear system is solved by CG (sixteen steps in the paper).

    Reference: Lu, Kamath & Yu, "Indiscriminate data poisoning attacks on neural networks" (TMLR 2022).

    Args:
        hypergradient: the total derivative; any hypergradient.
        inner_steps: T.
    """

    hypergradient: Hypergradient = field(default_factory=lambda: cg(16, 0.0))
    inner_steps: Count = 20
    outer_rate: Rate | float = field(default=0.01, kw_only=True)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        return derivatives.leader_first(state, batches, self.inner_steps)
