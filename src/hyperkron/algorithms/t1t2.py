"""T1–T2: one step on θ, one on λ, with the identity in place of the Hessian."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.cross import Mode
from hyperkron.curvature import Identity
from hyperkron.hypergradient import Implicit, identity
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class T1T2(Algorithm):
    r"""One step on θ, then one on λ through that step alone.

        θ ← θ − α ∂_θ g(λ, θ) ,     λ ← λ − γ (∂_λ f − scale · X(∂_θ f))

    which is the implicit formula with A = I/scale. The paper takes scale = α; ``scale=None`` does so too, with the
    learning rate the inner optimizer has at the time.

    Reference: Luketina et al., "Scalable gradient-based tuning of continuous regularization hyperparameters" (2016).

    Args:
        scale: the number that stands for H⁻¹; ``None`` for the inner learning rate.
        cross: how X is computed; ``difference`` is DARTS' [∂_λ g(θ + εv) − ∂_λ g(θ − εv)]/2ε with ε = .01/‖v‖;
            ``auto`` chooses.
        graph: on a GPU, replay the hypergradient as a CUDA graph; see :class:`hyperkron.Implicit`.
    """

    scale: float | None = None
    cross: Mode = "reverse"
    graph: bool = False

    def method(self) -> Implicit:
        return self._scaled(1.0 if self.scale is None else self.scale)

    def _scaled(self, scale: float) -> Implicit:
        return identity(scale, cross=self.cross, graph=self.graph)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        scale, method = state.inner.lr if self.scale is None else self.scale, state.hypergradient
        assert isinstance(method, Implicit)
        if scale == 0:
            raise HyperkronError(
                f"the inner learning rate, which stands for H⁻¹ in T1T2, is 0 at step {state.step}; pass scale=, or "
                "begin the schedule above 0."
            )
        if method.curvature != Identity(scale):
            state.hypergradient = self._scaled(scale)
            state.hypergradient.state = method.state
        return derivatives.alternate(state, batches, 1)
