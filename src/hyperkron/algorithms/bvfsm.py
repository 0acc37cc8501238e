"""BVFSM: the value function turned into a barrier, minimised in sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Nonnegative, Positive, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.optimizers import Rate, as_rate


@dataclass(frozen=True)
class BVFSM(Algorithm):
    r"""A regularised value function, then θ and λ on f with a barrier against exceeding it.

        r_t = 1 / log(1.1 (t + 1))
        T times:   z ↓ g(λ, z) + .01 r_t‖z‖² ,      g_z(λ) its value
        T times:   θ ↓ f + .01 r_t‖θ‖² − r_t log(sg[g(θ)] + 1e-4 + g_z − g(θ))
        λ ↓ the same objective (∂_λ g_z at fixed z)

    sg[·] holds its argument constant: the logarithm's argument is 1e-4 + g_z and never negative, where the paper's
    barrier g_z − g(θ) would be undefined. So the step is a penalty method of weight r_t/(1e-4 + g_z), close to exact
    only where the inner problem interpolates (g_z → 0); elsewhere the weight vanishes with r_t, and the longer the
    run the less the inner problem counts. At t = 0, r = 10.5.

    Reference: Liu et al., "A value-function-based interior-point method for non-convex bi-level optimization" (ICML
    2021), as published in code.

    Args:
        inner_steps: T, for z and for θ.
        value_rate: the step size of z, where no inner optimizer is given (else z has one of its own kind); ``None``
            for that of θ.
        weight: the factor .01 of the regularisers.
        margin: the 1e-4 in the logarithm.
    """

    inner_steps: Count = 10
    value_rate: Rate | float | None = None
    weight: Nonnegative = 0.01
    margin: Positive = 1e-4

    def prepare(self, state: State) -> None:
        state.twins["z"] = state.inner.twin()

    def step(self, state: State, batches: BatchSources) -> StepReport:
        r = 1.0 / math.log(1.1 * (state.step + 1))
        z, pull = state.twins["z"], 2 * self.weight * r
        if state.inner.rate is not None and self.value_rate is not None:
            z.set_lr(as_rate(self.value_rate)(state.step))
        for _ in range(self.inner_steps):
            g_z = derivatives.gradients(state, "inner", batches.inner(), theta=z.params, hyper=False)
            z.step(trees.add(g_z.theta, z.values(), alpha=pull))
        batch, outer_batch = batches.inner(), batches.outer()
        g_z = derivatives.gradients(state, "inner", batch, theta=z.params, hyper=False)
        regular = self.weight * r * trees.dot(z.values(), z.values())
        barrier = r / (self.margin + g_z.value + regular).to(torch.float64)
        penalty = float(barrier.clamp(min=0.0))
        for _ in range(self.inner_steps):
            f = derivatives.gradients(state, "outer", outer_batch, hyper=False)
            g = derivatives.gradients(state, "inner", batch, live=True, hyper=False)
            theta = trees.add(f.theta, state.inner.values(), alpha=pull)
            state.inner.step(trees.add(theta, g.theta, alpha=penalty))
        f = derivatives.gradients(state, "outer", outer_batch)
        g, g_z = derivatives.two_gradients(state, batch, z.params, live=False)
        direction = trees.add(f.hyper, trees.subtract(g.hyper, g_z.hyper), alpha=penalty)
        state.outer.step(direction)
        return state.finish(f.value, direction, g.value, stats={"multiplier": penalty})
