"""Large batches in small pieces: the same loss, gradients and products, with the memory of one piece.

For a mean over examples J(batch) = Σ_k R_k J(part k) / Σ_k R_k, with R_k the (valid) rows of a part, and so do its
gradient, its Hessian products and its cross term. Each part is evaluated, differentiated and forgotten before the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.algorithms.derivatives import kept_buffers
from hyperkron.batch_tensors import cut, tensors_of
from hyperkron.evaluation.differentiation import gradients_of
from hyperkron.evaluation.point import Level
from hyperkron.kernels.selection import WithoutAutocast, twice_differentiable
from hyperkron.losses import Loss, as_loss
from hyperkron.problem import BilevelProblem, Both, Objective, call_with, check_problem, rows, shares
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError
from hyperkron.training.randomness import kept_random_state, random_state, same_random_state, set_random_state
from hyperkron.validation import check_whole

Gradients = tuple[Tensor | None, ...]
Derive = Callable[[Tensor, tuple[Tensor, ...]], Gradients]
"""(J, parameters) → a derivative of J for each of these; empty where there is none."""


class Accumulated(BilevelProblem):
    """A problem whose batches are evaluated in micro-batches: the same numbers up to rounding, less memory.

    It serves wherever the problem does: gradients, Hessian and Gauss–Newton products, KFAC and EKFAC (their factors are
    sums over examples), cross terms by double backward and by finite difference. Not supported, and refused: losses
    that are not means over examples (sums, contrastive losses, weights normalised over the batch), BatchNorm in
    training mode (it mixes the examples of a batch), and forward mode. Dropout masks differ from those of the whole.

    Args:
        problem: the two objectives, each a mean over the examples of its batch (penalties that do not depend on the
            batch may be added). Tensors are cut along their first dimension, and lists with a text for each example.
        micro_batch: examples in a piece; ``None`` for whole batches.

    Example:
        >>> import hyperkron as hk
        >>> model, x = nn.Linear(2, 1), torch.randn(7, 2)
        >>> whole = hk.BilevelProblem(lambda m, h, b: m(b).square().mean(), lambda m, h, b: m(b).mean())
        >>> pieces = hk.training.Accumulated(whole, micro_batch=3)
        >>> [len(part) for part in pieces.parts(x)]
        [3, 3, 1]
        >>> bool((pieces.inner(model, nn.Module(), x).value - whole.inner(model, None, x)).abs() < 1e-6)
        True
    """

    def __init__(self, problem: BilevelProblem, micro_batch: int | None = None) -> None:
        check_problem(problem)
        if isinstance(problem, Accumulated):
            problem = problem.whole
        if problem.group.size > 1:
            raise HyperkronError(
                f"problem is divided among {problem.group.size} processes, which would not evaluate micro-batches in "
                "step; use smaller batches or more processes, and no HalveOnOutOfMemory."
            )
        object.__setattr__(self, "whole", problem)
        object.__setattr__(self, "_size", _Size())
        self.resize(micro_batch)
        levels = _Pieces("inner", problem.inner, self._size), _Pieces("outer", problem.outer, self._size)
        super().__init__(*levels, autocast=problem.autocast)

    whole: BilevelProblem
    _size: _Size

    @property
    def micro_batch(self) -> int | None:
        """The number of examples in a piece."""
        return self._size.value

    def resize(self, micro_batch: int | None) -> None:
        """Use pieces of this size from now on."""
        if micro_batch is not None:
            check_whole("micro_batch", micro_batch, remedy="None evaluates whole batches")
        self._size.value = micro_batch

    def parts(self, batch: Any) -> list[Any]:
        return split(batch, self._size.value)


@dataclass
class _Size:
    """The size of a piece, and the levels known to be means."""

    value: int | None = None
    means: set[Level] = field(default_factory=set)


@dataclass(frozen=True)
class _Pieces:
    """An objective that evaluates large batches piece by piece."""

    level: Level
    function: Objective
    size: _Size

    def __call__(self, model: nn.Module, hyper: nn.Module, batch: Any) -> Loss | Tensor:
        """The objective itself on a small batch; else a loss with the same value and gradients, summed over pieces."""
        parts = split(batch, self.size.value)
        if len(parts) == 1:
            return self.function(model, hyper, batch)
        if found := batch_norms(model):
            raise HyperkronError(
                f"BatchNorm ({found[0]}) in training mode computes other statistics on micro-batches than on the whole "
                "batch; use eval() for it, GroupNorm or LayerNorm instead, or smaller batches."
            )
        some = split(batch, max(2, length(parts[0])))[0]
        check_is_mean(self.level, self.function, model, hyper, some, self.size.means)
        work = _Work(self.function, model, hyper, parts)
        inputs = [x for x in work.named().values() if x.requires_grad]
        if not inputs or not torch.is_grad_enabled():
            return as_loss(work.mean(tuple(work.named()[name] for name in work.names))[0])
        return as_loss(_Value.apply(work, *inputs))


# --- batches -----------------------------------------------------------------------------------------------


def length(batch: Any) -> int:
    """The number of examples in a batch, which is the first dimension of its tensors; 0 if it has none."""
    found = [len(x) for _, x in tensors_of("batch", batch) if x.dim() > 0]
    if any(n != found[0] for n in found):
        raise HyperkronError(
            f"a batch with tensors of lengths {found} cannot be cut into micro-batches; give all of them the examples "
            "as first dimension."
        )
    return found[0] if found else 0


def split(batch: Any, size: int | None) -> list[Any]:
    """A batch as pieces of at most ``size`` examples, of the same structure."""
    if size is None:
        return [batch]
    count = length(batch)
    if count <= size:
        return [batch]
    return [cut(batch, count, slice(start, start + size)) for start in range(0, count, size)]


# --- sums over pieces --------------------------------------------------------------------------------------


class _Work:
    """An objective, its modules and the pieces; every evaluation draws the same random numbers."""

    def __init__(self, function: Objective, model: nn.Module, hyper: nn.Module, parts: list[Any]) -> None:
        self.function, self.both, self.parts = function, Both(model, hyper), parts
        self.random: dict[str, Any] = random_state()
        device = next(iter(self.named().values()), torch.zeros((), device="cpu")).device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.without = WithoutAutocast.entered > 0  # needed later: pieces are evaluated again in the backward pass
        self.names = [name for name, x in self.named().items() if x.requires_grad and not is_sharded(x)]

    def named(self) -> dict[str, Tensor]:
        """θ and λ as they are now, substituted ones included."""
        return dict(self.both.named_parameters())

    def _losses(self, tensors: tuple[Tensor, ...]) -> Iterator[tuple[Loss, tuple[float, ...]]]:
        """The loss and the rows of each piece, with ``tensors`` instead of the parameters that require a gradient."""
        kind, dtype, enabled = self.autocast
        substitutes = dict(zip(self.names, tensors, strict=True))
        for part in self.parts:
            without = WithoutAutocast(kind) if self.without else contextlib.nullcontext()
            with torch.autocast(kind, dtype, enabled=enabled), without:
                loss = as_loss(call_with(self.both, substitutes, self.function, part))
            yield loss, rows(loss.terms, length(part))

    def mean(self, inputs: tuple[Tensor, ...], derive: Derive | None = None) -> tuple[Tensor, Gradients]:
        """Σ_k R_k (J_k, derive(J_k, inputs)) / Σ_k R_k at these values of the parameters; else J alone."""
        leaves = tuple(x.detach().requires_grad_(derive is not None) for x in inputs)
        value, sums, counts = torch.zeros((), device="cpu"), list[Tensor | None]([None] * len(inputs)), []
        with torch.set_grad_enabled(derive is not None):
            for loss, count in self._losses(leaves):
                counts.append(count)
                value = value.to(loss.value) + loss.value.detach() * count[0]
                for i, g in enumerate(derive(loss.value, leaves) if derive else ()):
                    if g is not None:
                        scaled, old = g.detach() * count[0], sums[i]
                        sums[i] = scaled if old is None else old + scaled
                del loss
        shares(counts)  # refuses unequal ones
        total = sum(count[0] for count in counts)
        return value / total, tuple(None if x is None else x / total for x in sums)

    def gradients(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Gradients]:
        """J and its gradient."""

        def derive(value: Tensor, leaves: tuple[Tensor, ...]) -> Gradients:
            depends = bool(leaves) and value.requires_grad
            return torch.autograd.grad(value, leaves, allow_unused=True) if depends else ()

        return self.mean(inputs, derive)

    def products(self, inputs: tuple[Tensor, ...], used: list[int], vectors: tuple[Tensor, ...]) -> Gradients:
        """∂⟨∂J, v⟩: Hessian products and cross terms, with the draws of the gradient."""

        def derive(value: Tensor, leaves: tuple[Tensor, ...]) -> Gradients:
            first = gradients_of(value, [leaves[i] for i in used], create_graph=True)
            pairs = [(g, v) for g, v in zip(first, vectors, strict=True) if g is not None and g.requires_grad]
            live, along = [g for g, _ in pairs], [v for _, v in pairs]
            return torch.autograd.grad(live, leaves, along, allow_unused=True) if pairs else ()

        with kept_random_state(), twice_differentiable(self.both):
            set_random_state(self.random)
            return self.mean(inputs, derive)[1]


class _Value(torch.autograd.Function):
    """J, with its gradient computed in the forward pass, so that this is where memory may run out."""

    @staticmethod
    def forward(ctx: Any, work: _Work, *inputs: Tensor) -> Tensor:
        value, gradients = work.gradients(inputs)
        ctx.work, ctx.used = work, [i for i, g in enumerate(gradients) if g is not None]
        ctx.save_for_backward(*inputs, *(g for g in gradients if g is not None))
        return value

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        count = len(ctx.work.names)
        inputs, gradients = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled():
            gradients = _Gradient.apply(ctx.work, ctx.used, gradients, *inputs)
        found: list[Tensor | None] = [None] * count
        for i, g in zip(ctx.used, gradients, strict=True):
            found[i] = scale * g
        return None, *found


class _Gradient(torch.autograd.Function):
    """∂J as a function of θ and λ; its derivative along v is a sum over pieces too."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, used: list[int], gradients: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.work, ctx.used = work, used
        ctx.save_for_backward(*inputs)
        return tuple(g.clone() for g in gradients)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *vectors: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.work.products(ctx.saved_tensors, ctx.used, vectors)


# --- what is not possible in pieces ------------------------------------------------------------------------


def batch_norms(model: nn.Module) -> list[str]:
    """The BatchNorm layers in training mode, which mix the examples of a batch."""
    kinds = nn.modules.batchnorm._BatchNorm
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module.training]


def check_is_mean(
    level: Level, function: Objective, model: nn.Module, hyper: nn.Module, part: Any, means: set[Level]
) -> None:
    """Raise an error if J is not a mean over examples; otherwise add its level to ``means``, to check it only once.

    J and its gradient on one piece are compared with those on its halves. A loss that draws random numbers, or that
    fails on a half (all rows masked), is not compared, and neither are gradients of sharded parameters.
    Pieces of one example are not compared where memory has no room for two.
    """
    halves = split(part, -(-length(part) // 2))
    if level in means or len(halves) == 1:
        return
    work = _Work(function, model, hyper, [part])
    named = work.named()
    inputs, together = tuple(named[name] for name in work.names), any(is_sharded(x) for x in named.values())
    try:
        with kept_buffers(model, hyper), kept_random_state():
            whole, both, drew, coarse = _on_whole_and_halves(work, inputs, part, halves)
    except (HyperkronError, torch.OutOfMemoryError):
        if together:  # the other processes go on to the next half, which needs this one
            raise
        return
    coarse = max(coarse, 0.1 if any(x.dtype.itemsize == 2 for x in inputs) else 0.0)
    pairs = zip((whole[0], *whole[1]), (both[0], *both[1]), strict=True)
    steepest = max((float(g.abs().max()) for g in whole[1] if g is not None and g.numel()), default=0.0)
    if not drew and any(_differ(x, y, coarse, steepest) for x, y in pairs):
        raise HyperkronError(
            f"{level} or its gradient is not the same on {length(part)} examples ({float(whole[0]):.6g}) as on "
            f"average over two halves of them ({float(both[0]):.6g}): it is not a mean over examples and has no exact "
            "micro-batches; divide sums by the batch size, do not normalise over the batch, or use whole batches."
        )
    means.add(level)


def _on_whole_and_halves(work: _Work, inputs: tuple[Tensor, ...], part: Any, halves: list[Any]) -> tuple[Any, ...]:
    """J and its gradient on a piece and on its halves, whether random numbers were drawn, and the relative rounding.

    Evaluated without autocast, because its rounding would hide differences; with autocast if the objective needs it.
    """
    before, asked = random_state(), work.without
    for without in (True, asked):
        work.without = without
        try:
            work.parts = [part]
            whole = work.gradients(inputs)
            drew = not same_random_state(before, random_state())
            work.parts = halves
            return whole, work.gradients(inputs), drew, 0.0 if without else 0.1
        except HyperkronError:
            raise
        except RuntimeError:  # such as tensors in half precision beside others
            if work.without == asked:
                raise
            set_random_state(before)
    raise AssertionError


def _differ(x: Tensor | None, y: Tensor | None, coarse: float, steepest: float) -> bool:
    """Whether two values differ by more than rounding, including that of TF32 and half precision (``coarse``).

    A gradient far below the ``steepest`` may be only rounding: that of the biases of attention keys is zero.
    """
    if x is None or y is None:
        return (x is None) != (y is None)
    size = float(torch.maximum(x.abs().max(), y.abs().max())) if x.numel() else 0.0
    tolerance = max(coarse, 1e-6 if x.dtype == torch.float64 else 1e-2)
    least = torch.finfo(x.dtype).eps ** 0.5 * steepest
    return size > 0 and float((x - y).abs().max()) > tolerance * max(size, least)
