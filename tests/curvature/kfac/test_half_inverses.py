"""Damped inverses in float16: against dense solves in float64, and what a hypergradient loses by them."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from hyperkron.curvature.kfac import factors, grams, half_inverses, inverse, kfac
from hyperkron.curvature.kfac.factors import LowRank, System, inverses_of, load_factor_inverse, scaled
from hyperkron.curvature.kfac.half_inverses import HalfDual, HalfInverse, HalfPrimal, HalfRows, solve_both_sides
from hyperkron.kernels import linalg, split_products
from hyperkron.trees import HALF_TYPES

DOUBLE = torch.float64
KINDS = pytest.mark.parametrize(
    ("count", "dtype"),
    [(180, torch.float32), (40, torch.float32), (40, torch.bfloat16), (40, torch.float16)],
    ids=["primal", "dual", "rows in bfloat16", "rows in float16"],
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes by which the library decides, as small as the matrices here; several stripes and stretches."""
    for module, name, value in ((factors, "MIN_SIZE", 8), (factors, "MIN_ROWS", 2), (half_inverses, "NARROWEST", 16)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(half_inverses, "PIECE", 5000)


def rows(count: int, d: int, seed: int, kind: str = "plain") -> Tensor:
    """Inputs of a layer, as they are in networks: with a spectrum, a mean, or a channel far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, d, dtype=DOUBLE, generator=generator) * torch.logspace(0, -1.5, d, dtype=DOUBLE)
    basis = torch.randn(d, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(d))
    x = x @ torch.linalg.qr(basis)[0]
    if kind == "mean":
        x += torch.randn(d, dtype=DOUBLE, generator=torch.Generator().manual_seed(d + 1))
    if kind == "channel":
        x[:, 5] *= 100
    return x


@pytest.fixture(params=[False, True], ids=["float32", "split"])
def _split(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Systems are factorised in float32, or scaled and by products that are split."""
    if request.param:
        for module in (split_products, linalg):
            monkeypatch.setattr(module, "splits", lambda *sizes, like: like.dtype == torch.float32)


def factorised(system: Tensor, leaf: int) -> tuple[linalg.Halves, Tensor]:
    """As on a GPU."""
    return (linalg._scaled if linalg.splits(len(system), like=system) else linalg._halved)(system, leaf)


def halved(stack: list[Tensor], delta: float, dtype: torch.dtype = torch.float32) -> tuple[HalfInverse, list[Tensor]]:
    """The inverse of the factors of these rows, given in ``dtype``, and M + δI of each in float64."""
    given = [r.to(dtype)[None] for r in stack]
    x = torch.cat([r.double() / r.shape[1] ** 0.5 for r in given])
    shift, few = torch.full((len(x),), delta), x.shape[1] < x.shape[2]
    system = (x @ x.mT if few else x.mT @ x) + delta * torch.eye(min(x.shape[1:]), dtype=DOUBLE)
    low = [scaled(LowRank(r), 1 / r.shape[1]) for r in given]
    made = System(factorised(system.float(), 16)[0], shift, low if few else [])  # type: ignore[arg-type]
    found = inverses_of(made, made, half=True)[0]
    by_rows = HalfDual if dtype == torch.float32 else HalfRows
    assert isinstance(found, by_rows if few else HalfPrimal)
    return found, [m.mT @ m + delta * torch.eye(m.shape[1], dtype=DOUBLE) for m in x]


@pytest.mark.usefixtures("_split")
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
@KINDS
def test_they_invert_to_the_bits_of_float16_whatever_the_size_of_v(
    count: int, dtype: torch.dtype, scale: float
) -> None:
    found, damped = halved([rows(count // 2, 48, s) for s in range(4)], 0.05, dtype)
    v = scale * torch.randn(4, 48, 30, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    wanted = torch.linalg.solve(torch.stack(damped), v)
    for made in (found, load_factor_inverse(found.state_dict())):
        assert (made.solve(v.float()).double() - wanted).norm() < 2.0**-10 * wanted.norm()
    assert torch.equal(found.part(1, 3).solve(v[1:3].float()), found.solve(v.float())[1:3])
    back = found.times(wanted.float()).double()
    assert (back - v).norm() < 2e-2 * v.norm()


def test_zero_stays_zero_and_what_is_not_finite_is_seen() -> None:
    a, _ = halved([rows(100, 48, 0)], 0.05)
    b, _ = halved([rows(20, 32, 1)], 0.05)
    v = torch.zeros(1, 32, 48)
    assert not solve_both_sides(b, a, [v])[0].any()
    for bad in (float("nan"), float("inf")):
        v[0, 3, 4] = bad
        assert not solve_both_sides(b, a, [v])[0].isfinite().all()


@pytest.mark.usefixtures("_split")
@pytest.mark.parametrize("kind", ["plain", "mean", "channel"])
@KINDS
def test_a_hypergradient_loses_no_more_than_by_bfloat16(count: int, dtype: torch.dtype, kind: str) -> None:
    """Of c' = ⟨g, V a⟩ by example, where V is rounded to bfloat16 today, with the damping of factors' mean size."""
    xa, xb = rows(count, 96, 1, kind), rows(count, 64, 2, kind)
    deltas = [float(x.square().mean()) for x in (xa, xb)]
    (a, (full_a,)), (b, (full_b,)) = (halved([x], delta, dtype) for x, delta in zip((xa, xb), deltas, strict=True))
    v = rows(50, 64, 3, kind).mT @ rows(50, 96, 4, kind)
    wanted = torch.linalg.solve(full_b, torch.linalg.solve(full_a, v.mT).mT)
    inputs, gradients = xa[:40], rows(40, 64, 5, kind)

    def error(found: Tensor) -> float:
        changes = [((gradients @ m) * inputs).sum(1).reshape(4, 10).sum(1) for m in (found.double(), wanted)]
        return float((changes[0] - changes[1]).norm() / changes[1].norm())

    assert error(solve_both_sides(b, a, [v.float()[None]])[0][0]) < max(error(wanted.bfloat16()), 2.0**-9)


@pytest.mark.usefixtures("_split")
@pytest.mark.parametrize("kind", ["plain", "mean", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["dual", "rows in bfloat16"])
def test_at_small_damping_it_loses_no_more_either(dtype: torch.dtype, kind: str) -> None:
    """With a thousandth of the mean eigenvalues for damping one draw tells nothing: the median of eight."""
    errors: list[tuple[float, float]] = []
    for seed in range(0, 80, 10):
        xa, xb = rows(200, 64, seed + 1, kind), rows(32, 128, seed + 2, kind).to(dtype).double()
        deltas = [1e-3 * float(x.square().mean()) for x in (xa, xb)]
        a, (full_a,) = halved([xa], deltas[0])
        b, (full_b,) = halved([xb], deltas[1], dtype)
        assert float(torch.linalg.cond(full_b)) > {"plain": 5e3, "mean": 5e4, "channel": 1e5}[kind]
        v = rows(50, 128, seed + 3, kind).mT @ rows(50, 64, seed + 4, kind)
        wanted = torch.linalg.solve(full_b, torch.linalg.solve(full_a, v.mT).mT)
        found = solve_both_sides(b, a, [v.float()[None]])[0][0]
        inputs, gradients = xa[:40], rows(40, 128, seed + 5, kind)
        exact, ours, rounded = (
            ((gradients @ m.double()) * inputs).sum(1).reshape(4, 10).sum(1) for m in (wanted, found, wanted.bfloat16())
        )
        errors.append((float((ours - exact).norm() / exact.norm()), float((rounded - exact).norm() / exact.norm())))
    ours_median, rounded_median = (statistics.median(x) for x in zip(*errors, strict=True))
    assert ours_median < rounded_median


@pytest.mark.usefixtures("_split")
def test_groups_and_borders_are_those_of_the_stack() -> None:
    """Parts of several groups, and systems larger than V, with ones at the border."""
    a, damped_a = halved([rows(100, 40, s) for s in range(4)], 0.05)
    (bare_b, damped_b) = halved([rows(100, 24, 10 + s) for s in range(4)], 4000.0)
    assert isinstance(bare_b, HalfPrimal)
    larger = torch.block_diag(torch.zeros(24, 24), torch.eye(8)).expand(4, 32, 32).clone()
    larger[:, :24, :24] = torch.stack(damped_b).float()
    b = HalfPrimal.of(factorised(larger, 16)[0], bare_b.shift)
    v = torch.randn(4, 24, 40, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    wanted = torch.stack(
        [torch.linalg.solve(b, torch.linalg.solve(a, x.mT).mT) for a, b, x in zip(damped_a, damped_b, v, strict=True)]
    )
    parts = list(v.float().split([1, 2, 1]))
    found = torch.cat(solve_both_sides(b, a, parts))
    assert torch.equal(torch.cat(parts), v.float())
    overwritten = solve_both_sides(b, a, parts, overwrite=True)
    assert torch.equal(torch.cat(overwritten), found) and overwritten[1].data_ptr() == parts[1].data_ptr()
    assert found.isfinite().all() and (found.double() - wanted).norm() < 2.0**-9 * wanted.norm()


@pytest.mark.usefixtures("_split")
@pytest.mark.parametrize("shares", [(0.25, 0.25), (0.25, 1.0), (torch.tensor(0.25), 1.0)], ids=["one", "two", "tensor"])
@pytest.mark.parametrize("half", [True, False])
def test_rows_in_half_precision_are_those_of_float32(half: bool, shares: tuple[Any, Any]) -> None:
    """Kept as they are, with a number to multiply by, they give what their float32 copies give."""
    given = [rows(20, 48, s).bfloat16()[None] for s in (1, 2)]
    kept = [scaled(LowRank(x), c) for x, c in zip(given, shares, strict=True)]
    wide = [LowRank(x.float() * c**0.5) for x, c in zip(given, shares, strict=True)]
    assert all(x.in_half and not y.in_half for x, y in zip(kept, wide, strict=True))  # type: ignore[union-attr]
    torch.testing.assert_close(factors.dense(kept[0]), factors.dense(wide[0]))
    torch.testing.assert_close(factors.dense(factors.added(*kept)), factors.dense(factors.added(*wide)))  # type: ignore[call-arg]
    v, shift, found = torch.randn(2, 48, 30), torch.full((2,), 0.05), []
    for low in (kept, wide):
        system = torch.cat([x.kernel() for x in low]) + 0.05 * torch.eye(20)  # type: ignore[union-attr]
        made = System(factorised(system, 8)[0], shift, low)  # type: ignore[arg-type]
        found.append(inverses_of(made, made, half=half)[0].solve(v))
    truth = torch.linalg.solve(torch.cat([factors.dense(x) for x in wide]).double() + 0.05 * torch.eye(48), v.double())
    assert (found[0] - found[1]).norm() < (2.0**-10 if half else 1e-6) * found[1].norm()
    assert (found[0] - truth).norm() < (2.0**-10 if half else 1e-5) * truth.norm()


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def problem(autocast: bool) -> hk.BilevelProblem:
    def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=hyper(torch.arange(len(batch[0]))))

    def outer(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return hk.losses.cross_entropy(model(batch[0]), batch[1])

    return hk.BilevelProblem(inner, outer, autocast=True)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("count", [64, 10], ids=["primal", "dual"])
def test_kfac_uses_them_for_models_in_half_precision_only(
    count: int, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with TF32 allowed, where rows in half precision stay so. They move a hypergradient by less than
    bfloat16 has moved it already."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(count, 24, generator=generator), torch.randint(16, (count,), generator=generator))
        for _ in range(2)
    ]
    model, options = Net(), {"damping": 0.01, "fisher": "type-2", "refresh_every": 3}
    where = problem(autocast), model, hk.SampleWeights(count), *batches
    wanted = hk.kfac(**options).compute(*where)  # type: ignore[arg-type]
    exact = hk.kfac(**options).compute(problem(False), *where[1:])  # type: ignore[arg-type]
    monkeypatch.setattr(kfac, "tf32_products", lambda device: True)
    monkeypatch.setattr(inverse, "factorize", lambda m, lean=False, overwrite=False: factorised(m.clone(), 8))
    monkeypatch.setattr(grams, "_stays_half", lambda rows, dtype: rows.dtype in HALF_TYPES)
    monkeypatch.setattr(grams, "_plus_half_gram", lambda total, rows: grams.gram(rows.float()))  # of one chunk
    kept = []
    plain = LowRank.kernel
    monkeypatch.setattr(LowRank, "kernel", lambda self: kept.append(self.in_half) or plain(self))
    method = hk.kfac(**options)  # type: ignore[arg-type]
    found = [method.compute(*where) for _ in range(2)]
    kinds = {isinstance(side, HalfInverse) for c in method.state.curvature.inverses.classes for side in (c.a, c.b)}  # type: ignore[attr-defined]
    assert kinds == {autocast} and (True in kept) == (autocast and count == 10)
    assert found[0].stats["curvature_strategy"] == wanted.stats["curvature_strategy"]
    for result in found:
        rounding = oracles.relative(wanted.grads, exact.grads) if autocast else 1e-4
        assert oracles.relative(result.grads, wanted.grads) < rounding < 0.1
    restored = hk.kfac(**options)  # type: ignore[arg-type]
    restored.load_state_dict(method.state_dict())
    assert oracles.relative(restored.compute(*where).grads, found[1].grads) < 1e-6


def test_a_callable_split_or_no_damping_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their δ may be zero, and the contraction is scaled by it."""
    seen = []
    plain = kfac.factored_inverses
    monkeypatch.setattr(kfac, "tf32_products", lambda device: True)
    monkeypatch.setattr(kfac, "factored_inverses", lambda *a, **k: seen.append(k["half"]) or plain(*a, **k))
    batch = torch.randn(40, 24), torch.randint(16, (40,))
    usual = hk.curvature.KFAC(damping=0.01)
    half = lambda a, b, d: (d.sqrt(), d.sqrt())  # noqa: E731
    for curvature in (usual, dataclasses.replace(usual, split=half)):
        method = hk.Implicit(curvature, hk.solvers.Direct())
        method.compute(problem(True), Net(), hk.SampleWeights(40), batch, batch)
    assert seen == [True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("n", "r", "kind"), [(776, 0, HalfPrimal), (2048, 0, HalfPrimal), (2048, 640, HalfRows)])
def test_on_a_gpu_the_same(n: int, r: int, kind: type[HalfInverse]) -> None:
    x = torch.randn(9, r or 2 * n, n, device="cuda").div_((r or 2 * n) ** 0.5).bfloat16()
    x[:, :, 7] *= 30
    low = [LowRank(y[None], 0.5) for y in x] if r else []
    exact = x.double().mT @ x.double() * (0.5 if r else 1.0) + 0.05 * torch.eye(n, dtype=DOUBLE, device="cuda")
    system = torch.cat([y.kernel() for y in low]) if r else (x.double().mT @ x.double()).float()
    system.diagonal(dim1=1, dim2=2).add_(0.05)
    v = torch.randn(9, n, 64, dtype=DOUBLE, device="cuda")
    wanted, before = torch.linalg.solve(exact, v), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        made, info = linalg.factorize(system)
        found = System(made, torch.full((9,), 0.05, device="cuda"), low).half_inverse()
        error = (found.solve(v.float()).double() - wanted).norm() / wanted.norm()
    finally:
        torch.set_float32_matmul_precision(before)
    assert isinstance(made, linalg.Scaled) and not info.any() and isinstance(found, kind)
    assert error < 2.0**-10
