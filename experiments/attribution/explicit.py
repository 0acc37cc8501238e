"""The Gauss–Newton matrix of a small classifier by its rows, for solves with hundreds of products.

G = 1/N MᵀM, where M has the rows √p_c (e_c − p)ᵀ J_n, one for each example and class. It is the matrix of
``hk.curvature.GGN`` on the training set, without a pass through the network for each product; M must fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import hyperkron as hk
from experiments.attribution.peers import ours
from experiments.attribution.settings import DECAY, Setting
from hyperkron.curvature import EKFAC, Curvature, CurvatureState, Operator, Point
from hyperkron.curvature.shrunk import ShrunkOperator
from hyperkron.solvers import CG
from hyperkron.trees import Tree

CHUNK = 100
"""Examples whose Jacobians are made at once."""


def rows_of(model: nn.Module, x: Tensor) -> Tensor:
    """M, (examples × classes, parameters)."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    total = sum(p.numel() for p in params.values())
    with torch.no_grad():
        p = torch.cat([model(part).softmax(1) for part in x.split(1000)])
    found = x.new_empty(p.numel(), total)
    roots = torch.diag_embed(p.sqrt()) - p.sqrt()[:, :, None] * p[:, None, :]
    for start in range(0, len(x), CHUNK):
        some = slice(start, start + CHUNK)
        jacobians = vmap(jacrev(lambda w, one: functional_call(model, w, (one[None],))[0]), (None, 0))(params, x[some])
        flat = torch.cat([jacobians[name].flatten(2) for name in params], 2)
        found[start * p.shape[1] : (start + len(flat)) * p.shape[1]] = (roots[some] @ flat).flatten(0, 1)
    return found


class RowsOperator(Operator):
    """v ↦ (1/N MᵀM + δI + L2) v."""

    def __init__(self, rows: Tensor, examples: int, damping: float) -> None:
        self.rows, self.examples, self.damping, self.products = rows, examples, damping + 2 * DECAY, 0

    def matvec(self, v: Tree) -> Tree:
        return {n: x[0] for n, x in self.matvec_stacked({n: x[None] for n, x in v.items()}).items()}

    def matvec_stacked(self, v: Tree) -> Tree:
        flat = torch.cat([x.flatten(1) for x in v.values()], 1)
        self.products += len(flat)
        out = (flat @ self.rows.T) @ self.rows / self.examples + self.damping * flat
        parts = out.split([x[0].numel() for x in v.values()], 1)
        return {name: part.reshape(x.shape) for (name, x), part in zip(v.items(), parts, strict=True)}


@dataclass(frozen=True, eq=False)
class Rows(Curvature):
    """The operator of given rows; with ``share`` below 1 drawn towards EKFAC."""

    rows: Tensor
    examples: int
    damping: float
    share: float = 1.0

    def init(self) -> CurvatureState:
        return EKFAC(self.damping, fisher="type-2").init()

    def operator(self, point: Point, state: CurvatureState) -> Operator:
        exact = RowsOperator(self.rows, self.examples, self.damping)
        if self.share == 1.0:
            return exact
        kronecker = EKFAC(self.damping, fisher="type-2").operator(point, state).definite()
        return ShrunkOperator(exact, kronecker, self.share)


def solvers(model: nn.Module, setting: Setting) -> dict[str, Callable[[nn.Module, Setting], Tensor]]:
    """The methods of :mod:`~experiments.attribution.peers` that solve with the Gauss–Newton matrix, by their names."""
    rows, d = rows_of(model, setting.train[0]), setting.damping
    share = hk.curvature.ShrunkGGN().share

    def solver(iterations: int, share: float, preconditioned: bool, tolerance: float) -> Any:
        curvature = Rows(rows, len(setting.train[0]), d, share)
        preconditioner = EKFAC(d, fisher="type-2") if preconditioned else None
        return ours(hk.Implicit(curvature, CG(iterations, tolerance), preconditioner=preconditioner))

    found = {f"PCG-{k}, shrunk, δ by the rule": solver(k, share, True, 1e-6) for k in (3, 10)}
    found |= {f"PCG-{k}, δ by the rule": solver(k, 1.0, True, 1e-6) for k in (3, 10)}
    return found | {f"CG-{k}, δ by the rule": solver(k, 1.0, False, 0.0) for k in (10, 50)}
