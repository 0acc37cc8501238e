"""The conformance suite: the entry ticket of an algorithm.

Every algorithm must come to rest where it is proven to (``test_accuracy.py``) and, here, continue bit for
bit from a state_dict, repeat itself under a seed, follow the model's device and dtype, and respect λ's constraints at
every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.algorithms.base import Algorithm, State
from hyperkron.optimizers import LevelOptimizer
from quadratic import Quadratic
from tests.algorithms.test_accuracy import CASES, DOUBLE

SUM = Quadratic(examples=6, noise=0.2)  # in batches of two, which disagree

ALGORITHMS: dict[str, Algorithm] = {name: case.algorithm for name, case in CASES.items() if not case.variant}
ALGORITHMS["BSG-1"] = hk.algorithms.BSG1(1, **DOUBLE)
ALGORITHMS["AID-KFAC, Monte Carlo"] = hk.algorithms.aid_kfac(0.1, inner_steps=1)


def start(
    algorithm: Algorithm, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[State, hk.algorithms.BatchSources]:
    model, hyper = SUM.modules(dtype)
    return algorithm.init(SUM.problem(), model, hyper, **options), SUM.batches(2, dtype)


def run(algorithm: Algorithm, state: State, batches: hk.algorithms.BatchSources, steps: int) -> Tensor:
    for _ in range(steps):
        algorithm.step(state, batches)
    return state.hyper().detach().clone()


@pytest.fixture(params=ALGORITHMS, name="algorithm")
def _algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return ALGORITHMS[request.param]


def optimizers(algorithm: Algorithm) -> tuple[State, hk.algorithms.BatchSources]:
    """A state with Adam on θ, momentum on λ, and schedulers on both."""
    model, hyper = SUM.modules()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    momentum = torch.optim.SGD(hyper.parameters(), lr=0.01, momentum=0.9)
    inner: hk.algorithms.Updates | None = hk.algorithms.Updates(
        adam, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10), clip=1.0
    )
    outer = hk.algorithms.Updates(momentum, torch.optim.lr_scheduler.ReduceLROnPlateau(momentum, patience=0))
    if isinstance(algorithm, hk.algorithms.Unroll):  # it has functional steps of its own
        inner = None
    state = algorithm.init(SUM.problem(), model, hyper, inner=inner, outer=outer)
    return state, SUM.batches(2)


@pytest.mark.parametrize("start", [start, optimizers], ids=["own rates", "optimizers"])
def test_a_state_dict_round_trip_continues_bit_for_bit(algorithm: Algorithm, start: Any) -> None:
    state, batches = start(algorithm)
    run(algorithm, state, batches, 3)
    saved, saved_batches = state.state_dict(), batches.state_dict()
    _plain(saved), _plain(saved_batches)
    wanted = run(algorithm, state, batches, 3)
    other, other_draw = start(algorithm)
    run(algorithm, other, other_draw, 1)  # whatever it did before is forgotten
    other.load_state_dict(saved)
    other_draw.load_state_dict(saved_batches)
    assert torch.equal(run(algorithm, other, other_draw, 3), wanted)
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


def test_everything_follows_the_models_dtype(algorithm: Algorithm) -> None:
    """In float32 under a default of float64; all other tests run in float64 under a default of float32."""
    torch.set_default_dtype(torch.float64)
    dtype = torch.float32
    state, batches = start(algorithm, dtype)
    run(algorithm, state, batches, 2)
    assert state.hyper().dtype == dtype
    held = [x for tree in state.trees.values() for x in tree.values()]
    held += [x for twin in state.twins.values() for x in twin.params.values()]
    assert all(x.dtype == dtype for x in held if x.is_floating_point())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_follows_the_models_device(algorithm: Algorithm) -> None:
    problem, device = SUM.problem(), torch.device("cuda")
    model, hyper = (module.to(device) for module in SUM.modules())
    inner, outer = ([x.to(device) for x in part] for part in SUM.data())
    batches = hk.algorithms.BatchSources(
        hk.algorithms.Examples(*inner, batch_size=2, seed=1), hk.algorithms.Examples(*outer, batch_size=2, seed=2)
    )
    state = algorithm.init(problem, model, hyper)
    reached = run(algorithm, state, batches, 2)
    held = [x for tree in state.trees.values() for x in tree.values()]
    held += [x for twin in state.twins.values() for x in twin.params.values()]
    assert all(x.device.type == "cuda" for x in held)
    if algorithm not in (ALGORITHMS["PZOBO"], ALGORITHMS["AID-KFAC, Monte Carlo"]):  # these draw on the device
        assert torch.allclose(reached.cpu(), run(algorithm, *start(algorithm), 2), rtol=1e-8, atol=1e-10)


CONSTRAINTS: dict[str, tuple[Any, Any]] = {
    "box": (hk.Box(-0.01, 0.02), lambda x: bool((x >= -0.01).all() and (x <= 0.02).all())),
    "ball": (hk.Ball(0.01), lambda x: float(x.norm()) <= 0.01 * (1 + 1e-12)),
    "simplex": (hk.Simplex(), lambda x: bool((x >= 0).all()) and abs(float(x.sum()) - 1) < 1e-12),
}
CONSTRAINED = [
    pytest.param(name, constraint, marks=[] if constraint == ("box", "ball", "simplex")[i % 3] else pytest.mark.long)
    for i, name in enumerate(ALGORITHMS)
    for constraint in CONSTRAINTS
]
"""Every algorithm with one of them; the others in ``make long``."""


@pytest.mark.parametrize(("name", "constraint"), CONSTRAINED)
def test_constraints_hold_at_every_step(name: str, constraint: str) -> None:
    algorithm, (projection, holds) = ALGORITHMS[name], CONSTRAINTS[constraint]
    state, batches = start(algorithm, project=projection)
    assert holds(state.hyper().detach())
    seen = [state.hyper().detach().clone()]
    for _ in range(3):
        algorithm.step(state, batches)
        seen.append(state.hyper().detach().clone())
        assert holds(seen[-1])
    assert any(not torch.equal(x, seen[0]) for x in seen) or not isinstance(projection, hk.Simplex)


def test_one_configuration_serves_many_runs_that_are_all_the_same(algorithm: Algorithm) -> None:
    """Nothing leaks from a state into the algorithm it was made from; and reports are complete."""
    alone = run(algorithm, *start(algorithm), 3)
    assert not torch.equal(alone, torch.zeros_like(alone))
    one, two = start(algorithm), start(algorithm)
    reports = []
    for _ in range(3):
        reports.append(algorithm.step(*one))
        algorithm.step(*two)
    assert torch.equal(one[0].hyper(), alone)
    assert torch.equal(two[0].hyper(), alone)
    assert [report.step for report in reports] == [0, 1, 2]
    assert any(report.direction > 0 for report in reports)


DRAWN: dict[str, Callable[[], Any]] = {
    "torch": lambda: nn.functional.dropout(torch.ones(16), 0.5),
    "python": lambda: torch.tensor([random.random() for _ in range(16)]),
    "numpy": lambda: torch.from_numpy(np.random.rand(16)).float(),
}
"""Masks by random numbers of each kind."""


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("name", ["SOBA", "SABA", "SRBA", "Unroll"])
def test_dropout_draws_a_new_mask_in_every_step_and_one_for_both_points(name: str, drawn: str) -> None:
    masks: list[tuple[float, ...]] = []

    def inner(model: nn.Module, hyper: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        mask = DRAWN[drawn]()
        masks.append(tuple(mask.tolist()))
        return (model(batch[0]) * mask).square().mean() * hyper().exp()

    def outer(model: nn.Module, hyper: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0]).square().mean()

    torch.manual_seed(0)
    model, hyper = nn.Linear(3, 16), hk.as_hyper(torch.zeros(()))
    data = hk.algorithms.Examples(torch.randn(8, 3), batch_size=4)
    algorithm = getattr(hk.algorithms, name)(**{"inner_steps": 1} if name == "Unroll" else {})
    state = algorithm.init(hk.BilevelProblem(inner, outer), model, hyper)
    for steps in range(1, 5):
        algorithm.step(state, hk.algorithms.BatchSources(data, data))
        assert len(set(masks)) == steps


@pytest.mark.parametrize("name", ["MRBO", "SUSTAIN", "VRBO"])
def test_differences_between_two_points_are_taken_under_one_dropout_mask(name: str) -> None:
    """Where no variable moves the two points are one, so that d_θ stays what it was."""
    own = {"inner_steps": 3} if name == "VRBO" else {"momentum": 0.0}
    algorithm = getattr(hk.algorithms, name)(inner_rate=0.0, outer_rate=0.0, **own)
    model, hyper = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 16)), hk.as_hyper(torch.zeros(()))
    data = hk.algorithms.Examples(torch.randn(8, 3), batch_size=4)
    problem = hk.BilevelProblem(
        lambda model, hyper, batch: model(batch[0]).square().mean() * hyper().exp(),
        lambda model, hyper, batch: model(batch[0]).square().mean(),
    )
    state = algorithm.init(problem, model, hyper)
    found = []
    for _ in range(2):
        algorithm.step(state, hk.algorithms.BatchSources(data, data))
        found.append(state.trees["d theta" if name == "VRBO" else "d_theta"])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("BOME", {}),
        ("BVFSM", {"weight": 0.0}),
        ("F2SA", {"second_rate": 0.0}),
        ("MEHA", {"hat_rate": 0.0}),
        ("PBGD", {"ramp": 0}),
        ("ScaleBiO", {}),
    ],
)
@pytest.mark.parametrize("drawn", DRAWN)
def test_the_value_gap_is_taken_under_one_dropout_mask(name: str, own: dict[str, Any], drawn: str) -> None:
    """Where θ and its second copy are the same, so are their losses, and no multiple of the difference moves λ."""
    algorithm = getattr(hk.algorithms, name)(inner_rate=0.0, **own)
    model, hyper = nn.Linear(3, 16), hk.as_hyper(torch.zeros(()))
    data = hk.algorithms.Examples(torch.randn(8, 3), batch_size=4)
    problem = hk.BilevelProblem(
        lambda model, hyper, batch: (model(batch[0]) * DRAWN[drawn]()).square().mean() * hyper().exp(),
        lambda model, hyper, batch: model(batch[0]).square().mean(),
    )
    state = algorithm.init(problem, model, hyper)
    for _ in range(3):
        assert algorithm.step(state, hk.algorithms.BatchSources(data, data)).direction == 0


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("AID", {"hypergradient": None}, "hypergradient=None is a NoneType, not a hypergradient"),
        ("AmIGO", {"linear_steps": 2.5}, "linear_steps=2.5 must be a whole number ≥ 1"),
        ("SRBA", {"period": 0}, "period=0 must be a whole number ≥ 1"),
        ("BOME", {"eta": 0.0}, "eta=0.0 must be a positive number"),
        ("DARTS", {"lookahead": -1.0}, "lookahead=-1.0 must be a finite number ≥ 0"),
        ("F2SA", {"second_rate": -1.0}, "second_rate=-1.0 must be a finite number ≥ 0"),
        ("AID", {"hypergradient": hk.kfac(), "inner_rate": None}, "inner_rate=None must be a finite number ≥ 0"),
        ("SOBA", {"seed": "1"}, "seed='1' must be a whole number ≥ 0"),
        ("TTSA", {"seed": None}, "seed=None must be a whole number ≥ 0"),
        ("StocBiO", {"terms": None}, "terms=None must be a whole number ≥ 0"),
        ("StocBiO", {"step_size": None}, "step_size=None must be a positive number"),
        ("BSA", {"step_size": 0}, "step_size=0 must be a positive number"),
        ("SUSTAIN", {"step_size": "0.1"}, "step_size='0.1' must be a positive number"),
        ("StochasticNeumann", {"step": None}, "step=None must be a positive number"),
        ("StochasticNeumann", {"seed": 1.5}, "seed=1.5 must be a whole number ≥ 0"),
        ("PBGD", {"ramp": -1}, "ramp=-1 must be a whole number ≥ 0"),
        ("ScaleBiO", {"penalty": None}, "penalty=None must be a positive number"),
        ("ScaleBiO", {"growth": 0.5}, r"growth=0.5 must be a number in \[1, inf\)"),
        ("ScaleBiO", {"most": "1000"}, r"most='1000' must be a number in \[1, inf\]"),
        ("Rate", {"scale": 0.1, "exponent": "2"}, "exponent='2' must be a number"),
    ],
)
def test_a_field_is_checked_by_its_annotation(name: str, arguments: dict[str, Any], wanted: str) -> None:
    with pytest.raises(hk.HyperkronError, match=wanted):
        getattr(hk.algorithms, name)(**arguments)


def test_plain_gradient_descent_is_that_of_torch() -> None:
    start, gradients = torch.randn(3), torch.randn(4, 3)
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    rate = hk.algorithms.Rate(0.3, 0.5)
    own, given = LevelOptimizer({"p": ours}, None, rate), torch.optim.SGD([theirs], lr=rate(0))
    for t, gradient in enumerate(gradients):
        own.step({"p": gradient})
        own.tick(t, None)
        theirs.grad = gradient
        given.step()
        given.param_groups[0]["lr"] = rate(t + 1)
        assert torch.equal(ours, theirs)


def test_the_second_point_of_scalebio_moves_by_the_rate_of_each_group() -> None:
    model, hyper = nn.Linear(1, 1).double(), hk.as_hyper(torch.ones(1, dtype=torch.float64))
    problem = hk.BilevelProblem(lambda m, h, x: hk.losses.mse(m(x), h() * x), lambda m, h, x: hk.losses.mse(m(x), x))
    x, start = torch.ones(1, 1, dtype=torch.float64), [p.detach().clone() for p in model.parameters()]
    slope = float(model(x).detach() - 1)  # of both parameters
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.3}])
    run = hk.fit(problem, model, hyper, hk.algorithms.ScaleBiO(), x, x, steps=1, inner_optimizer=optimizer)
    moved = [float(p.detach() - q) for p, q in zip(run.state.twins["u"].params.values(), start, strict=True)]
    assert moved == pytest.approx([-0.1 * slope, -0.3 * slope])
