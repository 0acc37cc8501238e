"""One point (λ, θ) with its batches, and the promise that looking at it changes nothing.

Every forward pass of a hypergradient goes through a :class:`Point`. When the ``with`` block ends, by success or by
exception, the model's parameters, buffers, training mode and ``requires_grad`` flags and the global random states are
exactly what they were. Every evaluation begins at the same random states, buffers and modes, so that dropout draws one
mask for all products of a solve. What was given to ``torch.compile`` is evaluated as it was written.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from hyperkron.batch_tensors import tensors_of
from hyperkron.evaluation import sharded
from hyperkron.evaluation.differentiation import warn_of_hooks, warn_of_strangers
from hyperkron.evaluation.inputs import culprits, differentiable_batch, explained, misplaced
from hyperkron.evaluation.passes import Pass, Passes
from hyperkron.evaluation.snapshot import Snapshot, reseed
from hyperkron.kernels.checkpoints import differentiable_checkpoints
from hyperkron.kernels.execution import Execution
from hyperkron.kernels.graphs import GeneratorCopies, modules_of
from hyperkron.kernels.selection import LayoutError, WithoutAutocast, evaluate, small, twice_differentiable
from hyperkron.losses import Loss, as_loss
from hyperkron.problem import BilevelProblem, Both, call_with, check_problem
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError, NonFiniteError
from hyperkron.trees import HALF_TYPES, Tree

Level = Literal["inner", "outer"]
T = TypeVar("T")


class Point:
    """The point (λ, θ) at which the pieces of the formula are evaluated; a context manager.

    Args:
        problem: the two objectives.
        model: holds θ, its parameters with ``requires_grad``.
        hyper: holds λ, its parameters with ``requires_grad``.
        inner_batch: the batch of J_in for the cross term, and for the curvature unless ``curvature_batch`` is
            given.
        outer_batch: the batch of J_out.
        curvature_batch: another batch of J_in on which A is measured.
        recording: whether the evaluations are recorded as a CUDA graph; then nothing is read from the device.
        generator_copies: the copies of the GPU's random generator that a recording draws from.
        plain: evaluate the objectives without autocast, even where it is enabled.
        variables: θ and λ, if the caller already has them; ``None`` reads them from the modules.
        passes: runs the passes of this point, usually by replaying recordings; ``None`` runs them eagerly.

    Attributes:
        autocast: the caller's autocast, under which the objectives are evaluated; ``None`` without autocast.
        met_autocast: whether a ``plain`` evaluation would have run under autocast.
        execution: eager or recorded execution, with the values that are still to be read.
        keeps: whether a curvature measured in parts may keep gradients of single examples, which saves passes.
        kept: where the curvature stores the gradients of the loss, if the caller asks for them.
        consumes_vectors: whether a recorded pass may free the vectors it is given, to save memory.
        warns_of_strangers: whether to look, at the next inner loss, for parameters of others and for hooks on θ.
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
        recording: bool = False,
        generator_copies: GeneratorCopies | None = None,
        plain: bool = False,
        variables: tuple[Tree, Tree] | None = None,
        passes: Passes | None = None,
    ) -> None:
        check_problem(problem)
        self.problem, self.model, self.hyper = problem, model, hyper
        self.inner_batch = differentiable_batch(inner_batch)
        self.outer_batch = differentiable_batch(outer_batch)
        self.curvature_batch = self.inner_batch if curvature_batch is None else differentiable_batch(curvature_batch)
        self._sharded = sharded.check(model, hyper, problem.group if problem.divided else None)
        self.params, self.hypers = variables or (trainable(model, "model"), trainable(hyper, "hyper"))
        self.device, self.dtype = _common_place(self.params, self.hypers)
        self.notes: dict[str, str] = {}
        self.keeps = self.consumes_vectors = self.warns_of_strangers = False
        self.kept: Any = None
        self.execution = Execution(self.device, recorded=recording)
        self.plain, self.met_autocast = plain or problem.autocast is False, False
        self.autocast: torch.autocast | None = None
        self._stack = ExitStack()
        self._snapshot: Snapshot | None = None
        self._theta_moved, self._generator_copies, self._passes = False, generator_copies, passes

    def __enter__(self) -> Point:
        self._snapshot = Snapshot(self.model, self.hyper, self.device, self._generator_copies)
        self._stack.callback(self._snapshot.restore)
        if self._sharded:
            self._stack.enter_context(sharded.plain_modules(self.model))
        if torch.is_inference_mode_enabled():
            self._stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            self._stack.enter_context(torch.enable_grad())
        self._stack.enter_context(differentiable_checkpoints())
        if "torch._dynamo" in sys.modules:  # without it nothing can have been compiled
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        if torch.is_autocast_enabled(self.device.type):  # for the objectives alone: all else keeps its precision
            torch.clear_autocast_cache()  # it may hold casts of parameters that have moved since
            self.met_autocast = self.plain
            if not self.plain:
                cache = torch.is_autocast_cache_enabled()
                self.autocast = torch.autocast(
                    self.device.type, torch.get_autocast_dtype(self.device.type), cache_enabled=cache
                )
            self._stack.enter_context(torch.autocast(self.device.type, enabled=False))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self.settle()
        if isinstance(error, RuntimeError) and "through the graph a second time" in str(error):
            raise HyperkronError(
                "inner or outer uses a tensor that was computed from hyper or model before the call, perhaps in a "
                "batch; compute it inside, because every evaluation needs its graph again, or detach() it."
            ) from error

    def inner(self, batch: Any = None, *, differentiable: bool = False) -> Loss:
        """J_in at this point; ``differentiable`` asks for kernels that can be differentiated twice."""
        batch = self.inner_batch if batch is None else batch
        loss = self.evaluate("inner", batch, differentiable=differentiable)
        seen = [t.output.requires_grad for t in loss.terms] or [loss.value.requires_grad]
        if not self._theta_moved and not any(seen):
            raise independent("inner")
        return loss

    def outer(self) -> Loss:
        """J_out at this point."""
        return self.evaluate("outer", self.outer_batch)

    def evaluate(
        self,
        level: Level,
        batch: Any,
        params: Tree | None = None,
        *,
        stream: int = 0,
        differentiable: bool = False,
        where: str = "",
    ) -> Loss:
        """J_in or J_out, evaluated from the saved random states and buffers; refuses a value that is not finite.

        Args:
            level: ``"inner"`` or ``"outer"``.
            batch: the batch of this objective.
            params: values to use for θ, attached to their graph; ``None`` uses θ itself.
            stream: evaluations with the same number draw the same dropout masks; :meth:`inner` uses 0.
            differentiable: whether the result will be differentiated twice.
            where: a phrase for error messages.
        """
        assert self._snapshot is not None, "a Point is used inside its with block"
        place = f" {where}" if where else ""
        called, given = self.problem.words(level)
        self._snapshot.rewind()
        if stream:
            reseed(stream, self.device)
        try:
            with explained(called, given, batch):
                value = self._call(level, batch, params, differentiable)
        except LayoutError:
            if self.recording:
                raise
            return self.evaluate(level, batch, params, stream=stream, differentiable=differentiable, where=where)
        except RuntimeError as error:
            if what := misplaced(error, self._tensors(given, batch), self.device, self.dtype):
                raise HyperkronError(f"{called}{place} failed: {what}") from error
            if "nference tensor" in str(error):
                raise HyperkronError(
                    f"{called}{place} uses a tensor made in torch.inference_mode(), which has no gradients; make it "
                    "outside, under torch.no_grad() if need be, or clone() it."
                ) from error
            raise
        loss = as_loss(value, called)
        remedy = f"look for nan, inf or extreme values in {given}, in hyper and in the model's parameters"
        seen = None if self.execution.queued else batch  # a check that waits must not keep the batch
        self.finite(f"{called} loss{place}" if called == level else called, loss.value, remedy, given, seen)
        if self.warns_of_strangers and level == "inner" and loss.value.requires_grad and not self.problem.divided:
            self.warns_of_strangers = False
            warn_of_strangers(loss.value, params or self.params, self.hypers)
            warn_of_hooks(params or self.params)
        return loss

    def _call(self, level: Level, batch: Any, params: Tree | None, differentiable: bool) -> Loss | Tensor:
        """The objective itself, under the kernels chosen for it."""
        function = self.problem.inner if level == "inner" else self.problem.outer
        if params is None and not (self.execution.queued or self.plain or self.autocast):  # nothing to choose
            with twice_differentiable(self.model, self.hyper) if differentiable else nullcontext():
                return function(self.model, self.hyper, batch)

        def call() -> Loss | Tensor:
            with WithoutAutocast(self.device.type) if self.plain else nullcontext() as mode:
                if params is None:
                    value = function(self.model, self.hyper, batch)
                else:
                    named = {f"model.{name}": p for name, p in params.items()}
                    value = call_with(Both(self.model, self.hyper), named, function, batch)
            self.met_autocast = self.met_autocast or (mode is not None and mode.met_autocast)
            return value

        with self.autocast or nullcontext():
            return evaluate(
                call,
                self.model,
                self.device,
                _size(batch),
                differentiable=differentiable,
                recording=self.recording,
                hyper=self.hyper,
            )

    @property
    def recording(self) -> bool:
        """Whether what happens here is recorded as a CUDA graph."""
        return self.execution.recorded

    def run(self, wanted: Pass[T]) -> T:
        """The results of a pass."""
        found: T = wanted.work(self, wanted.given) if self._passes is None else self._passes(self, wanted)
        return found

    @property
    def reuses_pass_memory(self) -> bool:
        """Whether a pass may overwrite the temporary results (:attr:`Pass.temporary`) of the pass before it."""
        return self._passes is not None

    def rewind_random(self) -> None:
        """Restore the random states that every evaluation starts from, before a replay."""
        assert self._snapshot is not None, "a Point is used inside its with block"
        self._snapshot.rewind_random()

    @property
    def roundoff(self) -> float:
        """The unit roundoff of a model in half precision; 0 for other models, which are as precise as the vectors."""
        return float(torch.finfo(self.dtype).eps) if self.dtype in HALF_TYPES else 0.0

    @property
    def small(self) -> bool:
        """Whether an evaluation of J_in waits for Python rather than for the GPU; False before the first one."""
        with self.autocast or nullcontext():
            return small(self.model, self.device, _size(self.inner_batch))

    def finite(self, name: str, value: Tensor, remedy: str, given: str = "", batch: Any = None) -> None:
        """Raise an error if ``value``, a few numbers, is not finite; on a GPU this happens in :meth:`settle`."""
        self.execution.check_finite(
            value, lambda found: NonFiniteError(f"{name} is {found}; {self.culprits(given, batch) or remedy}.")
        )

    def settle(self) -> None:
        """Read all pending finite checks and raise the error of the first that failed."""
        self.execution.settle()

    @property
    def drew_on_host(self) -> bool:
        """Whether an evaluation on a GPU has drawn random numbers on the CPU, which a recording would repeat."""
        return self._snapshot is not None and self._snapshot.drew_on_host

    def drawn(self, anywhere: bool = False) -> bool:
        """Whether the last evaluation drew random numbers from torch, as dropout does, or ``anywhere``."""
        return self._snapshot is not None and self._snapshot.drawn(anywhere)

    @contextmanager
    def moved(self, displaced: Tree) -> Iterator[None]:
        """Replace θ by ``displaced``, detached, inside the block: autograd records no graph through θ.

        The memory of the parameters is not written (:func:`placed`).
        """
        self._theta_moved = True
        try:
            for p in self.params.values():
                p.requires_grad = False
            with placed(self.params, displaced):
                yield
        finally:
            self._theta_moved = False
            for p in self.params.values():
                p.requires_grad = True

    def _tensors(self, given: str = "", batch: Any = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that an objective uses, on this ``batch``, with its name for error messages."""
        if all(batch is not own for own in (self.inner_batch, self.outer_batch, self.curvature_batch)):
            yield from tensors_of(given, batch)
        for label, module in (("model", self.model), ("hyper", self.hyper)):
            for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
                yield from ((f"{label} {kind} {name}", x) for name, x in named)
        yield from tensors_of("inner_batch", self.inner_batch)
        yield from tensors_of("outer_batch", self.outer_batch)
        if self.curvature_batch is not self.inner_batch:
            yield from tensors_of("curvature_batch", self.curvature_batch)

    def culprits(self, given: str = "", batch: Any = None) -> str:
        """Describes tensors that are empty, not finite or extreme, with a remedy; an empty string if there are none."""
        return culprits(self._tensors(given, batch))


@contextmanager
def placed(params: Tree, values: Tree) -> Iterator[None]:
    """Inside the block ``params`` have the values ``values``; their own memory is not written."""
    places = {name: "_local_tensor" if is_sharded(p) else "data" for name, p in params.items()}
    own = {name: getattr(params[name], place) for name, place in places.items()}
    try:
        for name, place in places.items():
            setattr(params[name], place, getattr(values[name], place))
        torch.clear_autocast_cache()  # it may hold casts of the other values
        yield
    finally:
        for name, place in places.items():
            setattr(params[name], place, own[name])
        torch.clear_autocast_cache()


def _size(batch: Any) -> int:
    return sum(x.numel() for _, x in tensors_of("", batch))


def independent(objective: str, where: str = "") -> HyperkronError:
    """The error for an objective that does not depend on θ."""
    return HyperkronError(
        f"{objective} does not depend on the model's parameters{where}; compute it from the model it is given, "
        "without detach() or torch.no_grad()."
    )


def trainable(module: nn.Module, argument: str) -> Tree:
    """The parameters of ``module`` that require a gradient, by name; refuses a module without any."""
    if not isinstance(module, nn.Module):
        remedy = "wrap a tensor with hyperkron.as_hyper(tensor)" if argument == "hyper" else "pass the network itself"
        raise HyperkronError(f"{argument} is a {type(module).__name__}, not a torch.nn.Module; {remedy}.")
    named = dict(module.named_parameters())
    for name, p in named.items():
        if nn.parameter.is_lazy(p):
            raise HyperkronError(f"{argument} parameter {name} has no shape yet; call {argument} once on some data.")
        if not p.is_leaf:
            raise HyperkronError(
                f"{argument} parameter {name} was computed from other tensors, so no optimizer reaches it; put an "
                "nn.Parameter there (torch.func.functional_call leaves its values in a module with two names)."
            )
    buffers = (x for part in modules_of(module) for x in part._buffers.values() if x is not None)
    if any(x.is_inference() for x in itertools.chain(named.values(), buffers)):
        name = next(n for n, x in itertools.chain(named.items(), module.named_buffers()) if x.is_inference())
        raise HyperkronError(
            f"{argument} parameter or buffer {name} was made in torch.inference_mode(), so it has no gradients; "
            f"make {argument} outside, or use copy.deepcopy({argument}) outside."
        )
    found: Tree = {name: p for name, p in named.items() if p.requires_grad}
    if not named:
        raise HyperkronError(f"{argument} ({type(module).__name__}) has no parameters; give it an nn.Parameter.")
    if not found:
        raise HyperkronError(
            f"{argument} has no trainable parameter ({len(named)} parameters, all frozen); "
            f"call {argument}.requires_grad_(True) on the part that is to be learned."
        )
    return found


def _common_place(params: Tree, hypers: Tree) -> tuple[torch.device, torch.dtype]:
    """The device of θ and λ and the dtype of θ; refuses a model that mixes devices or dtypes."""
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
        raise HyperkronError(
            f"hyper parameter {name} is also a parameter of model, but λ and θ must be distinct; "
            "give hyper a parameter of its own (copy.deepcopy)."
        )
    return first.device, first.dtype
