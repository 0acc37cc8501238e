"""A = Jᵀ (∇²_f c) J, the Gauss–Newton matrix, known through products with vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import (
    Curvature,
    CurvatureState,
    Operator,
    check_damping,
    l2_curvature,
    warn_moving,
    warn_opaque,
)
from hyperkron.curvature.matrix_free import MatrixFreeOperator
from hyperkron.evaluation.differentiation import gradients_of
from hyperkron.evaluation.point import Point, independent
from hyperkron.losses import Loss
from hyperkron.problem import rows, shares
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree


class GGNOperator(MatrixFreeOperator):
    """v ↦ (Jᵀ (∇²_f c) J + L2 + δI) v, with J the Jacobian of the model's outputs."""

    @cached_property
    def loss(self) -> Loss:
        """The inner loss with the graph of the outputs."""
        loss = self.point.inner(self.point.curvature_batch, differentiable=True)
        if not loss.terms:
            raise HyperkronError(
                f"{self.point.problem.words('inner')[0]} returned a plain scalar tensor, which does not define a "
                "Gauss–Newton matrix: return hyperkron.losses.cross_entropy(...), mse(...) or "
                "binary_cross_entropy(...), or use Hessian()."
            )
        warn_opaque("the Gauss–Newton matrix", loss, self.params)
        warn_moving("the Gauss–Newton matrix", loss, self.params)
        return loss

    @cached_property
    def _graph(self) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        """The outputs f, vectors u shaped like them, and the graph of Jᵀu.

        Jᵀu is linear in u, so its derivative in u gives J v: two reverse passes make one forward-mode product.
        """
        outputs = [term.output for term in self.loss.terms]
        seeds = [torch.zeros_like(f, requires_grad=True) for f in outputs]
        found = gradients_of(outputs, list(self.params.values()), seeds, create_graph=True)
        if all(g is None for g in found):
            raise independent("inner")
        pulled = zip(self.params, found, strict=True)
        return outputs, seeds, {name: g for name, g in pulled if g is not None and g.requires_grad}

    def unreached(self) -> list[str]:
        # Opaque parts, penalties, weights and targets may depend on parameters that the outputs do not depend on.
        others = {name: p for name, p in self.params.items() if name not in self._graph[2]}
        found = gradients_of(self.loss.value, list(others.values()), retain_graph=True) if others else ()
        return [name for name, g in zip(others, found, strict=True) if g is None]

    def _product(self, v: Tree) -> tuple[Tensor | None, ...]:
        outputs, seeds, pulled = self._graph
        pushed = gradients_of(list(pulled.values()), seeds, [v[name] for name in pulled], retain_graph=True)
        bent = [
            term.hessian_product(torch.zeros_like(term.output) if j is None else j)
            for term, j in zip(self.loss.terms, pushed, strict=True)
        ]
        return gradients_of(outputs, list(self.params.values()), bent, retain_graph=True)

    def _products(self, v: Tree, count: int) -> tuple[Tensor | None, ...]:
        """The same for ``count`` stacked vectors, each pass for all of them."""
        outputs, seeds, pulled = self._graph
        batched = partial(torch.autograd.grad, retain_graph=True, allow_unused=True, is_grads_batched=True)
        pushed = batched(list(pulled.values()), seeds, [v[name] for name in pulled])
        bent = [
            torch.func.vmap(term.hessian_product)(f.new_zeros(count, *f.shape) if j is None else j)
            for term, f, j in zip(self.loss.terms, outputs, pushed, strict=True)
        ]
        return batched(outputs, list(self.params.values()), bent)

    def matvec_stacked(self, v: Tree) -> Tree:
        """One pass for all vectors; one pass each if an operation of the model does not support batched vectors."""
        count = len(next(iter(v.values())))
        if self.roundoff:  # vectors of half precision are scaled one by one
            return super().matvec_stacked(v)
        try:
            found = self._products(v, count)
        except RuntimeError:
            return super().matvec_stacked(v)
        self.products += count
        out: Tree = {}
        for (name, p), x in zip(self.params.items(), found, strict=True):
            product = p.new_zeros(v[name].shape) if x is None else x.detach()
            out[name] = product + (self._l2.get(name, 0.0) + self.damping) * v[name]
        return out

    @cached_property
    def _l2(self) -> dict[str, Tensor | float]:
        return l2_curvature(self.loss, self.params)

    def matvec(self, v: Tree) -> Tree:
        out = super().matvec(v)
        return out | {name: out[name] + penalty * v[name] for name, penalty in self._l2.items()}


class PartedGGNOperator(Operator):
    """The same operator on a batch that is evaluated in parts: Σ_k share_k A_k v, with one graph at a time."""

    def __init__(self, point: Point, damping: float) -> None:
        self.point, self.damping, self.products, self.roundoff = point, damping, 0, point.roundoff

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        return self._summed(v, GGNOperator.matvec)

    def matvec_stacked(self, v: Tree) -> Tree:
        """All vectors at once; the graph of each part is built only once."""
        self.products += len(next(iter(v.values())))
        return self._summed(v, GGNOperator.matvec_stacked)

    def _summed(self, v: Tree, product_of: Callable[[GGNOperator, Tree], Tree]) -> Tree:
        whole = self.point.curvature_batch
        total, counts = trees.zeros_like(v), []
        try:
            for part in self.point.problem.parts(whole):
                self.point.curvature_batch = part
                operator = GGNOperator(self.point, 0.0)
                product = product_of(operator, v)
                counts.append(rows(operator.loss.terms, 1))
                total = trees.add(total, product, alpha=counts[-1][0])
        finally:
            self.point.curvature_batch = whole
        shares(counts)  # refuses criteria that run over different shares of the rows
        mean = trees.scale(total, 1.0 / sum(first for first, *_ in counts))
        return trees.add(mean, v, alpha=self.damping)


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
        whole = len(point.problem.parts(point.curvature_batch)) == 1
        if point.recording and not whole:
            raise HyperkronError("GGN counts the rows of every part of a batch on the device; use whole batches")
        return GGNOperator(point, self.damping) if whole else PartedGGNOperator(point, self.damping)
