"""MEHA: Moreau envelope based, Hessian-free, single-loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Nonnegative, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.optimizers import Rate, as_rate
from hyperkron.validation import check_positive


@dataclass(frozen=True)
class MEHA(Algorithm):
    r"""The inner problem replaced by its Moreau envelope, followed by one proximal step at a time.

        θ̂ ← θ̂ − η (∂_θ g(λ, θ̂) + γ(θ̂ − θ))
        θ ← θ − α (∂_θ f/c_t + ∂_θ g(λ, θ) − γ(θ − θ̂))
        λ ← λ − β (∂_λ f/c_t + ∂_λ g(λ, θ) − ∂_λ g(λ, θ̂)) ,      c_t = c (t + 1)^{1/4}, at the new θ

    Reference: Liu et al., "Moreau envelope for nonconvex bi-level optimization: a single-loop and Hessian-free solution
    strategy" (ICML 2024).

    Args:
        proximal: γ.
        multiplier: c_t; a negative exponent of the :class:`Rate` makes it grow.
        hat_rate: η, the step size of θ̂.
    """

    proximal: Nonnegative = 0.01
    multiplier: Rate | float = field(default=Rate(0.2, -0.25))
    hat_rate: Rate | float = 1e-3
    inner_rate: Rate | float = field(default=1e-3, kw_only=True)
    outer_rate: Rate | float = field(default=1e-3, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("multiplier", as_rate(self.multiplier).scale)

    def prepare(self, state: State) -> None:
        state.trees["hat"] = state.inner.values()

    def step(self, state: State, batches: BatchSources) -> StepReport:
        hat, theta = state.trees["hat"], state.inner.values()
        c = as_rate(self.multiplier)(state.step)
        batch, outer_batch = batches.inner(), batches.outer()
        g_hat = derivatives.gradients(state, "inner", batch, theta=hat, hyper=False)
        pull = trees.subtract(hat, theta)
        along = trees.add(g_hat.theta, pull, alpha=self.proximal)
        hat = state.trees["hat"] = trees.add(hat, along, alpha=-as_rate(self.hat_rate)(state.step))
        f = derivatives.gradients(state, "outer", outer_batch, hyper=False)
        g = derivatives.gradients(state, "inner", batch, live=True, hyper=False)
        push = trees.subtract(theta, hat)
        descent = trees.add(g.theta, f.theta, alpha=1.0 / c)
        state.inner.step(trees.add(descent, push, alpha=-self.proximal))
        f = derivatives.gradients(state, "outer", outer_batch)
        g, g_hat = derivatives.two_gradients(state, batch, hat, live=False)
        direction = trees.add(trees.subtract(g.hyper, g_hat.hyper), f.hyper, alpha=1.0 / c)
        state.outer.step(direction)
        return state.finish(f.value, direction, g.value, stats={"multiplier": c})
