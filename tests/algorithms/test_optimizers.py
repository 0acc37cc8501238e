"""Optimizers, schedulers, scalers and autocast around algorithms: they change the steps, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import hyperkron as hk
from hyperkron.optimizers import LevelOptimizer, Updates
from quadratic import Quadratic

A = hk.algorithms
STOCHASTIC = Quadratic(examples=6, noise=0.2)


def ends(algorithm: Any, steps: int = 4, **made: Callable[[nn.Module], Any]) -> Tensor:
    """θ and λ after some steps; ``inner`` and ``outer`` make the optimizers."""
    model, hyper = STOCHASTIC.modules()
    modules = {"inner": model, "outer": hyper}
    state = algorithm.init(STOCHASTIC.problem(), model, hyper, **{name: f(modules[name]) for name, f in made.items()})
    batches = STOCHASTIC.batches(2)
    for _ in range(steps):
        algorithm.step(state, batches)
    return torch.cat([p.detach().flatten() for p in (*model.parameters(), *hyper.parameters())])


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "algorithm",
    [A.MRBO(), A.SUSTAIN(), A.FSLA(), A.SABA(), A.SRBA(), A.VRBO(inner_steps=2), A.SOBA(), A.F2SA(2)],
    ids=lambda x: type(x).__name__,
)
def test_an_optimizer_may_overwrite_the_gradients_it_is_given(algorithm: Any) -> None:
    """As Nesterov's momentum with ``foreach=True`` does: directions that an algorithm keeps are its own."""
    found = []
    for foreach in (False, True):
        options = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": foreach}
        make = lambda m, options=options: torch.optim.SGD(m.parameters(), **options)  # noqa: E731
        found.append(ends(algorithm, inner=make, outer=make))
    same(*found)


@pytest.mark.parametrize("algorithm", [A.SOBA(), A.SABA(), A.SRBA()], ids=lambda x: type(x).__name__)
def test_a_scaler_that_has_scaled_no_loss_yet_changes_nothing(algorithm: Any) -> None:
    def scaled(model: nn.Module) -> Updates:
        return Updates(torch.optim.SGD(model.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu"))

    plain = ends(algorithm, inner=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    assert torch.equal(ends(algorithm, inner=scaled), plain)


def test_scalebio_lowers_its_step_sizes_whatever_the_scheduler() -> None:
    """A schedule that is constant leaves the steps as they are without one."""

    def scheduled(module: nn.Module) -> Updates:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return Updates(optimizer, LambdaLR(optimizer, lambda t: 1.0))

    algorithm = A.ScaleBiO(growth=2.0, round_steps=2)
    same(ends(algorithm, 6, inner=scheduled, outer=scheduled), ends(algorithm, 6))
    assert not torch.equal(ends(algorithm, 6), ends(A.ScaleBiO(growth=1.0), 6))


@pytest.mark.parametrize("schedule", ["step", "update"])
def test_second_points_have_the_settings_that_theta_has_at_the_time(schedule: Any) -> None:
    """The one-cycle schedule changes momentum, too. Where f does not depend on θ, F2SA's y and z move alike."""
    model, hyper = STOCHASTIC.modules()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cycle = OneCycleLR(optimizer, 0.2, total_steps=20)
    problem = hk.BilevelProblem(STOCHASTIC.problem().inner, lambda m, h, b: h().square().sum())
    algorithm = A.F2SA(2, growth=0.0)
    state = algorithm.init(problem, model, hyper, inner=Updates(optimizer, cycle, schedule=schedule))
    batches = STOCHASTIC.batches(2)
    for _ in range(8):
        algorithm.step(state, batches)
        assert torch.equal(state.twins["z"].params["weight"], model.weight)
    assert optimizer.param_groups[0]["momentum"] != 0.95  # it has moved from where the cycle begins


# --- autocast ----------------------------------------------------------------------------------------------


def under_autocast(function: Any) -> Any:
    def call(*given: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return function(*given)

    return call


BATCH = (torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2, torch.arange(8))
PLAIN = hk.BilevelProblem(
    lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
    lambda m, w, b: hk.losses.cross_entropy(m(b[0]), 1 - b[1]),
    autocast=True,
)
INSIDE = hk.BilevelProblem(under_autocast(PLAIN.inner), under_autocast(PLAIN.outer), autocast=True)


def network() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), hk.SampleWeights(8)


@pytest.mark.parametrize(
    "algorithm",
    [
        hk.AID(hk.identity(), 2),
        A.F2SA(2, inner_rate=0.5, second_rate=0.3),
        A.MRBO(),
        A.SOBA(),
        A.BOME(2),
        A.PZOBO(2, 2),
        A.SAMA(2, nudge=True),
        A.MEHA(inner_rate=0.5, hat_rate=0.3),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_run_under_autocast_is_that_of_objectives_under_autocast(algorithm: Any) -> None:
    """torch keeps casts of parameters until the outermost autocast ends, whatever happens to the parameters."""
    found = []
    for problem, around in ((PLAIN, True), (INSIDE, False)):
        model, weights = network()
        with torch.autocast("cpu", torch.bfloat16) if around else contextlib.nullcontext():
            hk.fit(problem, model, weights, algorithm, BATCH, BATCH, steps=4, projection=hk.Box())
        found.append(torch.cat([p.detach().flatten() for p in (*model.parameters(), *weights.parameters())]))
    assert torch.equal(*found)


def test_what_first_order_methods_subtract_is_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """θ's own steps and those of second points run under autocast, and what moves λ does not."""
    seen: dict[bool, set[bool]] = {True: set(), False: set()}
    true = A.derivatives.gradients

    def watched(state: Any, level: Any, batch: Any, *, hyper: bool = True, **options: Any) -> Any:
        def inner(model: nn.Module, weights: nn.Module, given: Any) -> Any:
            seen[hyper].add(torch.is_autocast_enabled("cpu"))
            return plain.inner(model, weights, given)

        plain = state.problem
        state.problem = hk.BilevelProblem(inner, plain.outer)
        try:
            return true(state, level, batch, hyper=hyper, **options)
        finally:
            state.problem = plain

    monkeypatch.setattr(A.derivatives, "gradients", watched)
    for algorithm in (A.F2SA(2), A.BOME(2), A.PBGD(), A.ScaleBiO(), A.MEHA(), A.BVFSM(2), A.MRBO(), A.PZOBO(2, 2)):
        model, weights = network()
        updates = Updates(torch.optim.SGD(model.parameters(), lr=0.1), autocast=torch.bfloat16)
        hk.fit(PLAIN, model, weights, algorithm, BATCH, BATCH, steps=2, inner_optimizer=updates)
    assert seen == {True: {False}, False: {True}}


def test_a_hypergradient_in_the_autocast_of_a_step_is_at_the_new_parameters() -> None:
    found = []
    for together in (True, False):
        model, weights = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            PLAIN.inner(model, weights, BATCH).value.backward()
            optimizer.step()
            if not together:
                stack.close()
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            found.append(hk.cg(3, 0.1).compute(PLAIN, model, weights, BATCH, BATCH).grads["weight"])
    assert torch.equal(*found)


# --- what cannot work --------------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    """An optimizer whose constructor asks for more than its groups and defaults hold."""

    def __init__(self, params: Any, total: int) -> None:
        super().__init__(params, lr=0.1)


class Closed(torch.optim.SGD):
    """An optimizer that needs a closure."""

    def step(self, closure: Any) -> Any:
        return closure()


class Eta(torch.optim.Optimizer):
    """An optimizer that calls its learning rate something else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"eta": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["eta"] * p.grad)


@pytest.mark.parametrize(
    ("algorithm", "made", "says"),
    [
        (A.F2SA(2), lambda m: Own(m.parameters(), 3), "Own cannot be made from its parameter groups.*AID"),
        (A.SOBA(), lambda m: Closed(m.parameters(), lr=0.1), "Closed needs a closure"),
        (A.SOBA(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1, differentiable=True), "differentiable=True"),
        (A.SAMA(2), lambda m: Eta(m.parameters()), "Eta has no learning rate"),
        (A.T1T2(), lambda m: Eta(m.parameters()), "needs one number"),
        (A.ScaleBiO(round_steps=1), lambda m: Eta(m.parameters()), "no 'lr'"),
    ],
)
def test_optimizers_that_do_not_fit_an_algorithm_are_named(algorithm: Any, made: Any, says: str) -> None:
    with pytest.raises(hk.HyperkronError, match=says):
        ends(algorithm, inner=made)


def test_optimizers_of_ones_own_are_moved_by() -> None:
    plain = ends(A.SOBA(inner_rate=0.1), inner=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    for made in (lambda m: Own(m.parameters(), 3), lambda m: Eta(m.parameters())):
        same(ends(A.SOBA(inner_rate=0.1), inner=made), plain)
    ends(A.F2SA(2), inner=lambda m: Eta(m.parameters()))


def test_a_scheduler_that_is_not_given_is_said(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("hyperkron.solution._warned", set())
    optimizers: list[torch.optim.Optimizer] = []

    def scheduled(model: nn.Module, given: bool) -> Any:
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = LambdaLR(optimizers[-1], lambda t: min(1.0, t / 10))
        return Updates(optimizers[-1], scheduler) if given else optimizers[-1]

    ends(A.SOBA(), inner=lambda m: scheduled(m, True))
    assert not [w for w in recwarn if "has a scheduler" in str(w.message)]
    with pytest.warns(hk.HyperkronWarning, match=r"inner_optimizer has a scheduler .*Updates\(optimizer, scheduler\)"):
        ends(A.SOBA(), inner=lambda m: scheduled(m, False))


def test_a_projection_to_another_shape_is_named() -> None:
    _, hyper = STOCHASTIC.modules()
    with pytest.raises(hk.HyperkronError, match=r"projection made torch.Size\(\[\]\) of value"):
        LevelOptimizer({"value": next(hyper.parameters())}, None, A.Rate(0.1), project=torch.mean)
    with pytest.raises(hk.HyperkronError, match="projection made NoneType"):
        LevelOptimizer({"value": next(hyper.parameters())}, None, A.Rate(0.1), project=lambda x: None)  # type: ignore
