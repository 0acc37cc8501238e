"""Many right-hand sides at once against one at a time."""

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import trees
from hyperkron.curvature import EKFAC, GGN
from hyperkron.curvature.base import Operator
from hyperkron.evaluation.point import Point
from hyperkron.solution import NonFiniteError, Status
from hyperkron.solvers import CG

METHODS = {
    "kfac": hk.kfac(1e-2, fisher="type-2"),
    "kfac, exact": hk.kfac(1e-2, fisher="type-2", split="exact"),
    "ekfac": hk.ekfac(1e-2, fisher="type-2"),
    "identity": hk.identity(0.5),
    "pcg": hk.pcg(5, 1e-2),
}


class Network(nn.Module):
    """Blocks of two shapes, a diagonal, and a parameter outside all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 51), nn.LayerNorm(51), nn.Linear(51, 50)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.first(x) + self.shift)))


class Parted(hk.BilevelProblem):
    """Measured in two parts."""

    def parts(self, batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(batch[0][:20], batch[1][:20]), (batch[0][20:], batch[1][20:])] if len(batch[0]) > 20 else [batch]


def at(examples: int, parted: bool = False) -> Point:
    torch.manual_seed(0)
    model, weights = Network().double(), torch.rand(51, 4, dtype=torch.float64)
    batch = torch.randn(examples, 4, dtype=torch.float64), torch.randint(0, 50, (examples,))

    def inner(m: nn.Module, _: nn.Module, b: tuple[Tensor, Tensor]) -> hk.losses.Loss:
        return hk.losses.cross_entropy(m(b[0]), b[1]) + hk.losses.l2([m.first.weight], [weights[:1]])

    problem = (Parted if parted else hk.BilevelProblem)(inner, inner)
    return Point(problem, model, hk.as_hyper(torch.zeros(1).double()), batch, batch)


@pytest.mark.parametrize("examples", [2, 30])  # few rows: thin bases, low-rank factors
@pytest.mark.parametrize("name", METHODS)
def test_stacked_solves_equal_single_ones(name: str, examples: int) -> None:
    method = METHODS[name]
    with at(examples) as point:
        b = {n: torch.randn(3, *p.shape, dtype=p.dtype) for n, p in point.params.items()}
        found = method.fresh().inverse(point)(b)
        alone = [method.fresh().inverse(point)({n: x[q : q + 1] for n, x in b.items()}) for q in range(3)]
    for q, one in enumerate(alone):
        for n in b:
            torch.testing.assert_close(found.value[n][q], one.value[n][0], rtol=1e-9, atol=1e-12)
    assert found.products == sum(one.products for one in alone)
    assert found.status is (Status.BUDGET if name == "pcg" else Status.DIRECT)


def test_the_worst_of_several_solves_is_told() -> None:
    with at(30) as point:
        operator = GGN(1e-2).operator(point, GGN(1e-2).init())
        b = {n: torch.randn(2, *p.shape, dtype=p.dtype) for n, p in point.params.items()}
        found = CG(2).solve_stacked(operator, b)
        alone = [CG(2).solve(operator, one) for one in trees.unstacked(b)]
    assert found.residual == pytest.approx(max(x.residual for x in alone if x.residual is not None))
    assert found.iterations == 4


@pytest.mark.parametrize(
    ("parted", "iterations"),
    [(False, 1), (True, 1), (False, 4), (True, 4), (False, 200), pytest.param(True, 200, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("preconditioned", [False, True])
def test_systems_side_by_side_are_solved_as_each_alone(parted: bool, iterations: int, preconditioned: bool) -> None:
    with at(30, parted) as point:
        operator = GGN(1e-2).operator(point, GGN(1e-2).init())
        made = EKFAC(1e-1, fisher="type-2")
        state = made.init()
        inverse = made.operator(point, state) if preconditioned else None
        b = {n: torch.randn(4, *p.shape, dtype=p.dtype) for n, p in point.params.items()}
        for x in b.values():
            x[1] *= 1e-40
            x[2] = 0
        found = CG(iterations, 1e-10).solve_stacked(operator, b, preconditioner=inverse)
        alone = [CG(iterations, 1e-10).solve(operator, one, preconditioner=inverse) for one in trees.unstacked(b)]
    for q, one in enumerate(alone):
        for n in b:
            scale = max(float(x.abs().max()) for x in one.value.values()) or 1.0
            torch.testing.assert_close(found.value[n][q], one.value[n], rtol=1e-6, atol=1e-8 * scale)
    assert found.iterations == sum(one.iterations for one in alone)
    assert found.products == sum(one.products for one in alone)
    assert found.status is (Status.CONVERGED if iterations == 200 else Status.BUDGET)


def test_negative_curvature_ends_one_system_alone() -> None:
    class Diagonal(Operator):
        def matvec(self, v: trees.Tree) -> trees.Tree:
            self.products += 1
            return {"w": v["w"] * torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)}

    b = {"w": torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.1, 1.0, 1.0]], dtype=torch.float64)}
    found = CG(5).solve_stacked(Diagonal(), b)
    alone = [CG(5).solve(Diagonal(), one) for one in trees.unstacked(b)]
    assert [one.status for one in alone] == [Status.CONVERGED, *[Status.NONPOSITIVE_CURVATURE] * 2]
    assert found.status is Status.NONPOSITIVE_CURVATURE
    for q, one in enumerate(alone):
        torch.testing.assert_close(found.value["w"][q], one.value["w"])


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_solutions_are_as_large_as_right_hand_sides(size: float) -> None:
    """Also where float32 holds these, but not their squares."""

    class Diagonal(Operator):
        def matvec(self, v: trees.Tree) -> trees.Tree:
            return {"w": v["w"] * torch.tensor([1.0, 2.0, 4.0])}

    b = {"w": torch.tensor([[1.0, 0.0, 1.0], [0.1, 1.0, 1.0], [0.0, 0.0, 0.0]])}
    found, wanted = (CG(5).solve_stacked(Diagonal(), trees.scale(b, c)) for c in (size, 1.0))
    assert found.status is wanted.status is Status.CONVERGED
    torch.testing.assert_close(found.value["w"] / size, wanted.value["w"])
    torch.testing.assert_close(wanted.value["w"], b["w"] / torch.tensor([1.0, 2.0, 4.0]))


def test_a_right_hand_side_that_is_not_finite_is_refused() -> None:
    with at(30) as point:
        b = {n: torch.full((2, *p.shape), float("nan"), dtype=p.dtype) for n, p in point.params.items()}
        with pytest.raises(NonFiniteError, match="b holds NaN"):
            hk.kfac().inverse(point)(b)
