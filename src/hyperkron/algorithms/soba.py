"""SOBA: the three variables move together, each along its own stochastic direction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.curvature import Curvature, Hessian
from hyperkron.optimizers import Rate, as_rate
from hyperkron.trees import Tree


@dataclass(frozen=True)
class SOBA(Algorithm):
    r"""One step on θ, v and λ at once, from the same point and the same batches.

        θ ← θ − ρ_t ∂_θ g ,      v ← v − ρ_t (Hv − ∂_θ f) ,      λ ← λ − γ_t (∂_λ f − X(v))

    v follows H⁻¹∂_θ f (the paper's v is its negative). Rates decay as t^{−1/2}.

    Reference: Dagréou et al., "A framework for bilevel optimization that enables stochastic and global variance
    reduction algorithms" (NeurIPS 2022).

    Args:
        linear_rate: the step size of v; ``None`` for that of ``inner_rate``.
        curvature: whose product moves v: ``Hessian()`` or ``GGN()``.
    """

    linear_rate: Rate | float | None = None
    curvature: Curvature = field(default=Hessian())
    inner_rate: Rate | float = field(default=Rate(0.1, 0.5), kw_only=True)
    outer_rate: Rate | float = field(default=Rate(0.1, 0.5), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        derivatives.check_products(self.curvature, type(self).__name__)

    def _linear_rate(self) -> Rate | float:
        return self.inner_rate if self.linear_rate is None else self.linear_rate

    def prepare(self, state: State) -> None:
        state.trees["v"] = trees.zeros_like(state.inner.values())

    def move(self, state: State, directions: dict[str, Tree], batch: Any, drew: bool) -> None:
        """All three variables against their directions, found on ``batch``, where random numbers were drawn or not."""
        derivatives.advance(state, [batch], drew=drew)
        rate = as_rate(self._linear_rate())(state.step)
        state.trees["v"] = trees.add(state.trees["v"], directions["v"], alpha=-rate)
        state.inner.step(directions["theta"])
        state.outer.step(directions["hyper"])

    def step(self, state: State, batches: BatchSources) -> StepReport:
        batch, outer_batch = batches.inner(), batches.outer()
        with derivatives.at_point(state) as here:
            outer_loss, parts = here.parts(batch, outer_batch, state.trees["v"], self.curvature)
        directions = derivatives.directions(parts)
        self.move(state, directions, batch, here.drew)
        return state.finish(outer_loss, directions["hyper"])
