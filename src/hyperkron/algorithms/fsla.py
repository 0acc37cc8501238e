"""FSLA: a fully single-loop algorithm with momentum on λ."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import State, StepReport
from hyperkron.algorithms.soba import SOBA
from hyperkron.batches import BatchSources
from hyperkron.optimizers import Rate, as_rate


@dataclass(frozen=True)
class FSLA(SOBA):
    r"""One step on θ, one on v, one on λ along self-correcting momentum.

        θ ← θ − α_t ∂_θ g ,      v ← v − ρ_t (Hv − ∂_θ f)        at the new θ
        d ← h(z) + (1 − η_t)(d − h(z⁻)) ,      h = ∂_λ f − X(v)
        λ ← λ − γ_t d

    where z = (λ, θ, v) is the new point and z⁻ that of the step before, both on the same batches. All rates
    decay as t^{−1/2}.

    Reference: Li, Gu & Huang, "A fully single loop algorithm for bilevel optimization without Hessian inverse"
    (AAAI 2022).

    Args:
        momentum: η_t, 1 turns momentum off.
    """

    momentum: Rate | float = field(default=Rate(0.5, 0.5))
    inner_rate: Rate | float = field(default=Rate(0.1, 0.5), kw_only=True)
    outer_rate: Rate | float = field(default=Rate(0.1, 0.5), kw_only=True)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        memory = state.trees
        old_theta, old_v = state.inner.values(), memory["v"]
        inner = derivatives.gradients(state, "inner", batches.inner(), live=True, hyper=False)
        state.inner.step(inner.theta)
        outer_batch, batch, pair = batches.outer(), batches.inner(), (batches.inner(), batches.outer())
        with derivatives.at_point(state) as here:
            _, b, _ = here.outer(outer_batch)
            residual = trees.subtract(here.product(batch, old_v, self.curvature), b)
            memory["v"] = trees.add(old_v, residual, alpha=-as_rate(self._linear_rate())(state.step))
            outer_loss, h = here.hypergradient(*pair, memory["v"])
        direction = h
        if "d" in memory:
            keep = 1.0 - min(1.0, as_rate(self.momentum)(state.step))
            with derivatives.elsewhere(state, old_theta, memory["old hyper"]), derivatives.at_point(state) as there:
                _, h_old = there.hypergradient(*pair, old_v)
            direction = trees.add(h, trees.subtract(memory["d"], h_old), alpha=keep)
        memory["d"], memory["old hyper"] = direction, state.outer.values()
        state.outer.step(direction)
        return state.finish(outer_loss, direction, inner.value)
