"""VRBO: SPIDER's variance reduction on both levels."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, State, StepReport
from hyperkron.algorithms.mrbo import two_points
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import Hypergradient
from hyperkron.hypergradient.stochastic_neumann import StochasticNeumann


@dataclass(frozen=True)
class VRBO(Algorithm):
    r"""Directions from a full pass, kept up by differences on single batches.

        every ``period`` steps:  d_θ = ∂_θ g(z) ,  d_λ = h(z)  on all examples
        λ ← λ − γ d_λ
        T times:   d_θ += ∂_θ g_B(z) − ∂_θ g_B(z⁻) ,    d_λ += h_B(z) − h_B(z⁻) ,    θ ← θ − α d_θ

    with z = (λ, θ) and z⁻ the point before the last move. It needs :class:`~hyperkron.algorithms.Examples` on both
    levels.

    Reference: Yang, Ji & Liang, "Provably faster algorithms for bilevel optimization" (NeurIPS 2021).

    Args:
        hypergradient: h; ``None`` for a Neumann series of ten terms at step 0.1.
        inner_steps: T.
        period: steps between full passes.
    """

    hypergradient: Hypergradient | None = None
    inner_steps: Count = 10
    period: Count = 2

    def method(self) -> Hypergradient:
        return self.hypergradient or StochasticNeumann(10, 0.1)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        method = state.hypergradient
        assert method is not None
        inner, outer = batches.finite("VRBO")
        memory = state.trees
        if state.step % self.period == 0:
            memory["d theta"] = derivatives.gradients(state, "inner", inner.full(), hyper=False).theta
            own = derivatives.curvature_batch(state, batches)
            whole = method.compute(state.problem, state.model, state.hyper, inner.full(), outer.full(), **own)
            memory["d hyper"] = whole.grads
        old_theta, old_hyper = state.inner.values(), state.outer.values()
        direction = memory["d hyper"]
        state.outer.step(direction)
        for _ in range(self.inner_steps):
            i, j = inner.index(), outer.index()
            batch, share = inner.batch(i), inner.share(i)
            new, old = derivatives.two_gradients(state, batch, old_theta, old_hyper, hyper=False)
            pair = batches.inners(method.inner_batches), outer.batch(j)
            own = derivatives.curvature_batch(state, batches)
            here, there = two_points(state, *pair, old_theta, old_hyper, **own)
            old_theta, old_hyper = state.inner.values(), state.outer.values()
            memory["d theta"] = trees.add(memory["d theta"], trees.subtract(new.theta, old.theta), alpha=share)
            memory["d hyper"] = trees.add(memory["d hyper"], trees.subtract(here.grads, there.grads))
            state.inner.step(memory["d theta"])
        return state.finish(here.outer_loss, direction, new.value, status=here.status)
