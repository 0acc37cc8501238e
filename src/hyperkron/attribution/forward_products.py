"""Inner products ⟨V_q, ∂_θ c_n⟩ by one forward-mode pass for each vector: without layers, and cheap for one vector.

On the first batch they are added up and compared with the gradient of the batch, for tangents pass where gradients do
not: to the row of an embedding's ``padding_idx``, and through ``torch.no_grad()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, unpack_dual

from hyperkron import trees
from hyperkron.attribution.example_losses import weighted_rows, weights_move, without_penalties
from hyperkron.attribution.inner_products import Products
from hyperkron.attribution.layer_calls import UnsuitableError
from hyperkron.batch_tensors import map_tensors
from hyperkron.cross.ways import NoForwardModeError, along, forward_mode
from hyperkron.curvature.kfac.taps import in_order
from hyperkron.evaluation.differentiation import gradient_tree, in_half_precision
from hyperkron.evaluation.point import Point
from hyperkron.problem import rows
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree


def agreement(point: Point, value: Tensor) -> tuple[float, float]:
    """By how much a sum over a batch may differ from what its gradient or its halves say, relative to the sum of sizes;
    and what rounding may leave of a product of large numbers, relative to their sizes."""
    near = {torch.float64: 1e-6, torch.float32: 1e-3}.get(point.dtype)
    if near is None or in_half_precision(value):
        return 0.1, 0.03
    return near, 100 * torch.finfo(point.dtype).eps


class ForwardProducts(Products):
    """The way by forward mode."""

    name = "forward"

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        self._contiguous = False  # whether images must have their channels first
        self._differentiable = False  # whether the loss needs a graph
        self._compared = self._moving = False

    def __call__(self, batch: Any, vectors: Tree, count: int) -> Tensor:
        if not self._compared:
            self._moving = weights_move(self.point.evaluate("inner", batch))
        try:
            found = torch.stack([self._along(batch, v) for v in trees.unstacked(vectors)])
        except NoForwardModeError as error:
            raise UnsuitableError(
                f"way='forward' does not pass through this model ({error.why}); use way='layers'."
            ) from error
        if found.shape[1] != count:
            raise UnsuitableError(
                f"a batch of {count} examples has {found.shape[1]} rows in the loss; give it a target for each example "
                "(tokens as a second dimension)."
            )
        if not self._compared:
            self._compare(batch, vectors, found)
            self._compared = True
        return found

    def _compare(self, batch: Any, vectors: Tree, found: Tensor) -> None:
        """Refuse tangents that are not those of the gradient."""
        loss = self.point.evaluate("inner", batch)
        value = without_penalties(loss)
        near, rounding = agreement(self.point, value)
        gradient = gradient_tree(value, self.point.params)
        for v, moved in zip(trees.unstacked(vectors), found, strict=True):
            gap = float(trees.dot(gradient, trees.cast(v, gradient)) - moved.sum())
            noise = rounding * float(trees.norm(gradient)) * float(trees.norm(v))  # where the two are nearly orthogonal
            if abs(gap) > near * float(moved.abs().sum()) + noise:
                raise UnsuitableError(
                    "a plain tensor is added to the loss, which does not tell the losses of single examples; add terms "
                    "of hyperkron.losses, such as mse(...), and l2(...) as a penalty."
                    if loss.opaque
                    else "way='forward' does not see what stops gradients in this model (padding_idx of an embedding "
                    "whose weight is used elsewhere too, torch.no_grad()); use way='layers'."
                )

    def _along(self, batch: Any, v: Tree) -> Tensor:
        try:
            return self._tangents(map_tensors(in_order, batch) if self._contiguous else batch, v)
        except (RuntimeError, NoForwardModeError) as error:
            said = str(error)
            if not self._contiguous and "view size is not compatible" in said:
                self._contiguous = True  # torch's tangent of group_norm takes views that channels last do not allow
            elif not self._differentiable and "does not require grad" in said:
                self._differentiable = True  # the loss is made of gradients, as a gradient penalty is
            else:
                raise
        return self._along(batch, v)

    def _tangents(self, batch: Any, v: Tree) -> Tensor:
        with torch.set_grad_enabled(self._differentiable), forward_mode(), dual_level():
            loss, _ = along(self.point, trees.cast(v, self.point.params), batch)
            if not loss.terms:
                raise UnsuitableError(
                    "loss returned a plain tensor, which does not tell the losses of single examples; return "
                    "hyperkron.losses.cross_entropy(...), mse(...) or binary_cross_entropy(...)."
                )
            self.counted = rows(loss.terms, 0)
            tangents = [unpack_dual(weighted_rows(term, self._moving)).tangent for term in loss.terms]
        found = [tangent.reshape(len(tangent), -1).sum(1) for tangent in tangents if tangent is not None]
        if not found:
            raise HyperkronError(
                "the loss of the training examples does not depend on the model's parameters; compute it from the "
                "model it is given, without detach() or torch.no_grad()."
            )
        return torch.stack(found).sum(0).detach()
