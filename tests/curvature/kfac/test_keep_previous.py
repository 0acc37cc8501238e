"""keep_previous=False: old and new inverses never lie in memory side by side, and nothing else changes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.curvature import KroneckerState
from hyperkron.solution import Status

N = 6

METHODS: dict[str, Callable[..., hk.Implicit]] = {
    "pi": hk.kfac,
    "exact": lambda d, **k: hk.kfac(d, split="exact", **k),
    "ekfac": hk.ekfac,
    "ekfac, lasting basis": lambda d, **k: hk.ekfac(d, basis_every=3, **k),
}
methods = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


class Setting:
    """Regression with weighted examples and a norm layer; ``probe`` is called in every inner evaluation."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))
        self.hyper = hk.SampleWeights(N)
        self.x, self.y = torch.randn(N, 3), torch.randn(N, 2)
        self.probe: Callable[[], None] = lambda: None

        def inner(model: nn.Module, weights: hk.SampleWeights, batch: Any) -> Any:
            self.probe()
            return hk.losses.mse(model(batch[0]), batch[1], weight=weights(torch.arange(N)))

        self.problem = hk.BilevelProblem(inner, lambda m, w, b: hk.losses.mse(m(b[0]), b[1]))

    def run(self, method: hk.Implicit, x: Tensor | None = None) -> hk.HypergradientResult:
        batch = (self.x, self.y)
        other = (self.x if x is None else x, self.y)
        return method.compute(self.problem, self.model, self.hyper, batch, batch, curvature_batch=other)

    def drift(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(1.1)


def memory(method: hk.Implicit) -> KroneckerState:
    state = method.state.curvature
    assert isinstance(state, KroneckerState)
    return state


def tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else []
    return [x for part in parts for x in tensors(part)]


@methods
@pytest.mark.parametrize("options", [{}, {"refresh_every": 2}, {"ema": 0.3}], ids=["plain", "refresh_every", "ema"])
def test_while_nothing_fails_the_answers_are_the_same(
    make: Callable[..., hk.Implicit], options: dict[str, Any]
) -> None:
    runs = []
    for keep in (True, False):
        setting, method, found = Setting(), make(1e-2, keep_previous=keep, **options), []
        for _ in range(6):
            result = setting.run(method)
            found.append((result.grads["weight"], result.stats["curvature_age"]))
            setting.drift()
        state = method.state_dict()
        if not options.get("refresh_every"):  # without keep_previous such inverses have been let go
            del state["curvature"]["inverses"], state["curvature"]["diagonal"]
        runs.append((found, tensors(state)))
    assert all(torch.equal(a, b) and i == j for (a, i), (b, j) in zip(runs[0][0], runs[1][0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@methods
@pytest.mark.parametrize("keep", [True, False])
def test_the_previous_inverses_are_gone_while_new_ones_are_measured(
    make: Callable[..., hk.Implicit], keep: bool
) -> None:
    setting, method = Setting(), make(1e-2, keep_previous=keep, refresh_every=2)
    setting.run(method)
    setting.run(method)
    old = [weakref.ref(x) for x in tensors(memory(method).state_dict()["inverses"])]
    diagonal = [weakref.ref(x) for x in memory(method).diagonal.values()]
    assert old
    assert diagonal
    alive: list[tuple[int, int]] = []
    setting.probe = lambda: alive.append((sum(r() is not None for r in old), sum(r() is not None for r in diagonal)))
    setting.run(method)
    basis = (
        4 if method.curvature == hk.curvature.EKFAC(1e-2, basis_every=3, keep_previous=False, refresh_every=2) else 0
    )  # Q of two blocks serves on
    assert alive[0] == ((len(old), len(diagonal)) if keep else (basis, 0))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("make", [hk.kfac, METHODS["exact"], hk.ekfac], ids=["pi", "exact", "ekfac"])
def test_inverses_that_serve_once_are_gone_before_the_cross_term(
    make: Callable[..., hk.Implicit], keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Tensor]] = []
    renew = KroneckerState.renew

    def noted(state: KroneckerState, *args: Any) -> None:
        renew(state, *args)
        made.extend(weakref.ref(x) for x in tensors(state.state_dict()["inverses"]))

    monkeypatch.setattr(KroneckerState, "renew", noted)
    setting, method = Setting(), make(1e-2, keep_previous=keep)
    alive: list[int] = []
    setting.probe = lambda: alive.append(sum(r() is not None for r in made))
    result = setting.run(method)
    assert made
    assert alive[-1] == (len(made) if keep else 0)
    assert result.stats["curvature_strategy"]


@pytest.mark.parametrize("keep", [True, False])
def test_where_memory_counts_the_outer_gradient_comes_first(keep: bool) -> None:
    """Then no pass of the model has the inverses beside it."""
    setting, seen = Setting(), []
    inner, outer = setting.problem.inner, setting.problem.outer
    setting.problem = hk.BilevelProblem(
        lambda *a: seen.append("inner") or inner(*a), lambda *a: seen.append("outer") or outer(*a), autocast=True
    )
    setting.run(hk.kfac(1e-2, keep_previous=keep, cross="difference"))
    assert seen[:2] == (["inner", "outer"] if keep else ["outer", "inner"])


def test_between_refreshes_the_inverses_stay() -> None:
    setting, method = Setting(), hk.kfac(1e-2, refresh_every=3, keep_previous=False)
    assert [setting.run(method).stats["curvature_age"] for _ in range(5)] == [0, 1, 2, 0, 1]
    assert memory(method).refreshes == 2


@methods
def test_a_refresh_that_fails_is_an_error_and_a_good_batch_heals_it(make: Callable[..., hk.Implicit]) -> None:
    setting, method = Setting(), make(1e-2, fisher="type-2", keep_previous=False)
    good = setting.run(method)
    for _ in range(4):  # no count of failures stands in the way
        with pytest.raises(hk.NonFiniteError, match=r"(factors|spectrum) of 0 (are|is) not finite"):
            setting.run(method, setting.x * 1e30)
        assert memory(method).inverses is None
    saved = copy.deepcopy(method.state_dict())
    resumed = make(1e-2, fisher="type-2", keep_previous=False)
    resumed.load_state_dict(saved)
    for healed in (method, resumed):
        result = setting.run(healed)
        assert result.status is Status.DIRECT
        assert memory(healed).failures == 0
        torch.testing.assert_close(result.grads, good.grads, rtol=0, atol=0)


@methods
def test_with_keep_previous_the_same_refresh_is_survived(make: Callable[..., hk.Implicit]) -> None:
    setting, method = Setting(), make(1e-2)
    setting.run(method)
    assert setting.run(method, setting.x * 1e30).status is Status.KEPT_PREVIOUS


@pytest.mark.parametrize("value", [0, 1, None, "no"])
def test_other_values_are_refused(value: Any) -> None:
    for make in (hk.kfac, hk.ekfac, hk.curvature.KFAC, hk.curvature.EKFAC):
        with pytest.raises(hk.HyperkronError, match=f"keep_previous={value!r} must be True or False; False saves"):
            make(keep_previous=value)
