"""Damped inverses of Kronecker blocks: each fast path against the plain one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.curvature.kfac import inverse as inverse_module
from hyperkron.curvature.kfac.factors import Dual, Factor, LowRank, Primal, added, dense, scaled
from hyperkron.curvature.kfac.inverse import FactorsNeeded, _common_sizes, factored_inverses, load_inverses
from hyperkron.kernels import linalg
from hyperkron.kernels.execution import Execution
from hyperkron.solution import Status

DOUBLE = torch.float64
TRUE = torch.tensor(True)
CPU = Execution(torch.device("cpu"))


def rows(groups: int, count: int, d: int, seed: int) -> Tensor:
    return torch.randn(groups, count, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def factors(low_rank: bool) -> dict[str, tuple[Factor, Factor]]:
    """Blocks of several shapes, groups and sizes hardly different, as rows or as matrices."""
    shapes = {"one": (1, 12, 9), "two": (1, 12, 9), "grouped": (3, 4, 5), "near": (1, 51, 50), "small": (1, 1, 2)}
    made: dict[str, tuple[Factor, Factor]] = {}
    for i, (name, (groups, a, b)) in enumerate(shapes.items()):
        pair = LowRank(rows(groups, 3, a, 2 * i)), LowRank(rows(groups, 2, b, 2 * i + 1))
        made[name] = pair if low_rank else (dense(pair[0]), dense(pair[1]))
    return made


def right_hand_sides() -> dict[str, Tensor]:
    sizes = {
        name: (dense(a).shape[0], dense(b).shape[-1], dense(a).shape[-1]) for name, (a, b) in factors(True).items()
    }
    return {name: rows(*shape, seed=50 + i) for i, (name, shape) in enumerate(sizes.items())}


def plain(split: str, delta: float, dtype: torch.dtype = DOUBLE) -> dict[str, Tensor]:
    """(B + δ_B I)⁻¹ V (A + δ_A I)⁻¹, block by block and group by group."""
    found = {}
    for name, (fa, fb) in factors(False).items():
        a, b, v = (x.to(dtype) for x in (dense(fa), dense(fb), right_hand_sides()[name]))
        out = []
        for g in range(a.shape[0]):
            pi = 1.0 if split == "plain" else ((a[g].trace() / len(a[g])) / (b[g].trace() / len(b[g]))).sqrt()
            damped_a = a[g] + pi * delta**0.5 * torch.eye(len(a[g]), dtype=dtype)
            damped_b = b[g] + delta**0.5 / pi * torch.eye(len(b[g]), dtype=dtype)
            out.append(torch.linalg.inv(damped_b) @ v[g] @ torch.linalg.inv(damped_a))
        found[name] = torch.stack(out)
    return found


@pytest.mark.parametrize("alone", [False, True], ids=["stacked", "alone"])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "released"])
@pytest.mark.parametrize("low_rank", [True, False], ids=["dual", "primal"])
@pytest.mark.parametrize("split", ["pi", "plain"])
def test_dual_and_primal_equal_the_plain_formula(
    split: Any, low_rank: bool, keep: bool, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = 1e-3
    monkeypatch.setattr(inverse_module, "UNBATCHED_SIZE", 1 if alone else 10**9)
    given = factors(low_rank)
    before = {name: [dense(x).clone() for x in pair] for name, pair in given.items()}
    inverses, status, good = factored_inverses(given, dict.fromkeys(given, delta), split, TRUE, CPU, keep=keep).wait()
    assert status is Status.DIRECT and good
    assert all(
        torch.equal(dense(x), y) for name, pair in given.items() for x, y in zip(pair, before[name], strict=True)
    )
    kinds = {type(side) for c in inverses.classes for side in (c.a, c.b)}
    assert kinds == ({Dual} if low_rank else {Primal})
    v, wanted = right_hand_sides(), plain(split, delta)
    found = inverses.solve(v)
    together = {("one",), ("two",)} if alone else {("one", "two")}
    assert {c.names for c in inverses.classes} == together | {("grouped",), ("near",), ("small",)}
    for name, expected in wanted.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)
    back = inverses.matvec(found)
    restored = load_inverses(inverses.state_dict()).solve(v)
    for name in wanted:
        torch.testing.assert_close(back[name], v[name], rtol=1e-8, atol=1e-8)
        assert torch.equal(restored[name], found[name])


@pytest.mark.parametrize("low_rank", [True, False], ids=["dual", "primal"])
def test_float32_fast_paths_agree_with_float64(low_rank: bool) -> None:
    """To 1e-5, or as well as the plain formula in float32: the condition numbers are in the hundreds."""
    delta = 1e-2
    rounded = plain("pi", delta, torch.float32)
    wanted, v = plain("pi", delta), {name: x.float() for name, x in right_hand_sides().items()}
    given: dict[str, tuple[Factor, Factor]] = {}
    for name, pair in factors(low_rank).items():
        a, b = (LowRank(f.rows.float()) if isinstance(f, LowRank) else f.float() for f in pair)
        given[name] = (a, b)
    inverses, _, _ = factored_inverses(given, dict.fromkeys(given, delta), "pi", TRUE, CPU).wait()
    for name, found in inverses.solve(v).items():
        mine, its = ((x.double() - wanted[name]).norm() / wanted[name].norm() for x in (found, rounded[name]))
        assert mine < max(1e-5, its), name


def test_halved_systems_give_the_same_hypergradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does with large factors, on small ones."""
    given = factors(False)
    before = factored_inverses(given, dict.fromkeys(given, 1e-3), "pi", TRUE, CPU).wait()[0].solve(right_hand_sides())
    monkeypatch.setattr(inverse_module, "factorize", lambda m, lean, overwrite: linalg._halved(m, leaf=4))
    after = factored_inverses(given, dict.fromkeys(given, 1e-3), "pi", TRUE, CPU).wait()[0].solve(right_hand_sides())
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=1e-9, atol=1e-9)


def test_sizes_hardly_different_share_a_stack() -> None:
    sizes = {768, 769, 3072, 3073, 10}
    assert _common_sizes(sizes) == {768: 769, 769: 769, 3072: 3073, 3073: 3073, 10: 10}
    assert _common_sizes(sizes, 8, 64) == {768: 776, 769: 776, 3072: 3080, 3073: 3080, 10: 10}


@pytest.mark.parametrize("low_rank", [True, False], ids=["dual", "primal"])
@pytest.mark.parametrize("halved", [True, False], ids=["halved", "library"])
def test_systems_enlarged_for_alignment_give_the_same(
    low_rank: bool, halved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does with sizes that tensor cores do not take."""
    monkeypatch.setattr(inverse_module, "ALIGNED", {"cpu": (8, 4)})
    if halved:
        monkeypatch.setattr(inverse_module, "factorize", lambda m, lean, overwrite: linalg._halved(m, leaf=4))
    given = factors(low_rank)
    inverses, _, _ = factored_inverses(given, dict.fromkeys(given, 1e-3), "pi", TRUE, CPU).wait()
    assert low_rank or {c.a.size for c in inverses.classes} == {16, 4, 56, 1}
    found, wanted = inverses.solve(right_hand_sides()), plain("pi", 1e-3)
    for name, back in inverses.matvec(found).items():
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(back, right_hand_sides()[name], rtol=1e-8, atol=1e-8)


def test_large_factors_are_freed_one_by_one_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse_module, "UNBATCHED_SIZE", 1)
    given, alive, plainly = factors(False), [], inverse_module.factorize
    watched = [weakref.ref(side) for pair in given.values() for side in pair if isinstance(side, Tensor)]

    def counting(matrices: Tensor, lean: bool, overwrite: bool) -> Any:
        alive.append(sum(ref() is not None for ref in watched))
        return plainly(matrices)

    monkeypatch.setattr(inverse_module, "factorize", counting)
    factored_inverses(given, dict.fromkeys(given, 1e-3), "pi", TRUE, CPU, overwrite=True).wait()
    assert alive == list(range(len(watched), 0, -1))


def test_a_factor_alone_that_fails_is_kept_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse_module, "UNBATCHED_SIZE", 1)
    bad = torch.eye(3, dtype=DOUBLE)[None].clone()
    bad[0, 0, 0] = -1e-2  # damped by δ_A = 1e-2 it is singular; with ten times that it is not
    given: dict[str, tuple[Factor, Factor]] = {"bad": (bad, torch.eye(2, dtype=DOUBLE)[None].clone())}
    inverses, status, good = factored_inverses(given, {"bad": 1e-4}, "plain", TRUE, CPU, overwrite=True).wait()
    assert status is Status.MORE_DAMPING and good
    found = inverses.solve({"bad": torch.ones(1, 2, 3, dtype=DOUBLE)})["bad"]
    damped = bad[0] + 0.1 * torch.eye(3, dtype=DOUBLE)
    torch.testing.assert_close(found[0], (torch.ones(2, 3, dtype=DOUBLE) / 1.01) @ torch.linalg.inv(damped))


def test_without_the_factors_a_failure_asks_for_them() -> None:
    bad: dict[str, tuple[Factor, Factor]] = {"a": (-torch.eye(3, dtype=DOUBLE)[None], torch.eye(2, dtype=DOUBLE)[None])}
    with pytest.raises(FactorsNeeded):
        factored_inverses(bad, {"a": 1e-3}, "pi", TRUE, CPU, keep=False).wait()
    with pytest.raises(FactorsNeeded):
        factored_inverses(factors(False), dict.fromkeys(factors(False), 1e-3), "pi", ~TRUE, CPU, keep=False).wait()


def test_sums_and_scales_of_rows_are_those_of_matrices() -> None:
    a, b = LowRank(rows(2, 2, 20, 0)), LowRank(rows(2, 3, 20, 1))
    torch.testing.assert_close(dense(added(a, b)), dense(a) + dense(b))
    torch.testing.assert_close(dense(scaled(a, 0.3)), 0.3 * dense(a))
    assert isinstance(added(a, b), LowRank)
    assert isinstance(added(LowRank(rows(1, 8, 20, 2)), LowRank(rows(1, 8, 20, 3))), Tensor)


def _problem() -> tuple[hk.BilevelProblem, nn.Module, nn.Module, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    weights = hk.SampleWeights(10).double()
    batch = torch.randn(10, 6, dtype=DOUBLE), torch.randint(3, (10,)), torch.arange(10)
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])) + hk.losses.l2(m, 1e-3),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    return problem, model, weights, batch


def test_waiting_late_for_the_factorisation_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the outcome is read after the outer gradient has been queued, and the factors are gone by then."""
    problem, model, weights, batch = _problem()
    early, late = hk.kfac(seed=3), hk.kfac(seed=3)
    first = [early.compute(problem, model, weights, batch, batch).grads["weight"] for _ in range(3)]
    monkeypatch.setattr(Execution, "queued", True)
    for expected in first:
        assert torch.equal(late.compute(problem, model, weights, batch, batch).grads["weight"], expected)


def test_a_late_failure_measures_the_same_factors_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, model, weights, batch = _problem()
    reference = hk.kfac(seed=3).compute(problem, model, weights, batch, batch)
    monkeypatch.setattr(Execution, "queued", True)
    true_factorize, calls = inverse_module.factorize, []

    def failing(matrices: Tensor, lean: bool, overwrite: bool) -> Any:
        made, info = true_factorize(matrices)
        calls.append(len(calls))
        return made, torch.ones_like(info)

    monkeypatch.setattr(inverse_module, "factorize", failing)
    result = hk.kfac(seed=3).compute(problem, model, weights, batch, batch)
    assert calls and result.status is Status.MORE_DAMPING  # float64 was enough: the values are the same
    torch.testing.assert_close(result.grads["weight"], reference.grads["weight"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("examples", "strategy"), [(2, "1 primal, 3 dual"), (40, "4 primal")])
def test_the_strategy_follows_the_number_of_rows_and_is_shown(examples: int, strategy: str) -> None:
    torch.manual_seed(0)
    model, weights = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 2)).double(), hk.SampleWeights(examples)
    batch = torch.randn(examples, 9, dtype=DOUBLE), torch.arange(examples) % 2, torch.arange(examples)
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    result = hk.kfac(1e-2).compute(problem, model, weights, batch, batch)
    assert result.stats["curvature_strategy"] == strategy
    exact = hk.kfac(
        1e-2,
        split=lambda a, b, d: inverse_module.split_damping(
            a.diagonal(dim1=-2, dim2=-1).mean(-1), b.diagonal(dim1=-2, dim2=-1).mean(-1), d, "pi"
        ),
    ).compute(problem, model, weights, batch, batch)  # a callable keeps matrices: the primal way
    assert "dual" not in str(exact.stats["curvature_strategy"])
    torch.testing.assert_close(result.grads["weight"], exact.grads["weight"], rtol=1e-6, atol=1e-9)
