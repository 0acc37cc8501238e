"""The exact diagonal of layers outside Kronecker blocks: norm layers and embeddings.

For every parameter p it is Σ_n (∂/∂p s_nᵀf_n)², computed from the inputs and output gradients of the layer's calls on
the whole batch; calls on parts of it count as separate examples. Batch statistics are treated as constants.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperkron.curvature.kfac.factors import add_to

MAX_WAITING = 2**19
"""Batch norm layers are treated together, as soon as this many numbers are waiting."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)


def has_diagonal(module: nn.Module) -> bool:
    """Whether the exact per-example diagonal of ``module``'s block is known in closed form.

    False for a subclass of a norm layer with its own forward pass, for example with channels in the second dimension.
    """
    return type(module).forward in {kind.forward for kind in _NORMS} or looks_up(module)


def looks_up(module: nn.Module) -> bool:
    """Whether ``module`` is an embedding, also one of transformers whose output is times its ``embed_scale`` (Gemma,
    BART); the latter is checked by name, because transformers is not imported."""
    kind = type(module)
    scaled = kind.__name__.endswith("ScaledWordEmbedding") and kind.__module__.startswith("transformers.models.")
    return kind is nn.Embedding or (scaled and isinstance(module, nn.Embedding) and hasattr(module, "embed_scale"))


def example_gradients(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """∂/∂p s_nᵀf_n (N, …) for each parameter p of a norm layer, from its input and output gradient.

    A norm layer is z = weight·x̂ + bias, so an example's gradient is Σ_positions g·x̂ and Σ_positions g.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        sums = batch_norm_sums(module, x, g)
        return {"weight": (sums.along - sums.mean * sums.plain) * sums.scale, "bias": sums.plain}
    weighted = range(1, 2)  # the dimensions of z that the weight has
    if isinstance(module, nn.GroupNorm):
        normalised = F.group_norm(x, module.num_groups, eps=module.eps)
    else:
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        shape = list(module.normalized_shape)
        if g.dim() == len(shape):  # a single example without a dimension for examples
            x, g = x[None], g[None]
        weighted = range(g.dim() - len(shape), g.dim())
        if isinstance(module, nn.LayerNorm):
            normalised = F.layer_norm(x, shape, eps=module.eps)
        else:
            normalised = F.rms_norm(x, shape, eps=module.eps)
    positions = [axis for axis in range(1, g.dim()) if axis not in weighted]

    def total(t: Tensor) -> Tensor:
        return t.sum(positions) if positions else t

    found = {"weight": total(g * normalised)}
    if getattr(module, "bias", None) is not None:
        found["bias"] = total(g)
    return found


def embedding_squares(module: nn.Embedding, index: Tensor, g: Tensor) -> Tensor:
    """For each row of the table, Σ_n (Σ g over the positions of example n where the row was looked up)².

    Pairs (example, row) are numbered by sorting. The tensors are long enough for all pairs to be different, so that
    their size is fixed and a CUDA graph can record it; unused numbers have a sum of zero.
    """
    count, width = module.weight.shape
    g = g * getattr(module, "embed_scale", 1.0)
    examples = torch.arange(index.shape[0] if index.dim() > 1 else index.numel(), device=index.device)
    pairs, order = (index.reshape(len(examples), -1) + count * examples[:, None]).reshape(-1).sort()
    number = F.pad((pairs[1:] != pairs[:-1]).long(), (1, 0)).cumsum(0)
    sums = g.new_zeros(len(pairs), width).index_add_(0, number, g.reshape(-1, width)[order])
    looked_up = torch.zeros_like(pairs).scatter_(0, number, pairs % count)
    diagonal = g.new_zeros(count, width).index_add_(0, looked_up, sums.square())
    if module.padding_idx is not None:
        diagonal[module.padding_idx] = 0.0  # its row receives no gradient
    return diagonal


class BatchNormSums(NamedTuple):
    """The sums for the diagonal of a batch norm layer: Σ g·x and Σ g over positions (N, C), mean and 1/std (C,)."""

    along: Tensor
    plain: Tensor
    mean: Tensor
    scale: Tensor


def batch_norm_sums(module: nn.modules.batchnorm._BatchNorm, x: Tensor, g: Tensor) -> BatchNormSums:
    """The sums of one call of a batch norm layer, from its input and output gradient."""
    flat, g = (t.flatten(2) if t.dim() > 2 else t[:, :, None] for t in (x, g))
    return BatchNormSums((g * flat).sum(2), g.sum(2), *_batch_norm_statistics(module, x))


def _batch_norm_statistics(module: nn.modules.batchnorm._BatchNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and 1/std of every channel that ``module`` normalises ``x`` by."""
    if not module.training and module.running_mean is not None and module.running_var is not None:
        return module.running_mean, (module.running_var + module.eps).rsqrt()
    if x.is_cuda:  # the layer's own kernel; a general reduction needs several times the memory of x
        mean, scale = torch.batch_norm_stats(x, module.eps)
        return mean, scale
    variance, mean = torch.var_mean(x, dim=(0, *range(2, x.dim())), correction=0)
    return mean, (variance + module.eps).rsqrt()


def batch_norm_squares(sums: list[BatchNormSums]) -> list[tuple[Tensor, Tensor]]:
    """The squared gradients of weight and bias for each of ``sums``.

    With statistics per channel, Σ g·x̂ = (Σ g·x − mean·Σ g)/std needs no normalised copy of x. The layers of one batch
    are treated together, with their channels side by side, to save launches. ``sums`` is overwritten.
    """
    if len({(len(one.along), one.along.dtype, one.along.device) for one in sums}) > 1:
        return [squares for one in sums for squares in batch_norm_squares([one])]
    along, plain, mean, scale = (
        parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1) for parts in zip(*sums, strict=True)
    )
    along.addcmul_(mean, plain, value=-1).mul_(scale)
    widths = [one.mean.numel() for one in sums]
    return list(zip(*(x.square_().sum(0).split(widths) for x in (along, plain)), strict=True))


def _squares(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {local: x.square().sum(0) for local, x in gradients.items()}


class Diagonals:
    """The diagonals of one measurement, summed over calls and backward passes into ``sums``, by parameter.

    Attributes:
        examples: how many a call on the whole batch has.
    """

    def __init__(self, sums: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.sums, self.dtype, self.examples = sums, dtype, 0
        self._batch_norms: list[tuple[dict[str, str], BatchNormSums]] = []
        self._lookups: dict[nn.Embedding, tuple[dict[str, str], list[Tensor], list[Tensor]]] = {}
        self._norms: dict[nn.Module, tuple[dict[str, str], dict[str, Tensor]]] = {}

    def add(self, module: nn.Module, names: dict[str, str], x: Tensor, g: Tensor, again: bool) -> None:
        """Add one call of ``module``; ``names`` maps its parameter names to those of the model.

        Calls on the whole batch of a module that is called ``again`` wait until :meth:`flush`, to be summed.
        """
        x, g = x.to(self.dtype) if x.is_floating_point() else x, g.to(self.dtype)
        if isinstance(module, nn.Embedding):
            if not again or len(x) != self.examples:
                self._add(names, {"weight": embedding_squares(module, x, g)})
                return
            _, indices, gradients = self._lookups.setdefault(module, (names, [], []))
            indices.append(x.reshape(len(x), -1))
            gradients.append(g.reshape(len(x), -1, g.shape[-1]))
        elif again or not isinstance(module, nn.modules.batchnorm._BatchNorm):
            found = example_gradients(module, x, g)
            if not again or len(found["weight"]) != self.examples:
                self._add(names, _squares(found))
                return
            before = self._norms.get(module, (names, {}))[1]
            self._norms[module] = names, {local: before.get(local, 0.0) + x for local, x in found.items()}
        else:
            self._batch_norms.append((names, batch_norm_sums(module, x, g)))
            if sum(sums.along.numel() for _, sums in self._batch_norms) > MAX_WAITING:
                self._flush_batch_norms()

    def flush(self) -> None:
        """At the end of a backward pass: add the diagonals of the layers that are waiting."""
        self._flush_batch_norms()
        for names, found in self._norms.values():
            self._add(names, _squares(found))
        for module, (names, indices, gradients) in self._lookups.items():
            self._add(names, {"weight": embedding_squares(module, torch.cat(indices, 1), torch.cat(gradients, 1))})
        self._norms, self._lookups = {}, {}

    def _flush_batch_norms(self) -> None:
        passed, self._batch_norms = self._batch_norms, []
        if passed:
            found = batch_norm_squares([sums for _, sums in passed])
            for (names, _), squares in zip(passed, found, strict=True):
                self._add(names, dict(zip(("weight", "bias"), squares, strict=True)))

    def _add(self, names: dict[str, str], squares: dict[str, Tensor]) -> None:
        for local, square in squares.items():
            if local in names:
                add_to(self.sums, names[local], square)
