"""One point (λ, θ) with its batches, and the promise that looking at it changes nothing.

Every forward pass of a hypergradient goes through a :class:`Point`. It keeps the contract of the library:
when the ``with`` block ends, by success or by exception, the model's parameters, buffers, training mode and
``requires_grad`` flags and the global random states are exactly what they were. Between evaluations it rewinds
random states and buffers, so that dropout draws one mask for all products of a solve.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyperkron.losses import Loss, as_loss
from hyperkron.problem import BilevelProblem, Objective
from hyperkron.solution import HyperkronError, NonFiniteError
from hyperkron.trees import Tree


class Point:
    """The point (λ, θ) at which the pieces of the formula are evaluated; a context manager.

    Args:
        problem: the two objectives.
        model: holds θ, its parameters with ``requires_grad``.
        hyper: holds λ, its parameters with ``requires_grad``.
        inner_batch: the batch of J_in for the cross term, and for the curvature unless ``curvature_batch`` is given.
        outer_batch: the batch of J_out.
        curvature_batch: another batch of J_in on which A is measured.
    """

    def __init__(
        self,
        problem: BilevelProblem,
        model: nn.Module,
        hyper: nn.Module,
        inner_batch: Any,
        outer_batch: Any,
        *,
        curvature_batch: Any = None,
    ) -> None:
        self.problem = problem
        self.model = model
        self.hyper = hyper
        self.inner_batch = inner_batch
        self.outer_batch = outer_batch
        self.curvature_batch = inner_batch if curvature_batch is None else curvature_batch
        self.params = trainable(model, "model")
        self.hypers = trainable(hyper, "hyper")
        self.device, self.dtype = _common_place(self.params, self.hypers)
        self.notes: dict[str, str] = {}
        self._doors: list[tuple[str, Tensor]] = []
        self._stack: ExitStack | None = None
        self._snapshot: _Snapshot | None = None

    def __enter__(self) -> Point:
        self._snapshot = _Snapshot(self.model, self.hyper, self.device)
        self._stack = ExitStack()
        self._stack.callback(self._snapshot.restore)
        self._stack.enter_context(torch.enable_grad())
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._stack is not None
        self._stack.close()

    def inner(self, batch: Any = None, *, differentiable: bool = False) -> Loss:
        """J_in at this point; ``differentiable`` asks for kernels that can be differentiated twice."""
        return self._evaluate(self.problem.inner, "inner", self.inner_batch if batch is None else batch, differentiable)

    def outer(self, *, differentiable: bool = False) -> Loss:
        """J_out at this point."""
        return self._evaluate(self.problem.outer, "outer", self.outer_batch, differentiable)

    def _evaluate(self, function: Objective, level: str, batch: Any, differentiable: bool) -> Loss:
        assert self._snapshot is not None, "a Point is used inside its with block"
        self._snapshot.rewind()
        with ExitStack() as stack:
            if differentiable:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            loss = as_loss(function(self.model, self.hyper, batch))
        self.finite(f"{level} loss", loss.value, f"look for nan or inf in {level}_batch and in the model's parameters")
        return loss

    def finite(self, name: str, value: Tensor, remedy: str) -> None:
        """Refuse a non-finite ``value`` by name; on a GPU the answer is read once, in :meth:`settle`."""
        self._doors.append((f"{name} is not finite; {remedy}.", torch.isfinite(value.detach()).all()))
        if value.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Read all pending finite checks; raise for the first that failed."""
        if not self._doors:
            return
        doors, self._doors = self._doors, []
        passed = torch.stack([flag for _, flag in doors]).tolist()
        for (message, _), good in zip(doors, passed, strict=True):
            if not good:
                raise NonFiniteError(message)

    @contextmanager
    def moved(self, displaced: Tree) -> Iterator[None]:
        """θ replaced by ``displaced``, detached: no graph through the model's parameters is recorded.

        The parameters' own memory is never written: each parameter looks at other storage for the while, and gets
        its own back also when an exception passes through.
        """
        own = {name: p.data for name, p in self.params.items()}
        try:
            for name, p in self.params.items():
                p.requires_grad_(False)
                p.data = displaced[name]
            yield
        finally:
            for name, p in self.params.items():
                p.data = own[name]
                p.requires_grad_(True)

    def substituted(
        self,
        level: Literal["inner", "outer"],
        params: Tree,
        batch: Any,
        *,
        draw: int,
        differentiable: bool,
        where: str,
        remedy: str | None = None,
    ) -> Loss:
        """J_in or J_out with θ replaced by ``params`` and attached to their graph, for methods that move θ.

        Evaluations with the same ``draw`` draw the same dropout masks, those with different ones independent
        masks; draw 0 is that of :meth:`inner`. ``where`` and ``remedy`` go into the error of a non-finite value.
        """
        assert self._snapshot is not None, "a Point is used inside its with block"
        self._snapshot.rewind()
        for module, mode in self._snapshot.training:
            module.training = mode
        if draw:
            _reseed(draw, self.device)
        function = self.problem.inner if level == "inner" else self.problem.outer
        named = {f"model.{name}": p for name, p in params.items()}
        with ExitStack() as stack:
            if differentiable:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            loss = as_loss(functional_call(_Caller(self.model), named, (function, self.hyper, batch)))
        usual = f"look for nan or inf in {level}_batch, in hyper and in the model's parameters"
        self.finite(f"{level} loss {where}", loss.value, remedy or usual)
        return loss


class _Caller(nn.Module):
    """Gives an objective the module form that ``functional_call`` substitutes parameters in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Objective, hyper: nn.Module, batch: Any) -> Loss | Tensor:
        return function(self.model, hyper, batch)


def _reseed(draw: int, device: torch.device) -> None:
    """Random states number ``draw`` of those that follow from the current ones."""
    seed = int(torch.randint(2**62, ())) + draw
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


class _Snapshot:
    """Everything an evaluation may disturb: buffers, training modes, requires_grad flags, random states.

    A buffer's own memory is never written either: it looks at a scratch copy until the end, and the copy is renewed
    between evaluations without a mark on its version, so that a kept graph stays usable.
    """

    def __init__(self, model: nn.Module, hyper: nn.Module, device: torch.device) -> None:
        modules = [*model.modules(), *hyper.modules()]
        self.training = [(m, m.training) for m in modules]
        self.flags = [(p, p.requires_grad) for m in (model, hyper) for p in m.parameters()]
        owned = {id(b): (m, name, b) for m in modules for name, b in m._buffers.items() if b is not None}
        self.buffers = list(owned.values())
        self.own = [b.data for _, _, b in self.buffers]
        self.scratch = [data.clone() for data in self.own]
        for (_, _, buffer), data in zip(self.buffers, self.scratch, strict=True):
            buffer.data = data
        self.device = device
        self.random = random.getstate()
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random.get_state() if numpy is not None else None

    def rewind(self) -> None:
        """Random states and buffers as they were: the next evaluation repeats the last one."""
        random.setstate(self.random)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for module, name, buffer in self.buffers:
            module._buffers[name] = buffer
        if self.scratch:
            torch._foreach_copy_(self.scratch, self.own)

    def restore(self) -> None:
        """The whole promise, kept when the with block ends."""
        self.rewind()
        for (_, _, buffer), data in zip(self.buffers, self.own, strict=True):
            buffer.data = data
        for module, mode in self.training:
            module.training = mode
        for p, flag in self.flags:
            if p.requires_grad != flag:
                p.requires_grad_(flag)


def trainable(module: nn.Module, argument: str) -> Tree:
    """The parameters of ``module`` that require a gradient, by name; refuses a module without any."""
    if not isinstance(module, nn.Module):
        raise HyperkronError(
            f"{argument} is a {type(module).__name__}, not a torch.nn.Module; "
            "wrap a tensor with hyperkron.as_hyper(tensor)."
        )
    found: Tree = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not found:
        total = sum(1 for _ in module.parameters())
        raise HyperkronError(
            f"{argument} has no trainable parameter ({total} parameters, all frozen); "
            f"call {argument}.requires_grad_(True) on the part that is to be learned."
        )
    return found


def _common_place(params: Tree, hypers: Tree) -> tuple[torch.device, torch.dtype]:
    """The one device of θ and λ and the one dtype of θ; a mix is refused by name."""
    first_name, first = next(iter(params.items()))
    for name, p in params.items():
        if p.dtype != first.dtype:
            raise HyperkronError(
                f"model mixes dtypes: {first_name} is {first.dtype}, {name} is {p.dtype}; "
                "use model.to(dtype), and torch.autocast for reduced precision."
            )
    for label, tree in (("model", params), ("hyper", hypers)):
        for name, p in tree.items():
            if p.device != first.device:
                raise HyperkronError(
                    f"{label} parameter {name} is on {p.device} but model parameter {first_name} is on "
                    f"{first.device}; move both with .to({str(first.device)!r})."
                )
            if not p.dtype.is_floating_point:
                raise HyperkronError(f"{label} parameter {name} has dtype {p.dtype}; use a floating point dtype.")
    shared = {id(p) for p in params.values()} & {id(p) for p in hypers.values()}
    if shared:
        name = next(n for n, p in hypers.items() if id(p) in shared)
        raise HyperkronError(f"hyper parameter {name} is also a parameter of model; λ and θ must be distinct.")
    return first.device, first.dtype
