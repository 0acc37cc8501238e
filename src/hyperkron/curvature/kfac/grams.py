"""Sums Σ r rᵀ over the rows of a layer, chunk by chunk, as a matrix or, if the rows are few, as the rows themselves.

Where TF32 is allowed, rows are first scaled into the range of float16. Float16 has as many bits as TF32, so products
are as precise, are also summed in float32, and are several times as fast. EKFAC's spectrum is computed here too: the
sum of squares of every example's gradient in the eigenbasis of the factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperkron.curvature.kfac.coverage import Block
from hyperkron.curvature.kfac.factors import Factor, LowRank, few_rows
from hyperkron.curvature.kfac.layers import WeightSharing, cast_floating
from hyperkron.kernels.linalg import gram, in_blocks, tf32_products
from hyperkron.trees import HALF_TYPES

MAX_SCALED = 2.0**14
"""The largest scaled number. Numbers above 2⁻²⁸ of it keep all their bits; smaller ones do not change the sum."""
MIN_MULTIPLICATIONS = 2**34
"""From this many multiplications on, scaling (one pass over the rows, a few launches) costs less than it saves."""
GRADIENTS = {"cpu": 2**21, "cuda": 2**25}
"""Gradients of single examples are computed at most this many numbers at a time, by device type."""
LARGE_GRADIENT = 2**16
"""From this many numbers on, a CPU computes and squares the gradients of examples one by one."""
FEW_REACHED = 0.9
"""On a CPU, rows without a gradient are left out if at most this share of the rows has one."""
WIDE_OUTPUT = 2**14
"""For layers with at least this many outputs (a vocabulary), B is kept as rows and never as a matrix."""
MOST_ROWS = 2**12
"""The largest number of these rows."""


def pooled(g: Tensor, most: int = MOST_ROWS) -> Tensor:
    """At most ``most`` rows y with E Σ y yᵀ = Σ r rᵀ, where r are the rows in the last dimension of ``g``.

    Each y is the sum of every ``most``-th row with pseudo-random signs, so that mixed products cancel on average.
    """
    rows = g.reshape(-1, g.shape[-1])
    if len(rows) <= most:
        return g
    number = torch.arange(len(rows), device=g.device)
    signs = 1 - 2 * (((number * 0x9E3779B1) >> 17) & 1).to(g.dtype)[:, None]
    found = torch.zeros(most, rows.shape[1], device=g.device, dtype=torch.promote_types(g.dtype, torch.float32))
    for some, sign in zip(rows.split(most), signs.split(most), strict=True):
        found[: len(some)].addcmul_(some, sign)
    return found


def narrowed(x: Tensor, rows: int, d: int) -> tuple[Tensor, Tensor | None]:
    """(y, c) with c·y = x to ten bits and y in half precision, if that makes products faster; else (x, ``None``).

    Rows that are already in half precision are returned as they are: their products are exact in float32. If x is not
    finite, c·y is not finite either.
    """
    if x.dtype != torch.float32 or rows * d * d < MIN_MULTIPLICATIONS or not tf32_products(x.device):
        return x, None
    scale = torch.linalg.vector_norm(x, float("inf")).clamp_min(1e-30).mul_(1 / MAX_SCALED)
    return torch.div(x, scale, out=torch.empty_like(x, dtype=torch.float16)), scale


def summed(
    chunks: Iterator[Tensor], dtype: torch.dtype, block: Block | None, low_rank: bool, scale: Tensor | None = None
) -> tuple[Factor, int]:
    """Σ r rᵀ over chunks of rows (groups, rows, d), and the number of rows; ``block`` tells which columns to use.

    Rows in half precision are summed in ``dtype``. With ``scale`` the rows are multiplied by this number.
    """
    biased, weighted = block is not None and block.bias is not None, block is None or block.weight is not None
    total: Tensor | None = None
    sums: Tensor | None = None
    waiting: list[Tensor] = []
    count = 0
    for chunk in chunks:
        waiting.append(chunk)
        count, d = count + chunk.shape[1], chunk.shape[2]
        del chunk  # free a chunk before the next one is computed
        if low_rank and weighted and total is None and few_rows(count, d):
            continue
        while waiting:
            part = waiting.pop(0)
            total = _plus_gram(total, part, dtype) if weighted else None
            if biased:
                sums = part.sum(1, dtype=dtype) if sums is None else sums + part.sum(1, dtype=dtype)
            del part
    if scale is not None:
        total = None if total is None else total.mul_(scale.square())
        sums = None if sums is None else sums * scale
    layer = None if block is None else block.layer
    if waiting:
        kept = [rows if _stays_half(rows, dtype) else rows.to(dtype) for rows in waiting]
        waiting = kept if layer is None else [layer.ordered(rows) for rows in kept]
        rows = torch.cat(waiting, dim=1) if len(waiting) > 1 or not biased else waiting[0]
        return LowRank(F.pad(rows, (0, 1), value=1.0) if biased else rows), count
    if layer is not None and total is not None:
        total = layer.ordered_gram(total)
    if sums is None:
        assert total is not None
        return total, count
    return bordered(total, sums if layer is None else layer.ordered(sums), count), count


def masked_gram(
    block: Block, x: Tensor, mask: Tensor, sharing: WeightSharing, dtype: torch.dtype, low_rank: bool
) -> tuple[Factor, Tensor]:
    """Σ a aᵀ over the tokens in ``mask``, and their number as a tensor that is not read yet.

    With ``reduce`` each example with such tokens gives one row, their mean.
    """
    chunks = list(block.layer.inputs(x, "expand"))
    ones = mask.to(dtype).reshape(1, -1, 1)
    y = chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)
    y = y * ones.to(y.dtype) if sharing == "expand" and _stays_half(y, dtype) else y.to(dtype) * ones
    if sharing == "reduce":
        y, count = (t.unflatten(1, (len(x), -1)).sum(2) for t in (y, ones))
        y, ones = y / count.clamp_min(1), count.clamp_max(1)
    narrow, scale = (y, None) if low_rank and few_rows(*y.shape[1:]) else narrowed(y, *y.shape[1:])
    total, _ = summed(iter([narrow]), dtype, block, low_rank, scale)
    if block.bias is not None and isinstance(total, LowRank):
        total.rows[..., -1:].mul_(ones)
    elif block.bias is not None:
        total[:, -1, -1] = ones.sum()  # type: ignore[index]
    return total, ones.sum()


def _plus_gram(total: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """total + rowsᵀ rows, group by group, in the memory of ``total``; rows in half precision are multiplied as such."""
    if _stays_half(rows, dtype):
        return _plus_half_gram(total, rows)
    rows = rows.to(dtype)
    if total is None:
        return gram(rows)
    if in_blocks(rows):
        return total.add_(gram(rows))
    if rows.shape[0] > 1:
        return total.baddbmm_(rows.mT, rows)
    total[0].addmm_(rows[0].mT, rows[0])
    return total


def _stays_half(rows: Tensor, dtype: torch.dtype) -> bool:
    """Whether rows are multiplied in half precision and summed in float32, which only CUDA devices support."""
    return rows.dtype in HALF_TYPES and rows.is_cuda and dtype == torch.float32


def _plus_half_gram(total: Tensor | None, rows: Tensor) -> Tensor:
    """The same by products in half precision that are summed in float32."""
    if rows.shape[0] > 1:
        found: Tensor = torch.bmm(rows.mT, rows, out_dtype=torch.float32)
        return found if total is None else total.add_(found)
    x = rows[0]
    if total is None:
        return torch.mm(x.mT, x, out_dtype=torch.float32)[None]
    torch.addmm(total[0], x.mT, x, out_dtype=torch.float32, out=total[0])
    return total


def bordered(total: Tensor | None, sums: Tensor, count: int) -> Tensor:
    """Σ [r, 1][r, 1]ᵀ from Σ r rᵀ and Σ r: the column of ones of a bias is never materialised."""
    if total is None:
        return sums.new_full((sums.shape[0], 1, 1), float(count))
    joint = F.pad(total, (0, 1, 0, 1), value=float(count))
    joint[:, :-1, -1] = sums
    joint[:, -1, :-1] = sums
    return joint


def added_images(x: Tensor) -> Tensor:
    """The sum of images (N, C, …) as one image, by a matrix product, which is several times faster on a CPU."""
    last = not x.is_contiguous()
    images = (x.movedim(1, -1) if last else x).flatten(1)
    total = (images.new_ones(1, len(images)) @ images).view(1, *(x[:1].movedim(1, -1) if last else x[:1]).shape[1:])
    return total.movedim(-1, 1) if last else total


class InputGrams:
    """The sums of one measurement, kept while layers may share them.

    Args:
        dtype: the dtype of the sums.
        low_rank: keep few rows instead of their matrix.
        one_at_a_time: forget the sums of one input when another is summed, to save memory.
    """

    def __init__(self, dtype: torch.dtype, low_rank: bool, one_at_a_time: bool) -> None:
        self.dtype, self.low_rank, self.one_at_a_time = dtype, low_rank, one_at_a_time
        self._grams: dict[tuple[Any, ...], tuple[Factor, int]] = {}
        self._alive: list[Tensor] = []  # the inputs, whose ids are keys

    def forget(self) -> None:
        """Forget the shared sums and their inputs."""
        self._grams.clear()
        self._alive.clear()

    def gram(self, block: Block, x: Tensor, rows: int, sharing: WeightSharing) -> tuple[Factor, int]:
        """Σ a aᵀ over the rows of one call, with a = [x, 1] where the block has a bias; layers that read the same
        tensor (query, key, value) share one."""
        layer = block.layer
        key = (layer.same_rows, id(x), x._version, block.bias is not None, sharing)
        shareable = layer.same_rows is not None and block.weight is not None
        if shareable and key in self._grams:
            return self._grams[key]
        y, scale = x.detach(), None
        made = self._without_rows(block, y, rows, sharing)
        if made is None:
            if layer.homogeneous:
                y, scale = self.narrowed(y, rows, layer.d_in, sharing)
            made = summed(layer.inputs(y, sharing), self.dtype, block, self.low_rank, scale)
        if shareable:
            if self.one_at_a_time and not any(x is y for y in self._alive):
                self.forget()
            self._grams[key] = made
            self._alive.append(x)
        return made

    def _without_rows(self, block: Block, x: Tensor, rows: int, sharing: WeightSharing) -> tuple[Factor, int] | None:
        """The same for layers that can sum their ``rows`` rows without forming them; ``None`` for others."""
        layer = block.layer
        if self.few(rows, layer.d_in) or sharing == "reduce" or block.weight is None:
            return None
        total = layer.input_gram(x.to(self.dtype))
        if total is None or block.bias is None:
            return None if total is None else (total, rows)
        whole = layer.inputs(added_images(x.to(self.dtype)), "expand")  # a row is linear in the image
        sums = torch.stack([part.sum(1) for part in whole]).sum(0)
        return bordered(total, layer.ordered(sums), rows), rows

    def narrowed(self, x: Tensor, rows: int, d: int, sharing: WeightSharing) -> tuple[Tensor, Tensor | None]:
        """``x`` in half precision with its scale, if its ``rows`` rows of size ``d`` are summed to a matrix."""
        return (x, None) if sharing == "reduce" or self.few(rows, d) else narrowed(x, rows, d)

    def few(self, rows: int, d: int) -> bool:
        """Whether the rows are kept instead of their matrix."""
        return self.low_rank and few_rows(rows, d)


def corrected(block: Block, x: Tensor, g: Tensor, q_a: Tensor, q_b: Tensor) -> Tensor:
    """Σ_n (Q_Bᵀ G_n Q_A)² with G_n = Σ_positions g [x, 1]ᵀ, the gradient of one example.

    With more positions than outputs, G_n is computed first and then transformed; otherwise g and x are transformed.
    """
    layer, total = block.layer, _empty_spectrum(q_a, q_b)
    if not g.numel():  # an expert without tokens on this process
        return total
    together = max(1, GRADIENTS.get(x.device.type, 2**24) // total.numel())
    if by_gradients(block, x, g):
        chunks = layer.gradients_of_examples(cast_floating(x, q_a.dtype), g.to(q_a.dtype), together)
        return corrected_by_gradients(block, chunks, q_a, q_b)
    for a, b in rows_in_basis(block, x, g, q_a, q_b):
        if a.shape[2] == 1:
            total += (b[:, :, 0].square().permute(1, 2, 0)) @ (a[:, :, 0].square().transpose(0, 1))
        else:
            _add_squares(total, a, b, together)
    return total


def by_gradients(block: Block, x: Tensor, g: Tensor) -> bool:
    """Whether gradients of single examples are computed first, because there are more positions than outputs."""
    layer = block.layer
    return block.weight is not None and g.numel() > layer.examples(x) * layer.groups * layer.d_out**2


def corrected_by_gradients(block: Block, chunks: Iterable[tuple[Tensor, Tensor]], q_a: Tensor, q_b: Tensor) -> Tensor:
    """The same from chunks of gradients in the weight and in the bias."""
    total, columns = _empty_spectrum(q_a, q_b), _columns_of_inputs(block, q_a)
    assert columns is not None
    for gradients, sums in chunks:
        transformed = _in_basis(gradients, columns)
        if block.bias is not None:
            transformed.addcmul_(sums[..., None], q_a[:, -1:])
        total += _sum_of_squares(q_b.mT @ transformed)
    return total


def rows_in_basis(block: Block, x: Tensor, g: Tensor, q_a: Tensor, q_b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """[x, 1] Q_A and g Q_B for the positions of chunks of examples: (n, groups, S, r) and (n, groups, S, s).

    Only products of the two are right: x Q_A is left out where g is zero (:func:`reached`).
    """
    columns = _columns_of_inputs(block, q_a)
    for inputs, gradients in block.layer.positions(x, g):
        which = reached(gradients)
        if columns is None:
            a = inputs.new_zeros(*inputs.shape[:-1], 1, dtype=q_a.dtype)
        else:
            a = _in_basis(inputs, columns, which)
        yield a if block.bias is None else a.add_(q_a[:, -1:]), _in_basis(gradients, q_b, which)


def reached(g: Tensor) -> Tensor | None:
    """The numbers of the rows (n, 1, S, d) that have a gradient; ``None`` for all rows.

    Tokens that a model masks, such as padding, have none.
    """
    if g.device.type != "cpu" or g.shape[1] > 1 or g.shape[2] == 1:
        return None
    which = g.reshape(-1, g.shape[-1]).any(-1).nonzero()[:, 0]
    return which if len(which) <= FEW_REACHED * g.shape[0] * g.shape[2] else None


def _empty_spectrum(q_a: Tensor, q_b: Tensor) -> Tensor:
    return q_a.new_zeros(q_a.shape[0], q_b.shape[-1], q_a.shape[-1])


def _columns_of_inputs(block: Block, q_a: Tensor) -> Tensor | None:
    """The rows of Q_A that belong to the weight, in the order of the layer's inputs."""
    d = block.layer.d_in if block.weight is not None else 0
    return block.layer.reordered(q_a[:, :d]) if d else None


def _add_squares(total: Tensor, a: Tensor, b: Tensor, size: int) -> None:
    """Add Σ_n (b_nᵀ a_n)² to ``total``, ``size`` examples at a time; on a CPU one by one if they are large, so that
    the product is squared while it is in the cache."""
    if total.device.type == "cpu" and total.numel() >= LARGE_GRADIENT:
        product = torch.empty_like(total)
        for some, of_them in zip(b, a, strict=True):
            torch.bmm(some.mT, of_them, out=product)
            total.addcmul_(product, product)
        return
    for some, of_them in zip(b.split(size), a.split(size), strict=True):
        total += _sum_of_squares(some.mT @ of_them)


def _sum_of_squares(x: Tensor) -> Tensor:
    """Σ x² over the first dimension; overwrites ``x``. The one-pass version is faster on a GPU, but not on a CPU."""
    return torch.linalg.vector_norm(x, dim=0).square_() if x.is_cuda else x.square_().sum(0)


def _in_basis(rows: Tensor, basis: Tensor, which: Tensor | None = None) -> Tensor:
    """Rows (n, groups, S, d) in a basis (groups, d, k); in one product if there is one group. With ``which`` only
    these rows, and zeros for the others."""
    if len(basis) > 1:
        return rows.to(basis.dtype) @ basis
    flat = rows.reshape(-1, rows.shape[-1])
    found = (flat if which is None else flat[which]).to(basis.dtype) @ basis[0]
    if which is not None:
        found = found.new_zeros(len(flat), found.shape[1]).index_copy_(0, which, found)
    return found.view(*rows.shape[:-1], -1)
