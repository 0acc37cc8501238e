"""Block elimination against dense float64 solves; the code that runs on GPUs, here on the CPU at small size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hyperkron.kernels import linalg, split_products
from hyperkron.kernels.linalg import Halves

SIZES = [1, 5, 63, 64, 65, 129, 200, 321]


def spd(count: int, n: int, damping: float = 1e-2) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(count, n, n // 2 + 1, dtype=torch.float64, generator=generator)
    return x @ x.mT / n + damping * torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("n", SIZES)
def test_halving_solves_and_multiplies_like_the_dense_matrix(n: int) -> None:
    matrices = spd(3, n)
    v = torch.randn(3, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made, info = linalg._halved(matrices.clone(), leaf=48)
    assert info.tolist() == [0, 0, 0]
    assert isinstance(made, linalg.Leaf) == (n <= 48)
    torch.testing.assert_close(made.solve(v), torch.linalg.solve(matrices, v), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(made.times(v), matrices @ v, rtol=1e-9, atol=1e-10)
    assert made.size == n
    before = v.clone()
    for layout in (v, v.mT.contiguous().mT, torch.cat([v, v], dim=2)[..., :4]):
        torch.testing.assert_close(made.solve(layout), made.solve(v), rtol=1e-9, atol=1e-10)
        assert torch.equal(v, before)
        mine = layout.clone()
        assert made.solve(mine, overwrite=True) is mine
        torch.testing.assert_close(mine, made.solve(v), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("damping", [1e-1, 1e-3])
@pytest.mark.parametrize("n", SIZES)
def test_float32_error_is_that_of_a_library_solve(n: int, damping: float) -> None:
    exact = spd(2, n, damping)
    v = torch.randn(2, n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    truth = torch.linalg.solve(exact, v)
    made, _ = linalg._halved(exact.float(), leaf=48)
    ours = (made.solve(v.float()).double() - truth).norm() / truth.norm()
    library = torch.cholesky_solve(v.float(), torch.linalg.cholesky(exact.float())).double()
    condition = float(torch.linalg.cond(exact).max())
    assert ours < 1e-6 * condition
    assert ours < 4 * (library - truth).norm() / truth.norm() + 1e-7


@pytest.mark.parametrize("how", [linalg._halved, linalg._scaled])
def test_info_names_the_matrix_that_is_not_positive_definite(how: Callable[..., tuple[Halves, Tensor]]) -> None:
    for shift in (-5.0, -100.0):
        matrices = spd(4, 150)
        matrices[2] += shift * torch.eye(150, dtype=torch.float64)
        _, info = how(matrices.clone(), leaf=48)
        assert (info != 0).tolist() == [False, False, True, False]


@pytest.mark.parametrize("size", [1e-18, 1e-4, 1.0, 1e12])
def test_scaled_matrices_have_a_small_triangle_and_the_same_answers(size: float) -> None:
    matrices = size * spd(3, 200) * torch.tensor([1.0, 1e-3, 1e3], dtype=torch.float64)[:, None, None]
    v = torch.randn(3, 200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made, info = linalg._scaled(matrices.clone(), leaf=48)
    assert isinstance(made, linalg.Scaled) and not info.any() and made.size == 200
    assert torch.equal(made.scale.log2().round().exp2(), made.scale)  # multiplying by it rounds nothing
    triangle = made.scaled.lower(torch.eye(200, dtype=torch.float64).repeat(3, 1, 1)).abs().flatten(1).amax(1)
    assert (triangle <= 2**linalg.MAX_EXPONENT).all() and (triangle > 2**linalg.MAX_EXPONENT / 4).all()
    plain, _ = linalg._halved(matrices.clone(), leaf=48)
    before = v.clone()
    for found in (made, linalg.load_factorization(made.state_dict())):
        torch.testing.assert_close(found.solve(v), plain.solve(v), rtol=1e-9, atol=0)
        torch.testing.assert_close(found.times(v), plain.times(v), rtol=1e-9, atol=1e-12 * size)
        assert torch.equal(v, before)
    assert torch.equal(made.part(1, 3).solve(v[1:3]), made.solve(v)[1:3])
    mine = v.clone()
    assert made.solve(mine, overwrite=True) is mine and torch.equal(mine, made.solve(v))
    for name in ("forward", "backward"):
        halves = [torch.empty_like(v), torch.empty_like(v)]
        for one, out in zip((made, plain), halves, strict=True):
            getattr(one, name)(v.clone(), out)
        torch.testing.assert_close(*halves, rtol=1e-9, atol=0)
    times = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[:, None, None]
    triangles = [one.inverse_triangle(times) for one in (made, plain)]
    torch.testing.assert_close(*triangles, rtol=1e-9, atol=1e-14 / size**0.5)
    rows = matrices[:, :, :7]
    torch.testing.assert_close(made.contraction(rows, 4.0), plain.contraction(rows, 4.0), rtol=1e-9, atol=1e-20)
    assert torch.equal(rows, matrices[:, :, :7])


def test_part_and_state_dict_keep_the_answer() -> None:
    matrices = spd(5, 200)
    v = torch.randn(2, 200, 3, dtype=torch.float64)
    made, _ = linalg._halved(matrices.clone(), leaf=48)
    assert torch.equal(made.part(1, 3).solve(v), linalg.load_factorization(made.part(1, 3).state_dict()).solve(v))
    torch.testing.assert_close(made.part(1, 3).solve(v), torch.linalg.solve(matrices[1:3], v), rtol=1e-9, atol=1e-10)


def test_it_holds_about_half_of_an_explicit_inverse() -> None:
    def numbers(made: linalg.Factorization) -> int:
        if isinstance(made, linalg.Node):
            return numbers(made.head) + made.c.numel() + numbers(made.tail)
        assert isinstance(made, linalg.Leaf)
        return made.inverse.numel()

    made, _ = linalg._halved(spd(1, 1024), leaf=64)
    assert numbers(made) < 0.6 * 1024**2


def test_full_precision_restores_the_settings_also_after_an_exception() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        with contextlib.suppress(RuntimeError), split_products.full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
            raise RuntimeError
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("count", "n"), [(3, 300), (12, 769), (3, 2304)])
def test_on_a_gpu_the_same(count: int, n: int) -> None:
    matrices, v = spd(count, n).cuda(), torch.randn(count, n, 8, dtype=torch.float64, device="cuda")
    made, info = linalg.factorize(matrices.float())
    assert not info.any()
    truth = torch.linalg.solve(matrices, v)
    assert (made.solve(v.float()).double() - truth).norm() / truth.norm() < 1e-4
    assert (made.solve(v.float().mT.contiguous().mT).double() - truth).norm() / truth.norm() < 1e-4
