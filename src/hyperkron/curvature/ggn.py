"""A = Jᵀ (∇²_f c) J, the Gauss–Newton matrix, known through products with vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hyperkron import trees
from hyperkron.curvature.base import Curvature, CurvatureState, Operator, check_damping, l2_curvature, warn_opaque
from hyperkron.curvature.half_precision import damped, lowered, unit_roundoff
from hyperkron.evaluation.differentiation import gradients_of
from hyperkron.evaluation.point import Point, independent
from hyperkron.problem import rows, shares
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree


class GGNOperator(Operator):
    """v ↦ (Jᵀ (∇²_f c) J + L2 + δI) v, with J the Jacobian of the model's outputs."""

    def __init__(self, point: Point, damping: float) -> None:
        self.point, self.params, self.damping = point, point.params, damping
        self.products, self.roundoff = 0, unit_roundoff(point)
        self._built = False

    def _build(self) -> None:
        """The graph of the outputs and of Jᵀu, at the first product."""
        self._built = True
        loss = self.point.inner(self.point.curvature_batch, differentiable=True)
        if not loss.terms:
            raise HyperkronError(
                "inner returned a plain scalar tensor, which does not define a Gauss–Newton matrix: return "
                "hyperkron.losses.cross_entropy(...), mse(...) or binary_cross_entropy(...), or use Hessian()."
            )
        if loss.opaque:
            warn_opaque("the Gauss–Newton matrix")
        self.l2 = l2_curvature(loss, self.params)
        self.terms = loss.terms
        # Jᵀu is linear in u, so its derivative in u gives J v: two reverse passes make one forward-mode product.
        self._seeds = [torch.zeros_like(t.output, requires_grad=True) for t in self.terms]
        outputs = [t.output for t in self.terms]
        pulled = gradients_of(outputs, list(self.params.values()), self._seeds, create_graph=True)
        if all(g is None for g in pulled):
            raise independent("inner")
        self._pulled = [g for g in pulled if g is not None and g.requires_grad]
        self._names = [n for n, g in zip(self.params, pulled, strict=True) if g is not None and g.requires_grad]

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        if not self._built:
            self._build()
        low, unit = lowered(v, self.params)
        pushed = gradients_of(self._pulled, self._seeds, [low[n] for n in self._names], retain_graph=True)
        bent = [
            t.hessian_product(torch.zeros_like(t.output) if j is None else j)
            for t, j in zip(self.terms, pushed, strict=True)
        ]
        outputs = [t.output for t in self.terms]
        found = gradients_of(outputs, list(self.params.values()), bent, retain_graph=True)
        out = damped(self.params, found, v, self.damping, unit)
        for name, penalty in self.l2.items():
            out[name] = out[name] + penalty * v[name]
        return out


class PartedGGNOperator(Operator):
    """The same operator on a batch that is evaluated in parts: Σ_k share_k A_k v, the graph of one part at a time."""

    def __init__(self, point: Point, damping: float) -> None:
        self.point, self.damping = point, damping
        self.products, self.roundoff = 0, unit_roundoff(point)

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        whole = self.point.curvature_batch
        found, counts = [], []
        try:
            for part in self.point.problem.parts(whole):
                self.point.curvature_batch = part
                operator = GGNOperator(self.point, 0.0)
                found.append(operator.matvec(v))
                counts.append(rows(operator.terms, 1))
        finally:
            self.point.curvature_batch = whole
        total = trees.scale(v, self.damping)
        for product, share in zip(found, shares(counts), strict=True):
            total = trees.add(total, product, alpha=share)
        return total


@dataclass(frozen=True)
class GGN(Curvature):
    """A = Σ_n σ_n J_nᵀ (∇²_f c_n) J_n + L2 + δI, the generalized Gauss–Newton matrix (Schraudolph, 2002).

    Positive semi-definite wherever the weights are non-negative, so conjugate gradients are safe.

    Args:
        damping: δ, added once.
    """

    damping: float = 0.0

    records_products: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_damping(self.damping)

    def operator(self, point: Point, state: CurvatureState) -> Operator:
        """The Gauss–Newton matrix on the curvature batch."""
        whole = len(point.problem.parts(point.curvature_batch)) == 1
        if point.recording and not whole:
            raise HyperkronError("GGN counts the rows of every part of a batch on the device; use whole batches")
        return GGNOperator(point, self.damping) if whole else PartedGGNOperator(point, self.damping)
