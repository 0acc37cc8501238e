"""Matrices that are known only through products with vectors, computed by differentiating one graph repeatedly."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import Operator
from hyperkron.evaluation.point import Point
from hyperkron.trees import Tree


class MatrixFreeOperator(Operator):
    """v ↦ (A + δI) v; for a model in half precision v is float32, and so are the products.

    The graph is built at the first product, so that it is not in memory before.
    """

    def __init__(self, point: Point, damping: float) -> None:
        self.point, self.params, self.damping, self.products = point, point.params, damping, 0
        self.roundoff = point.roundoff

    @abstractmethod
    def _product(self, v: Tree) -> tuple[Tensor | None, ...]:
        """Av for each parameter, in the parameters' dtypes; ``None`` for zero."""

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        low, unit = lowered(v, self.params)
        return self._damped(self._product(low), v, unit)

    def _damped(self, found: tuple[Tensor | None, ...], v: Tree, unit: Tensor | None = None) -> Tree:
        """unit·Av + δv as a tree with the dtypes of ``v``."""
        whole = {
            name: torch.zeros_like(p) if x is None else x.detach().contiguous()
            for (name, p), x in zip(self.params.items(), found, strict=True)
        }
        whole = trees.cast(whole, v)
        if unit is not None:
            whole = trees.scale(whole, unit)
        return trees.add(whole, v, alpha=self.damping) if self.damping else whole


def lowered(v: Tree, params: Tree) -> tuple[Tree, Tensor | None]:
    """(v/c, c) in the dtypes of the parameters; c, which keeps v within the narrow range of float16, or ``None``."""
    narrow = any(p.dtype == torch.float16 and v[name].dtype != p.dtype for name, p in params.items())
    unit = trees.largest(v).clamp_min(1e-30) if narrow else None
    return trees.cast(v if unit is None else trees.scale(v, 1.0 / unit), params), unit
