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
from quadratic import Quadratic
from torch import Tensor

import hyperkron as hk
from hyperkron.algorithms.base import Algorithm, State

EXACT = Quadratic()
ISOTROPIC = Quadratic(isotropic=True)
REALIZABLE = Quadratic(direct=0.0, realizable=True)
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


DEEP = {"inner_rate": 0.8, "outer_rate": 0.4}

CASES: dict[str, Case] = {
    "AID-CG": Case(hk.aid_cg(6, **DEEP), 150, 1e-6, "CG solves in as many steps as distinct eigenvalues"),
    "AID-Neumann": Case(hk.aid_neumann(30, **DEEP), 150, 1e-6, "the series' tail is below 1e-8"),
    "AID-FP": Case(hk.aid_fp(30, **DEEP), 150, 1e-6, "the fixed point is reached to 1e-8"),
    "AID-KFAC": Case(
        hk.AID(hk.Implicit(hk.KFAC(0.0, fisher="type-2", split="exact"), hk.Direct()), **DEEP),
        150,
        1e-6,
        "KFAC is exact for one linear layer under squared error",
    ),
    "AID-EKFAC": Case(
        hk.AID(hk.ekfac(0.0, fisher="type-2"), **DEEP), 150, 1e-6, "EKFAC is exact for one linear layer"
    ),
    "AID-GGN-CG": Case(hk.aid_ggn_cg(6, 0.0, **DEEP), 150, 1e-6, "the Gauss–Newton matrix is the Hessian here"),
    "AID-GGN-Neumann": Case(hk.aid_ggn_neumann(30, **DEEP), 150, 1e-6, "the Gauss–Newton matrix is the Hessian"),
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


def test_a_state_dict_round_trip_continues_bit_for_bit(case: Case) -> None:
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
    """Only dictionaries with string keys, tensors, numbers, strings, None and lists or tuples of numbers."""
    if isinstance(x, dict):
        assert all(isinstance(key, str) for key in x)
        for value in x.values():
            _plain(value)
    elif isinstance(x, (list, tuple)):
        assert all(isinstance(value, (int, float)) for value in x)
    else:
        assert x is None or isinstance(x, (Tensor, int, float, str)), type(x)


def test_a_run_repeats_itself(case: Case) -> None:
    case = stochastic(case)
    first, second = (run(case, *start(case), 4) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.zeros_like(first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_follows_the_models_dtype(case: Case, dtype: torch.dtype) -> None:
    state, draw = start(stochastic(case), dtype)
    run(case, state, draw, 3)
    assert state.hyper().dtype == dtype
    held = [x for tree in state.trees.values() for x in tree.values()]
    held += [x for twin in state.twins.values() for x in twin.params.values()]
    assert all(x.dtype == dtype for x in held if x.is_floating_point())


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
    for _ in range(4):
        case.algorithm.step(state, draw)
        seen.append(state.hyper().detach().clone())
        assert holds(seen[-1])
    assert any(not torch.equal(x, seen[0]) for x in seen) or not isinstance(projection, hk.Simplex)


def test_reports_are_complete(case: Case) -> None:
    state, draw = start(case)
    reports = [case.algorithm.step(state, draw) for _ in range(3)]
    assert [report.step for report in reports] == [0, 1, 2]
    assert all(report.direction > 0 for report in reports[1:])


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
