"""The calls of layers in one pass over a batch: from their inputs and output gradients come the gradients of single
examples, and the inner products of these with vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.func import vjp, vmap

from hyperkron import trees
from hyperkron.curvature.base import Eigenbasis
from hyperkron.curvature.kfac.coverage import Block
from hyperkron.curvature.kfac.grams import reached, rows_in_basis
from hyperkron.curvature.kfac.kept import LayerGradients
from hyperkron.curvature.kfac.layers import cast_floating
from hyperkron.problem import call_with
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree

CHUNK = 2**26
"""Numbers held at once as gradients of single examples."""
PIECE = {"cpu": 2**23, "cuda": 2**25}
"""The same where they are used up at once, by device type."""
OUTPUTS = {"cpu": 2**20}
"""The same for outputs of layers, which on a CPU are used up while they are in its cache."""
FEW = 2
"""Up to this many vectors are multiplied by passing each through a layer as its weight."""


class UnsuitableError(HyperkronError):
    """A way does not work with this model or loss; another may."""


class QueryVectors:
    """The vectors V_q, stacked, as layers need them: taken apart once for all batches.

    For the blocks in ``bases``, the tree has their coordinates in the eigenbasis.
    """

    def __init__(self, tree: Tree, bases: Mapping[str, Eigenbasis]) -> None:
        self.tree, self.bases = tree, bases
        # the others are left out by the method; a look at the first vector mostly tells
        self.used = {name for name, v in tree.items() if bool(v[:1].any()) or bool(v.any())}
        self._parts: dict[str, tuple[Tensor | None, Tensor | None]] = {}

    def of(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        """Of the weight of a layer (queries, groups, d_out, d_in), its columns in the order of the rows that the layer
        makes of an input (in an eigenbasis as they are), and of the bias (queries, groups, d_out)."""
        if block.name not in self._parts:
            layer, weight, bias = block.layer, None, None
            if block.weight is not None:
                matrices = vmap(layer.to_matrix)(self.tree[block.weight])
                if block.name not in self.bases:
                    matrices = layer.reordered(matrices.flatten(0, 1).mT).mT.unflatten(0, matrices.shape[:2])
                weight = matrices.contiguous()
            if block.bias is not None:
                bias = self.tree[block.bias].unflatten(1, (layer.groups, layer.d_out))
            self._parts[block.name] = weight, bias
        return self._parts[block.name]


class LayerCall(ABC):
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

    def coordinates(self, bases: Mapping[str, Eigenbasis]) -> Iterator[Tree]:
        """The same, but of blocks in ``bases`` the coordinates of A⁻¹ times the gradients."""
        return self.gradients()

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
    def scores(self, vectors: QueryVectors) -> Tensor:
        """⟨V_q, ∂_θ c_n⟩ over the parameters of this module: (queries, examples)."""


class BlockCall(LayerCall):
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

    def coordinates(self, bases: Mapping[str, Eigenbasis]) -> Iterator[Tree]:
        basis = bases.get(self.block.name)
        if basis is None:
            yield from self.gradients()
            return
        layer, d, spectrum = self.block.layer, self.block.layer.d_in, basis.spectrum
        for a, b in rows_in_basis(self.block, *self._wide(), basis.a, basis.b):
            found: Tree = {}
            if self.block.weight is not None:  # apart from the bias, so that neither is copied
                shape = self.params[self.block.weight].shape
                made = (b.mT @ a[..., :d]).div_(spectrum[..., :d])
                found[self.block.weight] = vmap(partial(layer.to_weight, shape=shape))(made)
            if self.block.bias is not None:
                found[self.block.bias] = ((b * a[..., -1:]).sum(-2) / spectrum[..., -1]).flatten(1)
            yield found

    def _rows(self, size: int, basis: Eigenbasis | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """As :meth:`_positions`, perhaps in an eigenbasis, and Σ_s b_s times the input that is 1 for the bias."""
        if basis is None:
            yield from ((a, b, b.sum(-2)) for a, b in self._positions(size))
            return
        d_in = self.block.layer.d_in
        for x, g in zip(*(t.split(size) for t in self._wide()), strict=True):
            for a, b in rows_in_basis(self.block, x, g, basis.a, basis.b):
                yield a[..., :d_in], b, (b * a[..., -1:]).sum(-2)

    def scores(self, vectors: QueryVectors) -> Tensor:
        """Without rows for few queries, by g_sᵀ V_q a_s for few queries and positions, else by the gradients of single
        examples."""
        layer, (weight, bias) = self.block.layer, vectors.of(self.block)
        v = vectors.tree[self.block.names[0]]
        queries, basis, pieces = len(v), vectors.bases.get(self.block.name), []
        if self.made is not None:
            return _times_gradients(weight, bias, *self.made)
        if queries <= FEW and weight is not None and basis is None:
            found = self._without_rows(vectors.tree)
            if found is not None:
                return found
        numbers = PIECE.get(v.device.type, PIECE["cuda"])
        by_positions = len(self.x) > 0 and queries * (self.g[0].numel() // layer.d_out) <= layer.d_in
        if by_positions or layer.tokens or basis is not None:
            size = max(1, numbers // max(1, queries * self.g[:1].numel())) if by_positions else max(1, len(self.x))
            for a, b, sums in self._rows(size, basis):
                piece = v.new_zeros(queries, len(a)) if bias is None else bias.flatten(1) @ sums.flatten(1).T
                if weight is not None:
                    piece += (_times_positions if by_positions else partial(_times_outputs, numbers))(weight, a, b)
                pieces.append(piece)
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


def _times_positions(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Σ_s b_sᵀ V_q a_s, through V_q a_s."""
    which = reached(b)
    if which is None:
        return torch.einsum("ngsqo,ngso->qn", torch.einsum("ngsi,qgoi->ngsqo", a, weight), b)
    rows, gradients = (x.flatten(0, 2)[which] for x in (a, b))
    dots = torch.einsum("rqo,ro->qr", torch.einsum("ri,qoi->rqo", rows, weight[:, 0]), gradients)
    return dots.new_zeros(len(weight), len(a)).index_add_(1, which // a.shape[2], dots)


def _times_outputs(numbers: int, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The same through Σ_s b_s a_sᵀ, of some outputs at a time: at most ``numbers`` numbers, for at least one."""
    total = weight.new_zeros(len(weight), len(a))
    size = max(1, numbers // max(1, len(a) * weight.shape[1] * weight.shape[3]))
    for v, some in zip(weight.split(size, 2), b.split(size, 3), strict=True):
        total.addmm_(v.flatten(1), (some.mT @ a).flatten(1).T)
    return total


def _times_gradients(weight: Tensor | None, bias: Tensor | None, gradients: Tensor, sums: Tensor) -> Tensor:
    """Vectors times the gradients of single examples in the weight, and times those in the bias."""
    pairs = [(v, x) for v, x in ((weight, gradients), (bias, sums)) if v is not None]
    return torch.stack([v.flatten(1) @ x.flatten(1).to(v.dtype).T for v, x in pairs]).sum(0)


class ModuleCall(LayerCall):
    """Any other module that treats examples apart: the vector-Jacobian product of one example, for many at once."""

    def __init__(self, module: nn.Module, names: dict[str, str]) -> None:
        self.module, self.names = module, names
        self.own = {local: p.detach() for local, p in module.named_parameters() if local in names}

    def gradients(self) -> Iterator[Tree]:
        dtype = next(iter(self.own.values())).dtype  # under autocast inputs and gradients have others

        def pulled(one: Tensor, gradient: Tensor) -> dict[str, Tensor]:
            one = one.to(dtype) if one.is_floating_point() else one
            made, back = vjp(lambda p: call_with(self.module, p, one[None]), self.own)[:2]
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

    def scores(self, vectors: QueryVectors) -> Tensor:
        tree = vectors.tree
        pieces = []
        for part in self.gradients():
            products = [tree[name].flatten(1) @ x.flatten(1).to(tree[name].dtype).T for name, x in part.items()]
            pieces.append(torch.stack(products).sum(0))
        return torch.cat(pieces, dim=1)
