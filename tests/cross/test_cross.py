"""The cross term ∂²_λθ J_in · v, three ways, against the dense mixed derivative; and how ``auto`` chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import make, mlp, random_weights
from crossing import KINDS, Lambda, X, Y, dense_cross, everything, setting, weights
from hyperkron import trees
from hyperkron.cross import Cross, CrossState, choice, difference, forward, precision, reverse, weighting
from hyperkron.evaluation.point import Point


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("way", "tolerance"),
    [(reverse, 1e-12), (forward, 1e-12), (lambda p, v: difference(p, v, 1e-4), 1e-6)],
    ids=["reverse", "forward", "difference"],
)
def test_every_way_equals_the_dense_derivative(name: str, way: Callable[..., Any], tolerance: float) -> None:
    inner, build = KINDS[name]
    model, hyper = mlp(3, 4, 3), build()
    point, v = setting(inner, hyper, model)
    with point:
        found = way(point, v)
    assert set(found) == set(oracles.trainable(hyper))
    assert oracles.relative(found, dense_cross(inner, model, hyper, v)) < tolerance


@pytest.mark.parametrize("name", KINDS)
def test_auto_is_exact_enough_and_reports_its_choice(name: str) -> None:
    inner, build = KINDS[name]
    model, hyper = mlp(3, 4, 3), build()
    point, v = setting(inner, hyper, model)
    state = CrossState()
    with point:
        found = Cross().term(point, v, None, state)
        again = Cross().term(point, v, None, state)
    assert state.mode == ("difference" if name in ("weights", "decay per parameter") else "reverse")
    assert oracles.relative(found, dense_cross(inner, model, hyper, v)) < 1e-6
    assert oracles.relative(again, found) < 1e-6
    problem = hk.BilevelProblem(inner, lambda m, h, b: hk.losses.cross_entropy(m(X), Y))
    result = hk.identity().compute(problem, model, hyper, None, None)
    assert result.stats["cross"] == state.mode


def test_the_operator_graph_gives_the_cross_term_for_free() -> None:
    model, hyper = mlp(3, 4, 3), KINDS["everything"][1]()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    problem = hk.BilevelProblem(everything, lambda m, h, b: hk.losses.cross_entropy(m(X), Y))
    method = hk.cg(5, 1.0)
    method.compute(problem, model, hyper, None, None)  # the first call also looks for autocast
    calls.clear()
    result = method.compute(problem, model, hyper, None, None)
    assert result.stats["cross"] == "reverse"
    assert len(calls) == 2  # J_in and J_out once each
    v = result.solution.value  # type: ignore[union-attr]
    wanted = trees.scale(dense_cross(everything, model, hyper, v), -1.0)
    assert oracles.relative(result.grads, wanted) < 1e-12


def test_another_curvature_batch_does_not_lend_its_graph() -> None:
    case = make(mlp(3, 4, 2), (3,), hyper=random_weights(5))
    x, y = case.inner_batch
    made = hk.Implicit(hk.curvature.Hessian(5.0), hk.solvers.CG(100, 1e-12), cross="reverse")
    found = made.compute(*case.arguments, curvature_batch=(2 * x, y)).grads
    curved = make(mlp(3, 4, 2), (3,), hyper=case.hyper)
    curved.model, curved.inner_batch = case.model, (2 * x, y)
    assert oracles.relative(found, oracles.implicit(case, curved.hessian(), damping=5.0)) < 1e-8


# --- what a finite difference costs --------------------------------------------------------------------------------


class Witness(nn.Module):
    """Notes for every forward pass whether anything was recorded for a backward pass through the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)
        self.calls.append((any(p.requires_grad for p in self.parameters()), output.requires_grad))
        return output


def test_difference_is_two_plain_forwards_where_lambda_weights_examples() -> None:
    model, hyper = Witness(mlp(3, 4, 3)), KINDS["weights"][1]()
    point, v = setting(weights, hyper, model)
    with point:
        difference(point, v, 1e-4)
    assert model.calls == [(False, False)] * 2
    model.calls.clear()
    made = hk.kfac(0.1, cross="difference")
    problem = hk.BilevelProblem(weights, lambda m, h, b: hk.losses.cross_entropy(m(X), Y))
    made.compute(problem, model, hyper, None, None)  # the first call also looks for autocast
    model.calls.clear()
    made.compute(problem, model, hyper, None, None)
    assert sorted(model.calls) == [(False, False)] * 2 + [(True, True)] * 2  # + curvature and outer
    assert all(p.requires_grad for p in model.parameters())


def test_difference_restores_the_parameters_bit_for_bit_also_on_error() -> None:
    model, hyper = mlp(3, 4, 3), KINDS["weights"][1]()
    before = {n: (p.data_ptr(), p.detach().clone(), p._version) for n, p in model.named_parameters()}

    def failing(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        loss = weights(model, hyper, batch)
        if not next(model.parameters()).requires_grad:
            raise KeyError("inside the displaced evaluation")
        return loss

    for inner in (weights, failing):
        point, v = setting(inner, hyper, model)
        with point:
            if inner is failing:
                with pytest.raises(KeyError):
                    difference(point, v, 1e-4)
            else:
                difference(point, v, 1e-4)
        for n, p in model.named_parameters():
            pointer, value, version = before[n]
            assert (p.data_ptr(), p._version) == (pointer, version)
            assert torch.equal(p, value)
            assert p.requires_grad


# --- how ``auto`` decides ------------------------------------------------------------------------------------------


def test_auto_decides_anew_for_another_inner_loss() -> None:
    """A finite difference that was right for one loss is wrong for one with stopped gradients."""

    def stopped(m: nn.Module, h: nn.Module, b: Any) -> Any:
        return weights(m, h, b).value * weights(m, h, b).value.detach()

    model, hyper, state = mlp(3, 4, 3), KINDS["weights"][1](), CrossState()
    for inner, mode in ((weights, "difference"), (stopped, "reverse"), (weights, "difference")):
        point, v = setting(inner, hyper, model)
        with point:
            found, wanted = Cross().term(point, v, None, state), reverse(point, v)
        assert state.mode == mode
        assert oracles.relative(found, wanted) < 1e-5
    assert "inner" not in state.state_dict()
    calls = state.calls
    for _ in range(3):  # defined anew each time, and still one function
        point, v = setting(lambda m, h, b: weights(m, h, b), hyper, model)
        with point:
            Cross().term(point, v, None, state)
        state.error = 7.0 if state.calls == calls + 1 else state.error
    assert state.error == 7.0  # decided once, not again


def test_a_call_that_failed_decides_nothing() -> None:
    model, hyper = mlp(3, 4, 3), KINDS["weights"][1]()
    state = CrossState()
    broken, v = setting(lambda m, h, b: weights(m, h, b) * float("nan"), hyper, model)
    with broken, pytest.raises(hk.NonFiniteError):
        Cross().term(broken, v, None, state)
    point, v = setting(weights, hyper, model)
    with point:
        Cross().term(point, v, None, state)
    assert state.mode == "difference"


def test_lambda_that_does_not_reach_the_inner_loss_is_refused() -> None:
    model, hyper = mlp(3, 4, 3), KINDS["weights"][1]()
    point, v = setting(lambda m, h, b: hk.losses.cross_entropy(m(X), Y, weight=h.a.detach().sigmoid()), hyper, model)
    for way in (reverse, forward, lambda p, u: difference(p, u, 1e-4)):
        with point, pytest.raises(hk.HyperkronError, match="does not influence the inner loss"):
            way(point, v)


def test_float32_picks_a_way_within_its_tolerance() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))
    hyper = Lambda(a=torch.zeros(5))
    hyper.a.data = hyper.a.data.float()

    def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(X.float()), Y, weight=hyper.a.sigmoid())

    point, v = setting(inner, hyper, model)
    state = CrossState()
    with point:
        found, wanted = Cross().term(point, v, None, state), reverse(point, v)
    assert state.mode == "difference"
    assert oracles.relative(found, wanted) < 0.05
    assert F.cosine_similarity(found["a"], wanted["a"], dim=0) > 0.999


@pytest.mark.parametrize(
    ("small", "exact_enough", "mode"), [(False, True, "forward"), (True, True, "difference"), (True, False, "forward")]
)
def test_where_tf32_is_too_coarse_small_models_take_float32(
    small: bool, exact_enough: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated on a CPU: a difference is off by a fifth, in TF32 always, in float32 unless it is exact enough."""
    plain, calls = weighting.difference, []

    def rounded(point: Point, v: Any, radius: float, form: str, full: bool = False) -> Any:
        calls.append(full)
        found = plain(point, v, radius, form)
        off = 0.0 if full and exact_enough else 0.2 * (-1) ** len(calls)
        return weighting.Found(trees.scale(found.cross, 1.0 + off), found.parts)

    monkeypatch.setattr(weighting, "difference", rounded)
    for module in (choice, precision):
        monkeypatch.setattr(module, "tf32", lambda point: True)
    monkeypatch.setattr(Point, "small", property(lambda point: small))
    problem, (model, hyper) = hk.BilevelProblem(weights, weights), (mlp(3, 3, 3), Lambda(a=torch.ones(5)))
    state = CrossState()
    with Point(problem, model, hyper, X, X) as point:
        v = trees.map(torch.ones_like, point.params)
        found = Cross().term(point, v, None, state)
        exact = reverse(point, v)
        assert state.mode == mode and state.way.full is (mode == "difference") and any(calls) is small
        assert trees.norm(trees.add(found, exact, alpha=-1.0)) <= 1e-5 * trees.norm(exact)
        calls.clear()
        Cross().term(point, v, None, state)
        assert calls == ([True] if mode == "difference" else [])
