"""TGDA: total gradient descent ascent, the leader first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Facts, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import Hypergradient, cg
from hyperkron.optimizers import Rate
from hyperkron.validation import check_whole


def _cg() -> Hypergradient:
    return cg(16, 0.0)


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

    hypergradient: Hypergradient = field(default_factory=_cg)
    inner_steps: int = 20
    outer_rate: Rate | float = field(default=0.01, kw_only=True)

    facts: ClassVar[Facts] = Facts(
        name="TGDA",
        reference="Lu, Kamath & Yu, TMLR 2022",
        calls="one hypergradient (1 ∂f, the solve, 1 X), inner_steps ∂g",
        memory="what the hypergradient keeps",
        accuracy="the optimum, up to the error of the solve",
        use="attacker–learner games: poisoning, unlearnable examples",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("inner_steps", self.inner_steps)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        """One leader step, T follower steps."""
        result = derivatives.hypergradient(state, batches)
        state.outer.step(result.grads)
        inner_loss = derivatives.descend(state, batches, self.inner_steps)
        return state.finish(result.outer_loss, result.grads, inner_loss, status=result.status, stats=result.stats)
