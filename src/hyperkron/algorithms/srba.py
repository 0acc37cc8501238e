"""SRBA: SOBA with SARAH's recursive differences."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Count, State, StepReport
from hyperkron.algorithms.soba import SOBA
from hyperkron.batches import BatchSources
from hyperkron.optimizers import Rate


@dataclass(frozen=True)
class SRBA(SOBA):
    r"""SOBA's joint step whose directions are corrected by differences along the path.

        every ``period`` steps:  D_t = D(z_t) on all examples
        else:                    D_t = D(z_t; i, j) − D(z_{t−1}; i, j) + D_{t−1}
        z_{t+1} = z_t − rates · D_t ,      z = (θ, v, λ),  D = (∂_θ g, Hv − ∂_θ f, ∂_λ f − X(v))

    It needs :class:`~hyperkron.algorithms.Examples` on both levels.

    Reference: Dagréou et al., "A lower bound and a near-optimal algorithm for bilevel empirical risk minimization"
    (AISTATS 2024).

    Args:
        period: steps between full passes; ``None`` for half the number of batches of both levels.
    """

    period: Count | None = None
    inner_rate: Rate | float = field(default=0.1, kw_only=True)
    outer_rate: Rate | float = field(default=0.1, kw_only=True)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        inner, outer = batches.finite("SRBA")
        period = self.period or max(1, (len(inner) + len(outer)) // 2)
        memory = state.trees
        full = state.step % period == 0
        i, j = (0, 0) if full else (inner.index(), outer.index())
        pair = (inner.full(), outer.full()) if full else (inner.batch(i), outer.batch(j))
        with derivatives.at_point(state) as here:
            outer_loss, parts = here.parts(*pair, memory["v"], self.curvature)
        if full:
            moves = derivatives.directions(parts)
        else:
            old_point = memory["old theta"], memory["old hyper"]
            with derivatives.elsewhere(state, *old_point), derivatives.at_point(state) as there:
                _, old = there.parts(*pair, memory["old v"], self.curvature)
            share = {"inner": inner.share(i), "outer": outer.share(j)}
            change = {
                name: trees.scale(trees.subtract(x, old[name]), share[derivatives.PARTS[name]])
                for name, x in parts.items()
            }
            moves = {name: trees.add(memory[f"d {name}"], x) for name, x in derivatives.directions(change).items()}
        memory.update({f"d {name}": x for name, x in moves.items()})
        memory.update({"old theta": state.inner.values(), "old hyper": state.outer.values(), "old v": memory["v"]})
        self.move(state, moves, pair[0], here.drew)
        return state.finish(outer_loss, moves["hyper"])
