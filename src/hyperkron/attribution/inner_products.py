r"""Inner products ⟨V_q, ∂_θ c_n⟩ of many examples n with some vectors V_q, in two ways.

- ``layers``: one backward pass over a batch. The gradient of example n in a layer's weight is Σ_s g_ns a_nsᵀ, over the
  positions s at which it is used, so that inputs and output gradients are all it takes: one matrix product scores all
  vectors. Norms and embeddings give the gradients of single examples by ``torch.func.vmap``. On the first batch these
  gradients are added up, each with a weight of its own, and compared with autograd's.
- ``forward``: one forward-mode pass for each vector, see :mod:`~hyperkron.attribution.forward_products`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap

from hyperkron import trees
from hyperkron.attribution.example_losses import telling, without_penalties
from hyperkron.curvature.kfac.coverage import Block, plan
from hyperkron.curvature.kfac.kept import KeptGradients, LayerGradients
from hyperkron.curvature.kfac.layers import cast_floating
from hyperkron.evaluation.differentiation import gradient_tree
from hyperkron.evaluation.point import Level, Point
from hyperkron.kernels.split_products import full_precision
from hyperkron.losses import Loss
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree

CHUNK = 2**26
"""Numbers held at once as gradients of single examples."""
PIECE = {"cpu": 2**23, "cuda": 2**25}
"""The same where they are used up at once, by device type."""
OUTPUTS = {"cpu": 2**20}
"""The same for outputs of layers, which on a CPU are used up while they are in its cache."""
ROUNDINGS, HALF_ROUNDINGS = 1e3, 2.0
"""By how many roundings gradients may differ from autograd's; in half precision, as under autocast, these are large."""
FEW = 2
"""Up to this many vectors are multiplied by passing each through a layer as its weight."""


class UnsuitableError(HyperkronError):
    """A way does not work with this model or loss; another may."""


class Products(ABC):
    """A way to compute inner products at a point; ``name`` is what users call it."""

    name: ClassVar[str]

    def __init__(self, point: Point) -> None:
        self.point = point

    @abstractmethod
    def __call__(self, batch: Any, vectors: Tree, count: int) -> Tensor:
        """⟨V_q, ∂_θ c_n⟩ for every vector and each of ``count`` examples: (queries, examples).

        c_n is the share of example n in the loss of the batch, so that J = Σ_n c_n without penalties.
        """


class LayerProducts(Products):
    """The way by layers; see the module's docstring.

    Attributes:
        by_blocks: whether the gradients of the first batch came from layers that KFAC covers alone.
    """

    name = "layers"
    by_blocks = False

    def __init__(self, point: Point, level: Level = "inner", alike: bool = False) -> None:
        """With ``alike`` a loss in which rows do not count alike, for some are masked or weighted, is refused."""
        super().__init__(point)
        self.level, self.alike, self.plan = level, alike, plan(point.model, "diagonal")
        self._compared: set[str] = set()  # the parameters whose gradients were found to be autograd's
        self._vectors = _Vectors({})

    def __call__(self, batch: Any, vectors: Tree, count: int) -> Tensor:
        if self._vectors.tree is not vectors:
            self._vectors = _Vectors(vectors)
        calls = self._calls(batch, count, self._vectors.used or set(vectors))
        return torch.stack([call.scores(self._vectors) for call in calls]).sum(0)

    def gradients(self, batch: Any, count: int) -> Tree:
        """The gradient of each example, stacked."""
        found = {name: p.new_zeros(count, *p.shape) for name, p in self.point.params.items()}
        for call in self._calls(batch, count, set(found)):
            start = 0
            for part in call.gradients():
                for name, x in part.items():
                    found[name][start : start + len(x)] += x
                start += len(x)
        return found

    def _calls(self, batch: Any, count: int, used: set[str]) -> list[_LayerCall]:
        """Every call of a layer with parameters ``used`` that the loss depends on: its input and output gradient."""
        if used <= self._compared:
            return self._reached(batch, count, used)[0]
        with full_precision():
            calls, loss = self._reached(batch, count, used, retain_graph=True)
            weights, params = telling(count, loss), {n: p for n, p in self.point.params.items() if n in used}
            self._compare(calls, weights, gradient_tree(without_penalties(loss, weights), params))
        self._compared, self.by_blocks = used, all(isinstance(call, _BlockCall) for call in calls)
        return calls

    def _reached(
        self, batch: Any, count: int, used: set[str], retain_graph: bool = False
    ) -> tuple[list[_LayerCall], Loss]:
        with self._watched(used) as calls:
            loss = self.point.evaluate(self.level, batch)
            value = without_penalties(loss)
        counted = [term.coefficients.flatten() for term in loss.terms]
        if self.alike and not all(bool((x == x[0]).all()) for x in counted):
            raise UnsuitableError("the loss leaves out rows of the batch, or weights them; use way='forward'.")
        reached: list[_LayerCall] = []
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
                f"a batch of {count} examples reaches layers as {min(lengths)} rows, so which belong to an example is "
                "open; use way='forward', or layers whose first dimension is the example."
            )
        return reached, loss

    def _compare(self, calls: list[_LayerCall], weights: Tensor, wanted: Tree) -> None:
        """Refuse gradients that are not autograd's: of layers that see examples in another order, for example."""
        found = trees.zeros_like(wanted)
        for call in calls:
            for name, x in call.total(weights).items():
                if name in found:
                    found[name] += x
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
    def _watched(self, used: set[str]) -> Iterator[list[_LayerCall]]:
        """Hooks that note the input and output of every call of a layer with ``used``, while the block runs."""
        calls: list[_LayerCall] = []
        params, handles = self.point.params, []

        def hook(make: Callable[[], _LayerCall], _: nn.Module, given: tuple[Any, ...], named: Any, y: Tensor) -> None:
            if y.requires_grad:
                call = make()
                call.x, call.edge = (given[0] if given else next(iter(named.values()))).detach(), get_gradient_edge(y)
                calls.append(call)

        makers: list[tuple[nn.Module, Callable[[], _LayerCall]]] = [
            (module, partial(_BlockCall, self.plan.blocks[name], params))
            for module, name in self.plan.feeds
            if not used.isdisjoint(self.plan.blocks[name].names)
        ]
        makers += [
            (module, partial(_ModuleCall, module, names))
            for module, names in self.plan.diagonal
            if not used.isdisjoint(names.values())
        ]
        try:
            for module, make in makers:
                handles.append(module.register_forward_hook(partial(hook, make), with_kwargs=True, prepend=True))
            yield calls
        finally:
            for handle in handles:
                handle.remove()


class KeptProducts(KeptGradients):
    """The same from gradients that were kept when the curvature was measured: no pass over the data is needed."""

    def vectors(self, loss: Loss) -> list[tuple[Tensor, Tensor]]:
        value = without_penalties(loss)
        return [(value, torch.ones_like(value))]

    def products(self, vectors: Tree, params: Tree) -> Iterator[Tensor]:
        """⟨V_q, ∂_θ c_n⟩ of a part after the other."""
        apart = _Vectors(vectors)
        for _, part in self.parts:
            calls = [_BlockCall(one.block, params, one) for one in part]
            yield torch.stack([call.scores(apart) for call in calls]).sum(0)


class _Vectors:
    """The vectors V_q, stacked, as layers need them: taken apart once for all batches."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.used = {name for name, v in tree.items() if bool(v.any())}  # the others are left out by the method
        self._parts: dict[str, tuple[Tensor | None, Tensor | None]] = {}

    def of(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        """Of the weight of a layer (queries, groups, d_out, d_in), its columns in the order of the rows that the layer
        makes of an input, and of the bias (queries, groups, d_out)."""
        if block.name not in self._parts:
            layer, weight, bias = block.layer, None, None
            if block.weight is not None:
                matrices = vmap(layer.to_matrix)(self.tree[block.weight])
                weight = layer.reordered(matrices.flatten(0, 1).mT).mT.unflatten(0, matrices.shape[:2]).contiguous()
            if block.bias is not None:
                bias = self.tree[block.bias].unflatten(1, (layer.groups, layer.d_out))
            self._parts[block.name] = weight, bias
        return self._parts[block.name]


class _LayerCall(ABC):
    """A call of a module with parameters: from its input and output gradient come the gradients of single examples."""

    x: Tensor
    edge: GradientEdge  # of the output as it left the module, whatever is done to it in place later
    g: Tensor

    def receive(self, g: Tensor | None) -> bool:
        """Take the gradient at the output; whether there is one."""
        if g is not None:
            self.g = g
        return g is not None

    @abstractmethod
    def gradients(self) -> Iterator[Tree]:
        """The gradients of single examples, stacked, as many at a time as memory allows."""

    def total(self, weights: Tensor) -> Tree:
        """The gradients of all examples, weighted and added up."""
        start, parts = 0, []
        for part in self.gradients():
            size = len(next(iter(part.values())))
            w = weights[start : start + size]
            parts.append({name: torch.tensordot(w.to(x.dtype), x, 1) for name, x in part.items()})
            start += size
        return trees.map(lambda x: x.sum(0), trees.stacked(parts))

    @abstractmethod
    def scores(self, vectors: _Vectors) -> Tensor:
        """⟨V_q, ∂_θ c_n⟩ over the parameters of this module: (queries, examples)."""


class _BlockCall(_LayerCall):
    """A layer that KFAC covers: W has the gradient Σ_s g_s a_sᵀ, and b has Σ_s g_s."""

    def __init__(self, block: Block, params: Tree, kept: LayerGradients | None = None) -> None:
        self.block, self.params = block, params
        self.made = kept.pair if kept is not None and kept.whole else None  # the gradients of examples
        if kept is not None:
            self.x, self.g = kept.pair

    def _wide(self) -> tuple[Tensor, Tensor]:
        """The input and the output gradient, as wide as parameters are; under autocast they are not."""
        dtype = self.params[self.block.names[0]].dtype
        return cast_floating(self.x, dtype), self.g.to(dtype)

    def _positions(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs (n, groups, S, d_in), in the layer's own order of columns, and output gradients (n, groups, S, d_out)
        of at most ``size`` examples at a time."""
        for x, g in zip(*(t.split(size) for t in self._wide()), strict=True):
            yield from ((a.to(b.dtype), b) for a, b in self.block.layer.positions(x, g))

    def _of_examples(self, numbers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradients of single examples in the weight and in the bias, at most ``numbers`` numbers at a time."""
        width = sum(self.params[name].numel() for name in self.block.names)
        return self.block.layer.gradients_of_examples(*self._wide(), max(1, numbers // width))

    def gradients(self) -> Iterator[Tree]:
        for weight, bias in self._of_examples(CHUNK):
            parts = [] if self.block.weight is None else [self.block.layer.ordered(weight)]
            if self.block.bias is not None:
                parts.append(bias[..., None])
            found: Tree = vmap(partial(self.block.part, like=self.params))(torch.cat(parts, -1))
            yield found

    def scores(self, vectors: _Vectors) -> Tensor:
        """Without rows for few queries, by g_sᵀ V_q a_s for few queries and positions, else by the gradients of single
        examples."""
        layer, (weight, bias) = self.block.layer, vectors.of(self.block)
        v = vectors.tree[self.block.names[0]]
        queries, pieces = len(v), []
        if self.made is not None:
            return _times_gradients(weight, bias, *self.made)
        if queries <= FEW and weight is not None and (found := self._without_rows(vectors.tree)) is not None:
            return found
        numbers = PIECE.get(v.device.type, PIECE["cuda"])
        if len(self.x) > 0 and queries * (self.g[0].numel() // layer.d_out) <= layer.d_in:
            for a, b in self._positions(max(1, numbers // max(1, queries * self.g[:1].numel()))):
                piece = v.new_zeros(queries, len(a))
                if weight is not None:
                    piece += torch.einsum("ngsqo,ngso->qn", torch.einsum("ngsi,qgoi->ngsqo", a, weight), b)
                pieces.append(piece if bias is None else piece + bias.flatten(1) @ b.sum(-2).flatten(1).T)
            return torch.cat(pieces, dim=1)
        for made in self._of_examples(numbers):
            pieces.append(_times_gradients(weight, bias, *made))
            del made  # before the next ones are made
        return torch.cat(pieces, dim=1)

    def _without_rows(self, vectors: Tree) -> Tensor | None:
        """Σ_s g_sᵀ (V_q a_s + v_q) as g times the output of the layer with V_q and v_q for weight and bias, where the
        layer can do that."""
        assert self.block.weight is not None
        weights, pieces = vectors[self.block.weight], []
        biases = [None] * len(weights) if self.block.bias is None else list(vectors[self.block.bias])
        size = max(1, OUTPUTS.get(self.g.device.type, PIECE["cuda"]) // max(1, self.g[:1].numel()))
        for x, g in zip(self.x.split(size), self.g.split(size), strict=True):
            x, g = cast_floating(x, weights.dtype), g.to(weights.dtype)
            sums = []
            for weight, bias in zip(weights, biases, strict=True):
                outputs = self.block.layer.outputs(x, weight, bias)
                if outputs is None:
                    return None
                sums.append(outputs.mul_(g).sum(tuple(range(1, g.dim()))))
            pieces.append(torch.stack(sums))
        return torch.cat(pieces, dim=1)


def _times_gradients(weight: Tensor | None, bias: Tensor | None, gradients: Tensor, sums: Tensor) -> Tensor:
    """Vectors times the gradients of single examples in the weight, and times those in the bias."""
    pairs = [(v, x) for v, x in ((weight, gradients), (bias, sums)) if v is not None]
    return torch.stack([v.flatten(1) @ x.flatten(1).to(v.dtype).T for v, x in pairs]).sum(0)


class _ModuleCall(_LayerCall):
    """Any other module that treats examples apart: the vector-Jacobian product of one example, for many at once."""

    def __init__(self, module: nn.Module, names: dict[str, str]) -> None:
        self.module, self.names = module, names
        self.own = {local: p.detach() for local, p in module.named_parameters() if local in names}

    def gradients(self) -> Iterator[Tree]:
        dtype = next(iter(self.own.values())).dtype  # under autocast inputs and gradients have others

        def pulled(one: Tensor, gradient: Tensor) -> dict[str, Tensor]:
            one = one.to(dtype) if one.is_floating_point() else one
            made, back = vjp(lambda p: functional_call(self.module, p, (one[None],)), self.own)[:2]
            found: dict[str, Tensor] = back(gradient[None].to(made.dtype))[0]
            return found

        size = max(1, CHUNK // max(1, sum(p.numel() for p in self.own.values())))
        for x, g in zip(self.x.split(size), self.g.split(size), strict=True):
            try:
                found = vmap(pulled)(x, g)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # such as an embedding with max_norm, which writes to its weight
                kind, why = type(self.module).__name__, str(error).splitlines()[0]
                raise UnsuitableError(
                    f"way='layers' has no gradients of single examples in {next(iter(self.names.values()))}, of a "
                    f"{kind} ({why}); use way='forward'."
                ) from error
            yield {self.names[local]: gradient for local, gradient in found.items()}

    def scores(self, vectors: _Vectors) -> Tensor:
        tree = vectors.tree
        pieces = []
        for part in self.gradients():
            products = [tree[name].flatten(1) @ x.flatten(1).to(tree[name].dtype).T for name, x in part.items()]
            pieces.append(torch.stack(products).sum(0))
        return torch.cat(pieces, dim=1)
