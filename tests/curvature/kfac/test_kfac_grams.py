"""Rows in half precision, as they are used where TF32 is allowed, against float64; on the CPU by the same code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.curvature.kfac import grams, inverse
from hyperkron.curvature.kfac.capture import measure
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.factors import dense
from hyperkron.curvature.kfac.measured import Measured, Measurement
from hyperkron.evaluation.point import Point

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products may run in TF32, also on a CPU, and all are worth scaling."""
    monkeypatch.setattr(grams, "tf32_products", lambda device: True)
    monkeypatch.setattr(grams, "MIN_MULTIPLICATIONS", 0)


@pytest.mark.parametrize("size", [1e-25, 1e-6, 1.0, 1e6, 1e30])
def test_ten_bits_are_kept_whatever_the_scale(tf32: None, size: float) -> None:
    exponents = torch.linspace(-27, 0, 1000, dtype=torch.float64)
    x = (size * 2**exponents * torch.where(torch.arange(1000) % 2 == 0, 1, -1)).float()
    y, scale = grams.narrowed(x, 1, 1)
    assert y.dtype == torch.float16
    assert scale is not None
    back = y.double() * scale.double()
    assert ((back - x.double()).abs() / x.double().abs()).max() <= 2**-11 * 1.001


def test_nothing_is_hidden(tf32: None) -> None:
    y, scale = grams.narrowed(torch.zeros(5), 1, 1)
    assert scale is not None
    assert y.eq(0).all()
    for bad in (float("nan"), float("inf")):
        y, scale = grams.narrowed(torch.tensor([1.0, bad]), 1, 1)
        assert scale is not None
        assert not (y * scale).isfinite().all()


def test_half_precision_stays_and_full_precision_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)
    assert grams.narrowed(x, grams.MIN_MULTIPLICATIONS, 1)[0] is x  # no TF32 on a CPU
    monkeypatch.setattr(grams, "tf32_products", lambda device: True)
    assert grams.narrowed(x, 1, 1)[0] is x
    assert grams.narrowed(x, grams.MIN_MULTIPLICATIONS, 1)[0] is not x
    monkeypatch.setattr(grams, "MIN_MULTIPLICATIONS", 0)
    for kept in (x.bfloat16(), x.half(), x.double()):
        assert grams.narrowed(kept, 1, 1)[0] is kept
        assert grams.narrowed(kept, 1, 1)[1] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    rows = torch.randn(2, 3000, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, count = grams.summed(iter(rows.split(700, dim=1)), torch.float32, None, False)
    wide = rows.double()
    assert count == 3000
    torch.testing.assert_close(dense(found).double(), wide.mT @ wide, rtol=1e-5, atol=1e-3)


class Mixed(nn.Module):
    """Convolutions with bias, stride and groups, and linear layers, one of which has few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False)
        self.wide = nn.Linear(72, 64)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x))).flatten(1)
        return self.head(torch.tanh(self.wide(x)))


def factors(device: str, dtype: torch.dtype, low_rank: bool) -> Measured:
    torch.manual_seed(0)
    model, weights = Mixed().to(device, dtype), hk.SampleWeights(12).to(device)
    x = 100 * torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    batch = (x, torch.arange(12, device=device) % 3, torch.arange(12, device=device))
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2]).to(dtype)),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    with Point(problem, model, weights, batch, batch) as point:
        how = Measurement("empirical", 1, "expand", torch.Generator(device), low_rank=low_rank)
        return measure(point, plan(model, "diagonal"), how)


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_factors_have_the_accuracy_of_tf32(device: str, low_rank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = factors(device, torch.float64, low_rank)
    halves: list[int] = []
    plus = grams._plus_gram

    def counted(total: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
        halves.append(rows.dtype == torch.float16)
        return plus(total, rows, dtype)

    monkeypatch.setattr(grams, "tf32_products", lambda device: True)
    monkeypatch.setattr(grams, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(grams, "_plus_gram", counted)
    found = factors(device, torch.float32, low_rank)
    assert any(halves)
    for mine, its in ((found.a, exact.a), (found.b, exact.b)):
        assert list(mine) == list(its)
        for name in mine:
            true = dense(its[name])  # two factors rounded by 2⁻¹¹ each: at most 9.8e-4
            assert (dense(mine[name]).double() - true).norm() <= 1e-3 * true.norm(), name


def test_a_border_is_as_large_as_its_matrix() -> None:
    """Else a small matrix would be scaled by its border, and lose its bits where numbers are kept in float16."""
    scales = torch.tensor([1e-12, 2e-12, 3e-12, 1.0, 4e-12])[:, None, None]
    stack = torch.eye(5) * scales
    stack[[0, 1, 2], 3:] = stack[4, 4:] = 0.0
    systems: Any = SimpleNamespace(extra=[9, 2, 2, 0, 1], begin=[0, 9, 11, 12, 13], groups=[9, 2, 1, 1, 1])
    inverse._Systems._border(systems, stack, [1, 2, 3, 4])
    wanted = torch.eye(5) * scales
    torch.testing.assert_close(stack, wanted, rtol=0, atol=0)


def test_gradients_that_are_squared_one_by_one_give_the_same_spectrum(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = plan(nn.Linear(5, 4), "zero").blocks.values()
    x, g, q_a, q_b = (torch.randn(*size, dtype=torch.float64) for size in ((6, 3, 5), (6, 3, 4), (1, 6, 6), (1, 4, 4)))
    wanted = grams.corrected(block, x, g, q_a, q_b)
    monkeypatch.setattr(grams, "LARGE_GRADIENT", 1)
    torch.testing.assert_close(grams.corrected(block, x, g, q_a, q_b), wanted, rtol=1e-12, atol=1e-12)
