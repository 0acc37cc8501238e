"""Cross terms of inner losses that hold constant what moves with θ, against double backward and dense oracles."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, mlp
from crossing import Lambda, X, Y, dense_cross, perturbation, setting, weights
from hyperkron import solution
from hyperkron.cross import Cross, CrossState, reverse
from tests.cross.test_cross_models import Once, bent

METHODS: dict[str, Callable[..., hk.Implicit]] = {
    "kfac": lambda **options: hk.kfac(0.1, **options),
    "ekfac": lambda **options: hk.ekfac(0.1, **options),
    "identity": hk.identity,
    "pcg": lambda **options: hk.pcg(50, 0.1, **options),
    "cg, GGN": lambda **options: hk.cg(50, curvature=hk.curvature.GGN(0.1), **options),
}


def outer(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X), Y.flip(0))


def rows(model: nn.Module, y: Tensor = Y) -> Tensor:
    return F.cross_entropy(model(X), y, reduction="none")


def same_pass(model: nn.Module, net: Any, batch: Any) -> hk.losses.Loss:
    """The ordinary Meta-Weight-Net: weights from the detached losses of the same forward pass."""
    output = model(X)
    seen = hk.losses.cross_entropy(output, Y).per_example
    return hk.losses.cross_entropy(output, Y, weight=net(seen))


def without_grad(model: nn.Module, net: Any, batch: Any) -> hk.losses.Loss:
    with torch.no_grad():
        seen = rows(model)
    weight = net.net(seen[:, None]).squeeze(1).sigmoid()
    return hk.losses.cross_entropy(model(X), Y, weight=weight) + hk.losses.l2(model, 0.01)


def attached(model: nn.Module, net: Any, batch: Any) -> hk.losses.Loss:
    """θ learns through its own weights, so that they are more than weights."""
    seen = rows(model)
    return hk.losses.cross_entropy(model(X), Y, weight=net.net(seen[:, None]).squeeze(1).sigmoid())


def plain_scalar(model: nn.Module, net: Any, batch: Any) -> Tensor:
    """No record of what is weighted."""
    seen = rows(model)
    return (net(seen) * seen).mean()


def scaled(model: nn.Module, net: Any, batch: Any) -> hk.losses.Loss:
    """Weights, scale and penalty are functions of λ and of stopped losses."""
    loss = same_pass(model, net, batch)
    return loss * net.net(loss.value.detach().reshape(1, 1)).exp().sum() + hk.losses.l2(model, net.net[2].bias.exp())


def corrected(model: nn.Module, net: Any, batch: Any) -> hk.losses.Loss:
    """λ mixes labels with the stopped predictions of the model."""
    output = model(X)
    share = net(rows(model))[:, None]
    return hk.losses.cross_entropy(output, share * F.one_hot(Y, 3) + (1 - share) * output.detach().softmax(-1))


INNERS = [same_pass, without_grad, scaled, attached, plain_scalar, corrected]
STRUCTURED = {"same_pass", "without_grad", "scaled"}


def meta_net(**options: Any) -> nn.Module:
    torch.manual_seed(5)
    return hk.MetaWeightNet(6, **options).to(DOUBLE)


@pytest.fixture(autouse=True)
def _no_warnings_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", set())


@pytest.mark.parametrize("inner", INNERS)
def test_double_backward_is_the_dense_derivative(inner: Any) -> None:
    model, net = mlp(3, 4, 3), meta_net()
    problem = hk.BilevelProblem(inner, outer)
    point, v = setting(lambda m, h, b: hk.losses.as_loss(problem.inner(m, h, b)), net, model)
    with point:
        found = reverse(point, v)
    wanted = dense_cross(lambda m, h, b: hk.losses.as_loss(inner(m, h, b)), model, net, v)
    assert oracles.relative(found, wanted) < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inner", [i for i in INNERS if i is not plain_scalar])
def test_auto_is_right_with_every_method(inner: Any, method: str) -> None:
    problem, model, net = hk.BilevelProblem(inner, outer), mlp(3, 4, 3), meta_net(normalise=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hk.HyperkronWarning)
        if inner is attached:  # which the curvature, not the cross term, has to say something about
            warnings.filterwarnings("ignore", "weights or targets of the inner loss depend", hk.HyperkronWarning)
        found = METHODS[method]().compute(problem, model, net, None, None)
    wanted = METHODS[method](cross="reverse").compute(problem, model, net, None, None)
    assert found.stats["cross"] == ("difference" if inner.__name__ in STRUCTURED else "reverse")
    assert oracles.relative(found.grads, wanted.grads) < 1e-6


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("inner", INNERS)
def test_sama_is_right_up_to_its_radius(inner: Any, equal: bool) -> None:
    """Also where all weights are equal at first: with a last layer of zeros only their derivatives in λ move with θ."""
    problem, model, net = hk.BilevelProblem(inner, outer), mlp(3, 4, 3), meta_net()
    net.net[1] = nn.Tanh()  # type: ignore[operator, union-attr]
    nn.init.zeros_(net.net[2].weight) if equal else None  # type: ignore[index, union-attr, arg-type]
    wanted = hk.identity(cross="reverse").compute(problem, model, net, None, None).grads
    gaps = [
        oracles.relative(hk.sama(alpha=alpha).compute(problem, model, net, None, None).grads, wanted)
        for alpha in (0.1, 0.05)
    ]
    assert gaps[0] < 0.02
    assert gaps[1] < 0.3 * gaps[0] or gaps[0] < 1e-10  # O(radius²), or double backward


def test_sama_is_near_with_the_kinks_of_a_meta_weight_net_and_else_says_how_far_off_it_is() -> None:
    model, net = mlp(3, 4, 3), meta_net()
    for inner in (same_pass, attached):
        problem = hk.BilevelProblem(inner, outer)
        wanted = hk.identity(cross="reverse").compute(problem, model, net, None, None).grads
        if inner is same_pass:
            found = hk.sama().compute(problem, model, net, None, None)
            assert F.cosine_similarity(oracles.flat(found.grads), oracles.flat(wanted), dim=0) > 0.999
        else:
            with pytest.warns(hk.HyperkronWarning, match="lower radius"):
                found = hk.sama(alpha=4e-3).compute(problem, model, net, None, None)
            told = found.stats["cross_error"]
            assert told == pytest.approx(oracles.relative(found.grads, wanted), rel=0.01)


LAMBDAS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[..., Any]]] = {
    "SampleWeights": (
        lambda m: hk.SampleWeights(5),
        lambda m, h, b: hk.losses.cross_entropy(m(X), Y, weight=h(torch.arange(5))),
    ),
    "SampleWeights, softmax": (
        lambda m: hk.SampleWeights(9, "softmax"),
        lambda m, h, b: hk.losses.cross_entropy(m(X), Y, weight=h(torch.arange(5))),
    ),
    "MetaWeightNet": (lambda m: meta_net(), same_pass),
    "DomainWeights": (
        lambda m: hk.DomainWeights(2),
        lambda m, h, b: hk.losses.cross_entropy(m(X), Y, weight=h(torch.tensor([0, 1, 1, 0, 1]))),
    ),
    "WeightDecay": (hk.WeightDecay, lambda m, h, b: hk.losses.cross_entropy(m(X), Y) + h(m)),
    "WeightDecay of entries": (
        lambda m: hk.WeightDecay(m, each="entry"),
        lambda m, h, b: hk.losses.cross_entropy(m(X), Y) + h(m),
    ),
    "LabelCorrection": (
        lambda m: hk.LabelCorrection(Y, 3),
        lambda m, h, b: hk.losses.cross_entropy(m(X), h(torch.arange(5))),
    ),
    "Augmentation": (lambda m: hk.Augmentation(), lambda m, h, b: hk.losses.cross_entropy(m(h(X)), Y)),
    "as_hyper": (
        lambda m: hk.as_hyper(torch.tensor(-3.0)),
        lambda m, h, b: hk.losses.cross_entropy(m(X), Y) + hk.losses.l2(m, h().exp()),
    ),
}


@pytest.mark.parametrize("name", LAMBDAS)
def test_sama_and_auto_work_with_every_lambda_of_the_library(name: str) -> None:
    build, inner = LAMBDAS[name]
    model = mlp(3, 4, 3)
    hyper, problem = build(model).to(DOUBLE), hk.BilevelProblem(inner, outer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hk.HyperkronWarning)
        found = hk.sama(alpha=1e-3).compute(problem, model, hyper, None, None)
        auto = hk.identity().compute(problem, model, hyper, None, None)
    wanted = hk.identity(cross="reverse").compute(problem, model, hyper, None, None)
    assert found.stats["cross"] == "difference"
    assert oracles.relative(found.grads, wanted.grads) < 1e-5
    assert oracles.relative(auto.grads, wanted.grads) < 1e-6


# --- gradients that are stopped inside the model -----------------------------------------------------------


class Straight(nn.Module):
    """A straight-through estimator: the value is bent, the gradient is that of the identity."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.tanh() - x).detach()


def spectral() -> nn.Module:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = nn.utils.spectral_norm(nn.Linear(3, 4).to(DOUBLE))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 3).to(DOUBLE)).train()


@pytest.mark.parametrize("build", [lambda: bent(Straight()), spectral], ids=["straight-through", "spectral norm"])
@pytest.mark.parametrize("method", ["auto", "difference", "sama"])
def test_stopped_gradients_inside_the_model_take_an_exact_way(build: Any, method: str) -> None:
    model, hyper, problem = (
        build(),
        hk.SampleWeights(5).to(DOUBLE),
        hk.BilevelProblem(LAMBDAS["SampleWeights"][1], outer),
    )
    made = hk.sama() if method == "sama" else hk.identity(cross=method)  # type: ignore[arg-type]
    if method == "auto":
        found = made.compute(problem, model, hyper, None, None)
    else:
        with pytest.warns(hk.HyperkronWarning, match="cross='difference' would be wrong"):
            found = made.compute(problem, model, hyper, None, None)
    wanted = hk.identity(cross="reverse").compute(problem, model, hyper, None, None)
    assert found.stats["cross"] in ("reverse", "forward")  # which honours detach()
    assert oracles.relative(found.grads, wanted.grads) < 1e-12


def test_where_nothing_is_right_a_warning_says_so() -> None:
    """A model that stops gradients and cannot be differentiated twice."""
    model, hyper = bent(nn.Sequential(Straight(), Once())), hk.SampleWeights(5).to(DOUBLE)
    problem = hk.BilevelProblem(LAMBDAS["SampleWeights"][1], outer)
    for made in (hk.identity(), hk.sama()):
        solution._warned.clear()
        with pytest.warns(hk.HyperkronWarning, match="only cross='reverse' would be right"):
            made.compute(problem, model, hyper, None, None)


def test_forward_mode_does_not_look_through_no_grad() -> None:
    problem, model, net = hk.BilevelProblem(without_grad, outer), mlp(3, 4, 3), meta_net()
    wanted = hk.identity(cross="reverse").compute(problem, model, net, None, None).grads
    found = hk.identity(cross="forward").compute(problem, model, net, None, None)
    assert found.stats["cross"] == "forward"
    assert oracles.relative(found.grads, wanted) < 1e-12

    def scalar(m: nn.Module, h: nn.Module, b: Any) -> Tensor:
        return without_grad(m, h, b).value

    problem = hk.BilevelProblem(scalar, outer)
    with pytest.warns(hk.HyperkronWarning, match="cross='forward' would be wrong"):
        found = hk.identity(cross="forward").compute(problem, model, net, None, None)
    assert found.stats["cross"] == "reverse"
    assert oracles.relative(found.grads, wanted) < 1e-12


# --- the same choice, always -------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNERS)
def test_the_choice_does_not_depend_on_the_seed(inner: Any) -> None:
    chosen = set()
    for seed in range(5):
        torch.manual_seed(seed)
        model, net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).to(DOUBLE), hk.MetaWeightNet(6)
        problem = hk.BilevelProblem(inner, outer)
        chosen.add(hk.identity().compute(problem, model, net.to(DOUBLE), None, None).stats["cross"])
    assert len(chosen) == 1


@pytest.mark.long
def test_the_choice_holds_for_250_calls_of_training_and_after_a_resume() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    net, x = hk.MetaWeightNet(6), X.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def inner(m: nn.Module, h: Any, b: Any) -> hk.losses.Loss:
        output = m(x)
        return hk.losses.cross_entropy(output, Y, weight=h(hk.losses.cross_entropy(output, Y).per_example))

    problem = hk.BilevelProblem(inner, lambda m, h, b: hk.losses.cross_entropy(m(x), Y.flip(0)))
    method, seen = hk.identity(), set()
    for call in range(250):
        if call == 120:
            resumed = hk.identity()
            resumed.load_state_dict(method.state_dict())
            assert resumed.state.cross.state_dict() == method.state.cross.state_dict()
            method = resumed
        result = method.compute(problem, model, net, None, None)
        seen.add((result.stats["cross"], method.state.cross.way.form))
        optimizer.zero_grad()
        inner(model, net, None).backward()
        optimizer.step()
    assert seen == {("difference", "wm")}  # the weights move with θ, so they are taken at θ


@pytest.mark.parametrize("build", [hk.identity, hk.sama], ids=["auto", "sama"])
def test_weights_that_jump_between_the_two_sides_are_those_at_theta(build: Any) -> None:
    """A kink of the weight network at θ must not mix the weights of both sides."""
    torch.manual_seed(0)
    model, hyper = mlp(3, 4, 3), hk.SampleWeights(5).to(DOUBLE)
    at = rows(model).detach() - 1e-12

    def inner(m: nn.Module, h: Any, b: Any) -> hk.losses.Loss:
        w = h(torch.arange(5))
        return hk.losses.cross_entropy(m(X), Y, weight=torch.where(rows(m).detach() > at, w, 3 * w))

    problem = hk.BilevelProblem(inner, outer)
    wanted = hk.identity(cross="reverse").compute(problem, model, hyper, None, None).grads
    method = build(alpha=1e-3) if build is hk.sama else build()
    assert oracles.relative(method.compute(problem, model, hyper, None, None).grads, wanted) < 1e-5


@pytest.mark.parametrize("cross", ["reverse", "forward", "difference"])
def test_a_resumed_run_keeps_to_what_it_is_configured_for(cross: Any) -> None:
    problem, model, hyper = hk.BilevelProblem(LAMBDAS["SampleWeights"][1], outer), mlp(3, 4, 3), hk.SampleWeights(5)
    hyper = hyper.to(DOUBLE)
    for earlier in ("forward", "difference"):
        first, second = hk.identity(cross=earlier), hk.identity(cross=cross)  # type: ignore[arg-type]
        first.compute(problem, model, hyper, None, None)
        second.load_state_dict(first.state_dict())
        assert second.compute(problem, model, hyper, None, None).stats["cross"] == cross


def test_another_structure_of_the_same_code_is_noticed() -> None:
    def make(detach: bool) -> Any:
        def inner(m: nn.Module, h: Any, b: Any) -> hk.losses.Loss:
            seen = rows(m)
            seen = seen.detach() if detach else seen
            return hk.losses.cross_entropy(m(X), Y, weight=h.net(seen[:, None]).squeeze(1).sigmoid())

        return inner

    model, net, method = mlp(3, 4, 3), meta_net(), hk.identity()
    for detach in (True, False, True):
        problem = hk.BilevelProblem(make(detach), outer)
        found = method.compute(problem, model, net, None, None)
        assert found.stats["cross"] == ("difference" if detach else "reverse")
        wanted = hk.identity(cross="reverse").compute(problem, model, net, None, None)
        assert oracles.relative(found.grads, wanted.grads) < 1e-6


def test_a_loss_that_changes_its_form_is_decided_again() -> None:
    flags = {"more": False}

    def inner(m: nn.Module, h: Any, b: Any) -> hk.losses.Loss:
        loss = weights(m, h, b)
        return loss + perturbation(m, h.b, b) if flags["more"] else loss

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(5, dtype=DOUBLE))
            self.b = nn.Module()
            self.b.a = nn.Parameter(torch.zeros(5, 3, dtype=DOUBLE))

    model, hyper, state = mlp(3, 4, 3), Both(), CrossState()
    point, v = setting(inner, hyper, model)
    for more in (False, True):
        flags["more"] = more
        with point:
            found, wanted = Cross().term(point, v, None, state), reverse(point, v)
        assert state.mode == ("reverse" if more else "difference")
        assert oracles.relative(found, wanted) < 1e-6


def test_a_zero_vector_decides_nothing() -> None:
    model, hyper, state = bent(Straight()), hk.SampleWeights(5).to(DOUBLE), CrossState()
    point, v = setting(LAMBDAS["SampleWeights"][1], hyper, model)
    with point:
        zero = Cross().term(point, {n: torch.zeros_like(x) for n, x in v.items()}, None, state)
        assert all(float(x.norm()) == 0 for x in zero.values())
        found, wanted = Cross().term(point, v, None, state), reverse(point, v)
    assert state.mode in ("reverse", "forward")
    assert oracles.relative(found, wanted) < 1e-12


# --- losses whose value was changed by hand ----------------------------------------------------------------


def test_a_value_that_its_terms_do_not_make_is_not_taken_apart() -> None:
    def inner(m: nn.Module, h: Any, b: Any) -> hk.losses.Loss:
        loss = weights(m, h, b)
        return hk.losses.Loss(loss.value.square(), loss.terms)

    model, hyper, state = mlp(3, 4, 3), Lambda(a=torch.randn(5)), CrossState()
    point, v = setting(inner, hyper, model)
    with point:
        found, wanted = Cross().term(point, v, None, state), reverse(point, v)
    assert state.mode == "reverse"
    assert oracles.relative(found, wanted) < 1e-12
