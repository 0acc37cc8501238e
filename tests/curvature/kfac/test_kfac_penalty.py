"""An L2 penalty that falls on weights and biases unevenly enters every block as the diagonal that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Case, Mean, make, mlp, random_weights
from hyperkron import solution

DAMPING = 0.05
DECAYS: dict[str, dict[str, float | Tensor]] = {
    "weight alone": {"0.weight": 0.4},
    "bias alone": {"0.bias": 0.4},
    "both": {"0.weight": 0.4, "0.bias": 0.01},
    "tensors": {"0.weight": torch.tensor(0.1, dtype=DOUBLE), "0.bias": torch.tensor(0.02, dtype=DOUBLE)},
    "one of each input": {"0.weight": torch.tensor([0.1, 0.5, 2.0], dtype=DOUBLE)},
}
EXACT: dict[str, Callable[..., Any]] = {
    "kfac": lambda damping: hk.curvature.KFAC(damping, fisher="type-2", split="exact"),
    "ekfac": lambda damping: hk.curvature.EKFAC(damping, fisher="type-2"),
    "ekfac, lasting basis": lambda damping: hk.curvature.EKFAC(damping, fisher="type-2", basis_every=3),
}


def matrices(case: Case, curvature: Any) -> tuple[Tensor, Tensor]:
    """The damped curvature and its inverse, dense."""
    with case.point() as point:
        operator = curvature.operator(point, curvature.init())
        return oracles.dense(operator.matvec, case.params), oracles.dense(operator.solve, case.params)


@pytest.mark.parametrize("damping", [DAMPING, 0.0])
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", DECAYS)
def test_a_block_that_kfac_has_exactly_stays_exact(name: str, kind: str, damping: float) -> None:
    case = make(nn.Sequential(nn.Linear(3, 2)), (3,), count=9, decay=DECAYS[name])
    whole = case.hessian() + damping * torch.eye(8, dtype=DOUBLE)
    matrix, inverse = matrices(case, EXACT[kind](damping))
    tolerance = 1e-12 if damping else 1e-7  # without damping the unpenalised column gets √ε of the penalty
    assert oracles.relative(matrix, whole) < tolerance
    assert oracles.relative(inverse, torch.linalg.inv(whole)) < 100 * tolerance
    if damping:
        method = hk.Implicit(EXACT[kind](damping), hk.solvers.Direct(), cross="reverse")
        wanted = oracles.implicit(case, case.hessian(), damping=damping)
        assert oracles.relative(method.compute(*case.arguments).grads, wanted) < 1e-8


LAYERS: dict[str, Callable[[], Case]] = {
    "linear": lambda: make(mlp(4, 3, 3), (4,), loss="cross_entropy", count=9, hyper=random_weights(9)),
    "few rows": lambda: make(mlp(30, 12, 3), (30,), loss="cross_entropy", count=4),
    "convolution": lambda: make(
        nn.Sequential(nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), Mean(True), nn.Linear(4, 3)),
        (4, 3, 3),
        loss="cross_entropy",
        count=6,
    ),
}
DECAYED: dict[str, float | Tensor] = {"0.weight": 0.3, "2.bias": 0.2, "3.weight": 0.1, "3.bias": 0.02}


def built(case: Case, block: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """The whole matrix from ``block`` of every layer's (A, B, D), by loops."""
    whole = torch.zeros_like(case.l2())
    penalty = case.l2().diagonal()
    for name, (a, b) in case.slow_factors().items():
        order = oracles.joint_order(case.model.get_submodule(name), f"{name}.", case.params)
        d = (DAMPING + penalty[order]).reshape(len(a), b.shape[-1], a.shape[-1])[:, 0]
        parts = torch.block_diag(*[block(a[g], b[g], torch.diag(d[g])) for g in range(len(a))])
        whole[order[:, None], order] = parts
    return whole


@pytest.mark.parametrize("split", ["exact", "pi", "plain"])
@pytest.mark.parametrize("name", LAYERS)
def test_damping_with_uneven_penalties_is_as_declared(name: str, split: str) -> None:
    torch.manual_seed(0)
    case = LAYERS[name]()
    case.decay = {key: alpha for key, alpha in DECAYED.items() if key in case.params}

    def block(a: Tensor, b: Tensor, d: Tensor) -> Tensor:
        if split == "exact":
            return torch.kron(b, a) + torch.kron(torch.eye(len(b), dtype=DOUBLE), d)
        mean = d.diagonal().mean()
        e = d / mean
        pi = torch.ones((), dtype=DOUBLE)
        if split == "pi":
            inside = a / e.diagonal().sqrt() / e.diagonal().sqrt()[:, None]
            pi = (inside.trace() / len(a) / (b.trace() / len(b))).sqrt()
        return torch.kron(b + mean.sqrt() / pi * torch.eye(len(b), dtype=DOUBLE), a + pi * mean.sqrt() * e)

    wanted = built(case, block)
    matrix, inverse = matrices(case, hk.curvature.KFAC(DAMPING, fisher="type-2", split=split))  # type: ignore[arg-type]
    assert oracles.relative(matrix, wanted) < 1e-11
    assert oracles.relative(inverse, torch.linalg.inv(wanted)) < 1e-9


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", LAYERS)
def test_ekfac_adds_the_penalty_to_what_it_measures(name: str, sharing: Any) -> None:
    """E⁻¹(A − D)E⁻¹ is the best diagonal, in its own eigenbasis, for the block in these coordinates."""
    torch.manual_seed(0)
    case = LAYERS[name]()
    case.decay = {key: alpha for key, alpha in DECAYED.items() if key in case.params}
    curvature = hk.curvature.EKFAC(DAMPING, fisher="type-2", sharing=sharing)
    matrix, inverse = matrices(case, curvature)
    assert oracles.relative(inverse, torch.linalg.inv(matrix)) < 1e-9
    term = case.inner(case.model, case.hyper, case.inner_batch).terms[0]
    exact = oracles.fisher(term.output, list(term.vectors("type-2")), list(case.params.values()))
    d = DAMPING + case.l2().diagonal()
    found = (matrix - torch.diag(d)) / d.sqrt() / d.sqrt()[:, None]
    wanted = exact / d.sqrt() / d.sqrt()[:, None]
    for name in case.slow_factors():
        order = oracles.joint_order(case.model.get_submodule(name), f"{name}.", case.params)
        mine, best = found[order][:, order], wanted[order][:, order]
        q = torch.linalg.eigh(mine)[1]
        assert float((mine * (best - mine)).sum().abs()) < 1e-9 * float(best.square().sum())  # a projection of it
        assert oracles.relative((q.T @ mine @ q).diagonal().sum(), best.trace()) < 1e-9


def test_a_lasting_basis_follows_a_penalty_that_changes() -> None:
    """The spectrum is that of the block in the coordinates of the penalty as it is now: its trace there is exact."""
    case = make(nn.Sequential(nn.Linear(3, 2)), (3,), count=9)
    curvature = hk.curvature.EKFAC(DAMPING, fisher="type-2", basis_every=5)
    state = curvature.init()
    for alpha in (0.1, 0.1, 0.7):
        case.decay = {"0.weight": alpha}
        with case.point() as point:
            found = oracles.dense(curvature.operator(point, state).matvec, case.params)
        d = DAMPING + case.l2().diagonal()
        wanted = (case.hessian() - case.l2()).diagonal() / d
        assert oracles.relative((found.diagonal() / d - 1).sum(), wanted.sum()) < 1e-10
    assert state.basis_age == 2


@pytest.mark.parametrize("split", ["exact", "pi"])
def test_scales_are_part_of_the_state(split: Any) -> None:
    case = make(mlp(4, 3, 2), (4,), count=6, decay={"0.weight": 0.3})
    first = hk.Implicit(hk.curvature.KFAC(DAMPING, split=split, refresh_every=9), hk.solvers.Direct())
    first.compute(*case.arguments)
    second = hk.Implicit(hk.curvature.KFAC(DAMPING, split=split, refresh_every=9), hk.solvers.Direct())
    second.load_state_dict(first.state_dict())
    wanted, found = first.compute(*case.arguments), second.compute(*case.arguments)
    assert torch.equal(found.grads["weight"], wanted.grads["weight"])


@pytest.mark.parametrize("alpha", [0.3, torch.tensor(0.3, dtype=DOUBLE)], ids=["number", "tensor"])
def test_one_coefficient_for_all_needs_no_scales(alpha: float | Tensor) -> None:
    case = make(mlp(4, 3, 2), (4,), count=6)
    inner = lambda m, h, b: hk.losses.mse(m(b[0]), b[1], weight=h()) + hk.losses.l2(m, alpha)  # noqa: E731
    method = hk.kfac(DAMPING)
    method.compute(hk.BilevelProblem(inner, case.outer), *case.arguments[1:])
    assert method.state_dict()["curvature"]["scales"] == {}


def test_coefficients_of_single_rows_are_averaged_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", set())
    alpha = torch.tensor([[0.1], [0.3]], dtype=DOUBLE)
    case = make(nn.Sequential(nn.Linear(3, 2)), (3,), count=9, decay={"0.weight": alpha})
    with pytest.warns(UserWarning, match="mean over the rows"):
        found, _ = matrices(case, EXACT["kfac"](DAMPING))
    averaged = case.hessian() - case.l2() + DAMPING * torch.eye(8, dtype=DOUBLE)
    averaged += torch.diag(torch.tensor([0.4] * 6 + [0.0] * 2, dtype=DOUBLE))
    assert oracles.relative(found, averaged) < 1e-12
