"""Σ patch patchᵀ of a convolution without patches, from the correlations of the image with itself.

With stride 1 the entry of A for the kernel's taps k and l is Σ_p x[p+k] x[p+l]ᵀ over output positions p. It depends on
the taps through their distance l − k, but for pixels near the border, which some taps never meet. So the image is cut
into the segments that the same taps meet; each needs one product of channels for each distance: for a 3×3 kernel 13, up
to sign, in place of 81 pairs of taps.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Pair = tuple[int, int]


class Segment(NamedTuple):
    """Pixels ``begin`` to ``end`` of one dimension that ``taps`` meet while taps + ``distance`` meet those beyond."""

    distance: int
    begin: int
    end: int
    taps: tuple[int, ...]


def segments(size: int, kernel: int, dilation: int, padding: Pair) -> list[Segment]:
    """The segments of ``size`` pixels for all distances ≥ 0 between two taps of a kernel with stride 1."""
    before, after = padding
    out = size + before + after - dilation * (kernel - 1)
    found = []
    for d in range(kernel):
        first = [k * dilation - before for k in range(kernel - d)]  # where a tap meets the first pixel, or would
        met = [(max(0, f), min(size - d * dilation, f + out)) for f in first]
        cuts = sorted({edge for begin, end in met if begin < end for edge in (begin, end)})
        for begin, end in pairwise(cuts):
            taps = tuple(k for k, (low, high) in enumerate(met) if low <= begin and end <= high)
            if taps:
                found.append(Segment(d, begin, end, taps))
    return found


def patch_gram(x: Tensor, kernel: Pair, dilation: Pair, padding: tuple[Pair, Pair]) -> Tensor:
    """Σ patch patchᵀ over all positions of images (N, C, H, W), at stride 1, in the order of a weight's columns.

    ``padding`` has the zeros before and after, for both dimensions.
    """
    channels, (kh, kw) = x.shape[1], kernel
    pixels = x.permute(2, 3, 0, 1).contiguous()
    blocks = x.new_zeros(kh * kw, kh * kw, channels, channels)
    for rows in segments(x.shape[2], kh, dilation[0], padding[0]):
        below = rows.distance * dilation[0]
        upper, lower = pixels[rows.begin : rows.end], pixels[rows.begin + below : rows.end + below]
        for columns in segments(x.shape[3], kw, dilation[1], padding[1]):
            aside = columns.distance * dilation[1]
            for flip in (False, True) if rows.distance and columns.distance else (False,):
                near, far = (aside, 0) if flip else (0, aside)
                product = _correlation(
                    upper[:, columns.begin + near : columns.end + near],
                    lower[:, columns.begin + far : columns.end + far],
                )
                for i in rows.taps:
                    for j in columns.taps:
                        j_near, j_far = (j + columns.distance, j) if flip else (j, j + columns.distance)
                        blocks[i * kw + j_near, (i + rows.distance) * kw + j_far] += product
    for k in range(kh * kw):
        for smaller in range(k):
            blocks[k, smaller] = blocks[smaller, k].mT
    return blocks.permute(2, 0, 3, 1).reshape(channels * kh * kw, -1)


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Σ a bᵀ over the first three of (rows, columns, N, C), without copying either."""
    channels = a.shape[-1]
    if len(a) == 1 or (a.is_contiguous() and b.is_contiguous()):
        return a.reshape(-1, channels).mT @ b.reshape(-1, channels)
    return torch.bmm(a.flatten(1, 2).mT, b.flatten(1, 2)).sum(0)
