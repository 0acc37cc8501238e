"""SAMA: the identity in place of the Hessian, adapted to the inner optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Positive, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import sama


@dataclass(frozen=True)
class SAMA(Algorithm):
    r"""T steps on θ, then one on λ with v = lr·D⊙b and a finite-difference cross term.

        v = lr·D ⊙ ∂_θ f ,     D = [(1−β₁)β₂ s⁻ − β₁(1−β₂) g m⁻] / (√s + ϵ)³ for Adam, 1 for SGD
        X(v) ≈ [∂_λ g(θ + εv) − ∂_λ g(θ − εv)] / 2ε ,     ε = alpha/‖v‖

    Where λ only weights examples, it is their losses that are differenced (:func:`hyperkron.sama`).
    D is the Jacobian of the inner optimizer's step, read from its state after the last inner step. With ``nudge`` θ
    is left at θ − εv after the difference, as the reference implementation does, which lets the outer loss reach θ.

    Reference: Choe et al., "Making scalable meta learning practical" (NeurIPS 2023).

    In the reference code alpha defaults to 1 and the bias correction of Adam is left out; the paper uses .1 and .3.

    Args:
        inner_steps: T.
        alpha: radius of the finite difference.
        nudge: leave θ at θ − εv (the reference code's ``multitask``).
    """

    inner_steps: Count = 10
    alpha: Positive = 0.1
    nudge: bool = False

    def prepare(self, state: State) -> None:
        state.hypergradient = sama(state.inner.optimizer, alpha=self.alpha)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        inner_loss = derivatives.descend(state, batches, self.inner_steps)
        result = derivatives.hypergradient(state, batches)
        if self.nudge:
            assert result.solution is not None
            v = result.solution.value
            length = float(trees.norm(v))
            if length > 0:
                state.inner.place(trees.add(state.inner.values(), v, alpha=-self.alpha / length))
        return state.follow(result, inner_loss)
