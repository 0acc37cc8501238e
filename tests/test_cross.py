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
from cases import DOUBLE, Mean, make, mlp, random_weights
from hyperkron import cross, solution, trees
from hyperkron.cross import Cross, CrossState, difference, forward, reverse
from hyperkron.point import Point
from test_curvature_products import Attention, Once

X = torch.randn(5, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 1, 0])


class Lambda(nn.Module):
    """λ as named tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, t in tensors.items():
            setattr(self, name, nn.Parameter(t.to(DOUBLE)))


def weights(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X), Y, weight=hyper.a.sigmoid())


def perturbation(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X + hyper.a), Y)


def soft_labels(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X), hyper.a.softmax(-1))


def decay(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    named = dict(model.named_parameters())
    penalty = sum((hk.losses.l2(p, a.exp()) for p, a in zip(named.values(), hyper.a, strict=True)), 0)
    return hk.losses.cross_entropy(model(X), Y) + penalty  # type: ignore[no-any-return, operator]


def network(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    """λ is part of the network, with a part that J_in does not see."""
    features = torch.tanh(X @ hyper.a)
    return hk.losses.mse(model(features), torch.ones(5, 3, dtype=DOUBLE))


def everything(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    data = hk.losses.cross_entropy(model(X + hyper.a), hyper.b.softmax(-1), weight=hyper.c.sigmoid())
    return data * hyper.d.exp() + hk.losses.l2(model, hyper.d.exp())


random = torch.Generator().manual_seed(2)
KINDS: dict[str, tuple[Callable[..., hk.losses.Loss], Callable[[], nn.Module]]] = {
    "weights": (weights, lambda: Lambda(a=torch.randn(5, generator=random))),
    "perturbation": (perturbation, lambda: Lambda(a=torch.randn(5, 3, generator=random))),
    "soft labels": (soft_labels, lambda: Lambda(a=torch.randn(5, 3, generator=random))),
    "decay per parameter": (decay, lambda: Lambda(a=torch.randn(4, generator=random))),
    "network": (network, lambda: Lambda(a=torch.randn(3, 3, generator=random), unused=torch.ones(2))),
    "everything": (
        everything,
        lambda: Lambda(
            a=torch.randn(5, 3, generator=random),
            b=torch.randn(5, 3, generator=random),
            c=torch.randn(5, generator=random),
            d=torch.tensor(-0.5),
        ),
    ),
}


Inner = Callable[..., hk.losses.Loss]


def setting(inner: Inner, hyper: nn.Module, model: nn.Module) -> tuple[Point, dict[str, Tensor]]:
    problem = hk.BilevelProblem(inner, lambda m, h, b: hk.losses.cross_entropy(m(X), Y))
    v = trees.normal_like(oracles.trainable(model), torch.Generator().manual_seed(3))
    return Point(problem, model, hyper, None, None), v


def dense_cross(inner: Inner, model: nn.Module, hyper: nn.Module, v: Any) -> dict[str, Tensor]:
    params, hypers = list(oracles.trainable(model).values()), oracles.trainable(hyper)
    matrix = oracles.hessian(lambda: inner(model, hyper, None).value, params, list(hypers.values()))
    return oracles.tree(matrix.T @ oracles.flat(v), hypers)


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
    assert state.mode in ("difference", "forward")
    assert oracles.relative(found, dense_cross(inner, model, hyper, v)) < 1e-6
    assert oracles.relative(again, found) < 1e-6
    problem = hk.BilevelProblem(inner, lambda m, h, b: hk.losses.cross_entropy(m(X), Y))
    result = hk.identity().compute(problem, model, hyper, None, None)
    assert result.stats["cross"] == state.mode or state.error > 1e-8


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
    made = hk.Implicit(hk.Hessian(5.0), hk.CG(100, 1e-12), cross="reverse")
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


# --- models that cannot do everything ------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """x³ with a derivative that can be differentiated, but no forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * 3 * x**2


class Opaque(torch.autograd.Function):
    """sin, whose backward pass runs outside autograd without saying so, as a custom kernel's would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.from_numpy(g.detach().numpy() * x.detach().cos().numpy())


class Apply(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)  # type: ignore[no-any-return]


def bent(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 3)).to(DOUBLE)


COARSE = Cross(radius=0.5)
"""A radius at which no finite difference is exact enough, so that ``auto`` looks for another way."""


@pytest.mark.parametrize(
    ("middle", "mode"),
    [(nn.Tanh(), "forward"), (Apply(Cube), "reverse"), (Once(), "difference"), (Apply(Opaque), "difference")],
    ids=["smooth", "no forward mode", "once differentiable", "opaque backward"],
)
def test_auto_takes_the_first_way_that_works(middle: nn.Module, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", set())
    model, hyper = bent(middle), KINDS["everything"][1]()
    point, v = setting(everything, hyper, model)
    state = CrossState()
    with point:
        if mode == "difference":
            with pytest.warns(hk.HyperkronWarning, match="no exact way works"):
                found = COARSE.term(point, v, None, state)
        else:
            found = COARSE.term(point, v, None, state)
        again = COARSE.term(point, v, None, state)
        fine = difference(point, v, 1e-4)
    assert state.mode == mode
    assert oracles.relative(again, found) < 1e-12
    assert oracles.relative(found, fine) < (0.5 if mode == "difference" else 1e-6)
    assert (state.error > 0) == (mode == "difference")


@pytest.mark.parametrize("function", [Once, lambda: Apply(Opaque), lambda: Apply(Cube), nn.ReLU])
def test_auto_and_kfac_work_with_such_models(function: Callable[[], nn.Module]) -> None:
    """The finite difference is exact enough for all of them, and nothing else is asked of the model."""
    model, hyper = bent(function()), KINDS["weights"][1]()
    point, v = setting(weights, hyper, model)
    with point:
        wanted = difference(point, v, 1e-5)
    problem = hk.BilevelProblem(weights, lambda m, h, b: hk.losses.cross_entropy(m(X), Y))
    result = hk.kfac(0.1).compute(problem, model, hyper, None, None)
    assert result.stats["cross"] == "difference"
    with point:
        found = Cross().term(point, v, None, CrossState())
    assert oracles.relative(found, wanted) < 1e-6


def test_reverse_refuses_what_cannot_be_differentiated_twice() -> None:
    model, hyper = bent(Once()), KINDS["weights"][1]()
    point, v = setting(weights, hyper, model)
    with point, pytest.raises(hk.HyperkronError, match="cannot be differentiated twice"):
        reverse(point, v)


def test_auto_decides_anew_for_another_inner_loss() -> None:
    """A finite difference that was right for one loss is wrong for one with stopped gradients."""

    def stopped(m: nn.Module, h: nn.Module, b: Any) -> Any:
        return weights(m, h, b) * weights(m, h, b).value.detach()

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


@pytest.mark.parametrize("mode", ["auto", "reverse", "forward", "difference"])
@pytest.mark.parametrize("eval_mode", [True, False])
def test_fused_attention_works_in_every_mode(mode: str, eval_mode: bool) -> None:
    """F.scaled_dot_product_attention picks kernels without second derivatives unless told otherwise."""
    model = nn.Sequential(Attention(), Mean()).train(not eval_mode)
    case = make(model, (4, 3), loss="cross_entropy", hyper=random_weights(5))
    wanted = oracles.implicit(case, torch.eye(sum(p.numel() for p in case.params.values()), dtype=DOUBLE))
    for made in (hk.identity(cross=mode),):  # type: ignore[arg-type]
        assert oracles.relative(made.compute(*case.arguments).grads, wanted) < 1e-6


def test_fused_attention_with_every_curvature() -> None:
    case = make(nn.Sequential(Attention(), Mean()), (4, 3), loss="cross_entropy", hyper=random_weights(5))
    convex = 1.0 - float(torch.linalg.eigvalsh(case.hessian())[0])
    hessian = oracles.implicit(case, case.hessian(), damping=convex)
    ggn = oracles.implicit(case, case.ggn(), damping=1.0)
    assert oracles.relative(hk.cg(200, convex, tolerance=1e-12).compute(*case.arguments).grads, hessian) < 1e-6
    assert oracles.relative(hk.pcg(200, 1.0, tolerance=1e-12).compute(*case.arguments).grads, ggn) < 1e-6
    for made in (hk.kfac(1.0), hk.ekfac(1.0)):
        assert made.compute(*case.arguments).status is hk.Status.DIRECT


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.InstanceNorm1d(2)])
def test_forward_mode_refuses_norms_whose_tangents_cannot_be_differentiated(norm: nn.Module) -> None:
    """torch's tangents of these norms are wrong in λ inside the model, in silence; ``auto`` takes double backward."""
    shaped = nn.Sequential(nn.Unflatten(1, (2, 2)), norm, nn.Flatten()) if isinstance(norm, nn.InstanceNorm1d) else norm
    model, hyper = bent(shaped), KINDS["perturbation"][1]()
    point, v = setting(perturbation, hyper, model)
    state = CrossState()
    with point:
        with pytest.raises(hk.HyperkronError, match="forward mode and then λ"):
            forward(point, v)
        found, wanted = Cross(radius=1e-2, tolerance=1e-12).term(point, v, None, state), reverse(point, v)
    assert state.mode == "reverse"
    assert oracles.relative(found, wanted) < 1e-12
    point, v = setting(weights, KINDS["weights"][1](), model)
    with point:  # where λ only weights examples nothing passes through the norm
        assert oracles.relative(forward(point, v), reverse(point, v)) < 1e-12


def test_encoder_layer_of_torch_works_in_every_mode() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, Mean(), nn.Linear(4, 2))
    case = make(model.eval(), (3, 4), loss="cross_entropy", hyper=random_weights(5))
    found = [hk.identity(cross=m).compute(*case.arguments).grads for m in ("reverse", "forward", "difference", "auto")]
    for other in found[1:]:
        assert oracles.relative(other, found[0]) < 1e-6


def test_dropout_draws_the_same_mask_on_both_sides() -> None:
    model = nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 3)).to(DOUBLE)
    hyper = KINDS["weights"][1]()
    point, v = setting(weights, hyper, model)
    with point:
        found = [reverse(point, v), forward(point, v), difference(point, v, 1e-4)]
    assert oracles.relative(found[1], found[0]) < 1e-12
    assert oracles.relative(found[2], found[0]) < 1e-6


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
    plain, calls = difference, []

    def rounded(point: Point, v: Any, radius: float, full: bool = False) -> Any:
        calls.append(full)
        found = plain(point, v, radius)
        off = 0.0 if full and exact_enough else 0.2 * (-1) ** len(calls)
        return trees.scale(found, 1.0 + off)

    monkeypatch.setattr(cross, "difference", rounded)
    monkeypatch.setattr(cross, "_tf32", lambda point: True)
    monkeypatch.setattr(Point, "small", property(lambda point: small))
    problem, (model, hyper) = hk.BilevelProblem(weights, weights), (mlp(3, 3, 3), Lambda(a=torch.ones(5)))
    state = CrossState()
    with Point(problem, model, hyper, X, X) as point:
        v = trees.map(torch.ones_like, point.params)
        found = Cross().term(point, v, None, state)
        exact = reverse(point, v)
        assert state.mode == mode and state.full is (mode == "difference") and any(calls) is small
        assert trees.norm(trees.add(found, exact, alpha=-1.0)) <= 1e-5 * trees.norm(exact)
        calls.clear()
        Cross().term(point, v, None, state)
        assert calls == ([True] if mode == "difference" else [])
