"""Curvature that cannot be inverted: float64, more damping, the previous inverse, and only then an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.curvature.kfac import kfac
from hyperkron.curvature.kfac.kronecker import MAX_FAILURES, KroneckerState
from hyperkron.evaluation.point import Point
from hyperkron.solution import Status

N, D, C = 6, 3, 2


class Setting:
    """Regression with weighted examples; the curvature is measured on a batch of its own, which a test may spoil."""

    def __init__(self, model: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = (model or nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, C))).to(dtype)
        self.hyper = hk.SampleWeights(N)
        self.x, self.y = torch.randn(N, D, dtype=dtype), torch.randn(N, C, dtype=dtype)
        self.problem = hk.BilevelProblem(
            lambda m, w, b: hk.losses.mse(m(b[0]), b[1], weight=w(torch.arange(len(b[0])))),
            lambda m, w, b: hk.losses.mse(m(b[0]), b[1]),
        )

    def run(self, method: hk.Implicit, x: Tensor | None = None) -> hk.HypergradientResult:
        batch = (self.x, self.y)
        return method.backward(
            self.problem, self.model, self.hyper, batch, batch, curvature_batch=(self.x if x is None else x, self.y)
        )

    @property
    def overflowing(self) -> Tensor:
        """Inputs whose loss is finite, since tanh saturates, but whose squares are not."""
        return self.x * 1e30


def tensors(state: Any) -> list[Tensor]:
    """All tensors of a nested state, in order."""
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else []
    return [x for part in parts for x in tensors(part)]


def kronecker_state(method: hk.Implicit) -> KroneckerState:
    state = method.state.curvature
    assert isinstance(state, KroneckerState)
    return state


METHODS: dict[str, Callable[..., hk.Implicit]] = {
    "pi": hk.kfac,
    "plain": lambda d=1e-3, **k: hk.kfac(d, split="plain", **k),
    "exact": lambda d=1e-3, **k: hk.kfac(d, split="exact", **k),
    "ekfac": hk.ekfac,
}
methods = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


# The chain, step by step


@methods
def test_the_previous_inverse_is_kept_and_its_age_grows(make: Callable[..., hk.Implicit]) -> None:
    setting, method = Setting(), make(1e-2, fisher="type-2")
    good = setting.run(method)
    assert good.status is Status.DIRECT
    kept = copy.deepcopy(tensors(kronecker_state(method).state_dict()["inverses"]))
    assert kept
    for failures in (1, 2):
        result = setting.run(method, setting.overflowing)
        assert result.status is Status.KEPT_PREVIOUS
        assert not result.status.ok
        assert "previous inverse" in result.status.value
        assert result.solution is not None
        assert result.solution.status is Status.KEPT_PREVIOUS
        assert result.stats["curvature_age"] == failures
        assert result.stats["curvature_refreshes"] == 1
        assert "not finite" in str(result.stats["factorisation"])
        assert kronecker_state(method).failures == failures
        torch.testing.assert_close(result.grads, good.grads)  # the same inverse, the same answer
        torch.testing.assert_close(tensors(kronecker_state(method).state_dict()["inverses"]), kept, rtol=0, atol=0)


@methods
def test_the_third_failure_in_a_row_is_an_error(make: Callable[..., hk.Implicit]) -> None:
    setting, method = Setting(), make(1e-2)
    setting.run(method)
    for _ in range(MAX_FAILURES - 1):
        setting.run(method, setting.overflowing)
    before = setting.hyper.weight.grad.clone()
    with pytest.raises(hk.NonFiniteError, match="3 in a row"):
        setting.run(method, setting.overflowing)
    torch.testing.assert_close(setting.hyper.weight.grad, before, rtol=0, atol=0)
    with pytest.raises(hk.NonFiniteError, match="4 in a row"):
        setting.run(method, setting.overflowing)
    assert setting.run(method).status is Status.DIRECT  # a good batch still heals it


@methods
def test_a_success_in_between_starts_the_count_anew(make: Callable[..., hk.Implicit]) -> None:
    setting, method = Setting(), make(1e-2)
    for _ in range(3):
        result = setting.run(method)
        assert (result.status, result.stats["curvature_age"]) == (Status.DIRECT, 0)
        for age in (1, 2):
            assert setting.run(method, setting.overflowing).stats["curvature_age"] == age
    assert kronecker_state(method).refreshes == 3


@methods
def test_the_first_failure_of_all_is_an_error(make: Callable[..., hk.Implicit]) -> None:
    setting, method = Setting(), make(1e-2)
    with pytest.raises(hk.NonFiniteError, match=r"factors of 0 are not finite"):
        setting.run(method, setting.overflowing)
    assert not kronecker_state(method).inverses
    assert setting.run(method).status is Status.DIRECT


def test_an_old_inverse_is_tried_again_at_every_call() -> None:
    """With τ = 3 a refresh that failed is not put off for another three calls."""
    setting, method = Setting(), hk.kfac(1e-2, refresh_every=3)
    ages = [setting.run(method, x).stats["curvature_age"] for x in (None, None, None, setting.overflowing, None)]
    assert ages == [0, 1, 2, 3, 0]


def test_a_nan_in_the_curvature_batch_keeps_the_previous_inverse_and_says_so() -> None:
    setting, method = Setting(), hk.kfac(1e-2)
    setting.run(method)
    broken = setting.x.clone()
    broken[0, 0] = float("nan")
    result = setting.run(method, broken)
    assert result.status is Status.KEPT_PREVIOUS
    assert "curvature_batch[0] holds 1 nan" in str(result.stats["factorisation"])


def test_other_parameters_than_before_have_no_previous_inverse(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, method = Setting(), hk.kfac(1e-2)
    setting.run(method)
    setting.model[0].requires_grad_(False)
    monkeypatch.setattr(kfac, "factored_inverses", _fail)
    with pytest.raises(hk.solution.FactorizationError):
        setting.run(method)


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise hk.solution.FactorizationError("no")


def test_a_failed_factorisation_goes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, method = Setting(), hk.kfac(1e-2)
    setting.run(method)
    monkeypatch.setattr(kfac, "factored_inverses", _fail)
    assert [setting.run(method).status for _ in range(2)] == [Status.KEPT_PREVIOUS] * 2
    with pytest.raises(hk.solution.FactorizationError, match="3 in a row"):
        setting.run(method)


def test_other_errors_are_not_taken_for_failed_factorisations() -> None:
    setting, method = Setting(), hk.kfac(1e-2)
    setting.run(method)
    scalar = lambda m, w, b: (m(b[0]).sum() * w(torch.arange(N))).sum()  # noqa: E731
    setting.problem = hk.BilevelProblem(scalar, setting.problem.outer)
    with pytest.raises(hk.HyperkronError, match="plain scalar"):
        setting.run(method)


# State


@methods
def test_bad_factors_never_enter_the_moving_average(make: Callable[..., hk.Implicit]) -> None:
    setting, method = Setting(), make(1e-2, ema=0.5)
    setting.run(method)
    state = kronecker_state(method)
    before = copy.deepcopy(state.state_dict()["factors"])
    assert before
    setting.run(method, setting.overflowing)
    torch.testing.assert_close(state.state_dict()["factors"], before, rtol=0, atol=0)
    setting.run(method)
    assert not torch.equal(state.state_dict()["factors"]["0"]["b"], before["0"]["b"])
    _assert_finite(state.state_dict())


def _assert_finite(state: Any) -> None:
    assert all(bool(torch.isfinite(x.double()).all()) for x in tensors(state))


def test_a_spectrum_that_overflows_is_kept_out() -> None:
    """EKFAC squares gradients: its second pass may overflow where the factors did not."""
    setting, method = Setting(nn.Linear(D, C)), hk.ekfac(1e-2, fisher="empirical")
    setting.run(method)
    setting.y = setting.y * 1e12
    result = setting.run(method, setting.x * 1e12)
    assert result.status is Status.KEPT_PREVIOUS
    assert "spectrum of Linear is not finite" in str(result.stats["factorisation"])
    _assert_finite(kronecker_state(method).state_dict())


def test_kept_inverses_travel_with_the_state() -> None:
    setting, method = Setting(), hk.kfac(1e-2)
    setting.run(method)
    setting.run(method, setting.overflowing)
    resumed = hk.kfac(1e-2)
    resumed.load_state_dict(copy.deepcopy(method.state_dict()))
    first, second = (setting.run(m, setting.overflowing) for m in (method, resumed))
    assert first.stats == second.stats
    torch.testing.assert_close(first.grads, second.grads, rtol=0, atol=0)
    for m in (method, resumed):
        with pytest.raises(hk.NonFiniteError, match="3 in a row"):
            setting.run(m, setting.overflowing)


# float64 and more damping. With inputs of ones A is a matrix of ones, exactly: adding δ to its diagonal is lost in
# float32 where δ < 6e-8, and in float64 where δ < 1e-16.


def ones_setting(delta: float, dtype: torch.dtype = torch.float32) -> tuple[Setting, hk.Implicit]:
    setting = Setting(nn.Linear(D, C, bias=False), dtype)
    setting.x = torch.ones_like(setting.x)
    curvature = hk.curvature.KFAC(1.0, fisher="type-2", split=lambda a, b, damping: (delta * damping, damping))
    return setting, hk.Implicit(curvature, hk.solvers.Direct(), cross="reverse")


def damped_by(setting: Setting, method: hk.Implicit) -> float:
    """δ_A as the solve shows it: along a direction that no input has, A is zero."""
    batch = (setting.x, setting.y)
    with Point(setting.problem, setting.model, setting.hyper, batch, batch) as point:
        operator = method.curvature.operator(point, kronecker_state(method))
        v = {"weight": torch.tensor([[1.0, -1.0, 0.0]] * C, dtype=setting.x.dtype)}
        found = operator.solve(v)["weight"][0, 0]  # (B + 1)⁻¹ v / δ_A, and B = ½·I for weights of ½
    return float(1 / (1.5 * found))


@pytest.mark.parametrize(
    ("delta", "dtype", "status", "used"),
    [
        (1e-2, torch.float32, Status.DIRECT, 1e-2),
        (1e-9, torch.float64, Status.DIRECT, 1e-9),
        (1e-9, torch.float32, Status.MORE_DAMPING, 1e-9),  # float64 is enough
        (1e-17, torch.float32, Status.MORE_DAMPING, 1e-15),  # so is 100 times δ
        (1e-17, torch.float64, Status.MORE_DAMPING, 1e-15),
    ],
)
def test_float64_then_more_damping(delta: float, dtype: torch.dtype, status: Status, used: float) -> None:
    setting, method = ones_setting(delta, dtype)
    result = setting.run(method)
    assert result.status is status
    assert result.status.ok is (status is Status.DIRECT)
    assert damped_by(setting, method) == pytest.approx(used, rel=0.3 if used < 1e-12 else 1e-3)


@pytest.mark.parametrize("delta", [0.0, 1e-25])
def test_more_damping_has_an_end(delta: float) -> None:
    setting, method = ones_setting(delta)
    with pytest.raises(hk.solution.FactorizationError, match=r"factor of size 3 .*1000 times .*raise damping"):
        setting.run(method)


@pytest.mark.parametrize("rows", [2, 12], ids=["few rows", "many rows"])
def test_more_damping_is_the_same_damping_everywhere(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A is refused until its damping is 100-fold; the solve is then that of the more damped matrix, on all of θ."""
    torch.manual_seed(0)
    model, hyper = nn.Linear(8, 3, bias=False).double(), hk.SampleWeights(rows)
    x, y = torch.randn(rows, 8, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.mse(m(b[0]), b[1], weight=w(torch.arange(rows)) * 2),
        lambda m, w, b: hk.losses.mse(m(b[0]), b[1]),
    )
    true_cholesky, refused = torch.linalg.cholesky_ex, []

    def cholesky_ex(matrices: Tensor) -> Any:
        factor, info = true_cholesky(matrices)
        if matrices.shape[-1] == min(rows, 8) and len(refused) < 3:  # not B, whose size is another
            refused.append(matrices)
            info = torch.ones_like(info)
        return factor, info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", cholesky_ex)
    curvature = hk.curvature.KFAC(1e-4, fisher="type-2", split="plain")
    v = torch.randn(3, 8, dtype=torch.float64)
    with Point(problem, model, hyper, (x, y), (x, y)) as point:
        operator = curvature.operator(point, curvature.init())
        found = operator.solve({"weight": v})["weight"]
        back = operator.matvec({"weight": found})["weight"]
    assert operator.status is Status.MORE_DAMPING
    assert len(refused) == 3
    a = x.T @ x / rows + 100 * 1e-2 * torch.eye(8, dtype=torch.float64)  # B = I for weights of 1
    torch.testing.assert_close(found, torch.linalg.solve(a, v.T).T / 1.01, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(back, v, rtol=1e-9, atol=1e-12)


@methods
def test_singular_factors_without_damping(make: Callable[..., hk.Implicit]) -> None:
    """A feature that is always zero makes A singular; a good batch before it leaves an inverse to keep."""
    setting = Setting(nn.Linear(D, C), torch.float64)
    singular = setting.x.clone()
    singular[:, 0] = 0.0
    with pytest.raises(hk.solution.FactorizationError, match="raise damping"):
        setting.run(make(0.0, fisher="type-2"), singular)
    method = make(0.0, fisher="type-2")
    assert setting.run(method).status is Status.DIRECT
    assert setting.run(method, singular).status is Status.KEPT_PREVIOUS


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("name", ["exact", "ekfac"])
def test_an_eigendecomposition_that_does_not_converge(
    name: str, silent: bool, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 only: float64 is tried. In both: the previous basis is kept. The library may not even say so."""
    setting, method = Setting(), METHODS[name](1e-2, fisher="type-2")
    good = setting.run(method)
    true_eigh, tried = torch.linalg.eigh, []

    def eigh(matrix: Tensor) -> Any:
        tried.append(matrix.dtype)
        if matrix.dtype == torch.float32 or failing == 2:
            if silent:
                return matrix.diagonal(dim1=-2, dim2=-1), torch.full_like(matrix, float("nan"))
            raise torch.linalg.LinAlgError("it did not converge")
        return true_eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    result = setting.run(method)
    assert tried[:2] == [torch.float32, torch.float64]
    torch.testing.assert_close(result.grads, good.grads, rtol=1e-3, atol=1e-5)
    if failing == 1:
        assert result.status is Status.MORE_DAMPING
        assert result.stats["curvature_age"] == 0
    else:
        assert result.status is Status.KEPT_PREVIOUS
        assert ("not finite" if silent else "did not converge") in str(result.stats["factorisation"])


# Solvers


def saddle() -> tuple[hk.BilevelProblem, nn.Module, nn.Module]:
    """J_in = λ·θ₀² − 3·θ₁²: indefinite, whatever λ."""
    torch.manual_seed(0)
    model, hyper = nn.Linear(2, 1, bias=False), hk.as_hyper(torch.tensor(1.0))

    def inner(model: Any, hyper: Any, batch: Any) -> Tensor:
        theta = model.weight[0]
        return hyper() * theta[0] ** 2 - 3.0 * theta[1] ** 2

    return hk.BilevelProblem(inner, lambda m, h, b: m.weight.sum()), model, hyper


@pytest.mark.parametrize("method", [hk.cg(5, 0.0), hk.neumann(5), hk.gradient_descent(5)], ids=["cg", "neumann", "gd"])
def test_an_indefinite_hessian_is_visible(method: hk.Implicit) -> None:
    problem, model, hyper = saddle()
    result = method.compute(problem, model, hyper, None, None)
    assert result.status is Status.NONPOSITIVE_CURVATURE
    assert not result.status.ok
    assert "raise the damping" in result.status.value
    assert result.solution is not None
    assert result.solution.status is result.status
    assert bool(torch.isfinite(result.grads["value"]))


def test_enough_damping_makes_it_definite() -> None:
    problem, model, hyper = saddle()
    assert hk.cg(5, 10.0).compute(problem, model, hyper, None, None).status is Status.CONVERGED


def test_a_divergent_series_is_visible() -> None:
    setting = Setting(dtype=torch.float64)
    result = setting.run(hk.Implicit(hk.curvature.GGN(0.1), hk.solvers.Neumann(20, step=100.0)))
    assert result.status is Status.DIVERGED
    assert not result.status.ok


def test_a_failing_preconditioner_is_visible() -> None:
    """The answer is CG's, so its status is CG's; that the preconditioner is an old one is in the figures."""
    setting, method = Setting(), hk.pcg(50, 1e-2)
    setting.run(method)
    batch = (setting.x, setting.y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kfac, "factored_inverses", _fail)
        result = method.compute(setting.problem, setting.model, setting.hyper, batch, batch)
    assert result.status is Status.CONVERGED
    assert result.stats["factorisation"] == "no; raise damping."
    assert result.stats["curvature_age"] == 1
