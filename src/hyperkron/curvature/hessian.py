"""A = ∇²_θθ J_in, known through products with vectors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import Curvature, CurvatureState, check_damping
from hyperkron.curvature.matrix_free import MatrixFreeOperator
from hyperkron.evaluation.differentiation import gradients_of
from hyperkron.evaluation.point import Point, independent
from hyperkron.trees import Tree


class HessianOperator(MatrixFreeOperator):
    """v ↦ (∇²_θθ J_in + δI) v by differentiating the gradient's graph."""

    @cached_property
    def _graph(self) -> dict[str, Tensor | None]:
        """∂_θ J_in with its graph."""
        loss = self.point.inner(self.point.curvature_batch, differentiable=True)
        found = gradients_of(loss.value, list(self.params.values()), create_graph=True)
        if all(g is None for g in found):
            raise independent("inner")
        return dict(zip(self.params, found, strict=True))

    @property
    def gradients(self) -> Tree:
        return {n: torch.zeros_like(self.params[n]) if g is None else g.detach() for n, g in self._graph.items()}

    def unreached(self) -> list[str]:
        return [name for name, g in self._graph.items() if g is None]

    def _along(self, v: Tree, inputs: Tree) -> tuple[Tensor | None, ...]:
        """The derivative of vᵀ ∂_θ J_in in ``inputs``."""
        live = {name: g for name, g in self._graph.items() if g is not None and g.requires_grad}
        if not live:  # J_in is linear in θ
            return (None,) * len(inputs)
        vectors = [v[name] for name in live]
        return gradients_of(list(live.values()), list(inputs.values()), vectors, retain_graph=True)

    def _product(self, v: Tree) -> tuple[Tensor | None, ...]:
        return self._along(v, self.params)

    def cross(self, v: Tree, hypers: Tree) -> dict[str, Tensor | None]:
        """∂²_λθ J_in · v from the same graph; only where the curvature batch is the inner batch."""
        return dict(zip(hypers, self._along(trees.cast(v, self.params), hypers), strict=True))

    def matvec_and_cross(self, v: Tree, hypers: Tree) -> tuple[Tree, dict[str, Tensor | None]]:
        """Both from one backward pass."""
        if any(p.dtype == torch.float16 for p in self.params.values()):
            return self.matvec(v), self.cross(v, hypers)
        self.products += 1
        found = self._along(trees.cast(v, self.params), {**self.params, **{f"λ {n}": x for n, x in hypers.items()}})
        count = len(self.params)
        return self._damped(found[:count], v), dict(zip(hypers, found[count:], strict=True))


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
        return HessianOperator(point, self.damping)
