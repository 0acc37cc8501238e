"""The building blocks of algorithms: gradients, curvature products, cross terms and hypergradients of a state.

Steps of θ are *live*: BatchNorm statistics advance and dropout draws new masks, as in ordinary training. Every other
evaluation leaves the model's buffers unchanged.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyperkron import cross, trees
from hyperkron.algorithms.base import State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.curvature import Curvature, Operator
from hyperkron.curvature.hessian import HessianOperator
from hyperkron.evaluation.inputs import explained
from hyperkron.evaluation.point import Point, placed
from hyperkron.evaluation.snapshot import HostRandomState
from hyperkron.hypergradient.implicit import outer_gradients
from hyperkron.kernels.checkpoints import differentiable_checkpoints
from hyperkron.kernels.graphs import modules_of
from hyperkron.kernels.selection import WithoutAutocast
from hyperkron.losses import as_loss
from hyperkron.solution import HypergradientResult, HyperkronError
from hyperkron.trees import Tree


@dataclass(frozen=True)
class Gradients:
    """The value and the gradients of one objective at one point."""

    value: Tensor
    theta: Tree
    hyper: Tree


PARTS = {"inner": "inner", "product": "inner", "crossed": "inner", "b": "outer", "direct": "outer"}
"""The pieces of the implicit formula at one (θ, λ, v), ∂θ g, Hv, X(v), b = ∂θ f and ∂λ f: of which loss each is."""


def directions(parts: dict[str, Tree]) -> dict[str, Tree]:
    """SOBA's three directions: ∂θ g, the residual Hv − b, and the hypergradient ∂λ f − X(v) at this v."""
    v, hyper = trees.subtract(parts["product"], parts["b"]), trees.subtract(parts["direct"], parts["crossed"])
    return {"theta": parts["inner"], "v": v, "hyper": hyper}


@contextmanager
def elsewhere(state: State, theta: Tree, hyper: Tree) -> Iterator[None]:
    """Inside the block θ and λ have other values."""
    with placed(state.params, theta), placed(state.hypers, hyper):
        yield


@contextmanager
def kept_buffers(model: nn.Module, hyper: nn.Module) -> Iterator[None]:
    """After the block the buffers of model and hyper are what they were: the same tensors with the same values."""
    own = [(m, m._buffers.copy()) for m in modules_of(model, hyper)]
    kept = [(b, b.detach().clone()) for _, buffers in own for b in buffers.values() if b is not None]
    try:
        yield
    finally:
        for b, value in kept:
            b.data.copy_(value)  # not a new version: graphs from before the block stay valid
        for module, buffers in own:
            module._buffers.update(buffers)


@contextmanager
def kept_random(state: State) -> Iterator[None]:
    """After the block the random states of Python, numpy, and torch on the CPU and the device of θ are as before."""
    device, host = state.generator.device, HostRandomState()
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        try:
            yield
        finally:
            host.restore()


def gradients(
    state: State,
    level: Literal["inner", "outer"],
    batch: Any,
    *,
    theta: Tree | None = None,
    live: bool = False,
    hyper: bool = True,
) -> Gradients:
    """Value, ∂θ and (with ``hyper``) ∂λ of J_in or J_out at (θ, λ), or with ``theta`` in place of θ.

    ``live`` is a real training step of θ, which advances buffers. Gradients are dense, also those of embeddings with
    ``sparse=True``, because algorithms add and multiply them.

    Without ``hyper`` J_in is evaluated under the autocast of θ's optimizer, also at second points (unless there is a
    scaler), so that what is subtracted is rounded alike. With ``hyper`` it never is.
    """
    function = state.problem.inner if level == "inner" else state.problem.outer
    wanted = [*state.params.values(), *(state.hypers.values() if hyper else ())]
    kind, scaler = wanted[0].device.type, state.inner.scaler if live and level == "inner" else None
    low = state.inner.autocast if level == "inner" and not hyper and (live or state.inner.scaler is None) else None
    with (
        nullcontext() if theta is None else placed(state.params, theta),
        nullcontext() if live else kept_buffers(state.model, state.hyper),
        torch.enable_grad(),
        differentiable_checkpoints(),
        torch.autocast(kind, low) if low else nullcontext(),
    ):
        plain = state.problem.autocast is False and (hyper or level == "outer")
        with WithoutAutocast(kind) if plain else nullcontext(), explained(level, f"{level}_batch", batch):
            loss = as_loss(function(state.model, state.hyper, batch), level)
        if not loss.value.requires_grad:
            raise HyperkronError(f"{level} returned a loss that depends on neither model nor hyper; do not detach it.")
        value = loss.value if scaler is None else scaler.scale(loss.value)
        found = torch.autograd.grad(value, wanted, allow_unused=True)
        if scaler is not None:
            found = tuple(g if g is None else g / scaler.get_scale() for g in found)
    count = len(state.params)
    by_hyper = trees.filled(state.hypers, found[count:]) if hyper else {}
    return Gradients(loss.value.detach(), trees.filled(state.params, found[:count]), by_hyper)


def two_gradients(
    state: State, batch: Any, theta: Tree, hypers: Tree | None = None, *, live: bool = True, hyper: bool = True
) -> tuple[Gradients, Gradients]:
    """:func:`gradients` of J_in here and at ``theta`` (and ``hypers``), both with the same random numbers, so that
    their difference has no noise of dropout."""
    with kept_random(state), placed(state.hypers, state.hypers if hypers is None else hypers):
        there = gradients(state, "inner", batch, theta=theta, hyper=hyper)
    return gradients(state, "inner", batch, live=live, hyper=hyper), there


def descend(state: State, batches: BatchSources, steps: int) -> Tensor | None:
    """Take ``steps`` real steps of θ on J_in, each on a new batch; returns the loss before the last step."""
    loss = None
    for _ in range(steps):
        loss = state.loop.step(batches.inner())
    return loss


def alternate(state: State, batches: BatchSources, steps: int) -> StepReport:
    """``steps`` steps of θ on J_in, then one step of λ along the state's hypergradient: one step of AID."""
    inner_loss = descend(state, batches, steps)
    return state.follow(hypergradient(state, batches), inner_loss)


def leader_first(state: State, batches: BatchSources, steps: int) -> StepReport:
    """The same with λ first: the hypergradient is computed before the ``steps`` steps of θ."""
    result = hypergradient(state, batches)
    state.outer.step(result.grads)
    inner_loss = descend(state, batches, steps)
    return state.finish(result.outer_loss, result.grads, inner_loss, status=result.status, stats=result.stats)


def advance(state: State, batches: Iterable[Any], *, drew: bool) -> None:
    """Advance buffers and random states as a training step does, after a gradient that left them unchanged.

    BatchNorm statistics advance. If the gradient ``drew`` random numbers, the next step will draw new ones.
    """
    if drew:
        random.random()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.random()
        for device in {torch.device("cpu"), state.generator.device}:  # unrolled steps are seeded from the CPU
            torch.rand((), device=device)
    if state.model.training and next(state.model.buffers(), None) is not None:
        with torch.no_grad():
            for batch in batches:
                state.problem.inner(state.model, state.hyper, batch)


def curvature_batch(state: State, batches: BatchSources) -> dict[str, Any]:
    """A new curvature batch as an argument of ``compute``; empty if A is measured on the inner batch."""
    if "curvature" not in batches.sources:
        return {}
    check_curvature_data(state, batches)
    return {"curvature_batch": batches.curvature()}


def check_curvature_data(state: State, batches: BatchSources) -> None:
    """Refuse curvature data if the algorithm measures no curvature."""
    method = state.hypergradient
    if "curvature" in batches.sources and not (method is not None and method.measures_curvature):
        who = "this algorithm" if method is None else type(method).__name__
        given = type(batches.sources["curvature"]).__name__
        raise HyperkronError(
            f"curvature_data={given}(…) was given, but {who} measures no curvature "
            "here; leave it out, or use a hypergradient that measures curvature on data, as AID(hyperkron.kfac()) does."
        )


def hypergradient(state: State, batches: BatchSources) -> HypergradientResult:
    """dΦ/dλ at the current point on new batches, by the state's hypergradient."""
    method = state.hypergradient
    assert method is not None
    batch, outer_batch = batches.inners(method.inner_batches), batches.outer()
    own = curvature_batch(state, batches)
    return method.compute(state.problem, state.model, state.hyper, batch, outer_batch, **own)


class PointDerivatives:
    """The pieces of the implicit formula at one point (θ, λ), on any batches; see :func:`at_point`."""

    def __init__(self, point: Point) -> None:
        self._point, self.drew = point, False

    def outer(self, batch: Any) -> tuple[Tensor, Tree, Tree]:
        """J_out, b = ∂θ J_out and ∂λ J_out on ``batch``."""
        self._point.outer_batch = batch
        return outer_gradients(self._point)

    def product(self, batch: Any, v: Tree, curvature: Curvature) -> Tree:
        """(A + δI) v on ``batch``."""
        return self._operator(batch, curvature).matvec(v)

    def cross(self, batch: Any, v: Tree) -> Tree:
        """X(v) = ∂λ⟨∂θ J_in, v⟩ on ``batch``."""
        self._point.inner_batch = batch
        return cross.reverse(self._point, v)

    def hypergradient(self, inner_batch: Any, outer_batch: Any, v: Tree) -> tuple[Tensor, Tree]:
        """J_out and ∂λ f − X(v) for a given ``v``."""
        outer_loss, _, direct = self.outer(outer_batch)
        return outer_loss, trees.subtract(direct, self.cross(inner_batch, v))

    def parts(
        self, inner_batch: Any, outer_batch: Any, v: Tree, curvature: Curvature
    ) -> tuple[Tensor, dict[str, Tree]]:
        """J_out and all :data:`PARTS` for ``v``, on one batch of each level."""
        outer_loss, b, direct = self.outer(outer_batch)
        operator, point = self._operator(inner_batch, curvature), self._point
        (product, along), inner = operator.matvec_and_cross(v, point.hypers), operator.gradients
        if along is None or inner is None:
            graph = HessianOperator(point, 0.0)
            along, inner = graph.cross(v, point.hypers), graph.gradients
        found = _filled(inner, point.params), product, _filled(along, point.hypers), b, direct
        return outer_loss, dict(zip(PARTS, found, strict=True))

    def _operator(self, batch: Any, curvature: Curvature) -> Operator:
        self._point.inner_batch = self._point.curvature_batch = batch
        return curvature.operator(self._point, curvature.init())


@contextmanager
def at_point(state: State) -> Iterator[PointDerivatives]:
    """The derivatives at the current (θ, λ), which must not change inside the block.

    All of them use the same random numbers. When the block ends, model and random states are restored, so draw batches
    before it.
    """
    point = Point(state.problem, state.model, state.hyper, None, None, variables=(state.params, state.hypers))
    with point:
        found = PointDerivatives(point)
        yield found
        point.settle()
        found.drew = point.drawn(anywhere=True)


def _filled(found: Mapping[str, Tensor | None], like: Tree) -> Tree:
    return {n: torch.zeros_like(like[n]) if x is None else x.detach() for n, x in found.items()}


def check_products(curvature: Curvature, algorithm: str) -> None:
    """Refuse a curvature with an inverse in algorithms that update v by one product per step."""
    if not isinstance(curvature, Curvature) or curvature.invertible:
        raise HyperkronError(
            f"curvature={type(curvature).__name__} cannot be used in {algorithm}, which updates v ≈ A⁻¹b by one "
            "product with A per step: use Hessian() or GGN(). Use a curvature with an inverse in "
            "AID(hyperkron.kfac(), …) or AmIGO(hypergradient=hyperkron.kfac(), …)."
        )
