"""F2SA: a fully first-order stochastic method by a growing penalty."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Positive, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.optimizers import Rate, as_rate


@dataclass(frozen=True)
class F2SA(Algorithm):
    r"""Two copies of θ, one pulled by f with a growing multiplier ℓ on g; their difference is the hypergradient.

        T times:   y ← y − α_t (∂_θ f(λ, y) + ℓ ∂_θ g(λ, y)) ,      z ← z − β_t ∂_θ g(λ, z)
        λ ← λ − γ_t ( ∂_λ f(λ, y) + ℓ (∂_λ g(λ, y) − ∂_λ g(λ, z)) ) ;      ℓ ← ℓ + δ_t

    The model holds y, which tends to θ*(λ) as ℓ grows; z lives in the state. The bias of the direction is O(1/ℓ).
    Decay exponents are those of the benchmark_bilevel suite, with which ℓ grows as t^{6/7}. In the paper it grows as
    t^{1/7}: ``growth=Rate(0.1, 6 / 7)``, which did better on two of three problems (docs/benchmarks.md); on one
    of them the default ended worse than it began.

    Reference: Kwon et al., "A fully first-order method for stochastic bilevel optimization" (ICML 2023).

    Args:
        inner_steps: T.
        multiplier: ℓ at the start.
        growth: δ_t.
        second_rate: β_t, the step size of z, where no inner optimizer is given (else z has one of its own kind).
    """

    inner_steps: Count = 10
    multiplier: Positive = 1.0
    growth: Rate | float = field(default=Rate(0.1, 1 / 7))
    second_rate: Rate | float = field(default=Rate(0.01, 4 / 7))
    inner_rate: Rate | float = field(default=Rate(0.01, 5 / 7), kw_only=True)
    outer_rate: Rate | float = field(default=Rate(0.01, 4 / 7), kw_only=True)

    def prepare(self, state: State) -> None:
        state.twins["z"] = state.inner.twin()
        state.numbers["multiplier"] = self.multiplier

    def step(self, state: State, batches: BatchSources) -> StepReport:
        z, ell = state.twins["z"], state.numbers["multiplier"]
        if state.inner.rate is not None:
            z.set_lr(as_rate(self.second_rate)(state.step))
        for _ in range(self.inner_steps):
            batch = batches.inner()
            f = derivatives.gradients(state, "outer", batches.outer(), hyper=False)
            g, g_z = derivatives.two_gradients(state, batch, z.params, hyper=False)
            z.step(g_z.theta)  # first, so that both take this step with the same settings
            state.inner.step(trees.add(f.theta, g.theta, alpha=ell))
        batch = batches.inner()
        f = derivatives.gradients(state, "outer", batches.outer())
        g, g_z = derivatives.two_gradients(state, batch, z.params, live=False)
        direction = trees.add(f.hyper, trees.subtract(g.hyper, g_z.hyper), alpha=ell)
        state.outer.step(direction)
        state.numbers["multiplier"] = ell + as_rate(self.growth)(state.step)
        return state.finish(f.value, direction, g_z.value, stats={"multiplier": ell})
