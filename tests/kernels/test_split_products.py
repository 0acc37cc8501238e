"""Float32 products by three products in half precision: their error against float64, and when they are used."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hyperkron.curvature.kfac.factors import Dual, Primal
from hyperkron.kernels import linalg, split_products


@pytest.fixture
def _split(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that may use TF32, also for small matrices."""
    always = lambda *sizes, like: like.dtype == torch.float32  # noqa: E731
    monkeypatch.setattr(split_products, "splits", always)
    monkeypatch.setattr(linalg, "splits", always)
    monkeypatch.setattr(split_products, "PIECE", 2000)  # several pieces


def matrices(*shape: int, spread: float = 0.0) -> Tensor:
    """Normal numbers, the columns of very different size where ``spread``."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return x * 10 ** (spread * torch.linspace(-1, 1, shape[-1], dtype=torch.float64))


def error(found: Tensor, a: Tensor, b: Tensor) -> float:
    """Relative to |a| |b|, the size of what is summed."""
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    return float(((found.double() - exact).abs() / size).max())


@pytest.mark.usefixtures("_split")
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_products_keep_nearly_all_digits_of_float32(scale: float, spread: float) -> None:
    a, b = (scale * matrices(5, 30, 40, spread=spread)).float(), matrices(5, 40, 20).float()
    assert error(split_products.product(a, b), a, b) < 2.0**-20
    assert error(split_products.product(b.mT, a.mT), b.mT, a.mT) < 2.0**-20
    v = torch.zeros(5, 30, 20)
    assert split_products.subtract_product(v, a, b) is v
    assert error(-v, a, b) < 2.0**-20
    if scale == 1.0:  # else squares are outside the range of float32
        assert error(linalg.gram(a), a.mT, a) < 2.0**-20


@pytest.mark.usefixtures("_split")
def test_matrices_may_lie_in_memory_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        back = sorted(range(3), key=order.__getitem__)
        a = matrices(5, 30, 40).float().permute(order).contiguous().permute(back)
        b = matrices(5, 40, 20).float().permute(order).contiguous().permute(back)
        assert error(split_products.product(a, b), a, b) < 2.0**-20
        with split_products.bounded():
            assert error(-split_products.subtract_product(torch.zeros(5, 30, 20), a, b), a, b) < 2.0**-20


@pytest.mark.usefixtures("_split")
@pytest.mark.parametrize("largest", [2.0**7, 2.0**14])
def test_bounded_products_are_split_as_they_are(largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the digits of float32, relative to the largest numbers; nothing is scaled."""
    a, b = matrices(5, 30, 40, spread=2.0), matrices(5, 40, 20)
    a, b = ((largest * x / x.abs().max()).float() for x in (a, b))
    monkeypatch.setattr(split_products, "_in_range", None)
    size = 2.0**-22 * 40**0.5 * float(a.abs().max() * b.abs().max())
    with split_products.bounded():
        for v, x, y in ((torch.zeros(5, 30, 20), a, b), (torch.zeros(5, 20, 30), b.mT, a.mT)):
            assert split_products.subtract_product(v, x, y) is v
            assert (v.double() + x.double() @ y.double()).abs().max() < size
        v = torch.zeros(5, 50, 45)[:, 5:45, 5:45]  # a part of a larger matrix
        assert split_products.subtract_gram(v, a) is v
        assert (v.double() + a.double().mT @ a.double()).abs().max() < size
    assert not split_products._bounded[0]


@pytest.mark.usefixtures("_split")
def test_half_precision_alone_would_not_do() -> None:
    a, b = matrices(2, 30, 40).float(), matrices(2, 40, 20).float()
    assert error(a.half().float() @ b.half().float(), a, b) > 2.0**-13


@pytest.mark.usefixtures("_split")
def test_zeros_and_numbers_that_are_not_finite() -> None:
    a, b = torch.zeros(2, 3, 4), matrices(2, 4, 3).float()
    assert not split_products.product(a, b).any()
    a[0, 0, 0] = float("nan")
    a[1, 0, 0] = float("inf")
    found = split_products.product(a, b)
    assert not found[0, 0].isfinite().any() and not found[1, 0].isfinite().any()


@pytest.mark.usefixtures("_split")
@pytest.mark.parametrize("factorised", [linalg._halved, linalg._scaled])
def test_factorisations_and_solves_made_of_them_are_those_of_float32(
    factorised: Callable[..., tuple[linalg.Halves, Tensor]],
) -> None:
    """By Woodbury's identity, whose answer is a small difference of large numbers: half of the digits is not enough."""
    x, v = matrices(3, 60, 160) / 160**0.5, matrices(3, 160, 20)
    shift = torch.full((3,), 1e-3, dtype=torch.float64)
    exact = x.mT @ x + 1e-3 * torch.eye(160, dtype=torch.float64)
    kernel, info = factorised((x @ x.mT + 1e-3 * torch.eye(60, dtype=torch.float64)).float(), leaf=16)
    assert not info.any()
    found = Dual(x.float(), Primal(kernel), shift.float()).solve(v.float()).double()
    wanted = torch.linalg.solve(exact, v)
    along = lambda z: x @ z  # noqa: E731  where the cancellation is
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert (along(found) - along(wanted)).norm() < 1e-3 * along(wanted).norm()


def test_they_are_used_only_where_tf32_is_allowed_and_full_precision_asked_for() -> None:
    class Gpu:
        is_cuda, dtype = True, torch.float32

    def split(size: int) -> bool:
        return split_products.splits(size, size, like=Gpu())  # type: ignore[arg-type]

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert not split(512)
        with split_products.full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            assert split(512) and not split(128)
            with split_products.full_precision():
                assert split(512)
            assert split(512)
        assert not split(512) and torch.get_float32_matmul_precision() == "high"
        torch.set_float32_matmul_precision("highest")
        with split_products.full_precision():
            assert not split(512)
    finally:
        torch.set_float32_matmul_precision(before)
