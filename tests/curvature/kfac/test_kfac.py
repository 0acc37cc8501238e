"""KFAC where it is provably exact, its Monte-Carlo rate, its weights, damping and memory, against dense oracles."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cases
import hyperkron as hk
import oracles
from cases import DOUBLE, Case, Mean, make, mlp, random_weights, uniform_weights
from hyperkron.curvature.kfac.factors import dense as as_matrix
from hyperkron.curvature.kfac.inverse import split_damping


def only(model: nn.Module, *trained: str) -> nn.Module:
    """``model`` with all parameters frozen but those whose names begin with one of ``trained``."""
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(trained))
    return model


def method(case: Case, damping: float = 0.05, sharing: str = "expand", cross: str = "auto") -> hk.Implicit:
    curvature = hk.curvature.KFAC(damping, fisher="type-2", split="exact", sharing=sharing)  # type: ignore[arg-type]
    return hk.Implicit(curvature, hk.solvers.Direct(), cross=cross)  # type: ignore[arg-type]


def factors(case: Case, name: str, **how: object) -> tuple[Tensor, Tensor]:
    measured = case.measured(**how)  # type: ignore[arg-type]
    return as_matrix(measured.a[name]), as_matrix(measured.b[name])


# --- where KFAC is the Hessian ------------------------------------------------------------------------------------

conv = nn.Conv2d
EXACT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,), "expand"),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), (3,), "expand"),
    "wide linear, few rows": (lambda: nn.Linear(24, 3), (24,), "expand"),
    "first of a deep linear network": (lambda: only(mlp(3, 4, 3, 2, activation=nn.Identity), "0."), (3,), "expand"),
    "middle of a deep linear network": (lambda: only(mlp(3, 4, 3, 2, activation=nn.Identity), "2."), (3,), "expand"),
    "last layer on nonlinear features": (lambda: only(mlp(3, 6, 2), "2."), (3,), "expand"),
    "weight alone": (lambda: only(nn.Linear(3, 2), "weight"), (3,), "expand"),
    "bias alone": (lambda: only(nn.Linear(3, 2), "bias"), (3,), "expand"),
    "linear at each position": (lambda: nn.Linear(3, 2), (4, 3), "expand"),
    "linear, then the mean": (lambda: nn.Sequential(nn.Linear(3, 2), Mean()), (4, 3), "reduce"),
    "deep linear, then the mean": (
        lambda: only(nn.Sequential(mlp(3, 4, 2, activation=nn.Identity), Mean()), "0.0."),
        (2, 2, 3),
        "reduce",
    ),
    "convolution": (lambda: conv(2, 3, 2, padding=1, stride=2), (2, 4, 4), "expand"),
    "grouped convolution": (lambda: conv(4, 6, 2, groups=2), (4, 3, 3), "expand"),
    "depthwise convolution": (lambda: conv(3, 3, 2, groups=3), (3, 3, 3), "expand"),
    "convolution, then the mean": (lambda: nn.Sequential(conv(2, 3, 2), Mean(True)), (2, 3, 3), "reduce"),
}


@pytest.mark.parametrize(
    ("name", "cross"),
    [
        pytest.param(name, cross, marks=pytest.mark.long if i % 2 == j else ())  # each with one way by ``make test``
        for i, name in enumerate(EXACT)
        for j, cross in enumerate(("auto", "reverse"))
    ],
)
def test_hypergradient_is_exact_where_kfac_is_the_hessian(name: str, cross: str) -> None:
    build, shape, sharing = EXACT[name]
    case = make(build(), shape)
    result = method(case, sharing=sharing, cross=cross).compute(*case.arguments)
    assert result.status is hk.Status.DIRECT
    wanted = oracles.implicit(case, case.hessian(), damping=0.05)
    assert oracles.relative(result.grads, wanted) < 1e-8
    with case.point() as point:
        operator = hk.curvature.KFAC(0.05, fisher="type-2", split="exact", sharing=sharing).operator(  # type: ignore[arg-type]
            point, hk.curvature.KFAC().init()
        )
        eye = 0.05 * torch.eye(len(case.hessian()), dtype=DOUBLE)
        assert oracles.relative(oracles.dense(operator.matvec, case.params), case.hessian() + eye) < 1e-12


@pytest.mark.parametrize("name", ["linear, then the mean", "linear at each position"])
def test_the_other_weight_sharing_is_not_exact_there(name: str) -> None:
    build, shape, sharing = EXACT[name]
    case = make(build(), shape)
    other = "expand" if sharing == "reduce" else "reduce"
    result = method(case, sharing=other).compute(*case.arguments)
    assert oracles.relative(result.grads, oracles.implicit(case, case.hessian(), damping=0.05)) > 1e-4


@pytest.mark.parametrize(
    ("activation", "count", "loss"),
    [
        (nn.Identity, 5, "mse"),
        (nn.Tanh, 1, "mse"),
        (nn.Tanh, 1, "cross_entropy"),
        (nn.Tanh, 1, "binary"),
    ],
    ids=["deep linear", "one example, mse", "one example, cross entropy", "one example, binary"],
)
def test_blocks_are_exact_for_deep_linear_networks_and_for_one_example(
    activation: type[nn.Module], count: int, loss: str
) -> None:
    """B is the same for every example (linear, MSE), or there is but one: each layer's block of the GGN is B ⊗ A."""
    case = make(mlp(3, 4, 4, 2, activation=activation), (3,), count=count, loss=loss)
    names = [[f"{i}.weight", f"{i}.bias"] for i in (0, 2, 4)]
    blocks = oracles.block_diagonal(case.ggn(), case.params, names)
    result = method(case, cross="reverse").compute(*case.arguments)
    assert oracles.relative(result.grads, oracles.implicit(case, blocks, damping=0.05)) < 1e-8


DECAYS: dict[str, dict[str, float | Tensor]] = {
    "both": {"0.weight": 0.3, "0.bias": 0.3},
    "tensor": {"0.weight": torch.tensor(0.1, dtype=DOUBLE), "0.bias": torch.tensor(0.1, dtype=DOUBLE)},
}


@pytest.mark.parametrize("name", DECAYS)
def test_l2_penalty_joins_the_damping(name: str) -> None:
    case = make(nn.Sequential(nn.Linear(3, 2)), (3,), decay=DECAYS[name])
    result = method(case).compute(*case.arguments)
    wanted = oracles.implicit(case, case.hessian(), damping=0.05)
    assert oracles.relative(result.grads, wanted) < 1e-8
    with case.point() as point:
        operator = method(case).curvature.operator(point, method(case).curvature.init())
        whole = case.hessian() + 0.05 * torch.eye(8, dtype=DOUBLE)
        assert oracles.relative(oracles.dense(operator.matvec, case.params), whole) < 1e-12
    dropped = oracles.implicit(case, case.hessian() - case.l2(), damping=0.05)
    assert oracles.relative(result.grads, dropped) > 1e-2


def test_l2_penalty_of_one_layer_stays_in_its_block() -> None:
    case = make(mlp(3, 4, 2, activation=nn.Identity, bias=False), (3,), decay={"2.weight": 0.4})
    blocks = oracles.block_diagonal(case.ggn(), case.params, [["0.weight"], ["2.weight"]])
    result = method(case, cross="reverse").compute(*case.arguments)
    assert oracles.relative(result.grads, oracles.implicit(case, blocks, damping=0.05)) < 1e-8


# --- Monte-Carlo ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "binary"])
@pytest.mark.long
def test_monte_carlo_converges_to_type_2_at_the_root_of_the_samples(loss: str) -> None:
    case = make(mlp(3, 5, 4), (3,), loss=loss, hyper=random_weights(5))
    exact = case.measured("type-2")
    counts = [4**k for k in range(6)]  # 1 … 1024
    errors = []
    for samples in counts:
        seeds = range(16 if samples <= 64 else 4)
        squares = []
        for seed in seeds:
            drawn = case.measured("mc", samples=samples, seed=1000 * samples + seed)
            assert all(torch.equal(as_matrix(drawn.a[n]), as_matrix(exact.a[n])) for n in exact.a)
            squares.append(sum(float((as_matrix(drawn.b[n]) - as_matrix(exact.b[n])).square().sum()) for n in exact.b))
        errors.append(math.sqrt(sum(squares) / len(squares)))
    x = torch.tensor(counts, dtype=DOUBLE).log()
    y = torch.tensor(errors, dtype=DOUBLE).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    print(f"{loss}: error of B falls as M^{slope:.3f} from {errors[0]:.2e} (M=1) to {errors[-1]:.2e} (M={counts[-1]})")
    assert -0.6 < slope < -0.4
    assert errors[-1] < errors[0] / 15  # √1024 = 32 on average


def test_monte_carlo_is_unbiased() -> None:
    """Every entry of the mean of 600 one-sample factors lies within 4.5 standard errors of the exact one."""
    case = make(mlp(3, 4, 3), (3,), loss="cross_entropy", hyper=random_weights(5))
    exact = case.measured("type-2")
    measured = [case.measured("mc", seed=s).b for s in range(600)]
    for name in exact.b:
        draws = torch.stack([as_matrix(b[name]) for b in measured])
        spread = draws.std(0) / math.sqrt(len(draws))
        assert float(((draws.mean(0) - as_matrix(exact.b[name])) / (spread + 1e-12)).abs().max()) < 4.5


def test_monte_carlo_draws_differ_between_refreshes_and_follow_the_seed() -> None:
    case = make(mlp(3, 4, 3), (3,), loss="cross_entropy")
    run = lambda seed: [flat_grads(m, case) for m in [hk.kfac(seed=seed)] for _ in range(3)]  # noqa: E731
    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert not torch.equal(first[0], other[0])


def flat_grads(made: hk.Implicit, case: Case) -> Tensor:
    return oracles.flat(made.compute(*case.arguments).grads)


# --- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fisher", ["mc", "rademacher", "type-2", "empirical"])
def test_factors_carry_the_weight_once(fisher: str) -> None:
    case = make(mlp(3, 4, 3), (3,), loss="cross_entropy", hyper=random_weights(5))
    once = case.measured(fisher)
    with torch.no_grad():
        case.hyper.weight *= 2
    twice = case.measured(fisher)
    for name in once.a:
        assert oracles.relative(as_matrix(twice.b[name]), 2 * as_matrix(once.b[name])) < 1e-14
        assert torch.equal(as_matrix(twice.a[name]), as_matrix(once.a[name]))


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
def test_output_factor_of_a_linear_classifier_in_closed_form(fisher: str) -> None:
    case = make(nn.Linear(3, 4), (3,), loss="cross_entropy", hyper=random_weights(5))
    x, y = case.inner_batch
    p = case.model(x).softmax(-1).detach()
    sigma = case.hyper().detach() / len(x)
    residual = p - nn.functional.one_hot(y, 4)
    hessians = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    each = hessians if fisher == "type-2" else residual[:, :, None] * residual[:, None, :]
    b = factors(case, "Linear", fisher=fisher)[1][0]
    assert oracles.relative(b, (sigma[:, None, None] * each).sum(0)) < 1e-14


@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical"])
def test_examples_of_weight_zero_drop_out_of_b(fisher: str) -> None:
    weights = cases.Weights(torch.tensor([0.5, 0.0, 0.7, 0.0, 0.3], dtype=DOUBLE))
    case = make(mlp(3, 4, 3), (3,), loss="cross_entropy", hyper=weights)
    before = case.measured(fisher)
    x, y = case.inner_batch
    gone = weights.weight == 0
    other = torch.where(gone[:, None], torch.full_like(x, 7.0), x)
    case.inner_batch = (other, torch.where(gone, (y + 1) % 3, y))
    after = case.measured(fisher)
    for name in before.b:
        assert oracles.relative(as_matrix(after.b[name]), as_matrix(before.b[name])) < 1e-14
    if fisher != "mc":  # the same examples alone, divided by five as before
        case.inner_batch = (x[~gone], y[~gone])
        case.hyper = cases.Weights(weights.weight[~gone] * 3 / 5)
        alone = case.measured(fisher)
        for name in before.b:
            assert oracles.relative(as_matrix(alone.b[name]), as_matrix(before.b[name])) < 1e-14


# --- damping -------------------------------------------------------------------------------------------------------

SPLITS: dict[str, object] = {
    "pi": "pi",
    "plain": "plain",
    "callable": lambda a, b, delta: (0.7 * delta.expand(a.shape[0]), 0.2 + b[:, 0, 0]),
    "exact": "exact",
}


def damped(a: Tensor, b: Tensor, delta: float, split: str) -> Tensor:
    """The dense damped block of one group, from the definition."""
    eye_a, eye_b = torch.eye(len(a), dtype=DOUBLE), torch.eye(len(b), dtype=DOUBLE)
    if split == "exact":
        return torch.kron(b, a) + delta * torch.kron(eye_b, eye_a)
    root = math.sqrt(delta)
    pi = math.sqrt((float(a.trace()) / len(a)) / (float(b.trace()) / len(b)))
    shift_a, shift_b = {
        "pi": (pi * root, root / pi),
        "plain": (root, root),
        "callable": (0.7 * delta, 0.2 + float(b[0, 0])),
    }[split]
    return torch.kron(b + shift_b * eye_b, a + shift_a * eye_a)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4)), (3,)),
        (lambda: nn.Sequential(nn.Linear(30, 21), nn.Tanh(), only(nn.Linear(21, 3), "none")), (30,)),  # few rows
        (lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), Mean(True)), (4, 2, 2)),
    ],
    ids=["linear", "wide", "groups"],
)
def test_damping_is_split_as_declared(build: Callable[[], nn.Module], shape: tuple[int, ...], split: str) -> None:
    case = make(build(), shape, count=4, loss="cross_entropy", hyper=random_weights(4))
    a, b = case.slow_factors()["0"]
    order = oracles.joint_order(case.model[0], "0.", case.params)  # type: ignore[index]
    wanted = torch.block_diag(*[damped(a[g], b[g], 0.01, split) for g in range(len(a))])
    curvature = hk.curvature.KFAC(0.01, fisher="type-2", split=SPLITS[split])  # type: ignore[arg-type]
    with case.point() as point:
        operator = curvature.operator(point, curvature.init())
        found = oracles.dense(operator.matvec, case.params)[order][:, order]
        inverse = oracles.dense(operator.solve, case.params)[order][:, order]
    assert oracles.relative(found, wanted) < 1e-10
    assert oracles.relative(inverse, torch.linalg.inv(wanted)) < 1e-9


def test_unknown_split_is_refused_by_name() -> None:
    case = make(nn.Linear(3, 2), (3,))
    with pytest.raises(hk.HyperkronError, match="split='half'"):
        hk.Implicit(hk.curvature.KFAC(split="half"), hk.solvers.Direct()).compute(*case.arguments)  # type: ignore[arg-type]


# --- memory --------------------------------------------------------------------------------------------------------


def three_batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    x, y = case.inner_batch
    return [(x * s, y) for s in (1.0, 0.5, 2.0)]


def test_moving_average_of_factors() -> None:
    case = make(nn.Sequential(nn.Linear(3, 2)), (3,), loss="cross_entropy")
    curvature = hk.curvature.KFAC(0.01, fisher="type-2", split="exact", ema=0.3)
    state = curvature.init()
    order = oracles.joint_order(case.model[0], "0.", case.params)  # type: ignore[index]
    average: tuple[Tensor, Tensor] | None = None
    for batch in three_batches(case):
        case.inner_batch = batch
        a, b = case.slow_factors()["0"]
        average = (a, b) if average is None else (0.3 * average[0] + 0.7 * a, 0.3 * average[1] + 0.7 * b)
        with case.point() as point:
            found = oracles.dense(curvature.operator(point, state).matvec, case.params)[order][:, order]
        assert oracles.relative(found, damped(average[0][0], average[1][0], 0.01, "exact")) < 1e-12


@pytest.mark.parametrize("every", [1, 3])
def test_refresh_every_keeps_the_inverse_and_shows_its_age(every: int) -> None:
    case = make(mlp(3, 4, 2), (3,), loss="cross_entropy")
    made = hk.kfac(0.01, fisher="type-2", refresh_every=every)
    ages, matrices = [], []
    for _ in range(7):
        result = made.compute(*case.arguments)
        ages.append(result.stats["curvature_age"])
        operator = result.solution
        assert operator is not None
        b = {n: torch.ones_like(p) for n, p in case.params.items()}
        state = copy.deepcopy(made.state.curvature)
        state.age = -1  # reading the operator in use once more must not refresh it
        with case.point() as point:
            reading = hk.curvature.KFAC(0.01, fisher="type-2", refresh_every=1000)
            matrices.append(oracles.flat(reading.operator(point, state).solve(b)))
        with torch.no_grad():
            for p in case.model.parameters():
                p.mul_(1.1)
    assert ages == [i % every for i in range(7)]
    for i in range(1, 7):
        assert torch.equal(matrices[i], matrices[i - 1]) == (i % every != 0)
    assert result.stats["curvature_refreshes"] == -(-7 // every)


def test_newly_trained_parameters_refresh_the_curvature_at_once() -> None:
    """Gradual unfreezing: a layer that joins between two refreshes is not left without curvature."""
    case = make(only(mlp(3, 4, 2), "2."), (3,), loss="cross_entropy")
    made = hk.kfac(0.01, fisher="type-2", refresh_every=10)
    assert made.compute(*case.arguments).stats["curvature_refreshes"] == 1
    assert made.compute(*case.arguments).stats["curvature_age"] == 1
    for trained in (("0.", "2."), ("0.weight",), ("0.bias", "2.weight")):
        only(case.model, *trained)
        result = made.compute(*case.arguments)
        fresh = hk.kfac(0.01, fisher="type-2").compute(*case.arguments)
        assert result.stats["curvature_age"] == 0
        assert oracles.relative(result.grads, fresh.grads) < 1e-14


METHODS: dict[str, Callable[[], hk.Implicit]] = {
    "kfac": lambda: hk.kfac(0.01, refresh_every=2, ema=0.4),
    "kfac exact": lambda: hk.Implicit(hk.curvature.KFAC(0.01, split="exact", samples=2), hk.solvers.Direct()),
    "ekfac": lambda: hk.ekfac(0.01, refresh_every=3, ema=0.2),
    "pcg": lambda: hk.pcg(3, 0.01, warm_start=True),
    "gradient descent": lambda: hk.gradient_descent(4, 0.1),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_a_resumed_run_continues_bit_for_bit(name: str, stop: int) -> None:
    model = nn.Sequential(nn.Linear(3, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 2))
    case = make(model, (3,), loss="cross_entropy", count=4)
    batches = [(case.inner_batch[0] * s, case.inner_batch[1]) for s in (1.0, 0.8, 1.2, 0.9, 1.1, 1.3)]

    def run(made: hk.Implicit, some: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [
            oracles.flat(made.compute(case.problem, case.model, case.hyper, b, case.outer_batch).grads) for b in some
        ]

    through = METHODS[name]()
    whole = run(through, batches)
    first = METHODS[name]()
    run(first, batches[:stop])
    saved = copy.deepcopy(first.state_dict())
    resumed = METHODS[name]()
    resumed.load_state_dict(saved)
    for found, wanted in zip(run(resumed, batches[stop:]), whole[stop:], strict=True):
        assert torch.equal(found, wanted)
    run(METHODS[name](), batches)
    assert _same(resumed.state_dict(), through.state_dict())


def _same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def test_the_damping_of_vanishing_gradients_is_not_rounded_to_nothing() -> None:
    delta = torch.tensor([1e-3])
    for sizes in ((1.0, 2.5e-40), (2.5e-40, 1.0)):
        a, b = split_damping(*(torch.tensor([x]) for x in sizes), delta, "pi")
        assert a > 0 and b > 0 and torch.allclose(a * b, delta)


def test_where_no_example_weighs_anything_the_damping_alone_is_inverted() -> None:
    """B is zero then, and as small weights go to zero, the split of the damping goes to δ I."""
    case = make(mlp(3, 4, 2), (3,), loss="cross_entropy", hyper=uniform_weights(5, 0.0))
    size = sum(p.numel() for p in case.params.values())
    wanted = oracles.implicit(case, torch.zeros(size, size, dtype=DOUBLE), damping=0.1)
    assert oracles.relative(hk.kfac(0.1, cross="reverse").compute(*case.arguments).grads, wanted) < 1e-9
