"""EKFAC with a basis that serves longer than its spectrum: the best diagonal all the same, at the promised price."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, make, mlp, random_weights
from hyperkron.curvature import KroneckerState
from hyperkron.curvature.kfac import eigen
from hyperkron.curvature.kfac.capture import measure
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.eigen import EigenInverses
from hyperkron.curvature.kfac.measured import Basis, Measurement
from hyperkron.evaluation.point import Point
from hyperkron.training.encoding import join, split
from tests.curvature.kfac.test_ekfac_thin import WIDE, assert_best


class Course:
    """θ and the batch move from call to call; inner evaluations and eigendecompositions are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
        self.case = make(model, (4,), loss="cross_entropy", count=8, hyper=random_weights(8))
        self.passes = self.decompositions = self.calls = 0
        inner, true_eigh = self.case.inner, torch.linalg.eigh

        def counted(*args: Any) -> Any:
            self.passes += 1
            return inner(*args)

        def eigh(matrix: Tensor) -> Any:
            self.decompositions += 1
            return true_eigh(matrix)

        self.case.inner = counted  # type: ignore[method-assign]
        if monkeypatch is not None:
            monkeypatch.setattr(torch.linalg, "eigh", eigh)

    def move(self) -> None:
        self.calls += 1
        with torch.no_grad():
            for p in self.case.model.parameters():
                p.mul_(1.05).add_(0.01)
        x, y = self.case.inner_batch
        self.case.inner_batch = (x.roll(1, 1) * 0.97, y)

    def call(self, curvature: hk.curvature.EKFAC, state: KroneckerState) -> tuple[int, int]:
        """Passes and eigendecompositions of one call, after which θ and the batch move on."""
        before = self.passes, self.decompositions
        with self.case.point() as point:
            curvature.operator(point, state)
        found = self.passes - before[0], self.decompositions - before[1]
        self.move()
        return found


def test_passes_and_eigendecompositions_are_those_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, wanted in (
        ({"basis_every": 1}, [(2, 4)] * 4),
        ({"basis_every": 3}, [(2, 4), (1, 0), (1, 0), (2, 4), (1, 0), (1, 0), (2, 4)]),
        ({"basis_every": 2, "refresh_every": 2}, [(2, 4), (0, 0), (1, 0), (0, 0), (2, 4), (0, 0), (1, 0)]),
        ({"basis_every": 2, "ema": 0.5}, [(2, 4), (1, 0), (2, 4), (1, 0)]),
    ):
        course, curvature = Course(monkeypatch), hk.curvature.EKFAC(0.1, **options)  # type: ignore[arg-type]
        state = curvature.init()
        assert [course.call(curvature, state) for _ in wanted] == wanted
        monkeypatch.undo()


def test_the_spectrum_is_the_best_one_in_a_basis_older_than_theta() -> None:
    course, curvature = Course(), hk.curvature.EKFAC(0.1, fisher="type-2", basis_every=4)
    state, bases = curvature.init(), []
    for refresh in range(4):
        with course.case.point() as point:
            curvature.operator(point, state)
        assert isinstance(state.inverses, EigenInverses)
        assert state.basis_age == refresh
        assert_best(course.case, state, 0.1)
        bases.append([(block.a, block.b) for block in state.inverses.blocks.values()])
        fresh = hk.curvature.EKFAC(0.1, fisher="type-2")
        with course.case.point() as point:
            fresh.operator(point, newest := fresh.init())
        assert state.diagonal.keys() == newest.diagonal.keys() == {"1.weight", "1.bias"}
        assert all(torch.equal(state.diagonal[n], newest.diagonal[n]) for n in state.diagonal)
        course.move()
    assert all(
        q is p
        for basis in bases[1:]
        for old, new in zip(bases[0], basis, strict=True)
        for q, p in zip(old, new, strict=True)
    )


def test_every_refresh_with_a_basis_of_its_own_is_what_it_was() -> None:
    """Measure, decompose, measure: bit for bit, with basis_every=1, and at the first refresh with any."""
    course, generator = Course(), torch.Generator().manual_seed(5)
    curvature = hk.curvature.EKFAC(0.1, seed=5)
    state = curvature.init()
    for refresh in range(3):
        made = plan(course.case.model, "diagonal")
        how: dict[str, Any] = {"fisher": "mc", "samples": 1, "sharing": "expand", "generator": generator}
        with course.case.point() as point:
            factors = measure(point, made, Measurement(**how))
            bases, _ = eigen.eigen_bases({n: (factors.a[n], factors.b[n]) for n in factors.a})
            basis: Basis = {n: (a, b) for n, (_, a, _, b) in bases.items()}
            found = measure(point, made, Measurement(basis=basis, diagonal=False, **how))
        first = hk.curvature.EKFAC(0.1, seed=5, basis_every=3)
        with course.case.point() as point:
            curvature.operator(point, state)
            first.operator(point, other := first.init())
        for kept in (state, other) if refresh == 0 else (state,):
            assert isinstance(kept.inverses, EigenInverses)
            assert kept.basis_age == 0
            for name, (_, a, _, b) in bases.items():
                block = kept.inverses.blocks[name]
                assert torch.equal(block.a, a)
                assert torch.equal(block.b, b)
                assert torch.equal(block.spectrum, found.corrected[name] + 0.1)
        course.move()


@pytest.mark.parametrize(
    "stop", [pytest.param(1, marks=pytest.mark.long), 2, 3, pytest.param(4, marks=pytest.mark.long), 5]
)
@pytest.mark.parametrize("name", ["lasting", "lasting, kept calls", "lasting, average", "thin"])
def test_a_resumed_run_continues_bit_for_bit(name: str, stop: int) -> None:
    def method() -> hk.Implicit:
        return {
            "lasting": lambda: hk.ekfac(0.01, basis_every=3),
            "lasting, kept calls": lambda: hk.ekfac(0.01, basis_every=2, refresh_every=2),
            "lasting, average": lambda: hk.ekfac(0.01, basis_every=2, ema=0.4),
            "thin": lambda: hk.ekfac(0.01, refresh_every=3),
        }[name]()

    case = WIDE["wide"]() if name == "thin" else Course().case
    batches = [(case.inner_batch[0] * s, case.inner_batch[1]) for s in (1.0, 0.8, 1.2, 0.9, 1.1, 1.3, 0.7)]

    def run(made: hk.Implicit, some: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        steps = [made.compute(case.problem, case.model, case.hyper, b, case.outer_batch) for b in some]
        assert all(("thin" in str(step.stats["curvature_strategy"])) == (name == "thin") for step in steps)
        return [oracles.flat(step.grads) for step in steps]

    whole, first, resumed = run(method(), batches), method(), method()
    run(first, batches[:stop])
    tree, tensors = split(first.state_dict())
    resumed.load_state_dict(join(json.loads(json.dumps(tree)), lambda key: tensors[key].clone()))
    assert all(torch.equal(a, b) for a, b in zip(run(resumed, batches[stop:]), whole[stop:], strict=True))


def test_a_spectrum_that_is_not_finite_keeps_the_previous_inverse_and_basis() -> None:
    course, curvature = Course(), hk.curvature.EKFAC(0.1, basis_every=3)
    state = curvature.init()
    course.call(curvature, state)
    good, before = course.case.inner_batch, state.inverses
    course.case.inner_batch = (good[0] * 1e200, good[1])  # finite outputs after the norm layer, but no finite squares
    with course.case.point() as point:
        operator = curvature.operator(point, state)
    assert operator.status is hk.Status.KEPT_PREVIOUS
    assert "not finite" in point.notes["factorisation"]
    assert state.inverses is before
    assert (state.basis_age, state.refreshes, state.failures) == (0, 1, 1)
    course.case.inner_batch = good
    assert course.call(curvature, state)[0] == 1
    assert (state.basis_age, state.refreshes, state.failures) == (1, 2, 0)


class Offset(nn.Module):
    """A linear layer and a parameter outside it, whose gradient is as large as ``slope``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.offset, self.slope = nn.Linear(3, 2), nn.Parameter(torch.zeros(2)), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.slope * self.offset  # type: ignore[no-any-return]


def test_a_diagonal_that_is_not_finite_keeps_the_previous_one() -> None:
    torch.manual_seed(0)
    case = make(Offset(), (3,), count=6)
    curvature = hk.curvature.EKFAC(0.1, fisher="type-2", basis_every=3)
    state = curvature.init()
    for slope, status in ((1.0, hk.Status.DIRECT), (1e200, hk.Status.KEPT_PREVIOUS), (2.0, hk.Status.DIRECT)):
        case.model.slope = slope  # type: ignore[assignment]
        with case.point() as point:
            assert curvature.operator(point, state).status is status
        assert bool(torch.isfinite(state.diagonal["offset"]).all())
    assert state.basis_age == 1


class Branches(nn.Module):
    """Two layers, of which the second is used where ``wide`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.wide = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        return self.last(self.two(hidden).tanh() if self.wide else hidden)  # type: ignore[no-any-return]


def test_layers_that_come_and_go_make_a_new_basis() -> None:
    torch.manual_seed(0)
    case = make(Branches(), (3,), loss="cross_entropy", count=8)
    curvature = hk.curvature.EKFAC(0.1, fisher="type-2", basis_every=10)
    state = curvature.init()
    ages = []
    for wide in (True, True, False, False, True, True):
        case.model.wide = wide  # type: ignore[assignment]
        with case.point() as point:
            found = oracles.dense(curvature.operator(point, state).matvec, case.params)
        ages.append(state.basis_age)
        with case.point() as point:
            fresh = oracles.dense(
                hk.curvature.EKFAC(0.1, fisher="type-2").operator(point, curvature.init()).matvec, case.params
            )
        assert oracles.relative(found, fresh) < 1e-12  # θ stands still, so the old basis is the new one
    assert ages == [0, 1, 0, 1, 0, 1]


def test_a_lasting_basis_with_a_batch_in_parts_and_a_penalty() -> None:
    torch.manual_seed(0)
    model, weights = mlp(4, 5, 3), hk.SampleWeights(8).double()
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])) + hk.losses.l2(m, 0.25),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    x, rest = torch.randn(8, 4, dtype=DOUBLE), (torch.arange(8) % 3, torch.arange(8))
    curvature = hk.curvature.EKFAC(0.1, fisher="type-2", basis_every=5)
    whole, parts = curvature.init(), curvature.init()
    for refresh in range(3):
        matrices = []
        for given, state in ((problem, whole), (hk.training.Accumulated(problem, 3), parts)):
            batch = (x * 0.8**refresh, *rest)
            with Point(given, model, weights, batch, batch) as point:
                matrices.append(oracles.dense(curvature.operator(point, state).matvec, oracles.trainable(model)))
            assert state.basis_age == refresh
        assert oracles.relative(matrices[1], matrices[0]) < 1e-10
        assert float(torch.linalg.eigvalsh(matrices[0]).min()) > 0.6 - 1e-9  # δ + 2α


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", None])
def test_bad_values_of_basis_every_are_refused(value: Any) -> None:
    for build in (hk.ekfac, hk.curvature.EKFAC):
        with pytest.raises(
            hk.HyperkronError, match=rf"basis_every={value!r} must be a whole number ≥ 1; 1 makes a new"
        ):
            build(basis_every=value)
