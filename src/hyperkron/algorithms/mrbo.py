"""MRBO and SUSTAIN: recursive momentum on both levels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import Hypergradient
from hyperkron.hypergradient.stochastic_neumann import StochasticNeumann
from hyperkron.optimizers import Rate, as_rate
from hyperkron.solution import HypergradientResult


def two_points(
    state: State, inner_batch: Any, outer_batch: Any, theta: trees.Tree, hyper: trees.Tree, **own: Any
) -> tuple[HypergradientResult, HypergradientResult]:
    """The state's hypergradient here and at (``theta``, ``hyper``), on the same batches with the same randomness.

    Both start from the same memory (Monte-Carlo seeds, factors, warm start), and only what was found here is kept. The
    other point comes first, because a recorded step (``graph=True``) overwrites the inverses that both start from.
    """
    method = state.hypergradient
    assert method is not None
    other = method.fresh()
    other.load_state_dict(method.state_dict())
    with derivatives.elsewhere(state, theta, hyper):
        there = other.compute(state.problem, state.model, state.hyper, inner_batch, outer_batch, **own)
    here = method.compute(state.problem, state.model, state.hyper, inner_batch, outer_batch, **own)
    return here, there


@dataclass(frozen=True)
class MRBO(Algorithm):
    r"""Both levels follow momentum that corrects itself at the previous point (STORM).

        d_θ ← ∂_θ g(z) + (1 − η_t)(d_θ − ∂_θ g(z⁻)) ,      d_λ ← h(z) + (1 − η_t)(d_λ − h(z⁻))
        θ ← θ − α_t d_θ ,      λ ← λ − γ_t d_λ

    where z = (λ, θ), z⁻ is the point before, both evaluated on the same batches and random numbers, and h is the
    hypergradient (by default a Neumann series with a fresh batch for each product). At the first step d = the plain
    gradients.
    ``MRBO(hypergradient=hk.kfac())`` is MRBO-KFAC; the same Monte-Carlo draw serves both points. BOME's comparison
    code stores the old point as an alias of the new one, which turns this into a plain moving average.

    Reference: Yang, Ji & Liang, "Provably faster algorithms for bilevel optimization" (NeurIPS 2021).

    Args:
        hypergradient: h; ``None`` for the Neumann series of ten terms at step 0.1.
        momentum: η_t, 1 turns momentum off.
    """

    hypergradient: Hypergradient | None = None
    momentum: Rate | float = field(default=Rate(0.5, 2 / 3))
    inner_rate: Rate | float = field(default=Rate(0.1, 1 / 3), kw_only=True)
    outer_rate: Rate | float = field(default=Rate(0.1, 1 / 3), kw_only=True)

    def method(self) -> Hypergradient:
        return self.hypergradient or StochasticNeumann(10, 0.1)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        method = state.hypergradient
        assert method is not None
        theta_batch = batches.inner()
        pair = batches.inners(method.inner_batches), batches.outer()
        own = derivatives.curvature_batch(state, batches)
        memory = state.trees
        if memory:
            keep, before = 1.0 - min(1.0, as_rate(self.momentum)(state.step)), (memory["theta"], memory["lambda"])
            inner, old = derivatives.two_gradients(state, theta_batch, *before, hyper=False)
            result, there = two_points(state, *pair, *before, **own)
            d_theta = trees.add(inner.theta, trees.subtract(memory["d_theta"], old.theta), alpha=keep)
            d_lambda = trees.add(result.grads, trees.subtract(memory["d_lambda"], there.grads), alpha=keep)
        else:
            inner = derivatives.gradients(state, "inner", theta_batch, live=True, hyper=False)
            result = method.compute(state.problem, state.model, state.hyper, *pair, **own)
            d_theta, d_lambda = inner.theta, result.grads
        state.trees = {
            "theta": state.inner.values(),
            "lambda": state.outer.values(),
            "d_theta": d_theta,
            "d_lambda": d_lambda,
        }
        state.inner.step(d_theta)
        state.outer.step(d_lambda)
        return state.finish(result.outer_loss, d_lambda, inner.value, status=result.status, stats=result.stats)
