"""A = ∇²_θθ J_in, known through products with vectors; one graph is kept for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import Curvature, CurvatureState, Operator, check_damping
from hyperkron.curvature.half_precision import damped, lowered, unit_roundoff
from hyperkron.evaluation.differentiation import gradients_of
from hyperkron.evaluation.point import Point, independent
from hyperkron.trees import Tree


class HessianOperator(Operator):
    """v ↦ (∇²_θθ J_in + δI) v by differentiating the gradient's graph, built once."""

    def __init__(self, point: Point, damping: float) -> None:
        self.point, self.params, self.damping = point, point.params, damping
        self.products, self.roundoff = 0, unit_roundoff(point)
        self._live: list[Tensor] | None = None
        self._names: list[str] = []
        self._gradients: Tree = {}

    def _build(self) -> None:
        """The graph of ∂_θ J_in, at the first product: what is computed before it does not add to its memory."""
        loss = self.point.inner(self.point.curvature_batch, differentiable=True)
        gradients = gradients_of(loss.value, list(self.params.values()), create_graph=True)
        if all(g is None for g in gradients):
            raise independent("inner")
        pairs = [(n, g) for n, g in zip(self.params, gradients, strict=True) if g is not None and g.requires_grad]
        self._names, self._live = [n for n, _ in pairs], [g for _, g in pairs]
        self._gradients = {
            n: torch.zeros_like(p) if g is None else g.detach()
            for (n, p), g in zip(self.params.items(), gradients, strict=True)
        }

    @property
    def gradients(self) -> Tree:
        """∂_θ J_in on the curvature batch, which the products are derivatives of."""
        if self._live is None:
            self._build()
        return self._gradients

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        if self._live is None:
            self._build()
        if not self._live:  # J_in is linear in θ
            return trees.scale(v, self.damping)
        low, unit = lowered(v, self.params)
        found = gradients_of(self._live, list(self.params.values()), [low[n] for n in self._names], retain_graph=True)
        return damped(self.params, found, v, self.damping, unit)

    def cross(self, v: Tree, hypers: Tree) -> dict[str, Tensor | None]:
        """∂²_λθ J_in · v from the same graph; only where the curvature batch is the inner batch."""
        if self._live is None:
            self._build()
        if not self._live:
            return dict.fromkeys(hypers)
        low = trees.cast(v, self.params)
        found = gradients_of(self._live, list(hypers.values()), [low[n] for n in self._names], retain_graph=True)
        return dict(zip(hypers, found, strict=True))

    def matvec_and_cross(self, v: Tree, hypers: Tree) -> tuple[Tree, dict[str, Tensor | None]]:
        """Both from one backward pass."""
        if self._live is None:
            self._build()
        if not self._live or any(p.dtype == torch.float16 for p in self.params.values()):
            return self.matvec(v), self.cross(v, hypers)
        self.products += 1
        low, wanted = trees.cast(v, self.params), [*self.params.values(), *hypers.values()]
        found = gradients_of(self._live, wanted, [low[n] for n in self._names], retain_graph=True)
        count = len(self.params)
        return damped(self.params, found[:count], v, self.damping), dict(zip(hypers, found[count:], strict=True))


@dataclass(frozen=True)
class Hessian(Curvature):
    """A = ∇²_θθ J_in + δI, exactly, through Hessian-vector products (Pearlmutter, 1994).

    It may be indefinite away from a minimum; solvers report that as ``NONPOSITIVE_CURVATURE``.

    Args:
        damping: δ, added once.
    """

    damping: float = 0.0

    records_products: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_damping(self.damping)

    def operator(self, point: Point, state: CurvatureState) -> HessianOperator:
        """The Hessian on the curvature batch."""
        return HessianOperator(point, self.damping)
