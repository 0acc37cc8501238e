"""BOME: a first-order method with a dynamic barrier on the value gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Positive, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.optimizers import Rate, as_rate
from hyperkron.validation import check_one_of


@dataclass(frozen=True)
class BOME(Algorithm):
    r"""θ and λ move together down f, bent so that the value gap q shrinks at a given rate.

        θ̂ = θ after T steps on g ,      q(λ, θ) = g(λ, θ) − g(λ, θ̂)      (θ̂ held fixed)
        µ = max(φ − ⟨∇f, ∇q⟩, 0) / (‖∇q‖² + ϵ) ,      φ = η‖∇q‖²  or  η·q
        (θ, λ) ← (θ, λ) − rates · (∇f + µ∇q)

    with ∇ over (θ, λ) jointly and all on one pair of batches. The published code and BOAT take φ = η·q
    (``barrier="value"``), the paper's analysis and benchmark_bilevel φ = η‖∇q‖² (``"gradient"``, the default).
    It rests where ∇f + µ∇q = 0 and µϵ = φ: µ is bounded by about (‖∇f‖²η/ϵ)^{1/3}, some hundreds at ϵ = 1e-8, and
    constant rates well above 1/(µL) end in a cycle around that point.

    Reference: Liu et al., "BOME! Bilevel optimization made easy: a simple first-order approach" (NeurIPS 2022).

    Args:
        inner_steps: T.
        eta: η in (0, 1).
        barrier: which φ.
        hat_rate: the step size of θ̂ (the paper's α, where ``inner_rate`` is its ξ), where no inner optimizer is given
            (else θ̂ has one of its own kind); ``None`` for that of θ.
        epsilon: ϵ, which bounds µ.
    """

    inner_steps: Count = 10
    eta: Positive = 0.5
    barrier: Literal["gradient", "value"] = "gradient"
    hat_rate: Rate | float | None = None
    epsilon: Positive = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("barrier", self.barrier, ("gradient", "value"))

    def step(self, state: State, batches: BatchSources) -> StepReport:
        batch, outer_batch = batches.inner(), batches.outer()
        hat = state.inner.twin()
        if state.inner.rate is not None and self.hat_rate is not None:
            hat.set_lr(as_rate(self.hat_rate)(state.step))
        for _ in range(self.inner_steps):
            hat.step(derivatives.gradients(state, "inner", batch, theta=hat.params, hyper=False).theta)
        f = derivatives.gradients(state, "outer", outer_batch)
        g, g_hat = derivatives.two_gradients(state, batch, hat.params)
        q_hyper = trees.subtract(g.hyper, g_hat.hyper)
        square = trees.dot(g.theta, g.theta) + trees.dot(q_hyper, q_hyper)
        inner_product = trees.dot(f.theta, g.theta) + trees.dot(f.hyper, q_hyper)
        gap = g.value - g_hat.value
        phi = self.eta * (square if self.barrier == "gradient" else gap)
        mu = (phi - inner_product).clamp(min=0.0) / (square + self.epsilon)
        direction = trees.add(f.hyper, q_hyper, alpha=mu)
        state.inner.step(trees.add(f.theta, g.theta, alpha=mu))
        state.outer.step(direction)
        return state.finish(f.value, direction, g.value, stats={"gap": float(gap), "multiplier": float(mu)})
