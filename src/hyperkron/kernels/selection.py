"""Which kernels are used while a hypergradient evaluates a model.

An evaluation that is differentiated twice, or carries tangents, uses attention kernels that support this. It computes
weight norm without torch's fused kernel, whose second derivative is wrong and which has no tangent. On a GPU two more
changes are made where they save time:

- *Second derivatives* of convolutions and batch norm are computed in closed form (``second_order.py``).
- *Layout.* In TF32 and half precision, convolutions run in channels-last layout. The first convolution copies its input
  once; otherwise the library would copy before and after every convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hyperkron.kernels.graphs import modules_of
from hyperkron.kernels.second_order import batch_norm, convolution, plain
from hyperkron.trees import HALF_TYPES

T = TypeVar("T")

LARGE = 2**24
"""A tensor with at least this many numbers is large: its kernels take longer than launching them."""

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_CONTIGUOUS_ONLY: WeakSet[nn.Module] = WeakSet()
"""Models that fail with channels-last images, for example because of ``x.view(len(x), -1)``."""
_NOTHING_TO_CHANGE: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()
"""The batch sizes of each model for which no change saves time; intercepting every function would cost time."""


class LayoutError(RuntimeError):
    """A model does not work in channels-last layout; the next evaluation does not change the layout."""


class Replaced(TorchFunctionMode):
    """Inside the block, functions of torch are replaced by others."""

    def __init__(self, functions: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


class Kernels(Replaced):
    """Replaces torch's functions by those above where that saves time, or ``always``.

    ``second_order``: the result will be differentiated twice, or carries tangents. ``channels_last``: convolutions may
    change the layout; ``converted`` tells whether one did.
    """

    def __init__(self, *, second_order: bool, channels_last: bool, always: bool) -> None:
        norms = {F.batch_norm: batch_norm} if second_order else {}
        super().__init__({**{func: partial(self._convolution, func) for func in _CONVOLUTIONS}, **norms})
        self.second_order, self.channels_last, self.always = second_order, channels_last, always
        self.converted = False

    def _convolution(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
    ) -> Tensor:
        spatial = weight.dim() - 2
        usual = input.dim() == weight.dim() and plain(input) and plain(weight)
        steps = [stride] * spatial if isinstance(stride, int) else list(stride)
        output = input.numel() // max(1, input.shape[1]) * weight.shape[0] // math.prod(steps)
        pays = self.always or max(input.numel(), output) >= LARGE
        if usual and self.channels_last and spatial == 2 and groups == 1 and _coarse(input):
            # channels-last already; images of one pixel or one channel are that and contiguous too
            pays = pays or (input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous())
            if pays:
                self.converted = True
                input = input.contiguous(memory_format=torch.channels_last)
                if self.second_order:  # it is used several times; otherwise the kernel converts it without a copy
                    weight = weight.contiguous(memory_format=torch.channels_last)
        alike = input.dtype == weight.dtype and not torch.is_autocast_enabled(input.device.type)
        if not (self.second_order and pays and usual and alike) or isinstance(padding, str):
            return func(input, weight, bias, stride, padding, dilation, groups)
        pads, gaps = ([n] * spatial if isinstance(n, int) else list(n) for n in (padding, dilation))
        return convolution(input, weight, bias, (steps, pads, gaps, groups))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """v · g/‖v‖ by elementary operations: torch's fused kernel treats ‖v‖ as a constant in its second derivative."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


class WithoutAutocast(TorchFunctionMode):
    """Runs every torch function without autocast on one device type, even if the model enables autocast.

    ``entered`` counts the active contexts, so that later evaluations of the same objective can do the same.
    """

    entered: ClassVar[int] = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.met_autocast = kind, False

    def __enter__(self) -> WithoutAutocast:
        WithoutAutocast.entered += 1
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        WithoutAutocast.entered -= 1
        super().__exit__(*exc)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        enabled = torch.is_autocast_enabled(self.kind)
        if not enabled:
            return func(*args, **(kwargs or {}))
        self.met_autocast = True
        torch.set_autocast_enabled(self.kind, False)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.set_autocast_enabled(self.kind, True)


def chosen(
    model: nn.Module, device: torch.device, size: int, *, differentiable: bool, recording: bool
) -> Kernels | None:
    """The kernels for evaluating ``model`` on a batch of ``size`` numbers; ``None`` if no change saves time."""
    if device.type != "cuda" or (not (differentiable or recording) and small(model, device, size)):
        return None
    kinds = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm)
    if not any(isinstance(module, kinds) for module in modules_of(model)):
        return None
    return Kernels(second_order=differentiable, channels_last=model not in _CONTIGUOUS_ONLY, always=recording)


def small(model: nn.Module, device: torch.device, size: int) -> bool:
    """Whether ``model`` is known to have only small tensors in its convolutions and batch norms on such a batch."""
    return _conditions(device, size) in _NOTHING_TO_CHANGE.get(model, ())


def _conditions(device: torch.device, size: int) -> Hashable:
    """What decides, for one model, whether anything is worth changing."""
    return size, torch.backends.cudnn.allow_tf32, torch.is_autocast_enabled(device.type)


@contextmanager
def twice_differentiable(*modules: nn.Module) -> Iterator[None]:
    """Inside the block, attention and weight norm of ``modules`` have correct second derivatives and forward mode."""
    norms = Replaced({torch._weight_norm: _weight_norm}) if any(map(_has_weight_norm, modules)) else nullcontext()
    with _attention(False, True, False, False, False), norms:
        yield


def same_kernels() -> Callable[[], AbstractContextManager[None]]:
    """A function that returns a context with the kernels in use now, to recompute something later."""
    chosen, flags = (Replaced, WithoutAutocast), _attention_flags()
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, chosen)]

    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            for entered in (_attention(*flags), *modes):
                stack.enter_context(entered)
            yield

    return context


def _attention_flags() -> tuple[bool, ...]:
    """Which attention kernels are allowed: the fast path of transformer layers, unfused, flash, efficient, cuDNN."""
    cuda = torch.backends.cuda
    fused = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    return torch.backends.mha.get_fastpath_enabled(), cuda.math_sdp_enabled(), *fused


@contextmanager
def _attention(*flags: bool) -> Iterator[None]:
    """Inside the block, attention may use only these kernels (:func:`_attention_flags`)."""
    before = _attention_flags()
    try:
        _set_attention(*flags)
        yield
    finally:
        _set_attention(*before)


def _set_attention(fast_path: bool, unfused: bool, flash: bool, efficient: bool, cudnn: bool) -> None:
    """The same as ``torch.nn.attention.sdpa_kernel`` in a tenth of the time; also sets the fast path."""
    torch.backends.mha.set_fastpath_enabled(fast_path)
    torch.backends.cuda.enable_math_sdp(unfused)
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def evaluate(
    function: Callable[[], T],
    model: nn.Module,
    device: torch.device,
    size: int,
    *,
    differentiable: bool,
    recording: bool,
    hyper: nn.Module | None = None,
) -> T:
    """``function()``, which evaluates ``model`` and ``hyper`` on a batch of ``size`` numbers, with the best kernels.

    ``differentiable`` tells whether the result will be differentiated twice, ``recording`` whether a CUDA graph is
    recorded. Raises :class:`LayoutError` if the evaluation failed after a change of layout; a second call does not
    change the layout.
    """
    mode = chosen(model, device, size, differentiable=differentiable, recording=recording)
    modules = [model] if hyper is None else [model, hyper]
    with twice_differentiable(*modules) if differentiable else nullcontext(), mode or nullcontext():
        try:
            found = function()
        except RuntimeError as error:
            if mode is None or not mode.converted or isinstance(error, torch.OutOfMemoryError):
                _CONTIGUOUS_ONLY.discard(model)
                raise
            _CONTIGUOUS_ONLY.add(model)
            raise LayoutError(str(error)) from error
    if mode is not None and not (differentiable or recording or mode.converted):
        _NOTHING_TO_CHANGE.setdefault(model, set()).add(_conditions(device, size))
    return found


def _has_weight_norm(model: nn.Module) -> bool:
    """Whether a part of ``model`` is normalised by ``weight_norm``, as a parametrization or as a hook."""
    return any(
        isinstance(module, _WeightNorm)
        or any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values())
        for module in modules_of(model)
    )


def _coarse(x: Tensor) -> bool:
    """Whether a convolution of ``x`` runs on tensor cores."""
    half = x.dtype in HALF_TYPES or torch.is_autocast_enabled(x.device.type)
    return half or (x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32)
