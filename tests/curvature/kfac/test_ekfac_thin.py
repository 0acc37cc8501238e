"""Eigenbases of the rows' span only: thin ones give what complete ones do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Case, Mean, make, mlp, random_weights
from hyperkron.curvature import KroneckerState
from hyperkron.curvature.kfac import eigen
from hyperkron.curvature.kfac.eigen import EigenInverses
from hyperkron.curvature.kfac.factors import LowRank

WIDE: dict[str, Callable[[], Case]] = {
    "wide": lambda: make(mlp(10, 7, 3), (10,), loss="cross_entropy", count=4, hyper=random_weights(4)),
    "no bias": lambda: make(mlp(10, 7, 3, bias=False), (10,), loss="cross_entropy", count=4),
    "dependent rows": lambda: _dependent(make(mlp(12, 9, 3), (12,), loss="cross_entropy", count=6)),
    "convolution": lambda: make(
        nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.Tanh(), Mean(True), nn.Linear(6, 3)),
        (3, 5, 5),
        loss="cross_entropy",
        count=3,
    ),
    "groups": lambda: make(
        nn.Sequential(nn.Conv2d(6, 4, 3, groups=2), nn.Tanh(), Mean(True), nn.Linear(4, 3)),
        (6, 4, 4),
        loss="cross_entropy",
        count=3,
    ),
    "l2": lambda: make(
        mlp(10, 7, 3),
        (10,),
        loss="cross_entropy",
        count=4,
        decay={"0.weight": torch.tensor(0.3, dtype=DOUBLE), "0.bias": torch.tensor(0.3, dtype=DOUBLE)},
    ),
}


def _dependent(case: Case) -> Case:
    """Inputs of which one is zero, two are equal, and one is the small multiple of another."""
    x, y = case.inner_batch
    x[0], x[1], x[2] = 0.0, x[3], 1e-9 * x[4]
    case.inner_batch = (x, y)
    return case


def full(curvature: hk.curvature.KFAC | hk.curvature.EKFAC) -> hk.curvature.KFAC | hk.curvature.EKFAC:
    """The same curvature with complete bases only.

    They come from dense factors. But drawn spectra are not zero where B is, and depend on the vectors that
    complete its basis there, of which one choice is as good as another; so B's are then had from its rows.
    """
    kind = type(curvature)
    drawn = kind is hk.curvature.EKFAC and curvature.fisher in hk.losses.DRAWN
    complete = {"_thin": False, "_low_rank": drawn}
    return type(kind.__name__, (kind,), complete)(**vars(curvature))  # type: ignore[no-any-return]


def both(
    case: Case, curvature: hk.curvature.KFAC | hk.curvature.EKFAC
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], str]:
    """(matrix, inverse) of ``curvature`` and of that with complete bases, and how the former was had."""
    found, how = [], ""
    for one in (full(curvature), curvature):
        state = one.init()
        with case.point() as point:
            operator = one.operator(point, state)
            found.append((oracles.dense(operator.matvec, case.params), oracles.dense(operator.solve, case.params)))
        assert state.inverses is not None
        how = state.inverses.strategies()
    return found[1], found[0], how


def turns(kept: tuple[str, str], *later: str) -> list[Any]:
    """Every model with all these vectors; by ``make test`` with the first of ``kept``, the next one with the second."""
    return [
        pytest.param(name, fisher, marks=() if fisher == kept[i % 2] else pytest.mark.long)
        for i, name in enumerate(WIDE)
        for fisher in (*kept, *later)
    ]


@pytest.mark.parametrize("kind", ["ekfac", "exact"])
@pytest.mark.parametrize(("name", "fisher"), turns(("rademacher", "type-2"), "mc", "empirical"))
def test_a_thin_basis_gives_what_the_complete_one_does(name: str, kind: str, fisher: str) -> None:
    curvature = (
        hk.curvature.EKFAC(1e-3, fisher=fisher)
        if kind == "ekfac"
        else hk.curvature.KFAC(1e-3, fisher=fisher, split="exact")
    )  # type: ignore[arg-type]
    (matrix, inverse), (wanted, wanted_inverse), how = both(WIDE[name](), curvature)
    assert "thin" in how
    assert oracles.relative(matrix, wanted) < 1e-12
    assert oracles.relative(inverse, wanted_inverse) < 1e-10
    assert oracles.relative(inverse, torch.linalg.inv(wanted)) < 1e-10


@pytest.mark.parametrize("name", ["wide", "dependent rows", "convolution", "groups"])
def test_the_thin_spectrum_is_the_diagonal_of_the_exact_block(name: str) -> None:
    case = WIDE[name]()
    state = (curvature := hk.curvature.EKFAC(1e-3, fisher="type-2")).init()
    with case.point() as point:
        matrix = oracles.dense(curvature.operator(point, state).matvec, case.params)
    assert_best(case, state, 1e-3)
    outside = matrix - 1e-3 * torch.eye(len(matrix), dtype=DOUBLE)
    assert torch.linalg.matrix_rank(outside, hermitian=True, rtol=1e-10) < len(matrix) / 2


def assert_best(case: Case, state: KroneckerState, damping: float, tolerance: float = 1e-10) -> None:
    """Every block's spectrum is the diagonal of the exact Fisher block, here and now, in the basis that is kept."""
    term = case.inner(case.model, case.hyper, case.inner_batch).terms[0]
    exact = oracles.fisher(term.output, list(term.vectors("type-2")), list(case.params.values()))
    assert isinstance(state.inverses, EigenInverses)
    for name, block in state.inverses.blocks.items():
        order = oracles.joint_order(case.model.get_submodule(name), f"{name}.", case.params)
        whole = exact[order][:, order]
        size = len(whole) // len(block.a)
        for g in range(len(block.a)):
            basis = torch.kron(block.b[g].contiguous(), block.a[g].contiguous())
            mine = whole[g * size : (g + 1) * size, g * size : (g + 1) * size]
            wanted = (basis.T @ mine @ basis).diagonal()
            assert oracles.relative(block.spectrum[g].reshape(-1) - damping, wanted) < tolerance


@pytest.mark.long
def test_reduced_factors_do_not_span_the_gradients_of_all_positions() -> None:
    """Their rows are means over positions, and S is measured at every position: the basis stays complete."""
    case = WIDE["convolution"]()
    curvature = hk.curvature.EKFAC(1e-3, fisher="type-2", sharing="reduce")
    (matrix, _), (wanted, _), how = both(case, curvature)
    assert "thin" not in how
    assert torch.equal(matrix, wanted)
    (matrix, _), (wanted, _), how = both(
        case, hk.curvature.KFAC(1e-3, fisher="type-2", sharing="reduce", split="exact")
    )
    assert "thin" in how
    assert oracles.relative(matrix, wanted) < 1e-12


@pytest.mark.parametrize(("name", "fisher"), turns(("type-2", "empirical")))
def test_a_lasting_basis_from_rows_gives_what_that_of_the_matrix_does(name: str, fisher: str) -> None:
    (matrix, inverse), (wanted, wanted_inverse), how = both(
        WIDE[name](), hk.curvature.EKFAC(1e-3, fisher=fisher, basis_every=2)
    )  # type: ignore[arg-type]
    assert "thin" not in how
    assert oracles.relative(matrix, wanted) < 1e-12
    assert oracles.relative(inverse, wanted_inverse) < 1e-10


@pytest.mark.parametrize("thin", [True, False])
@pytest.mark.parametrize("rank", [1, 5, 20])
def test_bases_from_rows_diagonalise_the_factor(rank: int, thin: bool) -> None:
    """Also where most of its columns are zero, as in patches that see mostly padding."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(2, 20, rank, generator=generator, dtype=DOUBLE) @ torch.randn(
        2, rank, 45, generator=generator, dtype=DOUBLE
    )
    rows[1, :, 9:] = 0.0
    wanted = rows.mT @ rows
    bases, _ = eigen.eigen_bases({"one": (LowRank(rows), LowRank(rows))}, thin=(thin, thin))
    values, basis, *_ = bases["one"]
    assert basis.shape == (2, 45, 20 if thin else 45) and values.shape == basis.shape[::2]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[-1], dtype=DOUBLE).expand(2, -1, -1))
    assert oracles.relative(basis @ (values[..., None] * basis.mT), wanted) < 1e-13


def test_no_thin_basis_without_damping_or_with_an_average() -> None:
    for curvature in (hk.curvature.EKFAC(0.0, fisher="type-2"), hk.curvature.KFAC(0.0, fisher="type-2", split="exact")):
        state = curvature.init()
        with WIDE["wide"]().point() as point, contextlib.suppress(hk.solution.FactorizationError):  # rounding decides
            curvature.operator(point, state)
        assert state.inverses is None or "thin" not in state.inverses.strategies()
    for curvature in (
        hk.curvature.EKFAC(0.1, ema=0.5),
        hk.curvature.KFAC(0.1, split="exact", ema=0.5),
        hk.curvature.EKFAC(0.1, basis_every=2),
    ):
        assert "thin" not in both(WIDE["wide"](), curvature)[2]


@pytest.mark.parametrize("alpha", [-0.05, torch.tensor(-0.05, dtype=DOUBLE)], ids=["number", "tensor"])
def test_a_penalty_that_takes_all_damping_is_refused(alpha: float | Tensor) -> None:
    case = WIDE["wide"]()
    case.decay = {"0.weight": alpha, "0.bias": alpha}
    curvature = hk.curvature.EKFAC(0.1, fisher="type-2")
    with (
        case.point() as point,
        pytest.raises(hk.solution.FactorizationError, match=r"spectrum of 0 reaches down to .*damping"),
    ):
        curvature.operator(point, curvature.init())


def test_thin_eigenvectors_are_orthonormal_in_float32_whatever_the_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 40, 160, generator=generator) * torch.logspace(0, -6, 40)[:, None]
    rows[1, 10:] = 0.0
    rows[2, 20:] = rows[2, :20]
    values, q, _ = eigen._decomposed(LowRank(rows), True)
    assert (q.mT @ q - torch.eye(40)).abs().max() < 2e-6
    outside = rows.mT - q @ (q.mT @ rows.mT)
    assert bool((outside.norm(dim=1) <= 3e-6 * rows.norm(dim=2)).all())  # the smallest row too is in the span
    gram = rows.double().mT @ rows.double()
    again = q.double() @ torch.diag_embed(values.double()) @ q.double().mT
    assert float(((again - gram).norm(dim=(1, 2)) / gram.norm(dim=(1, 2))).max()) < 10 * torch.finfo(torch.float32).eps
    eye = eigen._decomposed(LowRank(torch.zeros(2, 3, 7)), True)[1]
    assert (eye.mT @ eye - torch.eye(3)).abs().max() < 1e-6


@pytest.mark.parametrize("damping", [1e-1, 1e-3, 1e-5])
def test_thin_bases_in_float32_are_as_good_as_complete_ones(damping: float) -> None:
    errors, exact = [], None
    for curvature, dtype in (
        (full(hk.curvature.EKFAC(damping, fisher="type-2")), DOUBLE),
        (hk.curvature.EKFAC(damping, fisher="type-2"), torch.float32),
        (full(hk.curvature.EKFAC(damping, fisher="type-2")), torch.float32),
    ):
        torch.manual_seed(0)
        case = make(mlp(60, 48, 40, 3), (60,), loss="cross_entropy", count=12, hyper=random_weights(12))
        case.model, case.hyper = case.model.to(dtype), case.hyper.to(dtype)
        case.inner_batch, case.outer_batch = ((x.to(dtype), y) for x, y in (case.inner_batch, case.outer_batch))
        found = hk.Implicit(curvature, hk.solvers.Direct(), cross="reverse").compute(*case.arguments).grads
        exact = exact or found
        errors.append(oracles.relative({n: x.double() for n, x in found.items()}, exact))
    print(f"δ = {damping}: thin {errors[1]:.1e}, complete {errors[2]:.1e}")
    assert errors[1] < max(3 * errors[2], 1e-5)


@pytest.mark.parametrize("size", [32, 33, 90, 513])
def test_sizes_for_which_float64_is_the_faster_routine(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigen, "FLOAT64_SIZES", {"cpu": eigen.FLOAT64_SIZES["cuda"]})
    asked: list[torch.dtype] = []
    true_eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: asked.append(m.dtype) or true_eigh(m))
    rows = torch.randn(3, size // 2, size, generator=torch.Generator().manual_seed(0))  # singular
    rows[1] = 0.0
    matrices = rows.mT @ rows
    values, q, direct = eigen._eigh(matrices)
    assert asked == [torch.float64 if 33 <= size <= 512 else torch.float32]
    assert direct
    assert values.dtype == q.dtype == torch.float32
    again = q.double() @ torch.diag_embed(values.double()) @ q.double().mT
    assert oracles.relative(again, matrices.double()) < (1e-7 if asked == [torch.float64] else 1e-5)
    assert (q.double().mT @ q.double() - torch.eye(size, dtype=DOUBLE)).abs().max() < 1e-5
    assert oracles.relative(values.double(), true_eigh(matrices.double())[0]) < 1e-5
