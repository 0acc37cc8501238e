"""How a module's input and output gradient become the rows of Kronecker factors.

For a layer z = W a the curvature block is (Σ_n g_n g_nᵀ) ⊗ (mean_n a_n a_nᵀ), with one row a_n and one row g_n for
each use of the weight. A layer that shares its weight over S positions of an example (a convolution, a linear layer
over tokens) has S rows for each example:

- ``expand`` keeps all N·S rows: A averages over them, B sums over them;
- ``reduce`` first averages a and sums g over the positions of an example (Eschenhagen et al., 2023).

Convolutions are seen as linear layers on patches; a convolution with G groups is G blocks side by side, so every
factor carries a leading dimension G (1 for everything else).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperkron.curvature.kfac.correlation import patch_gram, side_by_side_gram
from hyperkron.curvature.kfac.taps import in_order
from hyperkron.solution import HyperkronError

WeightSharing = Literal["expand", "reduce"]
Pair = tuple[Tensor, Tensor]
"""Gradients of examples in the weight (n, groups, d_out, d_in) and in the bias (n, groups, d_out)."""

CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**24}
"""Patches are materialised at most this many numbers at a time, by device type."""
CACHED_ELEMENTS = 2**19
"""The same on a CPU for patches that are used immediately, so that they stay in its cache."""
FEW_CHANNELS = 4
"""Up to this many channels, products with kw·C columns are too narrow for a CPU."""
NARROW = 8
"""Up to this many channels, the pixels under a row of the kernel are treated as channels (``side_by_side_gram``)."""
WIDEST = torch.complex128
"""A dtype of sixteen bytes, to copy several numbers as one."""
UNCALLED = nn.modules.linear.NonDynamicallyQuantizableLinear
"""The linear layer whose weights ``nn.MultiheadAttention`` uses without ever calling it."""


def cast_floating(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An input in ``dtype``; integers (indices) are not changed."""
    return x.to(dtype) if x.is_floating_point() else x


class Layer(ABC):
    """A kind of module that KFAC covers: z = W a [+ b], where a depends only on the module's input.

    W and b are the module's parameters ``weight`` and ``bias``, the input is its first argument and z its output. A
    layer for modules of your own goes into ``KFAC(layers=[…])``.

    Attributes:
        groups: how many blocks W has side by side, 1 for most.
        d_in, d_out: the sizes of one block.
        homogeneous: whether the rows of c·x are c times those of x, so that x may be scaled first.
        output_dim: which dimension of W its outputs lie in.
        tokens: whether input and output have features in the last dimension, examples in the first, and all positions
            as rows, in order. Positions that the loss masks (``ignore_index``) then do not count in A.
        keeps_input: whether autograd keeps the module's input, so that it can be read after the backward pass.
        same_rows: a name or ``None``; layers with the same name make the same rows of the same input.
    """

    groups: int
    d_in: int
    d_out: int
    output_dim: ClassVar[int] = 0
    homogeneous: ClassVar[bool] = False
    tokens: ClassVar[bool] = False
    keeps_input: ClassVar[bool] = False
    same_rows: ClassVar[str | None] = None

    @abstractmethod
    def inputs(self, x: Tensor, sharing: WeightSharing) -> Iterator[Tensor]:
        """Rows of the layer's input, as chunks of shape (groups, rows, d_in), in the order :meth:`ordered` expects."""

    def ordered(self, rows: Tensor) -> Tensor:
        """Rows of :meth:`inputs` in the order of the weight's columns."""
        return rows

    def ordered_gram(self, gram: Tensor) -> Tensor:
        """Σ r rᵀ of such rows, both sides in the order of the weight's columns."""
        return gram

    def reordered(self, basis: Tensor) -> Tensor:
        """A basis (groups, d_in, k) of the weight's columns, its entries in the order of :meth:`inputs`."""
        return basis

    def input_gram(self, x: Tensor) -> Tensor | None:
        """Σ r rᵀ over the rows that ``expand`` makes of ``x``, in the order of the weight's columns; ``None`` if
        it cannot be computed without the rows."""
        return None

    def outputs(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The module's output for ``x`` with another ``weight`` and ``bias``, a new tensor with its channels in the
        second dimension; ``None`` if that is no cheaper than with rows."""
        return None

    @abstractmethod
    def gradients(self, g: Tensor, sharing: WeightSharing) -> Iterator[Tensor]:
        """Rows of the gradient at the layer's output, as chunks of shape (groups, rows, d_out)."""

    @abstractmethod
    def positions(self, x: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of examples: inputs (n, groups, S, d_in), ordered as in :meth:`inputs`, with the output gradients
        (n, groups, S, d_out)."""

    def examples(self, x: Tensor) -> int:
        """How many examples an input has."""
        return len(x)

    def gradients_of_examples(self, x: Tensor, g: Tensor, most: int) -> Iterator[Pair]:
        """Chunks of at most ``most`` examples: their gradients Σ_s g_s a_sᵀ (n, groups, d_out, d_in), columns ordered
        as in :meth:`inputs`, and Σ_s g_s (n, groups, d_out)."""
        for inputs, gradients in self.positions(x, g):
            for a, b in zip(inputs.split(most), gradients.split(most), strict=True):
                yield b.mT @ a.to(b.dtype), b.sum(-2)

    def gradients_of_several(self, x: Tensor, gs: Sequence[Tensor], most: int) -> Iterator[tuple[Pair, ...]]:
        """:meth:`gradients_of_examples` for each of several output gradients ``gs`` of one input."""
        return zip(*(self.gradients_of_examples(x, g, most) for g in gs), strict=True)

    def to_matrix(self, weight: Tensor) -> Tensor:
        """The weight as (groups, d_out, d_in)."""
        return weight.reshape(self.groups, self.d_out, self.d_in)

    def to_weight(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of :meth:`to_matrix`: (groups, d_out, d_in) as a weight of ``shape``."""
        return matrix.reshape(shape)


@dataclass(frozen=True)
class LinearLayer(Layer):
    """``nn.Linear``: the last dimension is the feature, the first the example, those between are positions."""

    d_in: int
    d_out: int
    groups: int = 1

    homogeneous: ClassVar[bool] = True
    tokens: ClassVar[bool] = True
    same_rows: ClassVar[str | None] = "the input"

    def inputs(self, x: Tensor, sharing: WeightSharing) -> Iterator[Tensor]:
        if sharing == "reduce" and x.dim() > 2:
            x = x.flatten(1, -2).mean(1)
        yield x.reshape(1, -1, x.shape[-1])

    def gradients(self, g: Tensor, sharing: WeightSharing) -> Iterator[Tensor]:
        if sharing == "reduce" and g.dim() > 2:
            g = g.flatten(1, -2).sum(1)
        yield g.reshape(1, -1, g.shape[-1])

    def examples(self, x: Tensor) -> int:
        return len(x) if x.dim() > 1 else 1

    def positions(self, x: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        count = self.examples(x)
        yield x.reshape(count, 1, -1, x.shape[-1]), g.reshape(count, 1, -1, g.shape[-1])


@dataclass(frozen=True)
class TransposedLayer(LinearLayer):
    """Hugging Face's ``Conv1D`` (GPT-2): a linear layer whose weight is (d_in, d_out)."""

    output_dim: ClassVar[int] = -1

    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT[None]

    def to_weight(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        return matrix[0].mT


class ConvLayer(Layer):
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` with any stride, padding, dilation and groups."""

    homogeneous: ClassVar[bool] = True
    keeps_input: ClassVar[bool] = True

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        self.module, self.groups, self.taps = module, module.groups, math.prod(module.kernel_size)
        self.d_in, self.d_out = module.in_channels // self.groups * self.taps, module.out_channels // self.groups

    def patches(self, x: Tensor) -> Tensor:
        """A view of the padded input, channels last: (N, *output, groups, *kernel, C/groups).

        Channels last, so that copying the view reads and writes runs of channels; the few entries of a kernel would be
        read one by one.
        """
        m, x = self.module, self._padded(x)
        kernel, stride, dilation = m.kernel_size, m.stride, m.dilation
        spatial = x.shape[1:-1]
        out = [(s - d * (k - 1) - 1) // t + 1 for s, k, t, d in zip(spatial, kernel, stride, dilation, strict=True)]
        steps = x.stride()[1:-1]
        inside = [d * s for d, s in zip(dilation, steps, strict=True)]
        across = [t * s for t, s in zip(stride, steps, strict=True)]
        channels = x.shape[-1] // m.groups
        size = (x.shape[0], *out, m.groups, *kernel, channels)
        return x.as_strided(size, (x.stride(0), *across, channels, *inside, 1))

    def _padded(self, x: Tensor) -> Tensor:
        """The input with its padding, channels last: (N, *spatial, C)."""
        m = self.module
        pad = list(m._reversed_padding_repeated_twice)
        if any(pad) and m.padding_mode != "zeros":
            x = F.pad(x, pad, mode=m.padding_mode)
        x = x.movedim(1, -1)
        if any(pad) and m.padding_mode == "zeros":
            x = F.pad(x, [0, 0, *pad])  # copies into the new order at once
        return in_order(x)

    def ordered(self, rows: Tensor) -> Tensor:
        """Reorder the last dimension from (*kernel, C/groups), the order of patches, to that of the weight."""
        return rows if self.taps == 1 else rows.unflatten(-1, (self.taps, -1)).transpose(-1, -2).flatten(-2)

    def ordered_gram(self, gram: Tensor) -> Tensor:
        """Reorder both sides of Σ r rᵀ likewise, in one copy."""
        if self.taps == 1:
            return gram
        sizes = (self.taps, gram.shape[-1] // self.taps)
        return gram.view(-1, *sizes, *sizes).permute(0, 2, 1, 4, 3).reshape(gram.shape)

    def reordered(self, basis: Tensor) -> Tensor:
        return basis if self.taps == 1 else basis.unflatten(1, (-1, self.taps)).transpose(1, 2).flatten(1, 2)

    def examples(self, x: Tensor) -> int:
        return len(self._batched(x))

    def _batched(self, x: Tensor) -> Tensor:
        """A single example as a batch of one."""
        return x if x.dim() == 2 + len(self.module.kernel_size) else x[None]

    def inputs(self, x: Tensor, sharing: WeightSharing) -> Iterator[Tensor]:
        k = len(self.module.kernel_size)
        x = self._batched(x)
        if sharing == "reduce":
            mean = self.patches(x).mean(dim=tuple(range(1, 1 + k)))
            yield mean.flatten(2).transpose(0, 1)
            return
        for part in x.split(self._examples_per_chunk(x)):
            yield self._rows(self.patches(part))

    def _rows(self, patches: Tensor) -> Tensor:
        """All patches as rows, (groups, rows, d_in), copied sixteen bytes at a time where channels allow it."""
        if self.groups > 1:
            patches = patches.movedim(-2 - len(self.module.kernel_size), 0)
        whole = WIDEST.itemsize // patches.itemsize
        if patches.shape[-1] % whole or patches.storage_offset() % whole:
            return patches.reshape(self.groups, -1, self.d_in)
        return patches.view(WIDEST).reshape(self.groups, -1, self.d_in // whole).contiguous().view(patches.dtype)

    def input_gram(self, x: Tensor) -> Tensor | None:
        """Σ r rᵀ on the CPU for stride 1, else ``None``; see :mod:`~hyperkron.curvature.kfac.correlation`."""
        m = self.module
        if x.device.type != "cpu" or not isinstance(m, nn.Conv2d) or x.dim() != 4 or m.padding_mode != "zeros":
            return None
        if m.groups > 1 or set(m.stride) != {1} or set(m.kernel_size) == {1} or m.in_channels < 2:
            return None
        left, right, top, bottom = m._reversed_padding_repeated_twice
        kernel, dilation = (m.kernel_size[0], m.kernel_size[1]), (m.dilation[0], m.dilation[1])
        made = side_by_side_gram if m.in_channels <= NARROW else patch_gram
        return made(x, kernel, dilation, ((top, bottom), (left, right)))[None]

    def outputs(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        found: Tensor = self.module._conv_forward(x, weight, bias)
        return found

    def gradients(self, g: Tensor, sharing: WeightSharing) -> Iterator[Tensor]:
        g = self._batched(g)
        g = g.reshape(g.shape[0], self.groups, self.d_out, -1)
        if sharing == "reduce":
            yield g.sum(-1).transpose(0, 1)
        else:
            yield (g.mT if self.groups == 1 else g.permute(1, 0, 3, 2)).reshape(self.groups, -1, self.d_out)

    def positions(self, x: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        x, g = self._batched(x), self._batched(g)
        g = g.reshape(g.shape[0], self.groups, self.d_out, -1).transpose(2, 3)
        step = self._examples_per_chunk(x)
        for part, gradient in zip(x.split(step), g.split(step), strict=True):
            rows = self._rows(self.patches(part))
            yield rows.view(self.groups, len(part), -1, self.d_in).transpose(0, 1), gradient

    def gradients_of_examples(self, x: Tensor, g: Tensor, most: int) -> Iterator[Pair]:
        if self._side_by_side(x):
            return (made for (made,) in self._from_rows_of_pixels(x, [g], most))
        return super().gradients_of_examples(self._batched(x), self._batched(g), most)

    def gradients_of_several(self, x: Tensor, gs: Sequence[Tensor], most: int) -> Iterator[tuple[Pair, ...]]:
        if self._side_by_side(x):
            return self._from_rows_of_pixels(x, gs, most)
        return super().gradients_of_several(x, gs, most)

    def _side_by_side(self, x: Tensor) -> bool:
        """Whether gradients of examples are computed without patches."""
        m = self.module
        return x.device.type == "cpu" and isinstance(m, nn.Conv2d) and m.groups == 1 and m.stride[0] == 1

    def _from_rows_of_pixels(self, x: Tensor, gs: Sequence[Tensor], most: int) -> Iterator[tuple[Pair, ...]]:
        """Gradients of examples by one product for each row of the kernel; for few channels from transposed patches.

        A row of the kernel covers kw neighbouring pixels. With these side by side, (N, height, W_out, kw·C), the pixels
        under one row of the kernel at all positions are a slice of the image. So the image is copied once, for all rows
        of the kernel and all output gradients.
        """
        m, x, gs = self.module, self._batched(x), [self._batched(g) for g in gs]
        kw, channels, (high, wide) = m.kernel_size[1], x.shape[1], gs[0].shape[2:]
        step = CACHED_ELEMENTS // (x.shape[2:].numel() * kw * channels + len(gs) * gs[0].shape[1:].numel())
        step = max(1, min(step, most))
        for part, *gradients in zip(*(t.split(step) for t in (x, *gs)), strict=True):
            flat = [g.movedim(1, -1).reshape(len(part), high * wide, self.d_out) for g in gradients]
            if channels <= FEW_CHANNELS:
                planes = self._planes(part, high, wide)
                joint = [(planes @ b).mT[:, None] for b in flat]
                yield tuple((made[..., :-1].contiguous(), made[..., -1]) for made in joint)
                continue
            taps = self._taps(part, high, wide)
            yield tuple((torch.cat([b.mT @ a for a in taps], -1)[:, None], b.sum(1)[:, None]) for b in flat)

    def _taps(self, x: Tensor, high: int, wide: int) -> list[Tensor]:
        """The pixels under each row of the kernel at all positions, (N, high·wide, kw·C)."""
        m, padded = self.module, self._padded(x)
        (kh, kw), (images, lines, pixels, _) = m.kernel_size, padded.stride()
        size = (len(x), padded.shape[1], wide, kw, x.shape[1])
        side_by_side = padded.as_strided(size, (images, lines, m.stride[1] * pixels, m.dilation[1] * pixels, 1))
        rows = side_by_side.reshape(*size[:3], kw * x.shape[1]).contiguous()  # reshape alone may be a view
        return [rows[:, i * m.dilation[0] : i * m.dilation[0] + high].flatten(1, 2) for i in range(kh)]

    def _planes(self, x: Tensor, high: int, wide: int) -> Tensor:
        """The transposed patches of images and a row of ones, (N, d_in + 1, high·wide), copied in whole lines."""
        m, padded = self.module, self._padded(x).movedim(-1, 1).contiguous()
        (kh, kw), (images, planes, lines, _) = m.kernel_size, padded.stride()
        size = (len(x), kh, kw, x.shape[1], high, wide)
        taps = (m.dilation[0] * lines, m.dilation[1])
        shifted = padded.as_strided(size, (images, *taps, planes, m.stride[0] * lines, m.stride[1]))
        found = padded.new_empty(len(x), self.d_in + 1, high * wide)
        found[:, :-1].view(size).copy_(shifted)
        found[:, -1] = 1.0
        return found

    def _examples_per_chunk(self, x: Tensor) -> int:
        per_example = x.shape[1:].numel() * (self.d_in * self.groups // x.shape[1])
        for t in self.module.stride:
            per_example //= t
        return max(1, CHUNK_ELEMENTS.get(x.device.type, 2**24) // max(1, per_example))


def is_transposed(module: nn.Module) -> bool:
    """Whether ``module`` is the ``Conv1D`` of transformers; checked by name, because transformers is not imported."""
    kind, weight = type(module), module._parameters.get("weight")
    named = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return named and weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]


LayerOf = Callable[[nn.Module], Layer | None]
"""The Kronecker view of a module, or ``None`` for modules of another kind."""


def checked_layers(layers: Sequence[LayerOf]) -> tuple[LayerOf, ...]:
    """``layers`` if it is a list of functions, else an error that names it."""
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not all(map(callable, layers)):
        raise HyperkronError(f"layers={layers!r:.60} must be a list of functions module -> Layer or None.")
    return tuple(layers)


def kronecker_layer(module: nn.Module, layers: Sequence[LayerOf] = ()) -> Layer | None:
    """The Kronecker view of ``module``, first by ``layers``, or ``None`` where KFAC has none."""
    for view in layers:
        found = view(module)
        if found is not None:
            if not isinstance(found, Layer):
                raise HyperkronError(
                    f"layers: {view!r:.60} returned {found!r:.60} for a {type(module).__name__}; return a "
                    "hyperkron.curvature.Layer, or None for modules of another kind."
                )
            return found
    if isinstance(module, UNCALLED):
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        weight = module._parameters.get("weight")  # may have been replaced; None for a parametrized weight
        return LinearLayer(module.in_features, module.out_features if weight is None else weight.shape[0])
    if is_transposed(module):
        return TransposedLayer(*module.weight.shape)  # type: ignore[misc]
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return ConvLayer(module)
    return None
