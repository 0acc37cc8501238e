"""Σ patch patchᵀ from correlations, against the patches themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hyperkron.curvature.kfac.correlation import patch_gram, segments, side_by_side_gram
from hyperkron.curvature.kfac.layers import ConvLayer
from hyperkron.kernels.linalg import gram


def by_patches(x: Tensor, kernel: tuple[int, int], dilation: tuple[int, int], padding: list[tuple[int, int]]) -> Tensor:
    (top, bottom), (left, right) = padding
    columns = F.unfold(F.pad(x, (left, right, top, bottom)), kernel, dilation=dilation)
    rows = columns.transpose(1, 2).flatten(0, 1)
    return rows.mT @ rows


@st.composite
def dimension(draw: st.DrawFn) -> tuple[int, int, int, tuple[int, int]]:
    """A size with a kernel, dilation and padding that fit it; the padding may exceed the kernel."""
    kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    least = max(1, dilation * (kernel - 1) + 1 - sum(padding))
    return draw(st.integers(least, least + 6)), kernel, dilation, padding


@given(height=dimension(), width=dimension())
def test_patch_gram(
    height: tuple[int, int, int, tuple[int, int]], width: tuple[int, int, int, tuple[int, int]]
) -> None:
    """Any kernel, dilation and padding at stride 1, also where some pixels meet only part of the kernel."""
    x = torch.randn(2, 3, height[0], width[0], dtype=torch.float64)
    kernel, dilation, padding = ((a, b) for a, b in zip(height[1:], width[1:], strict=True))
    wanted = by_patches(x, kernel, dilation, list(padding))  # type: ignore[arg-type]
    for made in (patch_gram, side_by_side_gram):
        found = made(x, kernel, dilation, padding)  # type: ignore[arg-type]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_sums_in_float32_are_as_near_as_those_of_patches() -> None:
    """Images as a ReLU leaves them, whose sums grow with every term."""
    torch.manual_seed(0)
    x, geometry = torch.rand(64, 3, 32, 32), ((3, 3), (1, 1), ((1, 1), (1, 1)))
    exact = by_patches(x.double(), (3, 3), (1, 1), [(1, 1), (1, 1)])
    rounding = (by_patches(x, (3, 3), (1, 1), [(1, 1), (1, 1)]) - exact).abs().max()
    for made in (patch_gram, side_by_side_gram):
        assert (made(x, *geometry) - exact).abs().max() <= 2 * rounding


def test_a_same_convolution_needs_few_products() -> None:
    """A 3×3 kernel on a large image: one long product for each of 13 distances, the others along the border."""
    lengths = [[s.end - s.begin for s in segments(32, 3, 1, (1, 1)) if s.distance == d] for d in range(3)]
    assert lengths == [[1, 30, 1], [31], [30]]


@pytest.mark.parametrize(
    ("module", "covered"),
    [
        (nn.Conv2d(8, 2, 3, padding=1), True),
        (nn.Conv2d(8, 2, (2, 3), padding="same"), True),
        (nn.Conv2d(8, 2, 3, dilation=2), True),
        (nn.Conv2d(8, 2, 3, stride=2), False),
        (nn.Conv2d(8, 2, 3, groups=2), False),
        (nn.Conv2d(8, 2, 1), False),
        (nn.Conv2d(8, 2, 3, padding=1, padding_mode="circular"), False),
        (nn.Conv2d(3, 2, 3), True),
        (nn.Conv2d(9, 2, 3, padding=1), True),
        (nn.Conv2d(1, 2, 3), False),
    ],
)
def test_which_convolutions_need_no_rows(module: nn.Conv2d, covered: bool) -> None:
    layer = ConvLayer(module.double())
    x = torch.randn(2, module.in_channels, 6, 7, dtype=torch.float64)
    found = layer.input_gram(x)
    assert (found is not None) == covered
    if found is not None:
        rows = layer.ordered(torch.cat(list(layer.inputs(x, "expand")), dim=1))
        torch.testing.assert_close(found, rows.mT @ rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 9, 130), (1, 300, 257), (1, 5, 3), (2, 9, 140)])
def test_gram_is_rows_times_rows(shape: tuple[int, int, int]) -> None:
    rows = torch.randn(shape, dtype=torch.float64)
    found = gram(rows)
    torch.testing.assert_close(found, rows.mT @ rows, rtol=1e-12, atol=1e-12)
    assert shape[0] > 1 or torch.equal(found, found.mT)
