"""EKFAC's diagonal is the exact optimum for its basis, and so it is never worse than KFAC."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Case, Mean, make, mlp, random_weights
from hyperkron.curvature.kfac.grams import GRADIENTS
from hyperkron.curvature.kfac.layers import CHUNK_ELEMENTS

CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: make(mlp(3, 4, 3), (3,), loss="cross_entropy", count=8, hyper=random_weights(8)),
    "mlp, mse": lambda: make(mlp(3, 4, 3), (3,), count=8, hyper=random_weights(8)),
    "mlp, binary": lambda: make(mlp(3, 4, 2), (3,), loss="binary", count=8, hyper=random_weights(8)),
    "no bias": lambda: make(mlp(3, 4, 3, bias=False), (3,), loss="cross_entropy", count=8),
    "few examples": lambda: make(mlp(6, 5, 4), (6,), loss="cross_entropy", count=3, hyper=random_weights(3)),
    "convolution": lambda: make(
        nn.Sequential(nn.Conv2d(2, 3, 2, padding=1, stride=2), nn.Tanh(), Mean(True), nn.Linear(3, 3)),
        (2, 3, 3),
        loss="cross_entropy",
        count=8,
        hyper=random_weights(8),
    ),
    "grouped convolution": lambda: make(
        nn.Sequential(nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), Mean(True), nn.Linear(4, 3)),
        (4, 3, 3),
        loss="cross_entropy",
        count=12,
    ),
    "tokens": lambda: make(
        nn.Sequential(mlp(3, 4, 3), nn.Tanh(), Mean(), nn.Linear(3, 2)),
        (4, 3),
        loss="cross_entropy",
        count=8,
        hyper=random_weights(8),
    ),
    "a loss at every token": lambda: make(mlp(3, 4, 3), (4, 3), loss="cross_entropy", count=4),
    "frozen bias": lambda: make(_frozen(nn.Linear(3, 4), "bias"), (3,), loss="cross_entropy", count=8),
    "frozen weight": lambda: make(_frozen(nn.Linear(3, 4), "weight"), (3,), loss="cross_entropy", count=8),
}


def _frozen(layer: nn.Linear, part: str) -> nn.Module:
    getattr(layer, part).requires_grad_(False)
    return nn.Sequential(layer)


def blocks(case: Case, sharing: str) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(exact Fisher block, KFAC's block, EKFAC's block, eigenbasis) of every layer, dense."""
    term = case.inner(case.model, case.hyper, case.inner_batch).terms[0]
    found = []
    dense = {}
    for kind, curvature in (
        ("kfac", hk.curvature.KFAC(0.1, fisher="type-2", split="exact", sharing=sharing)),  # type: ignore[arg-type]
        ("ekfac", hk.curvature.EKFAC(0.1, fisher="type-2", sharing=sharing)),  # type: ignore[arg-type]
    ):
        with case.point() as point:
            operator = curvature.operator(point, curvature.init())
            matrix = oracles.dense(operator.matvec, case.params)
        dense[kind] = matrix - 0.1 * torch.eye(len(matrix), dtype=DOUBLE)
    exact = oracles.fisher(term.output, list(term.vectors("type-2")), list(case.params.values()))
    for name, (a, b) in case.slow_factors(sharing=sharing).items():
        order = oracles.joint_order(case.model.get_submodule(name), f"{name}.", case.params)
        bases = [torch.kron(torch.linalg.eigh(b[g])[1], torch.linalg.eigh(a[g])[1]) for g in range(len(a))]
        basis = torch.block_diag(*bases)
        pick = lambda m, order=order: m[order][:, order]  # noqa: E731
        found.append((pick(exact), pick(dense["kfac"]), pick(dense["ekfac"]), basis))
    return found


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", CASES)
def test_spectrum_is_the_diagonal_of_the_exact_block_in_the_basis_of_kfac(name: str, sharing: str) -> None:
    for exact, kfac, ekfac, basis in blocks(CASES[name](), sharing):
        # a basis is unique only up to the choice inside eigenspaces: take the one EKFAC itself must be diagonal in
        inside = basis.T @ ekfac @ basis
        if oracles.relative(inside, torch.diag(inside.diagonal())) > 1e-8:
            _, basis = torch.linalg.eigh(ekfac + 1e-3 * kfac)
            inside = basis.T @ ekfac @ basis
        assert oracles.relative(inside, torch.diag(inside.diagonal())) < 1e-8
        wanted = (basis.T @ exact @ basis).diagonal()
        assert oracles.relative(inside.diagonal(), wanted) < 1e-8


@pytest.mark.parametrize("name", ["convolution", "grouped convolution", "tokens", "mlp"])
def test_examples_may_come_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    whole = blocks(case, "expand")
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 1)  # one at a time
    monkeypatch.setitem(GRADIENTS, "cpu", 1)
    for (_, _, one, _), (_, _, parted, _) in zip(whole, blocks(case, "expand"), strict=True):
        assert oracles.relative(parted, one) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_no_other_diagonal_is_closer_to_the_exact_block(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for exact, kfac, ekfac, basis in blocks(CASES[name](), "expand"):
        best = float((exact - ekfac).norm())
        for scale in (1e-3, 1e-2, 0.1):
            change = scale * torch.randn(len(exact), dtype=DOUBLE, generator=generator) * ekfac.diagonal().mean()
            other = ekfac + basis @ torch.diag(change) @ basis.T
            assert float((exact - other).norm()) > best
        assert best <= float((exact - kfac).norm()) + 1e-12 * float(exact.norm())


def test_ekfac_is_closer_than_kfac_where_kfac_is_not_exact() -> None:
    gains = []
    for build in CASES.values():
        for exact, kfac, ekfac, _ in blocks(build(), "expand"):
            size = float(exact.norm())
            gains.append((float((exact - kfac).norm()) / size, float((exact - ekfac).norm()) / size))
    assert sum(after < 0.98 * before for before, after in gains) > len(gains) / 2
    print("relative Frobenius errors (KFAC, EKFAC):", [f"{a:.3f} {b:.3f}" for a, b in gains])


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_damping_is_added_to_the_spectrum(fisher: str) -> None:
    case = CASES["mlp"]()
    matrices = []
    for damping in (0.1, 0.7):
        curvature = hk.curvature.EKFAC(damping, fisher=fisher)  # type: ignore[arg-type]
        with case.point() as point:
            matrices.append(oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params))
    eye = torch.eye(len(matrices[0]), dtype=DOUBLE)
    assert oracles.relative(matrices[1] - matrices[0], 0.6 * eye) < 1e-10


def test_l2_penalty_joins_the_damping() -> None:
    case = CASES["mlp"]()
    curvature = hk.curvature.EKFAC(0.1, fisher="type-2")
    with case.point() as point:
        before = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
    case.decay = dict.fromkeys(case.params, 0.25)
    with case.point() as point:
        after = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
    assert oracles.relative(after - before, 0.5 * torch.eye(len(after), dtype=DOUBLE)) < 1e-10


def test_it_is_exact_where_kfac_is() -> None:
    case = make(nn.Sequential(nn.Linear(3, 2)), (3,))
    found = hk.ekfac(0.05, fisher="type-2").compute(*case.arguments).grads
    assert oracles.relative(found, oracles.implicit(case, case.hessian(), damping=0.05)) < 1e-8


def test_monte_carlo_spectrum_converges_to_the_exact_one() -> None:
    case = CASES["mlp"]()
    matrices = []
    for curvature in (
        hk.curvature.EKFAC(0.1, fisher="type-2"),
        hk.curvature.EKFAC(0.1, samples=2),
        hk.curvature.EKFAC(0.1, samples=500),
    ):
        with case.point() as point:
            matrices.append(oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params))
    coarse, fine = (oracles.relative(m, matrices[0]) for m in matrices[1:])
    assert fine < 0.2 * coarse  # the basis is sampled too, and turns freely between nearly equal eigenvalues


@pytest.mark.parametrize(
    "curvature", [hk.curvature.EKFAC(fisher="type-2"), hk.curvature.KFAC(fisher="type-2", split="exact")]
)
def test_factors_that_are_mostly_zero(curvature: hk.curvature.KFAC | hk.curvature.EKFAC) -> None:
    """A 3×3 kernel on an image of one pixel sees padding at eight of nine taps, on which LAPACK may give up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(128, 8, 3, padding=1), nn.Flatten(), nn.Linear(8, 4))
    weights = hk.SampleWeights(32)
    batch = torch.randn(32, 128, 1, 1).relu(), torch.arange(32) % 4, torch.arange(32)
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    found = hk.Implicit(curvature, hk.solvers.Direct(), cross="reverse").compute(problem, model, weights, batch, batch)
    model, weights = model.double(), weights.double()
    batch = batch[0].double(), *batch[1:]
    exact = hk.Implicit(curvature, hk.solvers.Direct(), cross="reverse").compute(problem, model, weights, batch, batch)
    assert oracles.relative(found.grads["weight"].double(), exact.grads["weight"]) < 1e-2


def test_exact_vectors_of_tokens_that_go_back_together_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """For them the spectrum has products of different tokens; drawn vectors, and a loss per example, have none."""
    monkeypatch.setattr("hyperkron.solution._warned", set())
    torch.manual_seed(0)
    model, x = torch.nn.Linear(5, 3), torch.randn(4, 6, 5)
    tokens, single = torch.randint(3, (4, 6)), torch.randint(3, (4,))

    def measured(fisher: str, y: torch.Tensor) -> None:
        rows = x if y.dim() == 2 else x[:, 0]
        problem = hk.BilevelProblem(
            lambda model, lam, batch: hk.losses.cross_entropy(model(rows), y, weight=lam().sigmoid()),
            lambda model, lam, batch: hk.losses.cross_entropy(model(rows), y),
        )
        hk.ekfac(0.1, fisher=fisher).compute(problem, model, hk.as_hyper(torch.zeros(4)), x, x)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured("rademacher", tokens)
        measured("type-2", single)
    with pytest.warns(hk.HyperkronWarning, match="use fisher='rademacher' or 'mc'"):
        measured("type-2", tokens)
