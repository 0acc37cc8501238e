"""What single algorithms promise beyond the conformance suite: their equations, on small quadratics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.mrbo import two_points
from hyperkron.curvature import Identity
from hyperkron.evaluation.point import placed
from hyperkron.hypergradient.steps import SGD
from hyperkron.hypergradient.stochastic_neumann import StochasticNeumann
from hyperkron.hypergradient.unrolled import Batches
from hyperkron.optimizers import LevelOptimizer
from quadratic import Quadratic


def at_random_point(problem: Quadratic) -> tuple[nn.Module, nn.Module, Any, Any]:
    model, hyper = problem.modules()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in (*model.parameters(), *hyper.parameters()):
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    batches = problem.batches()
    return model, hyper, batches.inner(), batches.outer()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# --- the stochastic inverse --------------------------------------------------------------------------------


def test_the_series_on_one_batch_is_neumann() -> None:
    problem = Quadratic()
    model, hyper, inner, outer = at_random_point(problem)
    ours = StochasticNeumann(7, 0.3).compute(problem.problem(), model, hyper, inner, outer)
    core = hk.neumann(7, step=0.3).compute(problem.problem(), model, hyper, inner, outer)
    assert relative(ours.grads["value"], core.grads["value"]) < 1e-12
    assert ours.outer_loss == core.outer_loss


def test_every_product_has_its_own_batch() -> None:
    problem = Quadratic(examples=6, noise=0.2)
    model, hyper, _, outer = at_random_point(problem)
    source = problem.batches(2).sources["inner"]
    assert isinstance(source, hk.algorithms.Examples)
    x0, x1, x2 = (source.batch(i) for i in range(3))
    found = StochasticNeumann(2, 0.3).compute(problem.problem(), model, hyper, Batches([x0, x1, x2]), outer)
    state = hk.algorithms.aid_cg().init(problem.problem(), model, hyper)
    with derivatives.at_point(state) as here:
        _, b, direct = here.outer(outer)
        p1 = trees.add(b, here.product(x1, b, hk.curvature.Hessian()), -0.3)
        p2 = trees.add(p1, here.product(x2, p1, hk.curvature.Hessian()), -0.3)
        v = {n: 0.3 * (b[n] + p1[n] + p2[n]) for n in b}
        wanted = direct["value"] - here.cross(x0, v)["value"]
    assert relative(found.grads["value"], wanted) < 1e-12


def test_hia_is_unbiased_for_the_series() -> None:
    """Its K values, averaged, are the sum of the first K terms."""
    problem = Quadratic()
    model, hyper, inner, outer = at_random_point(problem)
    terms = 5
    drawn: dict[int, Tensor] = {}
    method = hk.algorithms.hia(terms, 0.3)
    while len(drawn) < terms:
        result = method.compute(problem.problem(), model, hyper, inner, outer)
        drawn[int(result.stats["products"])] = result.grads["value"]
    wanted = StochasticNeumann(terms - 1, 0.3).compute(problem.problem(), model, hyper, inner, outer)
    assert relative(torch.stack(list(drawn.values())).mean(0), wanted.grads["value"]) < 1e-12


def test_the_misscaled_sum_is_the_published_one() -> None:
    """ηp_K + Σ_{k≥1} p_k, with p_k = (I − ηH)^k b, on a diagonal Hessian by hand."""
    problem = Quadratic(direct=0.0)
    model, hyper, inner, outer = at_random_point(problem)
    x = inner[0]
    hessian = x.T @ x / len(x) + 2 * problem.ridge * torch.eye(3, dtype=x.dtype)
    result = StochasticNeumann(3, 0.2, misscaled=True).compute(problem.problem(), model, hyper, inner, outer)
    state = hk.algorithms.aid_cg().init(problem.problem(), model, hyper)
    with derivatives.at_point(state) as here:
        b = here.outer(outer)[1]["weight"]
    step = torch.eye(3, dtype=x.dtype) - 0.2 * hessian
    powers = [b @ torch.linalg.matrix_power(step, k) for k in range(4)]
    v = 0.2 * powers[3] + powers[1] + powers[2] + powers[3]
    assert result.solution is not None
    assert relative(result.solution.value["weight"], v) < 1e-12


# --- single algorithms -------------------------------------------------------------------------------------


def test_bsg1_is_exact_for_a_single_residual() -> None:
    """g = ½(θ − wλ)²: the rank-one formula is the implicit one up to ϵ."""
    problem = hk.BilevelProblem(
        lambda m, h, _: 0.5 * (m() - 2 * h()).square().sum(), lambda m, h, _: 0.5 * (m() - 3).square().sum()
    )
    model, hyper = (hk.as_hyper(torch.tensor(x, dtype=torch.float64)) for x in (1.0, 0.25))
    algorithm = hk.algorithms.BSG1(1, epsilon=1e-14, inner_rate=0.0, outer_rate=1.0)
    algorithm.step(algorithm.init(problem, model, hyper), hk.algorithms.BatchSources(None, None))
    exact = (1.0 - 3.0) * 2.0  # ∂_θ f · dθ*/dλ
    assert float(hyper().detach()) == pytest.approx(0.25 - exact, rel=1e-9)


def test_amigo_with_one_batch_is_warm_started_gradient_descent() -> None:
    """Its v-loop and the core's solver are two ways to the same iterates."""
    problem = Quadratic()
    rates = {"inner_rate": 0.5, "outer_rate": 0.3}
    ends = []
    for algorithm in (
        hk.algorithms.AmIGO(2, 3, 0.4, **rates),
        hk.algorithms.AmIGO(2, hypergradient=hk.gradient_descent(3, step=0.4), **rates),
    ):
        model, hyper = problem.modules()
        state, batches = algorithm.init(problem.problem(), model, hyper), problem.batches()
        for _ in range(5):
            algorithm.step(state, batches)
        ends.append(hyper().detach())
    assert relative(ends[0], ends[1]) < 1e-10


def test_mrbo_compares_two_points_under_the_same_draws() -> None:
    """Monte-Carlo KFAC gives the same hypergradient at the same point, and only one draw is spent."""
    problem = Quadratic()
    model, hyper, inner, outer = at_random_point(problem)
    algorithm = hk.algorithms.MRBO(hk.kfac(0.1))
    state = algorithm.init(problem.problem(), model, hyper)
    here, there = two_points(state, inner, outer, state.inner.values(), state.outer.values())
    assert torch.equal(here.grads["value"], there.grads["value"])
    again, _ = two_points(state, inner, outer, state.inner.values(), state.outer.values())
    assert not torch.equal(again.grads["value"], here.grads["value"])


def test_mrbo_momentum_is_the_recursive_one() -> None:
    """The second step by hand, on other batches than the first: with the same ones the correction would vanish."""
    problem, eta = Quadratic(examples=6, noise=0.2), 0.25
    model, hyper = problem.modules()
    algorithm = hk.algorithms.MRBO(hk.cg(3, 0.0), eta, inner_rate=0.3, outer_rate=0.2)
    source, outer = problem.batches(2).sources["inner"], problem.data()[1]
    assert isinstance(source, hk.algorithms.Examples)
    order = iter([0, 1, 2, 0])  # a batch for θ, then one for the hypergradient, at each step
    batches = hk.algorithms.BatchSources(lambda: source.batch(next(order)), outer)
    state = algorithm.init(problem.problem(), model, hyper)

    def directions(first: int, second: int) -> tuple[Tensor, Tensor]:
        theta = derivatives.gradients(state, "inner", source.batch(first)).theta["weight"]
        found = hk.cg(3, 0.0).compute(problem.problem(), model, hyper, source.batch(second), outer)
        return theta, found.grads["value"]

    d_theta, d_hyper = directions(0, 1)
    old_theta, old_hyper = directions(2, 0)
    algorithm.step(state, batches)
    new_theta, new_hyper = directions(2, 0)
    wanted_theta = model.weight.detach() - 0.3 * (new_theta + (1 - eta) * (d_theta - old_theta))
    wanted_hyper = hyper().detach() - 0.2 * (new_hyper + (1 - eta) * (d_hyper - old_hyper))
    algorithm.step(state, batches)
    assert relative(model.weight.detach(), wanted_theta) < 1e-12
    assert relative(hyper().detach(), wanted_hyper) < 1e-12


def test_fsla_momentum_is_the_recursive_one() -> None:
    """The second step of λ by hand, with v and θ read from the state."""
    problem, eta = Quadratic(examples=6, noise=0.2), 0.25
    model, hyper = problem.modules()
    algorithm = hk.algorithms.FSLA(momentum=eta, inner_rate=0.3, outer_rate=0.2)
    source, outer = problem.batches(2).sources["inner"], problem.data()[1]
    assert isinstance(source, hk.algorithms.Examples)
    order = iter([0, 1, 2, 1, 2, 0])  # θ, v, λ at each step
    batches = hk.algorithms.BatchSources(lambda: source.batch(next(order)), outer)
    state = algorithm.init(problem.problem(), model, hyper)

    def h(batch: int) -> Tensor:
        with derivatives.at_point(state) as here:
            return here.hypergradient(source.batch(batch), outer, state.trees["v"])[1]["value"]

    algorithm.step(state, batches)
    d = state.trees["d"]["value"]
    with placed(state.hypers, state.trees["old hyper"]):
        old = h(0)  # at the θ and v of before the second step, and the λ of before the first
    before = hyper().detach().clone()
    algorithm.step(state, batches)
    with placed(state.hypers, {"value": before}):
        new = h(0)  # at the new θ and v, and the λ of before the second step
    assert relative(hyper().detach(), before - 0.2 * (new + (1 - eta) * (d - old))) < 1e-12


def test_saba_reduces_the_variance_of_every_oracle_by_its_table() -> None:
    """Five steps on batches of 3, 3 and 2 by hand: direction = new − table[i] + mean(table), shares included."""
    problem = Quadratic(examples=8, noise=0.2)
    model, hyper = problem.modules()
    nn.init.ones_(next(hyper.parameters()))
    algorithm = hk.algorithms.SABA(inner_rate=0.2, outer_rate=0.1)
    state, batches = algorithm.init(problem.problem(), model, hyper), problem.batches(3)
    inner, outer = batches.finite("the test")
    tables = {name: [torch.zeros(())] * 3 for name in ("inner", "product", "crossed", "b", "direct")}
    for i, j in [(0, 2), (2, 1), (1, 0), (0, 0), (2, 2)]:
        with derivatives.at_point(state) as here:
            _, found = here.parts(inner.batch(i), outer.batch(j), state.trees["v"], hk.curvature.Hessian())
        along = {}
        for name, table in tables.items():
            source, k = (inner, i) if name in ("inner", "product", "crossed") else (outer, j)
            (new,) = found[name].values()
            along[name] = source.share(k) * new - table[k] + sum(table) / 3
            table[k] = source.share(k) * new
        theta = model.weight.detach() - 0.2 * along["inner"]
        v = state.trees["v"]["weight"] - 0.2 * (along["product"] - along["b"])
        value = hyper().detach() - 0.1 * (along["direct"] - along["crossed"])
        inner.order, outer.order = [i], [j]
        algorithm.step(state, batches)
        assert relative(model.weight.detach(), theta) < 1e-12
        assert relative(state.trees["v"]["weight"], v) < 1e-12
        assert relative(hyper().detach(), value) < 1e-12


def test_vrbo_keeps_its_directions_up_by_differences() -> None:
    """λ's second step by hand: the full direction at the first point, moved by one batch's difference."""
    problem, method = Quadratic(examples=8, noise=0.2), hk.cg(3, 0.0)
    model, hyper = problem.modules()
    algorithm = hk.algorithms.VRBO(method, 1, inner_rate=0.2, outer_rate=0.1)
    state, batches = algorithm.init(problem.problem(), model, hyper), problem.batches(3)
    inner, outer = batches.finite("the test")

    def h(inner_batch: Any, outer_batch: Any) -> Tensor:
        return hk.cg(3, 0.0).compute(problem.problem(), model, hyper, inner_batch, outer_batch).grads["value"]

    full, old = h(inner.full(), outer.full()), h(inner.batch(2), outer.batch(1))
    with placed(state.hypers, {"value": -0.1 * full}):
        new = h(inner.batch(2), outer.batch(1))  # λ has moved, θ not yet
    inner.order, outer.order = [2, 0], [1]  # from the end: one batch for θ's difference, one for λ's
    algorithm.step(state, batches)
    assert relative(hyper().detach(), -0.1 * full) < 1e-12
    algorithm.step(state, batches)
    assert relative(hyper().detach(), -0.1 * full - 0.1 * (full + new - old)) < 1e-12


@pytest.mark.parametrize("restart", [False, True])
def test_unroll_moves_theta_by_its_own_steps(restart: bool) -> None:
    problem = Quadratic()
    model, hyper = problem.modules()
    algorithm = hk.algorithms.Unroll(3, SGD(0.4), restart=restart, outer_rate=0.0)
    state, batches = algorithm.init(problem.problem(), model, hyper), problem.batches()
    for _ in range(2):
        algorithm.step(state, batches)
    other, _ = problem.modules()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.4)
    for _ in range(3 if restart else 6):
        optimizer.zero_grad()
        problem.problem().inner(other, hyper, batches.inner()).backward()
        optimizer.step()
    assert relative(model.weight.detach(), other.weight.detach()) < 1e-12


def test_pzobo_is_a_gaussian_estimate_of_the_unrolled_hypergradient() -> None:
    """θ_T is affine in λ here, so each difference is exact: ∂_λ f + mean_q u_q (u_q · Jᵀb)."""
    problem = Quadratic()
    model, hyper = problem.modules()
    algorithm = hk.algorithms.PZOBO(4, samples=3, radius=0.5, seed=7, inner_rate=0.4, outer_rate=1.0)
    state, batches = algorithm.init(problem.problem(), model, hyper), problem.batches()
    inner, outer = batches.inner(), batches.outer()
    exact = hk.unrolled(4, SGD(0.4)).compute(problem.problem(), model, hyper, inner, outer).grads["value"]
    direct = problem.direct * hyper().detach()
    generator = torch.Generator().manual_seed(7)
    draws = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(3)]
    estimate = direct + torch.stack([u * (u @ (exact - direct)) for u in draws]).mean(0)
    algorithm.step(state, batches)
    assert relative(hyper().detach(), -estimate) < 1e-10


def test_sama_reads_adam_and_nudges() -> None:
    problem = Quadratic()
    ends = {}
    for name, make in (("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)):
        for nudge in (False, True):
            model, hyper = problem.modules()
            algorithm = hk.algorithms.SAMA(2, alpha=0.1, nudge=nudge)
            state = algorithm.init(problem.problem(), model, hyper, inner=make(model.parameters(), lr=0.1))
            batches = problem.batches()
            before = [algorithm.step(state, batches) for _ in range(2)]
            assert before[-1].direction > 0
            ends[name, nudge] = model.weight.detach().clone(), hyper().detach().clone()
    assert not torch.equal(ends["adam", False][1], ends["sgd", False][1])
    assert float((ends["sgd", True][0] - ends["sgd", False][0]).norm()) > 0.05  # about 2·alpha


def test_batch_norm_counts_the_real_steps_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    problem = Quadratic(examples=6, noise=0.2)
    _, hyper = problem.modules()
    counted: list[tuple[Any, int]] = [
        (hk.algorithms.aid_cg(2, inner_steps=3), 3),
        (hk.algorithms.F2SA(2), 2),
        (hk.algorithms.BOME(4), 1),
    ]
    counted += [
        (hk.algorithms.SOBA(), 1),
        (hk.algorithms.SRBA(), 1),
        (hk.algorithms.SABA(), 1),
        (hk.algorithms.MRBO(), 1),
        (hk.algorithms.Unroll(3), 3),
        (hk.algorithms.DARTS(), 1),
    ]
    for algorithm, steps in counted:
        state = algorithm.init(problem.problem(), model, hyper)
        before = int(model[1].num_batches_tracked)
        algorithm.step(state, problem.batches())
        assert int(model[1].num_batches_tracked) - before == steps, type(algorithm).__name__


OPTIMIZERS = [
    x
    for x in vars(torch.optim).values()
    if isinstance(x, type) and issubclass(x, torch.optim.Optimizer) and x is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda x: x.__name__)
def test_a_twin_moves_as_its_original(kind: Any) -> None:
    """Second points of θ have an optimizer of the same kind and settings, group by group."""
    model, _ = Quadratic().modules()
    bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
    groups = [{"params": [model.weight]}, {"params": [bias], "lr": 0.5}]
    if kind is torch.optim.LBFGS:
        with pytest.raises(hk.HyperkronError, match="closure"):
            hk.algorithms.Updates(kind([model.weight]))
        return
    if kind.__name__ == "Muon":  # for matrices only
        groups = [{"params": [model.weight]}]
    params = {"weight": model.weight} if len(groups) == 1 else {"weight": model.weight, "bias": bias}
    own = LevelOptimizer(params, kind(groups, lr=0.1), hk.algorithms.Rate(0.0))
    twin = own.twin()
    direction = {name: torch.full_like(p, 0.3) for name, p in params.items()}
    if kind is torch.optim.SparseAdam:
        direction = {name: x.to_sparse() for name, x in direction.items()}
    for _ in range(2):
        own.step(direction)
        twin.step(direction)
    assert all(torch.equal(p, twin.params[name]) for name, p in params.items())
    assert not torch.equal(model.weight, torch.zeros_like(model.weight))


@pytest.mark.parametrize("cross", ["forward", "difference"])
def test_t1t2_finds_the_same_direction_by_any_cross_term(cross: Any) -> None:
    problem = Quadratic()
    ends = []
    for mode in ("reverse", cross):
        model, hyper = problem.modules()
        algorithm = hk.algorithms.T1T2(cross=mode)
        state, batches = algorithm.init(problem.problem(), model, hyper), problem.batches()
        for _ in range(3):
            algorithm.step(state, batches)
        ends.append(hyper().detach())
    assert relative(ends[1], ends[0]) < 1e-9


def test_t1t2_keeps_its_hypergradient_while_the_step_size_stays_and_follows_it() -> None:
    """So that what was recorded on a GPU serves until the step size changes."""
    problem = Quadratic()
    model, hyper = problem.modules()
    optimizer, algorithm = torch.optim.SGD(model.parameters(), lr=0.1), hk.algorithms.T1T2(graph=True)
    state, batches = algorithm.init(problem.problem(), model, hyper, inner=optimizer), problem.batches()
    kept = []
    for rate in (0.1, 0.1, 0.05):
        optimizer.param_groups[0]["lr"] = rate
        algorithm.step(state, batches)
        kept.append(state.hypergradient)
        assert isinstance(kept[-1], hk.Implicit) and kept[-1].curvature == Identity(rate)
    assert kept[0] is kept[1] is not kept[2] and kept[2].state.calls == 3


def test_a_saved_state_does_not_move_with_the_run() -> None:
    problem = Quadratic(examples=6, noise=0.2)
    algorithm = hk.AID(hk.kfac(0.1, ema=0.5), 2)
    state, batches = algorithm.init(problem.problem(), *problem.modules()), problem.batches(2)
    algorithm.step(state, batches)
    saved = state.state_dict()
    before = torch.cat([x.double().flatten() for x in tensors(saved)])
    for _ in range(3):
        algorithm.step(state, batches)
    assert torch.equal(torch.cat([x.double().flatten() for x in tensors(saved)]), before)


def tensors(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [x for value in state.values() for x in tensors(value)]
    return [state] if isinstance(state, Tensor) else []
