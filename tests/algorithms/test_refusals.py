"""What algorithms refuse, and what they say about it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import hyperkron as hk
from quadratic import Quadratic


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: hk.AID("kfac"), "hypergradient='kfac' is a str"),
        (lambda: hk.AID(hk.curvature.KFAC()), "Implicit"),
        (lambda: hk.algorithms.aid_cg(inner_steps=0), "inner_steps=0"),
        (lambda: hk.algorithms.SOBA(curvature=hk.curvature.KFAC()), "KFAC cannot be used in SOBA"),
        (lambda: hk.algorithms.FSLA(curvature=hk.curvature.EKFAC()), "AmIGO"),
        (lambda: hk.algorithms.AmIGO(hypergradient=hk.cg(3)), "warm_start=True"),
        (lambda: hk.algorithms.AmIGO(hypergradient=hk.neumann(3)), "cannot be warm-started"),
        (lambda: hk.algorithms.AmIGO(hypergradient=hk.unrolled(3)), "no linear system"),
        (lambda: hk.algorithms.SUSTAIN(hk.cg(3)), "use MRBO"),
        (lambda: hk.algorithms.Rate(-1.0), "scale=-1.0"),
        (lambda: hk.algorithms.aid_cg(inner_rate=float("nan")), "finite"),
        (lambda: hk.algorithms.StochasticNeumann(3, 0.1, sampled=True, misscaled=True), "HIA"),
        (lambda: hk.algorithms.BOME(barrier="none"), "barrier"),
        (lambda: hk.algorithms.Updates("sgd"), "torch.optim"),
        (lambda: hk.algorithms.BatchSources([1, 2], None), "one batch or many"),
        (lambda: hk.algorithms.Examples(torch.zeros(3), torch.zeros(2), batch_size=1), "lengths"),
    ],
)
def test_nonsense_is_refused_with_the_reason(make: Any, says: str) -> None:
    with pytest.raises(hk.HyperkronError, match=says):
        make()


@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("algorithm", [hk.AID(hk.cg(3)), hk.algorithms.SOBA(), hk.algorithms.InnerOnly()])
def test_a_weight_decay_that_hypergradients_do_not_count_is_said(
    algorithm: Any, decay: float, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("hyperkron.solution._warned", set())
    problem = Quadratic()
    model, hyper = problem.modules()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=decay)
    hk.fit(problem.problem(), model, hyper, algorithm, *problem.data(), steps=1, inner_optimizer=optimizer)
    told = [str(warning.message) for warning in recwarn if "weight_decay=0.02" in str(warning.message)]
    assert bool(told) is (decay > 0 and algorithm.moves_hyper)
    assert not told or "l2(model, 0.01)" in told[0]


@pytest.mark.parametrize(
    "made",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.02),
        lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.02, decoupled_weight_decay=True),
        lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.02),
    ],
)
def test_a_decoupled_weight_decay_is_not_equated_with_a_penalty(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """θ − ηwθ beside a step of Adam's is not the step for a loss with ½w‖θ‖² added."""
    monkeypatch.setattr("hyperkron.solution._warned", set())
    problem = Quadratic()
    model, hyper = problem.modules()
    with pytest.warns(hk.HyperkronWarning, match="weight_decay=0.02.*decoupled") as told:
        hk.AID(hk.cg(3)).init(problem.problem(), model, hyper, inner=made(model.parameters()))
    assert "l2(model, 0.01)" not in str(told[0].message)


@pytest.mark.parametrize(
    "algorithm", [hk.algorithms.SABA(), hk.algorithms.SRBA(), hk.algorithms.VRBO()], ids=lambda a: type(a).__name__
)
def test_finite_sum_methods_ask_for_a_finite_sum(algorithm: Any) -> None:
    problem = Quadratic()
    inner, outer = problem.data()
    state = algorithm.init(problem.problem(), *problem.modules())
    with pytest.raises(hk.HyperkronError, match="Examples"):
        algorithm.step(state, hk.algorithms.BatchSources(inner, outer))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    problem = Quadratic()
    model, hyper = problem.modules()
    with pytest.raises(hk.HyperkronError, match="outer_optimizer does not hold value"):
        hk.algorithms.aid_cg().init(problem.problem(), model, hyper, outer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(hk.HyperkronError, match="functional steps"):
        hk.algorithms.Unroll(3).init(problem.problem(), model, hyper, inner=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("level", ["inner", "outer"])
def test_an_optimizer_that_would_move_the_other_level_is_refused(level: str) -> None:
    problem = Quadratic()
    model, hyper = problem.modules()
    whose = {"inner": "model", "outer": "hyper"}[level]
    optimizer = torch.optim.SGD([*model.parameters(), *hyper.parameters()], lr=0.1, weight_decay=0.1)
    with pytest.raises(hk.HyperkronError, match=rf"{level}_optimizer also holds .* {whose}.parameters\(\) alone"):
        hk.algorithms.aid_cg().init(problem.problem(), model, hyper, **{level: optimizer})
    with pytest.raises(hk.HyperkronError, match="optimizer holds value of hyper"):
        hk.training.InnerLoop(problem.problem(), model, hyper, optimizer)


def test_a_hyper_that_holds_the_model_is_named_as_such() -> None:
    problem = Quadratic()
    model, hyper = problem.modules()
    hyper.model = model
    with pytest.raises(hk.HyperkronError, match=r"model and hyper both hold model\.weight.* out of hyper"):
        hk.algorithms.aid_cg().init(problem.problem(), model, hyper)


@pytest.mark.parametrize("level", ["inner", "outer"])
def test_an_optimizer_that_maximises_is_refused(level: str) -> None:
    """Its θ or λ would climb, while curvatures, penalties and SAMA's diagonal suppose that they descend."""
    problem = Quadratic()
    model, hyper = problem.modules()
    module = {"inner": model, "outer": hyper}[level]
    optimizer = torch.optim.Adam(module.parameters(), maximize=True)
    with pytest.raises(hk.HyperkronError, match=f"{level}_optimizer has maximize=True.*negative of the loss"):
        hk.algorithms.aid_cg().init(problem.problem(), model, hyper, **{level: optimizer})
    if level == "inner":
        with pytest.raises(hk.HyperkronError, match=r"optimizer has maximize=True.*negative of the loss"):
            hk.sama(optimizer).compute(problem.problem(), model, hyper, *problem.data())


def test_parameters_of_neither_level_may_be_in_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperkron.solution._warned", set())
    problem = Quadratic()
    model, hyper = problem.modules()
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    with pytest.warns(
        hk.HyperkronWarning, match=r"inner_optimizer also holds a parameter of shape \(2,\) .*does not train it"
    ):
        hk.algorithms.aid_cg().init(problem.problem(), model, hyper, inner=optimizer)
    hk.training.InnerLoop(problem.problem(), model, None, optimizer)
    unused = torch.optim.SGD(hyper.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # θ alone is trained, so the optimizer of hyper has nothing to move
        hk.algorithms.InnerOnly(1).init(problem.problem(), model, hyper, outer=unused)


def test_frozen_parameters_may_stay_in_an_optimizer() -> None:
    problem = Quadratic()
    model, hyper = problem.modules()
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), frozen], lr=0.1)
    hk.algorithms.aid_cg().init(problem.problem(), model, hyper, inner=optimizer)


def test_divergence_is_named() -> None:
    problem = Quadratic()
    algorithm = hk.algorithms.SOBA(inner_rate=1e200, outer_rate=1e200)
    run = hk.fit(problem.problem(), *problem.modules(), algorithm, *problem.data(), steps=0)
    with pytest.raises(hk.NonFiniteError):
        run.advance(10)


def test_an_objective_in_place_of_a_problem_is_refused() -> None:
    problem = Quadratic()
    model, hyper = problem.modules()
    objective: Any = problem.problem().inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for refused in (
        lambda: hk.fit(objective, model, hyper, hk.AID(hk.cg(3)), *problem.data(), steps=1),
        lambda: hk.training.InnerLoop(objective, model, hyper, optimizer),
    ):
        with pytest.raises(hk.HyperkronError, match=r"problem is a function; pass hyperkron.BilevelProblem"):
            refused()


def two_rates() -> tuple[Quadratic, torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    """A model of two parameters, each in a group with a learning rate of its own."""
    problem = Quadratic()
    model, hyper = problem.modules()
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.unused], "lr": 0.3}]
    return problem, model, hyper, torch.optim.SGD(groups)


@pytest.mark.parametrize("algorithm", [hk.algorithms.DARTS(), hk.algorithms.T1T2()])
def test_one_rate_of_several_is_not_taken_for_all(algorithm: hk.algorithms.Algorithm) -> None:
    problem, model, hyper, optimizer = two_rates()
    with pytest.raises(hk.HyperkronError, match=r"learning rates \[0.1, 0.3\].*lookahead.*scale"):
        hk.fit(problem.problem(), model, hyper, algorithm, *problem.data(), steps=1, inner_optimizer=optimizer)


@pytest.mark.parametrize("algorithm", [hk.algorithms.DARTS(lookahead=0.1), hk.algorithms.T1T2(scale=0.1)])
def test_several_rates_are_no_hindrance_where_the_number_is_given(algorithm: hk.algorithms.Algorithm) -> None:
    problem, model, hyper, optimizer = two_rates()
    data = problem.data()
    run = hk.fit(problem.problem(), model, hyper, algorithm, *data, steps=1, inner_optimizer=optimizer)
    assert len(run.history) == 1


def test_t1t2_says_that_a_learning_rate_of_zero_is_no_inverse() -> None:
    problem = Quadratic()
    model, hyper = problem.modules()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm = hk.algorithms.Updates(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / 10))
    with pytest.raises(hk.HyperkronError, match=r"is 0 at step 0; pass scale="):
        hk.fit(problem.problem(), model, hyper, hk.algorithms.T1T2(), *problem.data(), steps=1, inner_optimizer=warm)
