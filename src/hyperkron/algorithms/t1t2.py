"""T1–T2: one step on θ, one on λ, with the identity in place of the Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import Implicit, identity


@dataclass(frozen=True)
class T1T2(Algorithm):
    r"""One step on θ, then one on λ through that step alone.

        θ ← θ − α ∂_θ g(λ, θ) ,     λ ← λ − γ (∂_λ f − scale · X(∂_θ f))

    which is the implicit formula with A = I/scale. The paper takes scale = α; ``scale=None`` does so too, with the
    learning rate the inner optimizer has at the time.

    Reference: Luketina et al., "Scalable gradient-based tuning of continuous regularization hyperparameters" (2016).

    Args:
        scale: the number that stands for H⁻¹; ``None`` for the inner learning rate.
        cross: how X is computed; ``difference`` is DARTS' [∂_λ g(θ + εv) − ∂_λ g(θ − εv)]/2ε with ε = .01/‖v‖.
    """

    scale: float | None = None
    cross: Literal["reverse", "forward", "difference"] = "reverse"

    def __post_init__(self) -> None:
        super().__post_init__()
        identity(1.0 if self.scale is None else self.scale, cross=self.cross)  # refuses what makes no sense

    def prepare(self, state: State) -> None:
        """What a hypergradient remembers serves all steps, though the scale may change."""
        state.hypergradient = identity(cross=self.cross)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        """One step on each level."""
        assert isinstance(state.hypergradient, Implicit)
        scale = state.inner.lr if self.scale is None else self.scale
        inner_loss = derivatives.descend(state, batches, 1)
        method = identity(scale, cross=self.cross)
        method.state = state.hypergradient.state
        result = method.compute(state.problem, state.model, state.hyper, batches.inner(), batches.outer())
        return state.follow(result, inner_loss)
