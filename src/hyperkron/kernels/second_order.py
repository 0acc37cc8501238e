"""Convolution and batch norm with fast tangents and second derivatives, computed by the kernels of first derivatives.

torch computes the second derivative of a convolution in its weight as a convolution with a whole image as its kernel.
For batch norm it needs dozens of passes over memory. Both have closed forms. For a convolution these are convolutions.
For z = w x̂ + b with x̂ = (x − mean)/std over N values of a channel, the Jacobian of x̂ in x is symmetric,

    P = (I − 11ᵀ/N − x̂x̂ᵀ/N)/std ,

so the tangent of batch norm along ẋ is the kernel of its backward pass applied to ẋ. The backward pass itself,
g ↦ w P g, has the pullback u ↦ w P u in g, and in x

    −(w/N std) P (⟨g, x̂⟩ u + ⟨u, x̂⟩ g) − (⟨u, w P g⟩/N std) x̂ ,

the same kernel again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def plain(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary tensor, not one inside ``torch.func``."""
    return type(x) in (Tensor, nn.Parameter) and torch.func.debug_unwrap(x) is x


Shape = tuple[list[int], list[int], list[int], int]
"""Stride, padding, dilation and groups."""


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    stride, padding, dilation, groups = shape
    return torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def _convolution_pullback(
    g: Tensor, x: Tensor, weight: Tensor, shape: Shape, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias; ``None`` where they are not ``wanted``."""
    stride, padding, dilation, groups = shape
    return torch.ops.aten.convolution_backward(
        g, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0] * len(stride), groups, wanted
    )


class _Convolution(torch.autograd.Function):
    """z = W * x + b, whose derivatives are convolutions again."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
        return _convolve(x, weight, bias, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, _, ctx.shape = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        return *_ConvolutionPullback.apply(g, x, weight, ctx.shape, wanted), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, _: None) -> Tensor:
        x, weight = ctx.saved_tensors
        parts = []
        if dweight is not None:
            parts.append(_convolve(x, dweight, dbias, ctx.shape))
        elif dbias is not None:
            parts.append(_convolve(x, torch.zeros_like(weight), dbias, ctx.shape))
        if dx is not None:
            parts.append(_convolve(dx, weight, None, ctx.shape))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


class _ConvolutionPullback(torch.autograd.Function):
    """The backward pass of :class:`_Convolution` as a function of g, x and W, with its own derivative."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, shape: Shape, wanted: list[bool]) -> Any:
        return _convolution_pullback(g, x, weight, shape, wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        g, x, weight, ctx.shape, _ = inputs
        ctx.save_for_backward(g, x, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, ux: Tensor | None, uweight: Tensor | None, ubias: Tensor | None) -> tuple[Any, ...]:
        g, x, weight = ctx.saved_tensors
        along_g, along_x, along_weight, *_ = ctx.needs_input_grad
        dg = dx = dweight = None
        if uweight is not None:
            dg = _convolve(x, uweight, ubias, ctx.shape) if along_g else None
            if along_x:
                dx = _convolution_pullback(g, x, uweight, ctx.shape, [True, False, False])[0]
        elif ubias is not None and along_g:
            dg = ubias.view(-1, *[1] * (g.dim() - 2)).expand_as(g)
        if ux is not None:
            if along_g:
                more = _convolve(ux, weight, None, ctx.shape)
                dg = more if dg is None else dg + more
            if along_weight:
                dweight = _convolution_pullback(g, ux, weight, ctx.shape, [False, True, False])[1]
        return dg, dx, dweight, None, None


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """W * x + b."""
    return _Convolution.apply(x, weight, bias, shape)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm``; in training mode and full precision it uses :class:`_BatchNorm`."""
    alike = all(x is not None and plain(x) and x.dtype == input.dtype for x in (input, weight, bias))
    wide = input.dtype in (torch.float32, torch.float64)
    if not (training and alike and wide) or input.numel() <= input.shape[1]:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _BatchNorm.apply(input, weight, bias, running_mean, running_var, momentum, eps)[0]


def _norm_pullback(
    g: Tensor, x: Tensor, weight: Tensor, kept: tuple[Tensor, Tensor, Tensor], how: tuple[int, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """w P g, ⟨g, x̂⟩ and Σ g by the kernel that torch chose for the forward pass."""
    mean, inverse_std, reserve = kept
    return torch.ops.aten._batch_norm_impl_index_backward(
        how[0], x, g, weight, None, None, mean, inverse_std, True, how[1], [True, True, True], reserve
    )


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))


def _along_normalised(scale: Tensor, x: Tensor, kept: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """scale · x̂."""
    mean, inverse_std, _ = kept
    slope = scale * inverse_std
    return torch.addcmul(_per_channel(-slope * mean, x), x, _per_channel(slope, x))


class _BatchNorm(torch.autograd.Function):
    """z = w x̂ + b with the statistics of the batch; also returns what the derivatives need."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        return torch.ops.aten._batch_norm_impl_index(
            x, weight, bias, running_mean, running_var, True, momentum, eps, torch.backends.cudnn.enabled
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, *_, eps = inputs
        _, *kept, kind = output
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(x, weight, *kept)
        ctx.save_for_forward(x, weight, *kept)
        ctx.how = kind, eps
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 7
        x, weight, *kept = ctx.saved_tensors
        found = _BatchNormPullback.apply(g, x, weight, *kept, ctx.how)
        return *found, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, *_: Any) -> tuple[Any, ...]:
        x, weight, *rest = ctx.saved_tensors
        kept = (rest[0], rest[1], rest[2])
        out = torch.zeros_like(x) if dx is None else _norm_pullback(dx, x, weight, kept, ctx.how)[0]
        if dweight is not None:
            out = out + _along_normalised(dweight, x, kept)
        if dbias is not None:
            out = out + _per_channel(dbias, x)
        return out, None, None, None, None


class _BatchNormPullback(torch.autograd.Function):
    """The backward pass g ↦ (w P g, ⟨g, x̂⟩, Σ g) as a function of g, x and w, with its own derivative."""

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse_std: Tensor, reserve: Tensor, how: tuple[int, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _norm_pullback(g, x, weight, (mean, inverse_std, reserve), how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        g, x, weight, *kept, ctx.how = inputs
        ctx.save_for_backward(g, x, weight, *kept, *output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, uweight: Tensor | None, ubias: Tensor | None) -> tuple[Any, ...]:
        g, x, weight, mean, inverse_std, reserve, g_along, g_sum = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph is wanted, for a third derivative
            return *_elementary(g, x, weight, (u, uweight, ubias), ctx.how[1]), None, None, None, None
        kept = (mean, inverse_std, reserve)
        count = x.numel() // x.shape[1]
        dg = dx = dweight = None
        if u is not None:
            dg, u_along, u_sum = _norm_pullback(u, x, weight, kept, ctx.how)
            both = (u * g).sum([d for d in range(x.dim()) if d != 1])
            dweight = inverse_std * (both - (u_sum * g_sum + u_along * g_along) / count)  # ⟨u, P g⟩
            mixed = torch.addcmul(u * _per_channel(g_along, x), g, _per_channel(u_along, x))
            scale = weight * inverse_std / -count
            dx = _norm_pullback(mixed, x, scale, kept, ctx.how)[0]
            dx += _along_normalised(scale * dweight, x, kept)
        if uweight is not None:
            more = _along_normalised(uweight, x, kept)
            dg = more if dg is None else dg + more
            more = _norm_pullback(g, x, uweight, kept, ctx.how)[0]
            dx = more if dx is None else dx + more
        if ubias is not None:
            more = _per_channel(ubias, x)
            dg = more.expand_as(x) if dg is None else dg + more
        return dg, dx, dweight, None, None, None, None


def _elementary(
    g: Tensor, x: Tensor, weight: Tensor, vectors: tuple[Tensor | None, ...], eps: float
) -> tuple[Tensor | None, ...]:
    """The pullback of ``vectors`` by elementary operations, which can be differentiated again.

    torch's second derivative of batch norm treats the statistics as constants, so its third would be wrong.
    """
    # separate variables, because g itself may depend on x
    inputs = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in (g, x, weight)]
    bias = torch.zeros_like(weight, requires_grad=True)
    variance, mean = torch.var_mean(inputs[1], [d for d in range(x.dim()) if d != 1], correction=0, keepdim=True)
    out = (inputs[1] - mean) * (variance + eps).rsqrt() * _per_channel(inputs[2], x) + _per_channel(bias, x)
    first = torch.autograd.grad(out, (*inputs[1:], bias), inputs[0], create_graph=True)
    asked = [(t, v) for t, v in zip(first, vectors, strict=True) if v is not None]
    return torch.autograd.grad(
        [t for t, _ in asked], inputs, [v for _, v in asked], create_graph=True, allow_unused=True
    )
