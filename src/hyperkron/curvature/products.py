"""A = Hessian or Gauss–Newton matrix, known through products with vectors; one graph is kept for all of them."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import (
    Curvature,
    CurvatureState,
    Operator,
    checked_damping,
    l2_curvature,
    warn_opaque,
)
from hyperkron.evaluation.point import Point, independent
from hyperkron.problem import rows, shares
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree


class HessianOperator(Operator):
    """v ↦ (∇²_θθ J_in + δI) v by differentiating the gradient's graph, built once."""

    def __init__(self, point: Point, damping: float) -> None:
        self.point, self.params, self.damping = point, point.params, damping
        self.products, self.roundoff = 0, coarseness(point)
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
        return _damped(self.params, found, v, self.damping, unit)

    def cross(self, v: Tree, hypers: Tree) -> dict[str, Tensor | None]:
        """∂²_λθ J_in · v from the same graph; only where the curvature batch is the inner batch."""
        if self._live is None:
            self._build()
        if not self._live:
            return dict.fromkeys(hypers)
        low = trees.cast(v, self.params)
        found = gradients_of(self._live, list(hypers.values()), [low[n] for n in self._names], retain_graph=True)
        return dict(zip(hypers, found, strict=True))


class GGNOperator(Operator):
    """v ↦ (Jᵀ (∇²_f c) J + L2 + δI) v, with J the Jacobian of the model's outputs."""

    def __init__(self, point: Point, damping: float) -> None:
        self.point, self.params, self.damping = point, point.params, damping
        self.products, self.roundoff = 0, coarseness(point)
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
        out = _damped(self.params, found, v, self.damping, unit)
        for name, penalty in self.l2.items():
            out[name] = out[name] + penalty * v[name]
        return out


class PartedGGNOperator(Operator):
    """The same operator on a batch that is evaluated in parts: Σ_k share_k A_k v, the graph of one part at a time."""

    def __init__(self, point: Point, damping: float) -> None:
        self.point, self.damping = point, damping
        self.products, self.roundoff = 0, coarseness(point)

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
class Hessian(Curvature):
    """A = ∇²_θθ J_in + δI, exactly, through Hessian-vector products (Pearlmutter, 1994).

    It may be indefinite away from a minimum; solvers report that as ``NONPOSITIVE_CURVATURE``.

    Args:
        damping: δ, added once.
    """

    damping: float = 0.0

    def __post_init__(self) -> None:
        checked_damping(self.damping)

    def operator(self, point: Point, state: CurvatureState) -> HessianOperator:
        """The Hessian on the curvature batch."""
        return HessianOperator(point, self.damping)

    def constants(self, state: CurvatureState) -> Hashable:
        return ()


@dataclass(frozen=True)
class GGN(Curvature):
    """A = Σ_n σ_n J_nᵀ (∇²_f c_n) J_n + L2 + δI, the generalized Gauss–Newton matrix (Schraudolph, 2002).

    Positive semi-definite wherever the weights are non-negative, so conjugate gradients are safe.

    Args:
        damping: δ, added once.
    """

    damping: float = 0.0

    def __post_init__(self) -> None:
        checked_damping(self.damping)

    def operator(self, point: Point, state: CurvatureState) -> Operator:
        """The Gauss–Newton matrix on the curvature batch."""
        whole = len(point.problem.parts(point.curvature_batch)) == 1
        if point.recording and not whole:
            raise HyperkronError("GGN counts the rows of every part of a batch on the device; use whole batches")
        return GGNOperator(point, self.damping) if whole else PartedGGNOperator(point, self.damping)

    def constants(self, state: CurvatureState) -> Hashable:
        return ()


class UndifferentiableError(HyperkronError):
    """An operation of the model has no second derivative."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"an operation of the model cannot be differentiated twice ({why}); use KFAC, EKFAC or Identity with a "
            "finite-difference cross term, or an eager implementation."
        )


def gradients_of(
    outputs: Tensor | list[Tensor],
    inputs: list[Tensor],
    vectors: list[Tensor] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` for first and second derivatives, with a named refusal where there is no second one."""
    watched: AbstractContextManager[None] = nullcontext()
    if create_graph:
        nodes = list(graph_nodes([outputs] if isinstance(outputs, Tensor) else outputs))
        _refuse_wrong_derivatives(nodes)
        watched = _refusing_lost_graphs(nodes)
    try:
        with watched:
            found = torch.autograd.grad(
                outputs, inputs, vectors, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
            )
    except RuntimeError as error:
        if any(words in str(error) for words in ("not implemented", "not differentiable", "double backward")):
            raise UndifferentiableError(str(error).splitlines()[0]) from error
        raise
    if create_graph:
        _refuse_dead_ends(found)
    return found


def _refuse_dead_ends(gradients: tuple[Tensor | None, ...]) -> None:
    """Refuse a graph through a function marked ``once_differentiable``: autograd would drop its terms in silence.

    Such a function hangs an error node into the graph, but cut off from the inputs, so that a derivative in given
    inputs never gets there.
    """
    if any(node.name() == "torch::autograd::Error" for node in graph_nodes([g for g in gradients if g is not None])):
        raise UndifferentiableError("a function is marked once_differentiable")


@contextmanager
def _refusing_lost_graphs(nodes: list[torch.autograd.graph.Node]) -> Iterator[None]:
    """Refuse a custom function whose backward pass runs outside autograd: its terms would be lost in silence.

    Its gradients are linear in those it is given, so where these have a graph, its own must have one.
    """
    lost: list[str] = []

    def watch(name: str, made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
        graphs = [g.requires_grad for g in made if g is not None]
        if graphs and not any(graphs) and any(g is not None and g.requires_grad for g in given):
            lost.append(name)

    custom = [node for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction)]
    handles = [node.register_hook(functools.partial(watch, node.name())) for node in custom]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if lost:
        raise UndifferentiableError(f"the backward pass of {lost[0].removesuffix('Backward')} records no graph")


def _refuse_wrong_derivatives(nodes: list[torch.autograd.graph.Node]) -> None:
    """Refuse the two derivatives that torch computes wrongly and in silence.

    The third derivative of batch norm, which the second one of a penalty on gradients needs, takes the statistics of
    the batch for constants (in evaluation mode they are); the second derivative of the fused weight norm takes the norm
    for one. Models with weight norm are evaluated without the fused kernel (``kernels.py``).
    """
    for node in nodes:
        if "BatchNormBackwardBackward" in node.name() and getattr(node, "_saved_train", True):
            raise UndifferentiableError(
                "the loss holds gradients through batch norm, and torch's third derivative of that is wrong"
            )
        if "WeightNormInterfaceBackward" in node.name():
            raise UndifferentiableError(
                "torch's second derivative of torch._weight_norm is wrong; compute v * (g / norm) instead"
            )


def graph_nodes(tensors: list[Tensor]) -> Iterator[torch.autograd.graph.Node]:
    """Every node of the autograd graph behind ``tensors``, once."""
    seen: set[torch.autograd.graph.Node] = set()
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        yield node
        for further, _ in node.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                waiting.append(further)


def coarseness(point: Point) -> float:
    """The unit roundoff of a model in half precision, whose products with float32 vectors have it; else 0."""
    return float(torch.finfo(point.dtype).eps) if point.dtype in (torch.float16, torch.bfloat16) else 0.0


def lowered(v: Tree, params: Tree) -> tuple[Tree, Tensor | None]:
    """(v/c, c) in the dtypes of the parameters; c, which keeps v within the narrow range of float16, or ``None``."""
    narrow = any(p.dtype == torch.float16 and v[name].dtype != p.dtype for name, p in params.items())
    unit = trees.largest(v).clamp_min(1e-30) if narrow else None
    return trees.cast(v if unit is None else trees.scale(v, 1.0 / unit), params), unit


def _damped(
    params: Tree, products: tuple[Tensor | None, ...], v: Tree, damping: float, unit: Tensor | None = None
) -> Tree:
    whole = {
        name: torch.zeros_like(p) if x is None else x.detach().contiguous()
        for (name, p), x in zip(params.items(), products, strict=True)
    }
    whole = trees.cast(whole, v)
    if unit is not None:
        whole = trees.scale(whole, unit)
    return trees.add(whole, v, alpha=damping) if damping else whole
