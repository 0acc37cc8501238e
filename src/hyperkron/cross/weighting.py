"""The cross term if λ only weights: J_in = Σ_r w_r(λ) c_r(θ) + Σ_p α_p(λ) ‖p‖² + terms that do not depend on λ.

Then, with c' = dc/dθ · v the change of the row losses along v,

    X(v) = ∂_λ [ Σ_r w_r c'_r + Σ_p 2 α_p ⟨p, v_p⟩ ] .

Only c changes along v. The weights do not, even if they are computed from θ with stopped gradients, like the losses in
a Meta-Weight-Net. Whether a loss has this form is read from its record (``Term.factors``, ``L2.factors``) and its
autograd graph.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, unpack_dual
from torch.autograd.graph import Node, get_gradient_edge

from hyperkron import trees
from hyperkron.cross.state import Way
from hyperkron.cross.ways import along, filled, forward_mode, sides, slope_of, step_of
from hyperkron.evaluation.differentiation import gradient_tree, graph_nodes
from hyperkron.evaluation.point import Point
from hyperkron.losses import Loss
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree

Factors = tuple[Tensor | float, ...]


class ChangedError(RuntimeError):
    """The inner loss no longer has the structure for which the cross term was decided."""


@dataclass(frozen=True)
class Found:
    """X(v), and the changes along v it was computed from: c' by criterion if λ only weights.

    ``error`` and ``spread`` are how X(v) and the changes vary with the radius of a difference.
    """

    cross: Tree
    parts: list[Tensor] = field(default_factory=list)
    moved: bool = False  # whether weights moved unawares
    way: Way = field(default_factory=Way)
    error: float = 0.0
    spread: float = 0.0

    @property
    def changes(self) -> Tensor:
        """The changes as one vector; empty if λ only weights penalties."""
        return torch.cat([c.reshape(-1) for c in self.parts]) if self.parts else torch.zeros(0, device="cpu")


def structure(point: Point, loss: Loss) -> str:
    """Which weights of ``loss`` depend on λ, as a string; empty if λ does more than weight.

    It has one letter for each criterion (``w`` if λ weights it, else ``-``), then ``p`` if λ weights penalties, and,
    from :func:`with_motion`, ``m`` if weights move with θ. ``loss`` must be evaluated at θ with its graph.
    """
    hypers, params = _ids(point.hypers), _ids(point.params)
    sources: list[Tensor] = []
    letters = ""
    for term in loss.terms:
        weighted = _weighted(term.factors, hypers, params)
        if weighted is None:
            return ""
        letters += "w" if weighted else "-"
        sources += weighted
    penalised = False
    for penalty in loss.l2:
        weighted = _weighted(penalty.factors, hypers, params)
        if weighted is None or (weighted and penalty.parameter.requires_grad and id(penalty.parameter) not in params):
            return ""
        penalised = penalised or bool(weighted)
        sources += weighted
    letters += "p" * penalised
    alone = bool(sources) and not _beside(loss, sources, hypers)
    return letters if point.problem.group.all(alone) and _adds_up(point, loss) else ""


def with_motion(point: Point, v: Tree, radius: float, form: str) -> str:
    """``form``, with ``m`` added if weights move with θ, as functions of θ with stopped gradients do.

    Their derivatives in λ count too: a network whose last layer is zero gives every example the same weight, but the
    derivative in that layer depends on its inputs. Empty if the loss fails or changes when θ requires no gradient, as
    with penalties on parameters that require one.
    """
    try:
        up, down = sides(point, v, step_of(v, radius), False, partial(Read.of, form, point))
        slopes, others = _slopes(point, up), _slopes(point, down)
    except torch.OutOfMemoryError:
        raise
    except (HyperkronError, RuntimeError):
        return ""
    gap, size = trees.norm(trees.subtract(slopes, others)), trees.norm(slopes)
    still = _same(up, down) and float(gap) <= 10 * torch.finfo(size.dtype).eps * float(size)
    return form if point.problem.group.all(still) else f"{form}m"


def _same(up: Read, down: Read) -> bool:
    """Whether the weights on both sides are equal."""
    pairs = [*zip(up.weights, down.weights, strict=True), *((up.decays[n], down.decays[n]) for n in up.decays)]
    return all(torch.equal(a, b) for a, b in pairs)


def _slopes(point: Point, read: Read) -> Tree:
    """The derivative in λ of the weights, summed over rows and parameters with fixed random factors."""
    generator = torch.Generator().manual_seed(0)
    weights = [*read.weights, *read.decays.values()]
    parts = [(w * torch.randn(w.shape, generator=generator, device="cpu").to(w)).sum() for w in weights]
    return gradient_tree(sum(parts[1:], parts[0]), point.hypers)


def difference(point: Point, v: Tree, radius: float, form: str, full: bool = False) -> Found:
    """X(v) from a central difference of the row losses; ``form`` is the :func:`structure` of the loss."""
    epsilon = step_of(v, radius)
    up, down = sides(point, v, epsilon, full, partial(Read.of, form, point))
    changes = [(a - b) / (2 * epsilon).to(a.dtype) for a, b in zip(up.losses, down.losses, strict=True)]
    if not form.endswith("m"):
        waits = point.problem.group.size > 1 or point.execution.queued or point.recording  # for processes or a GPU
        moved = not waits and not _same(up, down)
        return replace(weighted_sum(point, v, up.weights, changes, up.decays), moved=moved)
    with point.moved(trees.map(Tensor.detach, point.params)):
        still = Read.of(form, point, point.inner(), point.params)
    return weighted_sum(point, v, still.weights, changes, still.decays)


def forward(point: Point, v: Tree, form: str) -> Found:
    """X(v) from the tangents of the row losses."""
    with forward_mode(), dual_level():
        loss, params = along(point, v)
        read = Read.of(form, point, loss, params)
        terms = [t for t, letter in zip(loss.terms, form, strict=False) if letter == "w"]
        tangents = [unpack_dual(t.row_losses).tangent for t in terms]
        changes = [torch.zeros_like(c) if t is None else t for c, t in zip(read.losses, tangents, strict=True)]
    return weighted_sum(point, v, read.weights, [c.detach() for c in changes], read.decays)


def row_losses(loss: Loss, form: str) -> Tensor:
    """c as one vector, attached to the graph."""
    return torch.cat([t.row_losses.reshape(-1) for t, letter in zip(loss.terms, form, strict=False) if letter == "w"])


def disagreement(point: Point, rows: Tensor, v: Tree, changes: Tensor) -> float:
    """The relative difference, beyond rounding, between ``changes`` c' and dc/dθ · v by a backward pass.

    They differ if gradients are stopped or estimated inside the model. The result is the largest value of
    |⟨r, c'⟩ − ⟨∂_θ ⟨r, c⟩, v⟩| over three directions r: c' itself, and two with fixed random signs. ``rows`` are the c
    of the inner loss at θ with their graph, which is kept.
    """
    if changes.numel() == 0:
        return 0.0
    group = point.problem.group
    size = float(group.norm(changes))
    noise = rounding(point) * float(trees.norm(v))
    generator = torch.Generator().manual_seed(0)
    signs = [torch.randint(2, (len(rows),), generator=generator, device="cpu").to(rows) * 2 - 1 for _ in range(2)]
    gaps = []
    for r in (*([changes.to(rows) / size] if size else []), *signs):
        expected, steepness = slope_of(point, (rows * r).sum(), v, retain_graph=True)
        point.finite("the slope of the inner loss along v", expected, "look for inf or extreme values in inner_batch")
        (moved,) = group.sum([(changes.double() * r.double()).sum()])
        gap = abs(float(expected.double() - moved))
        gaps.append(max(0.0, gap - noise * float(steepness)))
    return max(gaps) / size if size else math.inf if any(gaps) else 0.0


def rounding(point: Point) -> float:
    """The rounding error of ⟨∂_θ J_in, v⟩, relative to ‖∂_θ J_in‖‖v‖."""
    return min(100 * torch.finfo(point.dtype).eps, 0.03)


@dataclass(frozen=True)
class Read:
    """The weights that depend on λ, with their graph (of criteria, and of penalties by parameter), and row losses."""

    weights: list[Tensor]
    losses: list[Tensor]
    decays: dict[str, Tensor]

    @classmethod
    def of(cls, form: str, point: Point, loss: Loss, params: Tree) -> Read:
        """Read a loss at ``params``; raises :class:`ChangedError` if it no longer has the structure ``form``."""
        names = {id(x): name for name, x in params.items()}
        found = [(_product(term.factors), term.row_losses.detach()) for term in loss.terms]
        decays: dict[str, Tensor] = {}
        for penalty in loss.l2:
            alpha, name = _product(penalty.factors), names.get(id(penalty.parameter))
            if alpha is not None and name is not None:
                decays[name] = decays[name] + alpha if name in decays else alpha
        now = "".join("-" if w is None else "w" for w, _ in found) + "p" * bool(decays)
        factors = [x for some in loss.terms for x in some.factors] + [x for some in loss.l2 for x in some.factors]
        weights = [x for x in factors if isinstance(x, Tensor) and x.requires_grad]
        same = now == form.removesuffix("m") and not _beside(loss, weights, _ids(point.hypers))
        if not (same if point.recording else point.problem.group.all(same)):  # all processes decide again, or none
            raise ChangedError(f"λ does more in the inner loss than weight it as {form!r} says, for this batch")
        live = [(w, c) for w, c in found if w is not None]
        return cls([w for w, _ in live], [c for _, c in live], decays)


def weighted_sum(
    point: Point, v: Tree, weights: list[Tensor], changes: list[Tensor], decays: dict[str, Tensor]
) -> Found:
    """∂_λ [Σ_r w_r c'_r + Σ_p 2 α_p ⟨p, v_p⟩]."""
    parts = [(w * c).sum() for w, c in zip(weights, changes, strict=True)]
    for n, alpha in decays.items():
        p, moved = point.params[n].detach(), v[n]
        parts.append(2 * alpha * trees.dot({n: p}, {n: moved}) if is_sharded(p) else (alpha * (2 * p * moved)).sum())
    found = torch.autograd.grad(parts, list(point.hypers.values()), allow_unused=True)
    return Found(filled(point, dict(zip(point.hypers, found, strict=True))), changes)


def _adds_up(point: Point, loss: Loss) -> bool:
    """Whether ∂_λ J_in follows from the weights and penalties in the record; False if its value was changed later."""
    weights = [(_product(term.factors), term.row_losses.detach()) for term in loss.terms]
    parts = [(w * losses).sum() for w, losses in weights if w is not None]
    for penalty in loss.l2:
        alpha = _product(penalty.factors)
        if alpha is not None:
            p = penalty.parameter.detach()
            parts.append(alpha * trees.norm({"": p}).square() if is_sharded(p) else (alpha * p.square()).sum())
    values = loss.value, sum(parts[1:], parts[0])
    actual, expected = (gradient_tree(x, point.hypers, retain_graph=True) for x in values)
    size, gap = float(trees.norm(actual)), float(trees.norm(trees.subtract(actual, expected)))
    return gap <= {torch.float64: 1e-9, torch.float32: 1e-3}.get(point.dtype, 0.03) * size


def _beside(loss: Loss, sources: Iterable[Tensor], hypers: set[int]) -> bool:
    """Whether ``loss`` depends on λ other than through ``sources``, its weights."""
    rows = [term.row_losses for term in loss.terms]
    if _leaves(rows) & hypers:
        return True
    known = [*sources, *(x for x in rows if x.requires_grad)]
    return bool(_leaves([loss.value], {get_gradient_edge(x).node for x in known}) & hypers)


def _weighted(factors: Factors, hypers: set[int], params: set[int]) -> list[Tensor] | None:
    """The factors that depend on λ; ``None`` if the product also depends on θ, so that it is not a weight."""
    tensors = [x for x in factors if isinstance(x, Tensor) and x.requires_grad]
    reached = [(x, _leaves([x])) for x in tensors]
    found = [x for x, leaves in reached if leaves & hypers]
    return None if found and any(leaves & params for _, leaves in reached) else found


def _product(factors: Factors) -> Tensor | None:
    """The product of the factors with its graph and without tangents; ``None`` if it has no graph."""
    if not any(isinstance(x, Tensor) and x.requires_grad for x in factors):
        return None
    first, *rest = (unpack_dual(x).primal if isinstance(x, Tensor) else x for x in factors)
    product = functools.reduce(operator.mul, rest, first)
    assert isinstance(product, Tensor)
    return product


def _leaves(tensors: Iterable[Tensor], stop: Collection[Node] = ()) -> set[int]:
    """The ids of the leaves behind ``tensors``, not looking behind the nodes in ``stop``."""
    variables = (getattr(node, "variable", None) for node in graph_nodes(tensors, stop))
    return {id(x) for x in variables if x is not None}


def _ids(tree: Tree) -> set[int]:
    return {id(x) for x in tree.values()}
