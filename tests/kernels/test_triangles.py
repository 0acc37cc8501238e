"""Inverses of small triangles: by blocks and by the library, against float64."""

from __future__ import annotations

import pytest
import torch

from hyperkron.kernels import linalg, triangles


def lower(count: int, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Triangles of well-conditioned systems."""
    x = torch.randn(count, n, 2 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    eye = torch.eye(n, dtype=torch.float64)
    return torch.linalg.cholesky(x @ x.mT / (2 * n) + 0.01 * eye).to(dtype)


@pytest.mark.parametrize(("count", "n"), [(2, 320), (3, 200), (5, 129), (5, 128), (8, 100), (12, 65)])
def test_blocks_give_the_inverse(count: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = lower(count, n)
    kept = given.clone()
    sizes: list[int] = []
    solve = torch.linalg.solve_triangular
    monkeypatch.setattr(
        torch.linalg, "solve_triangular", lambda a, *rest, **o: sizes.append(a.shape[-1]) or solve(a, *rest, **o)
    )
    found = triangles.inverse(given, blocks=True)
    assert sizes == [triangles.BLOCK]  # the corners, in one call
    assert torch.equal(given, kept) and found.is_contiguous()
    assert (found @ given - torch.eye(n, dtype=torch.float64)).abs().max() < 1e-12
    assert torch.equal(found, found.tril())
    low = triangles.inverse(given.float(), blocks=True)
    assert (low - found).norm() / found.norm() < 2e-6


@pytest.mark.parametrize(("count", "n"), [(1, 320), (2, 256), (13, 128), (9, 64), (5, 1)])
def test_the_library_inverts_where_blocks_gain_nothing(count: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = lower(count, n)
    monkeypatch.setattr(triangles, "_join", None)  # would fail
    found = triangles.inverse(given, blocks=True)
    assert torch.equal(found, triangles.inverse(given))
    assert (found @ given - torch.eye(n, dtype=torch.float64)).abs().max() < 1e-12


def test_factorisations_of_recordings_solve_as_others_do() -> None:
    triangle = lower(5, 300)
    matrices, v = triangle @ triangle.mT, torch.randn(5, 300, 7, dtype=torch.float64)
    plain, _ = linalg._halved(matrices.clone(), leaf=160)
    blocks, info = linalg._halved(matrices.clone(), leaf=160, recorded=True)
    assert not info.any()
    assert (blocks.solve(v) - plain.solve(v)).abs().max() < 1e-10
    assert (matrices @ blocks.solve(v) - v).abs().max() < 1e-10
