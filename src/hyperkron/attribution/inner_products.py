r"""Inner products ⟨V_q, ∂_θ c_n⟩ of many examples n with some vectors V_q, in two ways.

- ``layers``: one backward pass over a batch. The gradient of example n in a layer's weight is Σ_s g_ns a_nsᵀ, over the
  positions s at which it is used, so that inputs and output gradients are all it takes: one matrix product scores all
  vectors. Norms and embeddings give the gradients of single examples by ``torch.func.vmap``. On the first batch these
  gradients are added up, each with a weight of its own, and compared with autograd's.
- ``forward``: one forward-mode pass for each vector, see :mod:`~hyperkron.attribution.forward_products`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hyperkron import trees
from hyperkron.attribution.eigenbasis import EigenCoordinates
from hyperkron.attribution.example_losses import telling, without_penalties
from hyperkron.attribution.layer_calls import BlockCall, LayerCall, ModuleCall, QueryVectors, UnsuitableError
from hyperkron.curvature.base import Eigenbasis
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.kept import KeptGradients
from hyperkron.evaluation.differentiation import gradient_tree
from hyperkron.evaluation.point import Level, Point
from hyperkron.kernels.split_products import full_precision
from hyperkron.losses import Loss
from hyperkron.problem import rows
from hyperkron.trees import Tree

ROUNDINGS, HALF_ROUNDINGS = 1e3, 2.0
"""By how many roundings gradients may differ from autograd's; in half precision, as under autocast, these are large."""


class Products(ABC):
    """A way to compute inner products at a point; ``name`` is what users call it.

    Attributes:
        coordinates: the blocks of which vectors are given as coordinates, which only the way by layers can use.
        counted: over how many rows the means in the loss of the last batch ran.
    """

    name: ClassVar[str]
    counted: tuple[float, ...] = ()

    def __init__(self, point: Point) -> None:
        self.point, self.coordinates = point, EigenCoordinates({}, {})

    @abstractmethod
    def __call__(self, batch: Any, vectors: Tree, count: int) -> Tensor:
        """⟨V_q, ∂_θ c_n⟩ for every vector and each of ``count`` examples: (queries, examples).

        c_n is the share of example n in the loss of the batch, so that J = Σ_n c_n without penalties.
        """


class LayerProducts(Products):
    """The way by layers; see the module's docstring.

    Attributes:
        by_blocks: whether the gradients of the first batch came from layers that KFAC covers alone.
        positions: how many rows an example had in every block, in the last batch.
    """

    name = "layers"
    by_blocks = False

    def __init__(self, point: Point, level: Level = "inner", alike: bool = False, compared: bool = False) -> None:
        """With ``alike`` a loss in which rows do not count alike, for some are masked or weighted, is refused. With
        ``compared`` gradients are taken to be autograd's."""
        super().__init__(point)
        self.level, self.alike, self.plan = level, alike, plan(point.model, "diagonal")
        self._compared = set(point.params) if compared else set()  # whose gradients were found to be autograd's
        self.positions: dict[str, float] = {}
        self._vectors = QueryVectors({}, {})

    def __call__(self, batch: Any, vectors: Tree, count: int) -> Tensor:
        if self._vectors.tree is not vectors:
            self._vectors = QueryVectors(vectors, self.coordinates.bases)
        calls = self.calls(batch, count, self._vectors.used or set(vectors))
        return torch.stack([call.scores(self._vectors) for call in calls]).sum(0)

    def gradients_of(self, calls: list[LayerCall], count: int) -> Tree:
        """The gradients of the ``count`` examples of ``calls``, stacked; of the blocks in ``coordinates`` those of A⁻¹
        times them."""
        found: Tree = {}
        for call in calls:
            for name, x in trees.joined(call.coordinates(self.coordinates.bases), count).items():
                found[name] = found[name] + x if name in found else x
        params = self.point.params
        return {name: found[name] if name in found else p.new_zeros(count, *p.shape) for name, p in params.items()}

    def total(self, calls: list[LayerCall], weights: Tensor) -> Tree:
        """The gradients of all examples of ``calls``, weighted and added up."""
        found = trees.zeros_like(self.point.params)
        for call in calls:
            for name, x in call.total(weights).items():
                found[name] += x
        return found

    def calls(self, batch: Any, count: int, used: set[str] | None = None) -> list[LayerCall]:
        """Every call of a layer with parameters ``used`` (default: all) that the loss depends on."""
        used = set(self.point.params) if used is None else used
        if used <= self._compared:
            calls, loss = self._reached(batch, count, used)
            if not self.alike or all(len(term.row_losses) == count for term in loss.terms):
                return calls  # else rows may be other numbers of each example in every batch
            del calls, loss
        with full_precision():
            calls, loss = self._reached(batch, count, used, retain_graph=True)
            weights, params = telling(count, loss), {n: p for n, p in self.point.params.items() if n in used}
            self._compare(calls, weights, gradient_tree(without_penalties(loss, weights), params))
        self._compared, self.by_blocks = used, all(isinstance(call, BlockCall) for call in calls)
        return calls

    def _reached(
        self, batch: Any, count: int, used: set[str], retain_graph: bool = False
    ) -> tuple[list[LayerCall], Loss]:
        with self._watched(used) as calls:
            loss = self.point.evaluate(self.level, batch)
            value = without_penalties(loss)
        self.counted = rows(loss.terms, count)
        weights = [term.coefficients.flatten() for term in loss.terms]
        if self.alike and not all(len(x) % count == 0 and bool((x == x[0]).all()) for x in weights):
            raise UnsuitableError("the loss leaves out rows of the batch, or weights them; use way='forward'.")
        reached: list[LayerCall] = []
        if calls and value.requires_grad:
            edges = [call.edge for call in calls]
            found = torch.autograd.grad(value, edges, allow_unused=True, retain_graph=retain_graph)
            reached = [call for call, g in zip(calls, found, strict=True) if call.receive(g)]
        if not reached:
            raise UnsuitableError(
                "way='layers' sees no layer that the loss depends on; compute the loss from the model it is given, "
                "or use way='forward'."
            )
        lengths = {len(part) for call in reached for part in (call.x, call.g)} - {count}
        if lengths:
            raise UnsuitableError(
                f"a batch of {count} examples reaches layers as {min(lengths)} rows, so it is not clear which "
                "rows belong to an example; use way='forward', or layers whose first dimension is the example."
            )
        self.positions = {}
        for call in reached:
            if isinstance(call, BlockCall):
                name, layer = call.block.name, call.block.layer
                positions = call.g.numel() / max(1, count * layer.groups * layer.d_out)
                self.positions[name] = self.positions.get(name, 0.0) + positions
        return reached, loss

    def _compare(self, calls: list[LayerCall], weights: Tensor, wanted: Tree) -> None:
        """Refuse gradients that are not autograd's: of layers that see examples in another order, for example."""
        found = self.total(calls, weights)
        eps = max(torch.finfo(dtype).eps for dtype in {self.point.dtype, *(call.g.dtype for call in calls)})
        near = eps * (ROUNDINGS if eps < 1e-4 else HALF_ROUNDINGS)
        largest = max(float(x.abs().max()) for x in wanted.values())
        for name, x in wanted.items():
            if float((found[name] - x).norm()) > near * (float(x.norm()) + largest):
                raise UnsuitableError(
                    f"way='layers' does not see all of the gradient of {name}, which is used outside the layers that "
                    "KFAC covers, or by a layer whose rows are not the examples in their order; use way='forward'."
                )

    @contextmanager
    def _watched(self, used: set[str]) -> Iterator[list[LayerCall]]:
        """Hooks that note the input and output of every call of a layer with ``used``, while the block runs."""
        calls: list[LayerCall] = []
        params = self.point.params

        def hook(make: Callable[[], LayerCall], _: nn.Module, given: tuple[Any, ...], named: Any, y: Tensor) -> None:
            if y.requires_grad:
                call = make()
                call.x, call.edge = (given[0] if given else next(iter(named.values()))).detach(), get_gradient_edge(y)
                calls.append(call)

        makers: list[tuple[nn.Module, Callable[[], LayerCall]]] = [
            (module, partial(BlockCall, self.plan.blocks[name], params))
            for module, name in self.plan.feeds
            if not used.isdisjoint(self.plan.blocks[name].names)
        ]
        makers += [
            (module, partial(ModuleCall, module, names))
            for module, names in self.plan.diagonal.items()
            if not used.isdisjoint(names.values())
        ]
        with ExitStack() as hooks:
            for module, make in makers:
                hooks.enter_context(module.register_forward_hook(partial(hook, make), with_kwargs=True, prepend=True))
            yield calls


class KeptProducts(KeptGradients):
    """The same from gradients that were kept when the curvature was measured: no pass over the data is needed."""

    def vectors(self, loss: Loss) -> list[tuple[Tensor, Tensor]]:
        value = without_penalties(loss)
        return [(value, torch.ones_like(value))]

    def products(
        self, vectors: Tree, params: Tree, bases: Mapping[str, Eigenbasis]
    ) -> Iterator[tuple[Tensor, tuple[float, ...]]]:
        """⟨V_q, ∂_θ c_n⟩ of a part after the other, and the rows that count in its loss; ``vectors`` has coordinates of
        the blocks in ``bases``."""
        apart = QueryVectors(vectors, bases)
        for counted, part in self.parts:
            calls = [BlockCall(one.block, params, one) for one in part]
            yield torch.stack([call.scores(apart) for call in calls]).sum(0), (counted,)


def first_suitable(ways: list[Products], batch: Any, vectors: Tree, count: int) -> Tensor:
    """The products by the first of ``ways`` that works; those that do not are dropped, and with them coordinates."""
    failed = ""
    while True:
        try:
            return ways[0](batch, vectors, count)
        except UnsuitableError as error:
            if len(ways) == 1 and failed:
                raise UnsuitableError(
                    f"neither way suits this model. First: {failed} Then: {error} The default method leaves out the "
                    "parameters outside Linear and convolution layers, which may help."
                ) from error
            if len(ways) == 1:
                raise
            failed = str(error)
            vectors.update(ways.pop(0).coordinates.to_vectors(vectors))
