"""Hessian and Gauss–Newton products against dense matrices, and what they refuse."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Case, Mean, Weights, make, mlp, random_weights
from hyperkron import solution
from hyperkron.evaluation.point import Point


class Attention(nn.Module):
    """One head of F.scaled_dot_product_attention over tokens, with logits at every token."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.qkv, self.norm, self.head = nn.Linear(3, 3 * width), nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.head(self.norm(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)))


def masked(case: Case) -> Case:
    """Some tokens do not count."""
    x, y = case.inner_batch
    y = y.clone()
    y[0, 1:] = -100
    y[1, 0] = -100
    case.inner_batch = (x, y)
    return case


def signed(count: int) -> Weights:
    return Weights(torch.linspace(-0.6, 1.0, count, dtype=DOUBLE))


CASES: dict[str, Callable[[], Case]] = {
    "mse": lambda: make(mlp(3, 4, 2), (3,), hyper=random_weights(5)),
    "cross entropy": lambda: make(mlp(3, 4, 3), (3,), loss="cross_entropy", hyper=random_weights(5)),
    "binary": lambda: make(mlp(3, 4, 2), (3,), loss="binary", hyper=random_weights(5)),
    "negative weights": lambda: make(mlp(3, 4, 3), (3,), loss="cross_entropy", hyper=signed(5)),
    "one example": lambda: make(mlp(3, 4, 3), (3,), loss="cross_entropy", count=1),
    "convolution": lambda: make(
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.SiLU(), Mean(True), nn.Linear(3, 2)),
        (2, 3, 3),
        loss="cross_entropy",
        hyper=random_weights(5),
    ),
    "masked tokens": lambda: masked(make(mlp(3, 4, 3), (4, 3), loss="cross_entropy", count=3, hyper=random_weights(3))),
    "attention": lambda: masked(make(Attention(), (4, 3), loss="cross_entropy", count=3, hyper=random_weights(3))),
    "penalties": lambda: make(
        mlp(3, 4, 2),
        (3,),
        loss="cross_entropy",
        decay={"0.weight": 0.1, "0.bias": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=DOUBLE), "2.weight": 0.3},
    ),
}


@pytest.mark.parametrize(
    ("name", "damping"),
    [
        pytest.param(name, damping, marks=pytest.mark.long if i % 2 == j else ())  # each with one of them
        for i, name in enumerate(CASES)
        for j, damping in enumerate((0.0, 0.3))
    ],
)
def test_products_equal_the_dense_matrix(name: str, damping: float) -> None:
    case = CASES[name]()
    eye = damping * torch.eye(sum(p.numel() for p in case.params.values()), dtype=DOUBLE)
    for curvature, wanted in ((hk.curvature.Hessian(damping), case.hessian()), (hk.curvature.GGN(damping), case.ggn())):
        with case.point() as point:
            operator = curvature.operator(point, curvature.init())
            found = oracles.dense(operator.matvec, case.params)
        assert oracles.relative(found, wanted + eye) < 1e-10
        assert operator.products == len(eye)


def test_library_and_plain_objectives_agree() -> None:
    for build in CASES.values():
        case = build()
        value = case.inner(case.model, case.hyper, case.inner_batch).value
        assert float((value - case.plain_inner()).detach()) == pytest.approx(0.0, abs=1e-14)
        outer = case.outer(case.model, case.hyper, case.outer_batch).value
        assert float((outer - case.plain_outer()).detach()) == pytest.approx(0.0, abs=1e-14)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.values = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.classes(h), self.values(h)


def two_heads() -> tuple[nn.Module, Any, Callable[..., hk.losses.Loss], Callable[[Tensor, Tensor], Tensor]]:
    """A sum of scaled losses on two outputs: 0.7 cross-entropy with smoothing and soft targets, 2 squared errors."""
    model = TwoHeads().to(DOUBLE)
    x, soft = torch.randn(4, 3, dtype=DOUBLE), torch.rand(4, 3, dtype=DOUBLE)
    target = torch.randn(4, 2, dtype=DOUBLE)

    def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        logits, values = model(x)
        smooth = hk.losses.cross_entropy(logits, soft, weight=hyper(), label_smoothing=0.1)
        return 0.7 * smooth + 2.0 * hk.losses.mse(values, target)

    def plain(logits: Tensor, values: Tensor, sigma: Tensor) -> Tensor:
        q = 0.9 * soft + 0.1 / 3
        first = (sigma * -(q * logits.log_softmax(-1)).sum(-1)).mean()
        return 0.7 * first + (values - target).square().sum(1).mean()

    return model, x, inner, plain


def test_sums_of_losses_on_several_outputs() -> None:
    model, x, inner, plain = two_heads()
    hyper = random_weights(4)
    params = oracles.trainable(model)
    with hk.curvature.base.Point(hk.BilevelProblem(inner, inner), model, hyper, None, None) as point:
        logits, values = model(x)
        both = torch.cat([logits, values], dim=1)
        sigma = hyper().detach()
        wanted = oracles.ggn(both, lambda f: plain(f[:, :3], f[:, 3:], sigma), list(params.values()))
        found = oracles.dense(hk.curvature.GGN().operator(point, hk.curvature.GGN().init()).matvec, params)
        assert oracles.relative(found, wanted) < 1e-10
        hessian = oracles.hessian(lambda: plain(*model(x), sigma), list(params.values()))
        found = oracles.dense(hk.curvature.Hessian().operator(point, hk.curvature.Hessian().init()).matvec, params)
        assert oracles.relative(found, hessian) < 1e-10


def test_dropout_draws_one_mask_for_all_products() -> None:
    case = make(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)), (3,))
    for curvature in (hk.curvature.Hessian(), hk.curvature.GGN()):
        with case.point() as point:
            operator = curvature.operator(point, curvature.init())
            matrix = oracles.dense(operator.matvec, case.params)
            again = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
        assert oracles.relative(matrix, matrix.T) < 1e-12
        assert torch.equal(matrix, again)


def test_ggn_and_hessian_agree_where_the_model_is_linear() -> None:
    for loss in ("mse", "cross_entropy", "binary"):
        case = make(nn.Linear(3, 2), (3,), loss=loss, hyper=random_weights(5))
        with case.point() as point:
            hessian = oracles.dense(
                hk.curvature.Hessian().operator(point, hk.curvature.Hessian().init()).matvec, case.params
            )
            ggn = oracles.dense(hk.curvature.GGN().operator(point, hk.curvature.GGN().init()).matvec, case.params)
        assert oracles.relative(hessian, ggn) < 1e-12


class Sine(torch.autograd.Function):
    """sin, whose derivative cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Once(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Sine.apply(x)  # type: ignore[no-any-return]


def test_a_model_that_cannot_be_differentiated_twice_is_refused_by_name() -> None:
    case = make(nn.Sequential(nn.Linear(3, 4), Once(), nn.Linear(4, 2)), (3,))
    for made in (hk.cg(3, 0.1), hk.neumann(3), hk.gradient_descent(3)):
        with pytest.raises(hk.HyperkronError, match="cannot be differentiated twice"):
            made.compute(*case.arguments)
    assert hk.kfac(0.1).compute(*case.arguments).status is hk.Status.DIRECT


@pytest.mark.parametrize(
    ("norm", "training"), [(nn.Identity(), True), (nn.BatchNorm1d(4), False), (nn.BatchNorm1d(4), True)]
)
def test_a_penalty_on_gradients_through_batch_norm_is_refused(norm: nn.Module, training: bool) -> None:
    """Its Hessian needs a third derivative that torch has wrong for batch norm in training, and right for others."""
    normed = training and isinstance(norm, nn.BatchNorm1d)
    case = make(nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2)), (3,), count=6)
    case.model.train(training)

    def penalised(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return case.inner(model, hyper, batch).value + 0.1 * gradient.square().sum()

    problem = hk.BilevelProblem(penalised, case.outer)
    for method in (hk.cg(3, 10.0), hk.identity(cross="reverse")):
        if normed:
            with pytest.raises(hk.HyperkronError, match="holds gradients through batch norm"):
                method.compute(problem, *case.arguments[1:])
        else:
            assert method.compute(problem, *case.arguments[1:]).status in (hk.Status.BUDGET, hk.Status.DIRECT)
    assert hk.identity(cross="difference").compute(problem, *case.arguments[1:]).status is hk.Status.DIRECT


def test_ggn_refuses_a_plain_scalar() -> None:
    case = make(nn.Linear(3, 2), (3,))
    scalar = hk.BilevelProblem(lambda m, h, b: case.inner(m, h, b).value, case.outer)
    with pytest.raises(hk.HyperkronError, match=r"plain scalar.*Hessian\(\)"):
        hk.cg(3, curvature=hk.curvature.GGN(0.1)).compute(scalar, *case.arguments[1:])
    result = hk.cg(30, 0.1).compute(scalar, *case.arguments[1:])  # the Hessian needs no more than a scalar
    assert oracles.relative(result.grads, oracles.implicit(case, case.hessian(), damping=0.1)) < 1e-8


@pytest.mark.parametrize(("amsgrad", "decay"), [(False, 0.0), (True, 0.0), (False, 0.5)])
def test_adam_diagonal_is_the_derivative_of_the_step(amsgrad: bool, decay: float) -> None:
    """D = ∂(m/√s)/∂g for each number, by autograd through Adam's moments, which a weight decay is part of."""
    model = nn.Linear(3, 2).to(DOUBLE)
    options: Any = {"betas": (0.8, 0.9), "eps": 1e-300, "amsgrad": amsgrad, "weight_decay": decay}
    optimizer = torch.optim.Adam(model.parameters(), lr=(rate := 1e-12 if decay else 0.1), **options)
    for size in (1.0, 1.0, 0.3):  # with the last gradient some s grow and some fall
        optimizer.zero_grad()
        model(size * torch.randn(4, 3, dtype=DOUBLE)).square().sum().backward()
        before = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()}
        optimizer.step()
    case = make(model, (3,))
    curvature = hk.curvature.AdamDiagonal(optimizer)
    b = {n: torch.ones_like(p) for n, p in case.params.items()}
    with case.point() as point:
        operator = curvature.operator(point, curvature.init())
        v, back = operator.solve(b), operator.matvec(operator.solve(b))
    for name, p in model.named_parameters():
        g = (p.grad + decay * p).detach().requires_grad_()  # type: ignore[operator]
        m = 0.8 * before[p]["exp_avg"] + 0.2 * g
        s = 0.9 * before[p]["exp_avg_sq"] + 0.1 * g.square()
        s = torch.maximum(s, before[p]["max_exp_avg_sq"]) if amsgrad else s
        (slope,) = torch.autograd.grad((m / s.sqrt()).sum(), g)
        assert oracles.relative(v[name], rate * slope) < 1e-10
        assert oracles.relative(back[name], b[name]) < 1e-12
    sgd = hk.curvature.AdamDiagonal(torch.optim.SGD(model.parameters(), lr=0.1))
    with case.point() as point:
        v = sgd.operator(point, sgd.init()).solve(b)
    assert all(math.isclose(float(x.min()), 0.1) and math.isclose(float(x.max()), 0.1) for x in v.values())


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam])
def test_the_diagonal_of_another_step_than_that_of_adam_is_warned_of(kind: type[torch.optim.Optimizer]) -> None:
    case = make(nn.Linear(3, 2), (3,))
    optimizer = kind(case.model.parameters())  # type: ignore[call-arg]
    case.inner(*case.arguments[1:4]).value.backward()
    optimizer.step()
    with pytest.warns(hk.HyperkronWarning, match=f"optimizer is {kind.__name__}, but D is that of Adam"):
        hk.sama(optimizer).compute(*case.arguments)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_diagonal_of_a_step_whose_gradients_are_cleared_is_warned_of(
    set_to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one step D = 0, as m/√s is ±1 whatever g is; without g it would be about 1/|g|."""
    monkeypatch.setattr("hyperkron.solution._warned", set())
    case = make(nn.Linear(3, 2), (3,))
    optimizer = torch.optim.Adam(case.model.parameters())
    case.inner(*case.arguments[1:4]).value.backward()
    optimizer.step()
    result = hk.sama(optimizer).compute(*case.arguments)
    assert float(torch.cat([x.flatten() for x in result.solution.value.values()]).abs().max()) < 1e-6
    optimizer.zero_grad(set_to_none)
    with pytest.warns(hk.HyperkronWarning, match=r"gradients are cleared.* before zero_grad\(\)"):
        hk.sama(optimizer).compute(*case.arguments)


def test_the_diagonal_takes_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Flatten())
    case = make(model, (2,), tokens=4)
    optimizer = torch.optim.SparseAdam(model.parameters())
    case.inner(*case.arguments[1:4]).value.backward()
    optimizer.step()
    found = hk.sama(optimizer).compute(*case.arguments)
    for p in case.params.values():
        p.grad = p.grad.to_dense()  # type: ignore[union-attr]
    assert oracles.relative(hk.sama(optimizer).compute(*case.arguments).grads, found.grads) == 0


def test_a_penalty_and_its_transpose_are_two_penalties() -> None:
    """The coefficients of a tied pair, α of W and αᵀ of the other, lie in one memory."""
    case = make(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)), (3,))
    alpha, curvature = torch.rand(3, 3, dtype=DOUBLE), hk.curvature.GGN()

    def inner(model: Any, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        return case.inner(model, hyper, batch) + hk.losses.l2(model, [alpha, alpha.T])

    with case.point() as point:
        bare = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
    with Point(hk.BilevelProblem(inner, case.outer), *case.arguments[1:]) as point:
        found = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
    assert oracles.relative(found, bare + 2 * torch.cat([alpha.flatten(), alpha.T.flatten()]).diag()) < 1e-12


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda model: model.weight.square().sum(), "plain tensor whose curvature the Gauss–Newton matrix cannot see"),
        (lambda model: hk.losses.l2(2 * model.weight, 0.5), "l2 penalty on a tensor computed from parameters"),
    ],
    ids=["plain penalty", "penalty of a derived tensor"],
)
def test_curvature_that_is_not_counted_is_said(
    extra: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solution, "_warned", set())
    case = make(nn.Linear(3, 2), (3,))
    problem = hk.BilevelProblem(lambda m, h, b: case.inner(m, h, b) + extra(m), case.outer)
    with pytest.warns(hk.HyperkronWarning, match=message):
        hk.cg(3, curvature=hk.curvature.GGN(0.1)).compute(problem, *case.arguments[1:])


@pytest.mark.parametrize(
    "extra",
    [
        lambda hyper: hyper.weight.square().sum(),
        lambda hyper: hk.losses.l2(2 * hyper.weight, 0.5),
        lambda hyper: torch.tensor(0.3, dtype=DOUBLE),
    ],
    ids=["plain tensor of λ", "penalty on λ", "constant"],
)
@pytest.mark.parametrize("made", [hk.kfac, lambda: hk.cg(3, curvature=hk.curvature.GGN(0.1))])
def test_what_has_no_curvature_in_theta_is_not_warned_of(
    extra: Callable[[Any], Any], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solution, "_warned", set())
    case = make(nn.Linear(3, 2), (3,))
    problem = hk.BilevelProblem(lambda m, h, b: case.inner(m, h, b) + extra(h), case.outer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hk.HyperkronWarning)
        made().compute(problem, *case.arguments[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("curvature", [hk.curvature.Hessian(0.3), hk.curvature.GGN(0.3)])
def test_a_product_and_the_cross_term_are_the_same_together(curvature: hk.curvature.Curvature, dtype: Any) -> None:
    model, hyper = nn.Linear(3, 2).to(dtype), hk.as_hyper(torch.tensor(0.2, dtype=dtype))
    batch = torch.randn(4, 3, dtype=dtype), torch.randn(4, 2, dtype=dtype)

    def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.mse(model(batch[0]).tanh(), batch[1]) + hk.losses.l2(model, hyper().exp())

    with Point(hk.BilevelProblem(inner, inner), model, hyper, batch, batch) as point:
        operator = curvature.operator(point, curvature.init())
        v = {name: torch.randn_like(p).float() for name, p in point.params.items()}
        v = v if dtype is torch.float16 else {name: x.to(dtype) for name, x in v.items()}
        product, crossed = operator.matvec_and_cross(v, point.hypers)
        assert operator.products == 1
        torch.testing.assert_close(product, operator.matvec(v))
        alone = operator.cross(v, point.hypers)
        assert (crossed is None) == (alone is None)
        if crossed is not None:
            torch.testing.assert_close(crossed, alone)
