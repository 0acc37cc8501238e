"""SABA: SOBA with SAGA's tables."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import State, StepReport
from hyperkron.algorithms.soba import SOBA
from hyperkron.batches import BatchSources
from hyperkron.optimizers import Rate
from hyperkron.trees import Tree


@dataclass(frozen=True)
class SABA(SOBA):
    r"""SOBA's joint step with a table of the last value of every batch for each of its five oracles.

        for q in (∂_θ g_i, H_i v, X_i(v), ∂_θ f_j, ∂_λ f_j):
            q̂ = q_i − table_q[i] + mean(table_q) ;      table_q[i] ← q_i
        θ ← θ − ρ ∂̂_θ g ,      v ← v − ρ (Ĥv − ∂̂_θ f) ,      λ ← λ − γ (∂̂_λ f − X̂(v))

    Constant rates; tables start at zero. It needs :class:`~hyperkron.algorithms.Examples` on both levels and keeps
    (batches × dimension) numbers: for small models.

    Reference: Dagréou et al., "A framework for bilevel optimization that enables stochastic and global variance
    reduction algorithms" (NeurIPS 2022).
    """

    inner_rate: Rate | float = field(default=0.1, kw_only=True)
    outer_rate: Rate | float = field(default=0.1, kw_only=True)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        inner, outer = batches.finite("SABA")
        i, j = inner.index(), outer.index()
        with derivatives.at_point(state) as here:
            outer_loss, parts = here.parts(inner.batch(i), outer.batch(j), state.trees["v"], self.curvature)
        place = {"inner": (i, len(inner), inner.share(i)), "outer": (j, len(outer), outer.share(j))}
        reduced = {name: _reduced(state, name, x, *place[derivatives.PARTS[name]]) for name, x in parts.items()}
        directions = derivatives.directions(reduced)
        self.move(state, directions, inner.batch(i), here.drew)
        return state.finish(outer_loss, directions["hyper"])


def _reduced(state: State, name: str, new: Tree, index: int, count: int, share: float) -> Tree:
    """SAGA's direction for batch ``index`` of ``count``; its table and the table's mean are updated."""
    if f"{name} table" not in state.trees:
        state.trees[f"{name} table"] = {n: x.new_zeros((count, *x.shape)) for n, x in new.items()}
        state.trees[f"{name} mean"] = trees.zeros_like(new)
    table, mean = state.trees[f"{name} table"], state.trees[f"{name} mean"]
    change = trees.subtract(trees.scale(new, share), {n: x[index] for n, x in table.items()})
    with torch.no_grad():
        for n, x in table.items():
            x[index] += change[n]
    state.trees[f"{name} mean"] = trees.add(mean, change, alpha=1.0 / count)
    return trees.add(change, mean)
