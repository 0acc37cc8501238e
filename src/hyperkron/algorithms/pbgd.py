"""PBGD: penalty-based bilevel gradient descent on the value gap."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Positive, State, StepReport, Whole
from hyperkron.batches import BatchSources


@dataclass(frozen=True)
class PBGD(Algorithm):
    r"""Gradient descent on f plus γ times the value gap, with γ rising to a final value.

        ŷ ← T steps on g(λ, ·) from the last ŷ
        (θ, λ) ← (θ, λ) − rates · min(1/γ, 1) ∇[ f(λ, θ) + γ (g(λ, θ) − g(λ, ŷ)) ]       (ŷ held fixed)
        γ = final · min(1, t/ramp)

    Reference: Shen & Chen, "On penalty-based bilevel gradient descent method" (ICML 2023).

    Args:
        inner_steps: T.
        penalty: the final γ; the bias is O(1/γ).
        ramp: steps in which γ rises linearly from 0; 0 for γ = penalty from the start.
    """

    inner_steps: Count = 1
    penalty: Positive = 0.2
    ramp: Whole = 30_000

    def prepare(self, state: State) -> None:
        state.twins["y"] = state.inner.twin()

    def step(self, state: State, batches: BatchSources) -> StepReport:
        y = state.twins["y"]
        for _ in range(self.inner_steps):
            y.step(derivatives.gradients(state, "inner", batches.inner(), theta=y.params, hyper=False).theta)
        gamma = self.penalty * (min(1.0, state.step / self.ramp) if self.ramp else 1.0)
        scale = 1.0 if gamma <= 1.0 else 1.0 / gamma
        batch = batches.inner()
        f = derivatives.gradients(state, "outer", batches.outer())
        g, g_y = derivatives.two_gradients(state, batch, y.params)
        gap = trees.subtract(g.hyper, g_y.hyper)
        direction = trees.scale(trees.add(f.hyper, gap, alpha=gamma), scale)
        state.inner.step(trees.scale(trees.add(f.theta, g.theta, alpha=gamma), scale))
        state.outer.step(direction)
        return state.finish(f.value, direction, g.value, stats={"penalty": gamma})
