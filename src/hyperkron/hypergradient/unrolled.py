"""Hypergradients by differentiating through the steps of the inner optimizer.

    Φ_T(λ) = J_out(λ, θ^T(λ)),    (θ^{t+1}, s^{t+1}) = step(θ^t, ∇_θ J_in(λ, θ^t), s^t),    t = 0 … T−1

with θ^0 the model's current parameters and s^0 the optimizer's initial state, both independent of λ. The sum
over all paths from λ to J_out is accumulated backwards: with the adjoint α^t = ∂Φ_T/∂(θ^t, s^t),

    dΦ_T/dλ = ∂_λ J_out(λ, θ^T) + Σ_t α^{t+1} ∂_λ step_t,        α^t = α^{t+1} ∂_{(θ,s)} step_t.

The forward sweep keeps iterates (θ^t, s^t), not graphs; the backward sweep rebuilds the graph of one step at
a time. So memory is that of one step's activations plus the kept iterates, however large T is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron import trees
from hyperkron.evaluation.differentiation import gradients_of
from hyperkron.evaluation.point import Level, Point, independent
from hyperkron.hypergradient.base import Hypergradient
from hyperkron.hypergradient.steps import SGD, Step, StepState
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HypergradientResult, HyperkronError, Status, warn_once
from hyperkron.trees import Tree
from hyperkron.validation import check_whole


class Batches(tuple[Any, ...]):
    """One inner batch for every unrolled step: ``Batches([batch_1, …, batch_T])``.

    It is a type of its own because a plain list or tuple is what data loaders give as *one* batch.
    """


_DEFAULT = SGD(lr=0.1)
_REMEDY = "lower the optimizer's lr, take fewer steps, or look for nan or inf in inner_batch"


@dataclass(frozen=True)
class Unrolled(Hypergradient):
    """dΦ_T/dλ through T functional optimizer steps, exactly, in the memory of one step.

    The T steps are a look-ahead from the model's current parameters: the model itself is not moved. Every step draws
    its own dropout mask, and draws it again when it is recomputed. Buffers do not move along the steps: each evaluation
    sees BatchNorm's statistics as they are in the model. ``inner_batch`` is used at every step, unless it is a
    :class:`Batches`.

    Args:
        steps: T, the number of inner steps.
        optimizer: the inner step (:class:`SGD`, :class:`Adam` or :class:`AdamW`), from its initial state.
        last: differentiate only through this many last steps, with the iterate before them held constant;
            ``None`` for all.
        checkpoint_every: keep every k-th iterate and recompute those between. The default 1 keeps T copies of
            θ and the optimizer state; k keeps about T/k + k of them, for one more inner gradient a step.

    Reference: Maclaurin, Duvenaud and Adams, "Gradient-based Hyperparameter Optimization through Reversible Learning"
    (2015); Franceschi et al., "Forward and Reverse Gradient-Based Hyperparameter Optimization" (2017).
    """

    steps: int
    optimizer: Step = _DEFAULT
    last: int | None = None
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        check_whole("checkpoint_every", self.checkpoint_every)
        if self.last is not None:
            check_whole("last", self.last, remedy="it is the number of final steps to differentiate through")
        if self.last is not None and self.last > self.steps:
            raise HyperkronError(
                f"last={self.last!r} is not between 1 and steps={self.steps}; "
                "give the number of final steps to differentiate through, or None for all."
            )
        if not isinstance(self.optimizer, Step):
            raise HyperkronError(
                f"optimizer is a {type(self.optimizer).__name__}, not a functional step that autograd can "
                "pass through; give SGD(lr=…), Adam(lr=…) or AdamW(lr=…) of hyperkron.hypergradient.steps."
            )

    @property
    def inner_batches(self) -> int:
        """One batch for every step."""
        return self.steps

    def fresh(self) -> Unrolled:
        return replace(self)

    def compute(
        self,
        problem: BilevelProblem,
        model: nn.Module,
        hyper: nn.Module,
        inner_batch: Any,
        outer_batch: Any,
    ) -> HypergradientResult:
        """dΦ_T/dλ by parameter name of ``hyper``; model, hyper and random states are left as they were."""
        with Point(problem, model, hyper, inner_batch, outer_batch) as point:
            point.warns_of_strangers = True
            sweep = _Sweep(self, point)
            outer_loss, grads = sweep.hypergradient()
        stats: dict[str, float | int | str] = {
            "steps": self.steps,
            "differentiated": self.steps - sweep.first,
            "inner_gradients": sweep.gradients,
            "kept_iterates": sweep.most_kept,
        }
        return HypergradientResult(grads, Status.BUDGET, float(outer_loss), stats=stats)

    def lookahead(self, problem: BilevelProblem, model: nn.Module, hyper: nn.Module, inner_batch: Any) -> Tree:
        """θ^T, the parameters at which :meth:`compute` evaluates J_out; the model is left as it was."""
        with Point(problem, model, hyper, inner_batch, None) as point:
            sweep = _Sweep(self, point)
            params = sweep.advance(sweep.forward()).params
        return trees.map(torch.clone, params)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise HyperkronError(
                f"state has entries {sorted(state)}, but Unrolled keeps none; it belongs to another method."
            )


def unrolled(steps: int, optimizer: Step = _DEFAULT, *, checkpoint_every: int = 1) -> Unrolled:
    """Reverse-mode differentiation through all T inner steps.

    For plain SGD

        dΦ_T/dλ = ∂_λ J_out − η Σ_{t<T} ∂²_λθ J_in(λ, θ^t) Π_{t<j<T} (I − ηH_j) ∂_θ J_out

    At a minimum of J_in this is the Neumann series of the implicit hypergradient, cut after T terms.

    Args:
        steps, optimizer, checkpoint_every: see :class:`Unrolled`; the optimizer is the one that trains the model.

    Reference: Franceschi et al., "Forward and Reverse Gradient-Based Hyperparameter Optimization" (2017).

    Example:
        >>> from hyperkron.problem import BilevelProblem
        >>> model, decay = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight), nn.init.ones_(decay.weight)
        >>> def inner(model, decay, batch):
        ...     return 0.5 * (decay.weight * model.weight**2).sum()
        >>> def outer(model, decay, batch):
        ...     return model.weight.sum()
        >>> problem = BilevelProblem(inner, outer)
        >>> unrolled(2, SGD(lr=0.5)).compute(problem, model, decay, None, None).grads  # d(1 − λ/2)²/dλ
        {'weight': tensor([[-0.5000]])}
    """
    return Unrolled(steps, optimizer, checkpoint_every=checkpoint_every)


def truncated(steps: int, last: int, optimizer: Step = _DEFAULT, *, checkpoint_every: int = 1) -> Unrolled:
    """T inner steps, differentiated through the last K only: truncated back-propagation.

    For plain SGD

        dΦ_T/dλ ≈ ∂_λ J_out − η Σ_{T−K≤t<T} ∂²_λθ J_in(λ, θ^t) Π_{t<j<T} (I − ηH_j) ∂_θ J_out

    Args:
        last: K, the number of final steps to differentiate through; (θ^{T−K}, s^{T−K}) is held constant.
        steps, optimizer, checkpoint_every: see :class:`Unrolled`.

    Reference: Shaban et al., "Truncated Back-propagation for Bilevel Optimization" (AISTATS 2019).

    Example: ten steps of SGD, differentiated through the last three.
        >>> truncated(10, 3, SGD(lr=0.1)).last
        3
    """
    return Unrolled(steps, optimizer, last, checkpoint_every)


def one_step(lr: float) -> Unrolled:
    """One look-ahead step of gradient descent: T1–T2, and second-order DARTS without weight decay.

        θ^1 = θ^0 − η ∂_θ J_in(λ, θ^0),
        dΦ_1/dλ = ∂_λ J_out(λ, θ^1) − η ∂²_λθ J_in(λ, θ^0) ∂_θ J_out(λ, θ^1).

    It is the implicit formula with A = I/η, its outer gradient taken one step ahead.

    Args:
        lr: η.

    Reference: Luketina et al., "Scalable Gradient-Based Tuning of Continuous Regularization Hyperparameters"
    (ICML 2016); Liu, Simonyan & Yang, "DARTS: Differentiable Architecture Search" (ICLR 2019).

    Example:
        >>> one_step(lr=0.1).steps
        1
    """
    return Unrolled(1, SGD(lr))


@dataclass(frozen=True)
class _Iterate:
    """(θ^t, s^t), and t."""

    t: int
    params: Tree
    state: StepState

    def tensors(self) -> list[Tensor]:
        return [*self.params.values(), *self.state.tensors()]

    def map(self, f: Callable[[Tensor], Tensor]) -> _Iterate:
        return _Iterate(self.t, trees.map(f, self.params), self.state.map(f))


_Adjoint = Sequence[Tensor | None]  # one for each tensor of an _Iterate; None stands for zero


class _Sweep:
    """The forward and backward sweeps of one call."""

    def __init__(self, method: Unrolled, point: Point) -> None:
        self.point, self.optimizer, self.steps = point, method.optimizer, method.steps
        self.first = 0 if method.last is None else method.steps - method.last
        self.every = method.checkpoint_every
        self.kept: dict[int, _Iterate] = {}
        self.most_kept = self.gradients = 0
        given = point.inner_batch
        if isinstance(given, Batches) and len(given) != method.steps:
            raise HyperkronError(
                f"inner_batch holds {len(given)} batches but steps={method.steps}; "
                "give one batch for each step, or a single batch that is used at every step."
            )

    def hypergradient(self) -> tuple[Tensor, Tree]:
        """J_out(λ, θ^T) and dΦ_T/dλ."""
        hypers = self.point.hypers
        before, after = self.linearise(self.forward())  # the last step is not recomputed
        outer_loss, adjoint, direct = self._outer(after.map(Tensor.detach))
        adjoint, through = self._pull_back(before, after, adjoint)
        sizes = [_norm(direct), _norm(through)]
        del before, after  # free this graph before the next one is built
        for t in reversed(range(self.first, self.steps - 1)):
            self._finite(f"∂Φ/∂θ after unrolled step {t + 1} of {self.steps}", adjoint)
            adjoint, further = self._pull_back(*self.linearise(self._recall(t)), adjoint)
            through = _sum(through, further)
            sizes.append(_norm(further))
        if all(x is None for x in through):
            raise HyperkronError(
                f"hyper does not influence the inner loss: ∂_θ J_in depends on none of {sorted(hypers)} in "
                f"the {self.steps - self.first} steps differentiated; in inner, use the hyper it is given "
                "(as weights, penalties, …), without detach() or no_grad()."
            )
        total = zip(hypers.items(), _sum(direct, through), strict=True)
        grads = {name: torch.zeros_like(p) if g is None else g for (name, p), g in total}
        for name, gradient in grads.items():
            self._finite(f"the hypergradient of hyper parameter {name}", [gradient])
        self._warn_cancelled(trees.norm(grads), sizes)
        return outer_loss, grads

    def _warn_cancelled(self, total: Tensor, sizes: list[Tensor]) -> None:
        """Warn if, in half precision, the terms cancel to little more than their rounding error."""
        roundoff = self.point.roundoff
        if roundoff:
            share = float(total) / (sum(map(float, sizes)) or 1.0)
            if 0.0 < share < 16 * roundoff:
                warn_once(
                    "unrolled-cancelled",
                    f"the terms of the hypergradient, one for each unrolled step, cancel to {share:.1%} of their size, "
                    f"which {self.point.dtype} hardly resolves, so its direction may be wrong; use fewer steps, or "
                    "hold the model in float32.",
                )

    def forward(self) -> _Iterate:
        """Step from the model's parameters to (θ^{T−1}, s^{T−1}), keeping the iterates for the backward sweep."""
        params = trees.map(Tensor.detach, self.point.params)
        iterate = _Iterate(0, params, self.optimizer.init(params))
        while iterate.t < self.steps - 1:
            if iterate.t >= self.first and (iterate.t - self.first) % self.every == 0:
                self._keep(iterate)
            iterate = self.advance(iterate)
        return iterate

    def advance(self, iterate: _Iterate) -> _Iterate:
        """One step without a graph."""
        return self._step(iterate, self._gradient(iterate.t, trees.map(_leaf, iterate.params), False))

    def linearise(self, iterate: _Iterate) -> tuple[_Iterate, _Iterate]:
        """(θ^t, s^t) and (θ^{t+1}, s^{t+1}), with the graph from the one and λ to the other."""
        before = iterate.map(_leaf)
        return before, self._step(before, self._gradient(before.t, before.params, True))

    def _pull_back(self, before: _Iterate, after: _Iterate, adjoint: _Adjoint) -> tuple[_Adjoint, _Adjoint]:
        """α^{t+1} ↦ α^t and α^{t+1} ∂_λ step_t, for each parameter of λ; frees the graph."""
        pairs = zip(after.tensors(), adjoint, strict=True)
        known = [(x, a) for x, a in pairs if a is not None and x.requires_grad]
        inputs = before.tensors()
        count = len(inputs)
        wanted = [*inputs, *self.point.hypers.values()]
        found = gradients_of([x for x, _ in known], wanted, [a for _, a in known])
        return found[:count], found[count:]

    def _recall(self, t: int) -> _Iterate:
        """(θ^t, s^t), recomputed from the last kept iterate before it if necessary, and no longer kept."""
        if t not in self.kept:
            iterate = self.kept[t - (t - self.first) % self.every]
            while iterate.t < t:
                iterate = self.advance(iterate)
                self._keep(iterate)
        return self.kept.pop(t)

    def _keep(self, iterate: _Iterate) -> None:
        self.kept[iterate.t] = iterate
        self.most_kept = max(self.most_kept, len(self.kept))

    def _step(self, iterate: _Iterate, grads: Tree) -> _Iterate:
        params, state = self.optimizer.step(iterate.params, grads, iterate.state)
        after = _Iterate(iterate.t + 1, params, state)
        self._finite(f"the iterate after unrolled step {after.t} of {self.steps}", after.tensors())
        return after

    def _gradient(self, t: int, params: Tree, create_graph: bool) -> Tree:
        """∇_θ J_in(λ, θ^t), of the parameters that J_in depends on."""
        given = self.point.inner_batch
        batch = given[t] if isinstance(given, Batches) else given
        where = f"at unrolled step {t + 1} of {self.steps}"
        hint = where if t == 0 else f"{where} (if the steps diverge, lower the optimizer's lr)"
        loss = self.point.evaluate("inner", batch, params, stream=t, differentiable=True, where=hint)
        self.gradients += 1
        found = self._derivatives("inner", loss.value, list(params.values()), create_graph)
        grads = {name: g for name, g in zip(params, found, strict=True) if g is not None}
        if not grads:
            raise independent("inner", f" {where}")
        return grads

    def _outer(self, iterate: _Iterate) -> tuple[Tensor, _Adjoint, _Adjoint]:
        """J_out(λ, θ^T), the adjoint of (θ^T, s^T), and ∂_λ J_out for each of λ's parameters."""
        point, params = self.point, trees.map(_leaf, iterate.params)
        where = f"after {self.steps} unrolled steps (if they diverge, lower the optimizer's lr)"
        loss = point.evaluate("outer", point.outer_batch, params, where=where).value
        found = self._derivatives("outer", loss, [*params.values(), *point.hypers.values()], False)
        adjoint, direct = found[: len(params)], found[len(params) :]
        if all(a is None for a in adjoint):
            raise independent("outer")
        return loss.detach(), [*adjoint, *(None for _ in iterate.state.tensors())], direct

    def _derivatives(self, level: Level, loss: Tensor, inputs: list[Tensor], create_graph: bool) -> _Adjoint:
        """The derivative of ``loss`` by each input, ``None`` where it does not depend on it.

        Refuses a loss that depends on the model's own parameters, which stay where they are while the iterates move.
        """
        if not loss.requires_grad:
            return [None] * len(inputs)
        own = self.point.params
        found = gradients_of(loss, [*inputs, *own.values()], create_graph=create_graph)
        kept = [name for name, g in zip(own, found[len(inputs) :], strict=True) if g is not None]
        if kept:
            raise HyperkronError(
                f"{level} uses {kept[0]} of the model by a reference kept from before (a list of parameters, or an "
                "attribute that is not a parameter), which does not follow the unrolled steps; read it from the model "
                f"that {level} is given: model.parameters(), or the layer itself."
            )
        return found[: len(inputs)]

    def _finite(self, name: str, tensors: _Adjoint) -> None:
        present = [x.detach() for x in tensors if x is not None and x.numel() > 0]
        if present:
            self.point.finite(name, trees.largest({str(i): x for i, x in enumerate(present)}), _REMEDY)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _norm(x: _Adjoint) -> Tensor:
    return trees.norm({str(i): part for i, part in enumerate(x) if part is not None})


def _sum(a: _Adjoint, b: _Adjoint) -> _Adjoint:
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]
