"""With reduced factors EKFAC is the dense optimum too, also where a factor has a null space that gradients reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Case, Mean, make, mlp, random_weights
from hyperkron.evaluation.point import Point

DAMPING = 0.1


def pooled(conv: nn.Module, channels: int, size: tuple[int, ...], count: int) -> Case:
    model = nn.Sequential(conv, nn.Tanh(), Mean(True), nn.Linear(channels, 3))
    return make(model, size, loss="cross_entropy", count=count, hyper=random_weights(count))


def over_tokens(width: int, count: int) -> Case:
    model = nn.Sequential(mlp(width, 4, 3), nn.Tanh(), Mean(), nn.Linear(3, 3))
    return make(model, (4, width), loss="cross_entropy", count=count, hyper=random_weights(count))


CASES: dict[str, Callable[[], Case]] = {
    "conv, both full": lambda: pooled(nn.Conv2d(2, 3, 2, padding=1, stride=2), 3, (2, 3, 3), 14),
    "conv, A deficient": lambda: pooled(nn.Conv2d(2, 3, 2, padding=1), 3, (2, 3, 3), 4),
    "conv, B deficient": lambda: pooled(nn.Conv1d(1, 12, 2), 12, (1, 4), 5),
    "conv, both deficient": lambda: pooled(nn.Conv2d(2, 8, 2, dilation=2), 8, (2, 4, 4), 3),
    "groups, deficient": lambda: pooled(nn.Conv2d(4, 4, 2, groups=2), 4, (4, 3, 3), 4),
    "linear, full": lambda: over_tokens(3, 9),
    "linear, deficient": lambda: over_tokens(7, 3),
}


def basis(reduced: Tensor, expanded: Tensor) -> Tensor:
    """Eigenvectors of ``reduced``; in its null space those of ``expanded``."""
    values, vectors = torch.linalg.eigh(reduced)
    null = values < 1e-12 * values.max()
    inside = vectors[:, null]
    return torch.cat([inside @ torch.linalg.eigh(inside.T @ expanded @ inside)[1], vectors[:, ~null]], 1)


def optimum(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """For every layer the exact Fisher block F and Q diag(QᵀFQ) Qᵀ, from loops alone."""
    term = case.inner(case.model, case.hyper, case.inner_batch).terms[0]
    exact = oracles.fisher(term.output, list(term.vectors("type-2")), list(case.params.values()))
    wide = case.slow_factors(sharing="expand")
    found = {}
    for name, (a, b) in case.slow_factors(sharing="reduce").items():
        order = oracles.joint_order(case.model.get_submodule(name), f"{name}.", case.params)
        f = exact[order][:, order]
        parts = [torch.kron(basis(b[g], wide[name][1][g]), basis(a[g], wide[name][0][g])) for g in range(len(a))]
        q = torch.block_diag(*parts)
        found[name] = f, q @ torch.diag((q.T @ f @ q).diagonal()) @ q.T
    return found


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_best_diagonal_in_the_one_basis(name: str, every: int) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    curvature = hk.curvature.EKFAC(DAMPING, fisher="type-2", sharing="reduce", basis_every=every)
    with case.point() as point:
        matrix = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
    matrix = matrix - DAMPING * torch.eye(len(matrix), dtype=DOUBLE)
    for layer, (_, wanted) in optimum(case).items():
        order = oracles.joint_order(case.model.get_submodule(layer), f"{layer}.", case.params)
        assert oracles.relative(matrix[order][:, order], wanted) < 1e-9


def test_the_cases_have_the_ranks_they_are_named_for() -> None:
    torch.manual_seed(0)
    for name, sides in {"conv, both full": (), "conv, A deficient": (0,), "conv, B deficient": (1,)}.items():
        factors = CASES[name]().slow_factors(sharing="reduce")["0"]
        for side, factor in enumerate(factors):
            missing = factor.shape[-1] - int(torch.linalg.matrix_rank(factor[0], hermitian=True))
            assert (missing > 1) == (side in sides)


def matrix_of(case: Case, problem: hk.BilevelProblem) -> Tensor:
    curvature = hk.curvature.EKFAC(DAMPING, fisher="empirical", sharing="reduce")
    with Point(problem, *case.arguments[1:]) as point:
        return oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)


class Indexed(Case):
    """Its batches bring the numbers of their examples, so that they can be cut into pieces."""

    def inner(self, model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        x, y, index = batch
        return hk.losses.cross_entropy(model(x), y, weight=hyper()[index])


def test_in_uneven_pieces_it_is_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), Mean(), nn.Linear(6, 3))
    case = make(model, (5, 3), loss="cross_entropy", count=3, hyper=random_weights(3))
    x, y = case.inner_batch
    x[2] *= 4
    indexed = Indexed(case.model, case.hyper, (x, y, torch.arange(3)), case.outer_batch, case.loss)  # type: ignore[arg-type]
    whole, pieces = indexed.problem, hk.training.Accumulated(indexed.problem, 2)
    assert oracles.relative(matrix_of(indexed, pieces), matrix_of(indexed, whole)) < 1e-9


class Attention(nn.Module):
    """The gradients of its keys add up to zero over the positions of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)).mean(1)


def test_the_basis_is_not_made_of_roundings_where_sums_over_positions_vanish() -> None:
    torch.manual_seed(0)
    case = make(Attention(), (3, 2), loss="cross_entropy", hyper=random_weights(5))
    one = matrix_of(case, case.problem) - DAMPING * torch.eye(12, dtype=DOUBLE)
    scaled = hk.BilevelProblem(lambda *given: 3.7 * case.inner(*given), case.outer)
    other = matrix_of(case, scaled) - DAMPING * torch.eye(12, dtype=DOUBLE)
    assert oracles.relative(other, 3.7 * one) < 1e-9
