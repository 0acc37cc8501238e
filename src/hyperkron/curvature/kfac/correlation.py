"""Σ patch patchᵀ of a convolution, computed without patches from the correlations of the image with itself.

With stride 1 the entry of A for the kernel's taps k and l is Σ_p x[p+k] x[p+l]ᵀ over output positions p. It depends
only on the distance l − k of the taps, except for pixels near the border, which some taps never reach. So the image is
cut into segments that are reached by the same taps. Each segment needs one product of channels for each distance: for a
3×3 kernel 13 (up to sign) instead of 81 pairs of taps.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]


class Segment(NamedTuple):
    """Pixels ``begin`` to ``end`` of one dimension that the adjacent ``taps`` reach, while taps + ``distance`` reach
    the pixels that many positions further."""

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
        first = [k * dilation - before for k in range(kernel - d)]  # the first position of a tap; may be outside
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
    return _pixel_gram(x.permute(2, 3, 0, 1).contiguous(), kernel, dilation, padding)


def _pixel_gram(pixels: Tensor, kernel: Pair, dilation: Pair, padding: tuple[Pair, Pair]) -> Tensor:
    """The same of images (H, W, N, C)."""
    channels, (kh, kw) = pixels.shape[-1], kernel
    blocks = pixels.new_zeros(kh, kw, kh, kw, channels, channels)
    for rows in segments(pixels.shape[0], kh, dilation[0], padding[0]):
        below = rows.distance * dilation[0]
        upper, lower = pixels[rows.begin : rows.end], pixels[rows.begin + below : rows.end + below]
        of_rows = blocks.diagonal(rows.distance, 0, 2)[..., rows.taps[0] : rows.taps[-1] + 1]
        for columns in segments(pixels.shape[1], kw, dilation[1], padding[1]):
            aside = columns.distance * dilation[1]
            for flip in (False, True) if rows.distance and columns.distance else (False,):
                near, far = (aside, 0) if flip else (0, aside)
                product = _correlation(
                    upper[:, columns.begin + near : columns.end + near],
                    lower[:, columns.begin + far : columns.end + far],
                )
                pairs = of_rows.diagonal(-columns.distance if flip else columns.distance, 0, 1)
                pairs[..., columns.taps[0] : columns.taps[-1] + 1] += product[..., None, None]
    blocks.diagonal(0, 0, 2).diagonal(0, 0, 1).mul_(0.5)  # only pairs of ordered taps so far: add the transpose
    half = blocks.permute(4, 0, 1, 5, 2, 3).reshape(channels * kh * kw, -1)
    return half + half.mT


def side_by_side_gram(x: Tensor, kernel: Pair, dilation: Pair, padding: tuple[Pair, Pair]) -> Tensor:
    """The same for images with few channels: the kw pixels under a row of the kernel are treated as kw·C channels, so
    that products are less narrow."""
    (kh, kw), (count, channels, height, _) = kernel, x.shape
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, *padding[1])).contiguous()
    wide, (images, lines, pixels, _) = padded.shape[2] - dilation[1] * (kw - 1), padded.stride()
    size, strides = (height, count, wide, kw, channels), (lines, images, pixels, dilation[1] * pixels, 1)
    rows = padded.as_strided(size, strides).reshape(height, 1, count * wide, kw * channels)  # columns count as images
    found = _pixel_gram(rows, (kh, 1), (dilation[0], 1), (padding[0], (0, 0)))
    ordered = found.view(kw, channels, kh, kw, channels, kh).permute(1, 2, 0, 4, 5, 3)
    return ordered.reshape(found.shape)


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Σ a bᵀ over the first three of (rows, columns, N, C), without copying either."""
    channels = a.shape[-1]
    if len(a) == 1 or (a.is_contiguous() and b.is_contiguous()):
        return a.reshape(-1, channels).mT @ b.reshape(-1, channels)
    return torch.bmm(a.flatten(1, 2).mT, b.flatten(1, 2)).sum(0)
