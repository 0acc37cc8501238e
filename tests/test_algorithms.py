"""The conformance suite: the entry ticket of an algorithm.

Every algorithm has a case in CASES: a configuration, a problem whose solution is known, a number of steps and the
accuracy it is proven to reach there. On it, every algorithm must reach that accuracy, continue bit for bit from a
state_dict, repeat itself under a seed, follow the model's dtype, and respect λ's constraints at every step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import hyperkron as hk
from hyperkron.algorithms.base import Algorithm, State
from hyperkron.hypergradient.steps import SGD
from quadratic import Quadratic

EXACT = Quadratic()
ISOTROPIC = Quadratic(isotropic=True)
REALIZABLE = Quadratic(direct=0.0, realizable=True)
INTERPOLATING = Quadratic(ridge=0.0)  # g* = 0
SUM = Quadratic(examples=6, noise=0.2)  # its batches disagree: only variance reduction reaches the optimum


@dataclass(frozen=True)
class Case:
    """An algorithm on a problem: after ``steps``, ‖λ − λ*‖ ≤ ``tolerance``·‖λ*‖, for the reason in ``why``."""

    algorithm: Algorithm
    steps: int
    tolerance: float
    why: str
    problem: Quadratic = EXACT
    batch_size: int | None = None


FAST: dict[str, Any] = {"inner_rate": 0.8, "outer_rate": 0.8}
SLOW: dict[str, Any] = {"inner_rate": 0.3, "outer_rate": 0.15}


def exact_kfac() -> hk.Implicit:
    """KFAC without Monte-Carlo noise, damped exactly: here it is the inverse Hessian itself."""
    return hk.Implicit(hk.KFAC(0.0, fisher="type-2", split="exact"), hk.Direct())


# The accuracy of "exact" solvers is that of their linear solve; a penalty method has the bias 1/penalty that it is
# proven to have; an identity method is exact where the Hessian is a multiple of the identity.
CASES: dict[str, Case] = {
    "AID-CG": Case(hk.aid_cg(3, inner_steps=3, **FAST), 30, 1e-9, "CG needs one step per distinct eigenvalue"),
    "AID-Neumann": Case(hk.aid_neumann(20, 0.9, inner_steps=3, **FAST), 20, 1e-6, "tail (1 − ηµ)^20 ≈ 1e-9"),
    "AID-FP": Case(hk.aid_fp(20, 0.9, inner_steps=3, **FAST), 20, 1e-6, "tail (1 − ηµ)^20 ≈ 1e-9"),
    "AID-KFAC": Case(hk.AID(exact_kfac(), 3, **FAST), 30, 1e-9, "KFAC is exact for a linear layer under mse"),
    "AID-EKFAC": Case(hk.AID(hk.ekfac(0.0, fisher="type-2"), 3, **FAST), 30, 1e-9, "EKFAC is exact here too"),
    "AID-GGN-CG": Case(hk.aid_ggn_cg(3, 0.0, inner_steps=3, **FAST), 30, 1e-9, "GGN = Hessian here"),
    "AID-GGN-Neumann": Case(hk.aid_ggn_neumann(20, 0.9, inner_steps=3, **FAST), 20, 1e-6, "GGN = Hessian here"),
    "SAMA": Case(hk.SAMA(2, inner_rate=1 / 1.1, outer_rate=0.8), 30, 1e-9, "exact where lr·H = I", problem=ISOTROPIC),
    "T1-T2": Case(hk.T1T2(inner_rate=1 / 1.1, outer_rate=0.8), 30, 1e-9, "exact where lr·H = I", problem=ISOTROPIC),
    "DARTS": Case(hk.DARTS(inner_rate=1 / 1.1, outer_rate=0.8), 30, 1e-9, "exact where lr·H = I", problem=ISOTROPIC),
    "Unrolled": Case(hk.Unroll(15, SGD(0.9), outer_rate=0.8), 15, 1e-4, "(1 − ηµ)^15 ≈ 3e-6"),
    "Unrolled, restarted": Case(
        hk.Unroll(15, SGD(0.9), restart=True, outer_rate=0.8), 15, 1e-3, "and θ itself is 3e-6 off"
    ),
    "Truncated": Case(hk.Unroll(15, SGD(0.9), last=10, outer_rate=0.8), 15, 1e-3, "(1 − ηµ)^10 ≈ 2e-5"),
    "AmIGO": Case(hk.AmIGO(3, 3, 0.8, **FAST), 30, 1e-9, "θ and v converge with λ"),
    "AmIGO-GGN": Case(hk.AmIGO(3, 3, 0.8, hk.GGN(), **FAST), 30, 1e-9, "GGN = Hessian here"),
    "AmIGO-KFAC": Case(hk.AmIGO(3, hypergradient=exact_kfac(), **FAST), 30, 1e-9, "KFAC is exact here"),
    "AmIGO-CG": Case(hk.AmIGO(3, hypergradient=hk.cg(2, 0.0, warm_start=True), **FAST), 30, 1e-6, "warm-started CG"),
    "MRBO": Case(
        hk.MRBO(hk.StochasticNeumann(10, 0.8), inner_rate=0.5, outer_rate=0.5),
        60,
        1e-3,
        "without noise it is AID with one inner step",
    ),
    "MRBO-KFAC": Case(hk.MRBO(exact_kfac(), inner_rate=0.5, outer_rate=0.5), 60, 1e-3, "as MRBO"),
    "SUSTAIN": Case(
        hk.SUSTAIN(terms=15, step_size=0.5, inner_rate=0.5, outer_rate=0.05),
        150,
        0.05,
        "HIA's noise vanishes with b",
        problem=REALIZABLE,
    ),
    "TTSA": Case(
        hk.TTSA(10, 0.8, inner_rate=0.5, outer_rate=0.15), 100, 1e-3, "HIA's noise vanishes with b", REALIZABLE
    ),
    "BSA": Case(
        hk.BSA(10, 0.8, 3, inner_rate=0.5, outer_rate=0.15), 80, 1e-2, "HIA's noise vanishes with b", REALIZABLE
    ),
    "stocBiO": Case(hk.StocBiO(3, 20, 0.9, **FAST), 20, 1e-6, "tail (1 − ηµ)^20 ≈ 1e-9"),
    "TGDA": Case(hk.TGDA(inner_steps=3, **FAST), 30, 1e-9, "CG solves exactly"),
    "SOBA": Case(hk.SOBA(inner_rate=0.8, outer_rate=0.3), 100, 1e-4, "deterministic: linear convergence"),
    "FSLA": Case(hk.FSLA(inner_rate=0.5, outer_rate=0.2), 100, 1e-4, "deterministic: linear convergence"),
    "SABA": Case(hk.SABA(**SLOW), 200, 1e-3, "linear at constant rates in spite of noisy batches", SUM, 2),
    "SRBA": Case(hk.SRBA(**SLOW), 200, 5e-3, "linear at constant rates in spite of noisy batches", SUM, 2),
    "VRBO": Case(
        hk.VRBO(hk.StochasticNeumann(8, 0.5), 2, inner_rate=0.3, outer_rate=0.3),
        25,
        2e-2,
        "the tail of h, (1 − ηµ)^8 ≈ 7e-2 in the worst direction, in spite of noisy batches",
        SUM,
        2,
    ),
    "PZOBO": Case(
        hk.PZOBO(5, inner_rate=0.8, outer_rate=0.4), 30, 1e-2, "the estimate's noise vanishes with b", REALIZABLE
    ),
    "F2SA": Case(
        hk.F2SA(2, 10.0, 10.0, 0.5, inner_rate=hk.Rate(0.05, 1.0), outer_rate=0.2), 100, 3e-3, "bias 1/ℓ, ℓ = 1000"
    ),
    "PBGD": Case(hk.PBGD(3, 10.0, 0, inner_rate=0.5, outer_rate=1.0), 250, 2e-2, "bias 1/γ, γ = 10"),
    "MEHA": Case(
        hk.MEHA(multiplier=100.0, hat_rate=0.5, inner_rate=0.5, outer_rate=20.0), 100, 2e-3, "bias 1/c, c = 100"
    ),
    "ScaleBiO": Case(hk.ScaleBiO(1.0, 2.0, 15, 32.0, inner_rate=0.5, outer_rate=0.5), 150, 1e-2, "bias 1/α, α = 32"),
    "BOME": Case(hk.BOME(20, inner_rate=0.3, outer_rate=0.3), 60, 0.1, "at constant rates a limit cycle of their size"),
    "BVFSM": Case(
        hk.BVFSM(5, 0.5, 1e-4, 0.01, inner_rate=hk.Rate(1e-3, -0.4), outer_rate=hk.Rate(1e-3, -0.8)),
        200,
        0.05,
        "bias (margin + g_z)/r ≈ 0.05 where the inner problem interpolates",
        INTERPOLATING,
    ),
    "BSG-1": Case(
        hk.BSG1(1, inner_rate=0.1, outer_rate=1.0), 60, 1.0, "no guarantee; its exact case is tested apart", REALIZABLE
    ),
}


def start(case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[State, hk.Draw]:
    model, hyper = case.problem.modules(dtype)
    state = case.algorithm.init(case.problem.problem(), model, hyper, **options)
    return state, case.problem.draw(case.batch_size, dtype)


def stochastic(case: Case) -> Case:
    """The same algorithm where batches are random, for the tests that are about randomness."""
    return dataclasses.replace(case, problem=SUM, batch_size=2)


def run(case: Case, state: State, draw: hk.Draw, steps: int) -> Tensor:
    for _ in range(steps):
        case.algorithm.step(state, draw)
    return state.hyper().detach().clone()


@pytest.fixture(params=CASES, name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_reaches_the_optimum_to_its_proven_accuracy(case: Case) -> None:
    state, draw = start(case)
    reached, wanted = run(case, state, draw, case.steps), case.problem.solution()
    error = float((reached - wanted).norm() / wanted.norm())
    assert error <= case.tolerance, f"relative error {error:.2e} after {case.steps} steps; {case.why}"


def optimizers(case: Case) -> tuple[State, hk.Draw]:
    """A state with Adam on θ, momentum on λ, and schedulers on both."""
    model, hyper = case.problem.modules()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    momentum = torch.optim.SGD(hyper.parameters(), lr=0.01, momentum=0.9)
    inner: hk.Updates | None = hk.Updates(adam, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10), clip=1.0)
    outer = hk.Updates(momentum, torch.optim.lr_scheduler.ReduceLROnPlateau(momentum, patience=0))
    if isinstance(case.algorithm, hk.Unroll):  # it has functional steps of its own
        inner = None
    state = case.algorithm.init(case.problem.problem(), model, hyper, inner=inner, outer=outer)
    return state, case.problem.draw(case.batch_size)


@pytest.mark.parametrize("start", [start, optimizers], ids=["own rates", "optimizers"])
def test_a_state_dict_round_trip_continues_bit_for_bit(case: Case, start: Any) -> None:
    case = stochastic(case)
    state, draw = start(case)
    run(case, state, draw, 3)
    saved, saved_draw = state.state_dict(), draw.state_dict()
    _plain(saved), _plain(saved_draw)
    wanted = run(case, state, draw, 3)
    other, other_draw = start(case)
    run(case, other, other_draw, 1)  # whatever it did before is forgotten
    other.load_state_dict(saved)
    other_draw.load_state_dict(saved_draw)
    assert torch.equal(run(case, other, other_draw, 3), wanted)
    for name, p in state.params.items():
        assert torch.equal(p, other.params[name])


def _plain(x: Any) -> None:
    """Only dictionaries with string keys, tensors, numbers, strings, None and lists of numbers or strings."""
    if isinstance(x, dict):
        assert all(isinstance(key, str) for key in x)
        for value in x.values():
            _plain(value)
    elif isinstance(x, (list, tuple)):
        assert all(isinstance(value, (int, float, str)) for value in x)
    else:
        assert x is None or isinstance(x, (Tensor, int, float, str)), type(x)


def test_a_run_repeats_itself(case: Case) -> None:
    case = stochastic(case)
    first, second = (run(case, *start(case), 4) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.zeros_like(first))


def test_everything_follows_the_models_dtype(case: Case) -> None:
    """In float32 under a default of float64; all other tests run in float64 under a default of float32."""
    torch.set_default_dtype(torch.float64)
    dtype = torch.float32
    state, draw = start(stochastic(case), dtype)
    run(case, state, draw, 2)
    assert state.hyper().dtype == dtype
    held = [x for tree in state.trees.values() for x in tree.values()]
    held += [x for twin in state.twins.values() for x in twin.params.values()]
    assert all(x.dtype == dtype for x in held if x.is_floating_point())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_follows_the_models_device(case: Case) -> None:
    problem, device = SUM.problem(), torch.device("cuda")
    model, hyper = (module.to(device) for module in SUM.modules())
    inner, outer = ([x.to(device) for x in part] for part in SUM.data())
    draw = hk.Draw(hk.Examples(*inner, batch_size=2, seed=1), hk.Examples(*outer, batch_size=2, seed=2))
    state = case.algorithm.init(problem, model, hyper)
    reached = run(case, state, draw, 2)
    held = [x for tree in state.trees.values() for x in tree.values()]
    held += [x for twin in state.twins.values() for x in twin.params.values()]
    assert all(x.device.type == "cuda" for x in held)
    if not isinstance(case.algorithm, hk.PZOBO):  # it draws its directions on the device
        on_cpu = stochastic(case)
        assert torch.allclose(reached.cpu(), run(on_cpu, *start(on_cpu), 2), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("projection", "holds"),
    [
        (hk.Box(-0.01, 0.02), lambda x: bool((x >= -0.01).all() and (x <= 0.02).all())),
        (hk.Ball(0.01), lambda x: float(x.norm()) <= 0.01 * (1 + 1e-12)),
        (hk.Simplex(), lambda x: bool((x >= 0).all()) and abs(float(x.sum()) - 1) < 1e-12),
    ],
    ids=["box", "ball", "simplex"],
)
def test_constraints_hold_at_every_step(case: Case, projection: Any, holds: Any) -> None:
    state, draw = start(case, project=projection)
    assert holds(state.hyper().detach())
    seen = []
    for _ in range(3):
        case.algorithm.step(state, draw)
        seen.append(state.hyper().detach().clone())
        assert holds(seen[-1])
    assert any(not torch.equal(x, seen[0]) for x in seen) or not isinstance(projection, hk.Simplex)


def test_reports_are_complete(case: Case) -> None:
    state, draw = start(case)
    reports = [case.algorithm.step(state, draw) for _ in range(3)]
    assert [report.step for report in reports] == [0, 1, 2]
    assert any(report.direction > 0 for report in reports)


def test_one_configuration_serves_many_runs(case: Case) -> None:
    """Nothing leaks from a state into the algorithm it was made from."""
    case = stochastic(case)
    alone = run(case, *start(case), 3)
    one, two = start(case), start(case)
    for _ in range(3):
        case.algorithm.step(*one)
        case.algorithm.step(*two)
    assert torch.equal(one[0].hyper(), alone)
    assert torch.equal(two[0].hyper(), alone)


def test_every_algorithm_has_a_case() -> None:
    named = {getattr(hk, name) for name in hk.algorithms.__all__}
    classes = {x for x in named if isinstance(x, type) and issubclass(x, Algorithm) and x is not Algorithm}
    assert classes == {type(case.algorithm) for case in CASES.values()}
