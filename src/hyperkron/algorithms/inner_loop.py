"""Fast training steps of θ between two hypergradients: a small model on a large GPU waits for Python."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hyperkron.evaluation.inputs import explained
from hyperkron.kernels.checkpoints import differentiable_checkpoints
from hyperkron.kernels.graphs import Recording, StaticBatch, available, switches
from hyperkron.kernels.selection import LayoutError, evaluate
from hyperkron.losses import as_loss
from hyperkron.optimizers import LevelOptimizer, Rate, Updates
from hyperkron.problem import BilevelProblem, Objective, check_problem
from hyperkron.solution import HyperkronError, warn_once

WARM_UP = 3
"""Passes before recording, in which libraries choose their algorithms."""
UNCHANGED_STEPS = 3
"""The optimizer's step is recorded after this many steps with the same settings."""


class InnerLoop:
    """Steps of θ on J_in: ``loss = loop.step(batch)``. All algorithms use it for their steps of θ.

    Args:
        problem: its inner objective is minimised.
        model: holds θ.
        hyper: holds λ; its values may change between steps, but not the memory of its parameters.
        optimizer: of θ, alone or in :class:`hyperkron.algorithms.Updates` with a scheduler, clipping and autocast.
        graph: replay the forward and backward pass as a CUDA graph. This needs an objective that never waits for the
            device; if it cannot be recorded, it runs eagerly, with a warning. Batches of other shapes than the first
            run eagerly, and so does a model that is switched, by ``eval()``, a flag or a hook. In TF32 and half
            precision convolutions run in channels-last layout, which changes rounding.
            The optimizer's step is replayed too, if it is SGD or was made with ``capturable=True`` and its step size
            is a tensor or stays the same. Without a GPU it has no effect.
        autocast: run the objective in this dtype (``torch.bfloat16``) where torch considers it safe; θ stays float32.

    Example:
        >>> import torch, hyperkron as hk
        >>> model, weights = torch.nn.Linear(4, 3), hk.SampleWeights(8)
        >>> problem = hk.BilevelProblem(
        ...     lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
        ...     lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
        ... )
        >>> loop = hk.training.InnerLoop(problem, model, weights, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loss = loop.step((torch.ones(8, 4), torch.zeros(8, dtype=torch.long), torch.arange(8)))
    """

    def __init__(
        self,
        problem: BilevelProblem,
        model: nn.Module,
        hyper: nn.Module,
        optimizer: torch.optim.Optimizer | Updates | LevelOptimizer,
        *,
        graph: bool = True,
        autocast: torch.dtype | None = None,
    ) -> None:
        check_problem(problem)
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise HyperkronError(f"autocast={autocast!r} must be torch.bfloat16, torch.float16 or None.")
        if not isinstance(optimizer, LevelOptimizer):
            optimizer = optimizer if isinstance(optimizer, Updates) else Updates(optimizer)
            params = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
            if not isinstance(hyper, nn.Module | None):
                raise HyperkronError(
                    f"hyper is a {type(hyper).__name__}, not a torch.nn.Module; pass that of λ, or None."
                )
            hypers = {} if hyper is None else {id(p): name for name, p in hyper.named_parameters()}
            if name := next((hypers[id(p)] for p in params if p.requires_grad and id(p) in hypers), ""):
                raise HyperkronError(
                    f"optimizer holds {name} of hyper, which would be trained on the inner loss; give it "
                    "model.parameters() alone."
                )
            optimizer = LevelOptimizer({str(i): p for i, p in enumerate(params)}, optimizer, Rate(0.0))
        self.problem, self.model, self.hyper, self.optimizer = problem, model, hyper, optimizer
        self._objective: Objective = problem.inner
        self.autocast = optimizer.autocast if autocast is None else autocast
        self.scaler = optimizer.scaler
        if self.autocast is torch.float16 and self.scaler is None:
            warn_once(
                "autocast-float16", "autocast=torch.float16 without loss scaling may underflow; use torch.bfloat16."
            )
        if graph and self.scaler is not None:
            raise HyperkronError("graph=True records no loss scaling; use autocast=torch.bfloat16 without a scaler.")
        self.params = list(optimizer.params.values())
        self.device = self.params[0].device
        self._wants_graph = graph and available(self.device)
        self._recorded: _Recorded | None = None

    @property
    def recorded(self) -> bool:
        """Whether a CUDA graph has been recorded."""
        return self._recorded is not None

    @property
    def step_recorded(self) -> bool:
        """Whether the optimizer's step is part of what is replayed now."""
        step = None if self._recorded is None else self._recorded.step
        return step is not None and step.recorded

    def replace_problem(self, problem: BilevelProblem) -> None:
        """Minimise the inner objective of another problem from now on."""
        self.problem, self._objective, self._recorded = problem, problem.inner, None

    def replace_objective(self, inner: Objective) -> None:
        """Take steps on ``inner`` from now on; hypergradients keep the problem's own J_in.

        It must have the same value and gradient in θ; a gradient in λ is not needed. This saves time if J_in computes
        something from λ alone, such as rows made by a network: λ does not change between two hypergradients, so
        ``inner`` can compute it once.
        """
        self._objective, self._recorded = inner, None

    def step(self, batch: Any) -> Tensor:
        """Take one optimizer step on ``batch``; returns J_in before the step, detached, without waiting for it."""
        if not self._wants_graph:
            loss, step = self._pass(batch), None
        else:
            loss, step = self._replay(batch)
        self.optimizer.update(step)
        return loss

    def _replay(self, batch: Any) -> tuple[Tensor, RecordedStep | None]:
        """J_in and the optimizer step that follows: replayed if batch and model are as recorded, else eager."""
        if self._recorded is None:
            try:
                self._recorded = _Recorded(self, batch)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                text = f"the inner steps could not be recorded as a CUDA graph ({error!s:.200}); they run eagerly."
                warn_once(f"inner-graph {error!s:.60}", text)
                self._wants_graph = False
                return self._pass(batch), None
        if not self._recorded.fits(batch):
            return self._pass(batch), None
        return self._recorded.replay(batch), self._recorded.step

    def _pass(self, batch: Any) -> Tensor:
        """Forward and backward: J_in, with its gradient in θ's ``.grad`` and none in λ's."""
        kind, keeps = self.device.type, not self._wants_graph
        autocast = torch.autocast(kind, self.autocast, cache_enabled=keeps) if self.autocast else nullcontext()
        with torch.enable_grad(), differentiable_checkpoints():
            with autocast, explained("inner", "inner_batch", batch):
                value = self._value(batch)
            if not value.requires_grad:
                raise HyperkronError("inner returned a loss that depends on neither model nor hyper; do not detach it.")
            scaled = value if self.scaler is None else self.scaler.scale(value)
            wanted = [p for p in self.params if p.requires_grad]  # perhaps not those of the last step
            found = iter(torch.autograd.grad(scaled, wanted, allow_unused=True))
        for p in self.params:
            gradient = next(found) if p.requires_grad else None
            if gradient is not None and self.scaler is not None:
                gradient = gradient / self.scaler.get_scale()
            p.grad = gradient.contiguous() if gradient is not None and self._wants_graph else gradient
        return value.detach()

    def _value(self, batch: Any) -> Tensor:
        """J_in; with special kernels if it is recorded."""
        if not self._wants_graph:
            return as_loss(self._objective(self.model, self.hyper, batch), "inner").value
        try:
            return evaluate(
                lambda: as_loss(self._objective(self.model, self.hyper, batch), "inner").value,
                self.model,
                self.device,
                0,
                differentiable=False,
                recording=True,
            )
        except LayoutError:  # happens in the warm-up, before the recording
            return self._value(batch)


class _Recorded:
    """A forward and backward pass as a CUDA graph, with the memory it reads and writes."""

    def __init__(self, loop: InnerLoop, batch: Any) -> None:
        self.batch = StaticBatch(batch)
        self.parts = [part for module in (loop.model, loop.hyper) if module is not None for part in module.modules()]
        self.switches = switches(self.parts)
        buffers = list(loop.model.buffers())
        saved, random = [b.clone() for b in buffers], torch.cuda.get_rng_state(loop.device)
        try:
            side = torch.cuda.Stream(loop.device)
            side.wait_stream(torch.cuda.current_stream(loop.device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    loop._pass(self.batch.value)
            torch.cuda.current_stream(loop.device).wait_stream(side)
            for p in loop.params:
                p.grad = None
            self.recording = Recording(lambda: loop._pass(self.batch.value))
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, saved, strict=True):
                    buffer.copy_(value)  # the warm-up must not change running statistics
            torch.cuda.set_rng_state(random, loop.device)
        self.gradients = [(p, p.grad) for p in loop.params]
        self.step = RecordedStep(loop.optimizer.optimizer, self.recording.pool) if loop.optimizer.clip is None else None

    def fits(self, batch: Any) -> bool:
        """Whether ``batch`` has the recorded shapes, and the model still computes the recorded function."""
        return self.batch.fits(batch) and switches(self.parts) == self.switches

    def replay(self, batch: Any) -> Tensor:
        """Replay the pass on ``batch``; returns J_in and sets the gradients of θ."""
        self.batch.fill(batch)
        loss = self.recording.replay()
        for p, gradient in self.gradients:
            p.grad = gradient
        return loss.clone()


class RecordedStep:
    """An optimizer's step, which is recorded after :data:`UNCHANGED_STEPS` steps with the same settings, and replayed.

    When settings change (a schedule, a state that is loaded or cleared), it runs eagerly again for as many steps. The
    gradients must be in the same memory at every call. An optimizer whose step computes on the CPU is never recorded.
    ``pool`` is the memory of the recording that computes the gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pool: Any = None) -> None:
        self.optimizer, self.pool = optimizer, pool
        self._can_record = True
        self._recording: Recording[Any] | None = None
        self._settings: list[Any] = []
        self._memory: list[Any] = []
        self._unchanged = 0

    @property
    def recorded(self) -> bool:
        """Whether the next step is replayed if no setting changes."""
        return self._recording is not None

    def __call__(self) -> None:
        """One step."""
        if not (self._can_record and _recordable(self.optimizer)):  # hooks may have come since
            self.optimizer.step()
            return
        if self._changed():
            self._recording, self._unchanged = None, 0
        if self._recording is None and self._unchanged >= UNCHANGED_STEPS:
            self._record()
        if self._recording is None:
            self.optimizer.step()
            self._unchanged += 1
        else:
            self._recording.replay()

    def _changed(self) -> bool:
        """Whether settings have changed since the last call; tensors on the GPU may change, replays read them."""
        values = [v for group in self.optimizer.param_groups for name, v in group.items() if name != "params"]
        tensors = [value for value in values if isinstance(value, Tensor)]
        settings = [value.tolist() if isinstance(value, Tensor) and not value.is_cuda else value for value in values]
        settings = [value for value in settings if not isinstance(value, Tensor)]
        # loading a state replaces its dictionary; clearing it replaces the tensors of the first parameter
        state = self.optimizer.state
        memory = [
            state,
            *(x for parameter in list(state)[:1] for x in (parameter, *state[parameter].values())),
            *tensors,
        ]
        kept = len(memory) == len(self._memory) and all(x is y for x, y in zip(memory, self._memory, strict=True))
        same = kept and settings == self._settings
        self._settings, self._memory = settings, memory
        return not same

    def _record(self) -> None:
        try:
            self._recording = Recording(self.optimizer.step, pool=self.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            text = f"the step of {type(self.optimizer).__name__} could not be recorded as a CUDA graph ({error!s:.200})"
            warn_once(f"step-graph {error!s:.60}", f"{text}; it runs eagerly.")
            self._can_record = False


def _recordable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the whole step runs on the GPU."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
        return False
    return type(optimizer) is torch.optim.SGD or all(group.get("capturable") for group in optimizer.param_groups)
