"""AmIGO: amortised implicit differentiation, θ and v both warm-started."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.curvature import Curvature, Hessian
from hyperkron.hypergradient import Hypergradient
from hyperkron.optimizers import Rate, as_rate
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class AmIGO(Algorithm):
    r"""T stochastic steps on θ, N on v, one on λ, all continuing where they were.

        θ ← θ − α ∂_θ g_B(λ, θ)                 T times
        v ← v − ρ (H_B v − b)                   N times, b = ∂_θ f on one outer batch, H_B on fresh inner ones
        λ ← λ − γ (∂_λ f − X_B(v))

    All rates are constant. With ``hypergradient`` the v-loop is replaced: ``AmIGO(hypergradient=hk.kfac())`` is
    AmIGO-KFAC, and ``hk.gradient_descent(2, step=1.0, preconditioner=KFAC(δ, split="exact"))`` takes two steps from the
    last v, preconditioned by KFAC, in place of ten plain ones (docs/benchmarks.md).

    Reference: Arbel & Mairal, "Amortized implicit differentiation for stochastic bilevel optimization" (ICLR 2022).

    Args:
        inner_steps: T.
        linear_steps: N.
        linear_rate: ρ, below 2/λmax.
        curvature: whose products move v: ``Hessian()`` or ``GGN()``.
        hypergradient: in place of the v-loop: a direct solve, or an iterative one with ``warm_start=True``.
    """

    inner_steps: Count = 10
    linear_steps: Count = 10
    linear_rate: Rate | float = 0.1
    curvature: Curvature = field(default=Hessian())
    hypergradient: Hypergradient | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        derivatives.check_products(self.curvature, "AmIGO")
        method = self.hypergradient
        if method is None:
            return
        if method.solver is None:
            raise HyperkronError(
                f"hypergradient={type(method).__name__} solves no linear system that AmIGO could amortise; "
                "use it in AID, or Unroll for unrolled differentiation."
            )
        if method.solver.needs_products and not method.warm_start:
            remedy = "pass warm_start=True" if method.solver.uses_start else "it cannot be warm-started: use cg()"
            raise HyperkronError(
                f"hypergradient with solver={method.solver!r} starts every solve from zero, but AmIGO is the "
                f"amortised method that continues it; {remedy}, or use AID for solves from zero."
            )

    def prepare(self, state: State) -> None:
        if self.hypergradient is None:
            state.trees["v"] = trees.zeros_like(state.inner.values())

    def step(self, state: State, batches: BatchSources) -> StepReport:
        if self.hypergradient is not None:
            return derivatives.alternate(state, batches, self.inner_steps)
        inner_loss = derivatives.descend(state, batches, self.inner_steps)
        outer_batch, *inner_batches = batches.outer(), *(batches.inner() for _ in range(self.linear_steps + 1))
        v, rate = state.trees["v"], as_rate(self.linear_rate)(state.step)
        with derivatives.at_point(state) as here:
            outer_loss, b, direct = here.outer(outer_batch)
            for batch in inner_batches[:-1]:
                residual = trees.subtract(here.product(batch, v, self.curvature), b)
                v = trees.add(v, residual, alpha=-rate)
            direction = trees.subtract(direct, here.cross(inner_batches[-1], v))
        state.trees["v"] = v
        state.outer.step(direction)
        return state.finish(outer_loss, direction, inner_loss)
