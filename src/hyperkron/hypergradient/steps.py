"""One step of an optimizer as a pure, differentiable function θ⁺, s⁺ = step(θ, g, s).

``torch.optim`` writes parameters in place, so nothing can be differentiated through it. These are the same updates with
the state as an argument and a result, including the treatment of a parameter without a gradient: it is left alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree
from hyperkron.validation import check_nonnegative, check_positive


@dataclass(frozen=True)
class StepState:
    """The state of an optimizer: the steps each parameter has taken, and trees shaped like θ (``momentum``, …)."""

    taken: dict[str, int]
    slots: dict[str, Tree]

    def tensors(self) -> list[Tensor]:
        """All tensors of all slots, in a fixed order."""
        return [x for slot in self.slots.values() for x in slot.values()]

    def map(self, f: Callable[[Tensor], Tensor]) -> StepState:
        """``f`` applied to every tensor of every slot."""
        return StepState(self.taken, {name: trees.map(f, slot) for name, slot in self.slots.items()})

    def updated(self, grads: Tree, **slots: Tree) -> StepState:
        """The state after a step of the parameters in ``grads``, whose entries of ``slots`` are replaced."""
        taken = {name: count + (name in grads) for name, count in self.taken.items()}
        return StepState(taken, {slot: {**self.slots[slot], **new} for slot, new in slots.items()})


class Step(ABC):
    """An optimizer's update as a pure function of parameters, gradients and state."""

    @abstractmethod
    def init(self, params: Tree) -> StepState:
        """The state before the first step."""

    @abstractmethod
    def step(self, params: Tree, grads: Tree, state: StepState) -> tuple[Tree, StepState]:
        """The parameters and the state after one step; a parameter missing from ``grads`` does not move."""


@dataclass(frozen=True)
class SGD(Step):
    """Gradient descent with momentum, as ``torch.optim.SGD``.

        d = g + weight_decay·θ,    m⁺ = momentum·m + (1 − dampening)·d  (m⁺ = d at the first step),
        θ⁺ = θ − lr·m⁺,  or with ``nesterov``  θ⁺ = θ − lr·(d + momentum·m⁺).

    Reference: Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013).

    Example:
        >>> sgd = SGD(lr=0.5)
        >>> theta = {"w": torch.tensor([1.0])}
        >>> sgd.step(theta, {"w": torch.tensor([4.0])}, sgd.init(theta))[0]
        {'w': tensor([-1.])}
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        for name in ("momentum", "dampening", "weight_decay"):
            check_nonnegative(name, getattr(self, name))
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise HyperkronError(
                f"nesterov=True with momentum={self.momentum!r} and dampening={self.dampening!r}; "
                "it needs momentum > 0 and dampening = 0."
            )

    def init(self, params: Tree) -> StepState:
        return _fresh(params, *(("momentum",) if self.momentum else ()))

    def step(self, params: Tree, grads: Tree, state: StepState) -> tuple[Tree, StepState]:
        moving = {name: params[name] for name in grads}
        direction = trees.add(grads, moving, self.weight_decay) if self.weight_decay else grads
        if not self.momentum:
            return {**params, **trees.add(moving, direction, -self.lr)}, state.updated(grads)
        old = {name: state.slots["momentum"][name] for name in grads if state.taken[name]}
        push = {name: direction[name] for name in old}
        buffer = {**direction, **trees.add(trees.scale(old, self.momentum), push, 1.0 - self.dampening)}
        direction = trees.add(direction, buffer, self.momentum) if self.nesterov else buffer
        return {**params, **trees.add(moving, direction, -self.lr)}, state.updated(grads, momentum=buffer)


@dataclass(frozen=True)
class Adam(Step):
    """Adam with bias correction, as ``torch.optim.Adam`` (``weight_decay`` joins the gradient).

        d = g + weight_decay·θ,    m⁺ = β₁m + (1−β₁)d,    v⁺ = β₂v + (1−β₂)d²,
        θ⁺ = θ − lr · m⁺/(1−β₁ᵗ) / (√(v⁺/(1−β₂ᵗ)) + eps).

    Where v⁺ = 0 (all gradients so far were zero, as behind a dead ReLU) the derivative of √v⁺ is taken as 0. There
    m⁺ = 0 too, so this is the exact derivative of the step, while plain autograd gives NaN.

    Reference: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015).

    Example:
        >>> adam = Adam(lr=0.5)
        >>> theta = {"w": torch.tensor([1.0])}
        >>> adam.step(theta, {"w": torch.tensor([4.0])}, adam.init(theta))[0]
        {'w': tensor([0.5000])}
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_positive("eps", self.eps)
        check_nonnegative("weight_decay", self.weight_decay)
        given = self.betas if isinstance(self.betas, Sequence) else ()
        if len(given) != 2 or not all(isinstance(beta, Real) and 0.0 <= beta < 1.0 for beta in given):
            raise HyperkronError(f"betas={self.betas!r:.60} are not two numbers in [0, 1); (0.9, 0.999) are usual.")

    def init(self, params: Tree) -> StepState:
        return _fresh(params, "mean", "square")

    def _along(self, params: Tree, start: Tree, direction: Tree, state: StepState) -> tuple[Tree, StepState]:
        """θ⁺ and the new moments; the parameters in ``start`` move from there, against ``direction``."""
        beta1, beta2 = self.betas
        mean, square = ({name: state.slots[slot][name] for name in direction} for slot in ("mean", "square"))
        squares = trees.map(torch.square, direction)
        mean = trees.add(trees.scale(mean, beta1), direction, 1.0 - beta1)
        square = trees.add(trees.scale(square, beta2), squares, 1.0 - beta2)
        after = state.updated(direction, mean=mean, square=square)
        moved = {}
        for name, theta in start.items():
            count = after.taken[name]
            denominator = _sqrt(square[name]) / math.sqrt(1.0 - beta2**count) + self.eps
            moved[name] = theta - (self.lr / (1.0 - beta1**count)) * (mean[name] / denominator)
        return {**params, **moved}, after

    def step(self, params: Tree, grads: Tree, state: StepState) -> tuple[Tree, StepState]:
        moving = {name: params[name] for name in grads}
        direction = trees.add(grads, moving, self.weight_decay) if self.weight_decay else grads
        return self._along(params, moving, direction, state)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``.

    It is the step of :class:`Adam` without decay, taken from (1 − lr·weight_decay)·θ instead of θ.

    Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).

    Example:
        >>> adamw = AdamW(lr=0.5, weight_decay=0.1)
        >>> theta = {"w": torch.tensor([1.0])}
        >>> adamw.step(theta, {"w": torch.tensor([4.0])}, adamw.init(theta))[0]
        {'w': tensor([0.4500])}
    """

    weight_decay: float = 1e-2

    def step(self, params: Tree, grads: Tree, state: StepState) -> tuple[Tree, StepState]:
        moving = {name: params[name] for name in grads}
        if self.weight_decay:
            moving = trees.scale(moving, 1.0 - self.lr * self.weight_decay)
        return self._along(params, moving, grads, state)


def _sqrt(x: Tensor) -> Tensor:
    """√x whose derivative at 0 is 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def _fresh(params: Tree, *slots: str) -> StepState:
    return StepState(dict.fromkeys(params, 0), {slot: trees.zeros_like(params) for slot in slots})
