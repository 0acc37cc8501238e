"""Unrolling and implicit differentiation are one (appendix C of the paper): at one step, and at infinitely many.

dΦ_T/dλ = ∂_λ J_out − η Σ_{t<T} ∂²_λθ J_in (I − ηH)^t ∂_θ J_out      at a fixed point θ⁰ = θ* of the inner steps
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Case, make, mlp, random_weights
from hyperkron.hypergradient.steps import SGD


def at_the_minimum(model: nn.Module, loss: str) -> Case:
    """A problem whose inner level is solved to the last bit that Newton steps can give."""
    names = [name for name, _ in model.named_parameters()]
    case = make(model, (3,), loss=loss, hyper=random_weights(5), decay=dict.fromkeys(names, 0.05))
    params = list(case.params.values())
    for turn in range(400):
        matrix = case.hessian()
        g = oracles.gradient(case.plain_inner(), params).detach()
        shift = max(0.0, 1e-2 - float(torch.linalg.eigvalsh(matrix)[0]))
        step = oracles.tree(torch.linalg.solve(matrix + shift * torch.eye(len(g), dtype=DOUBLE), g), case.params)
        with torch.no_grad():
            for name, p in case.params.items():
                p -= (0.3 if turn < 20 else 1.0) * step[name]
        if float(g.norm()) < 1e-14:
            break
    assert float(oracles.gradient(case.plain_inner(), params).norm()) < 1e-13
    assert float(torch.linalg.eigvalsh(case.hessian())[0]) > 0.02
    return case


@pytest.fixture(scope="module", params=["linear, mse", "linear, cross entropy", "two layers, cross entropy"])
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    model, loss = {
        "linear, mse": (nn.Linear(3, 2), "mse"),
        "linear, cross entropy": (nn.Linear(3, 3), "cross_entropy"),
        "two layers, cross entropy": (mlp(3, 4, 3), "cross_entropy"),
    }[request.param]
    return at_the_minimum(model.to(DOUBLE), loss)


def rate(case: Case) -> float:
    return 1.0 / float(torch.linalg.eigvalsh(case.hessian())[-1])


def test_one_step_is_the_identity_formula(case: Case) -> None:
    """θ⁰ = θ¹ at the fixed point, and A⁻¹ = η."""
    for eta in (0.1, 1.0):
        one = hk.one_step(eta).compute(*case.arguments).grads
        assert oracles.relative(one, hk.identity(eta, cross="reverse").compute(*case.arguments).grads) < 1e-10
        size = sum(p.numel() for p in case.params.values())
        assert oracles.relative(one, oracles.implicit(case, torch.eye(size, dtype=DOUBLE) / eta)) < 1e-10


@pytest.mark.parametrize("steps", [2, 5, 20])
def test_finitely_many_steps_are_the_neumann_series(case: Case, steps: int) -> None:
    eta = rate(case)
    unrolled = hk.unrolled(steps, SGD(eta)).compute(*case.arguments).grads
    series = hk.neumann(steps - 1, step=eta, cross="reverse").compute(*case.arguments).grads
    assert oracles.relative(unrolled, series) < 1e-10


def test_infinitely_many_steps_are_the_implicit_hypergradient(case: Case) -> None:
    """The error is the contraction (1 − η·λmin) to the power T."""
    eta = rate(case)
    implicit = (
        hk.Implicit(hk.curvature.Hessian(), hk.solvers.CG(300, 1e-14), cross="reverse").compute(*case.arguments).grads
    )
    assert oracles.relative(implicit, oracles.implicit(case, case.hessian())) < 1e-8
    contraction = 1 - eta * float(torch.linalg.eigvalsh(case.hessian())[0])
    errors = []
    for steps in (10, 40, 160):
        errors.append(oracles.relative(hk.unrolled(steps, SGD(eta)).compute(*case.arguments).grads, implicit))
    print(f"contraction {contraction:.3f}, errors after 10, 40, 160 steps: {errors}")
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 10 * contraction**160 + 1e-9


def test_kfac_lies_between_the_identity_and_the_hessian(case: Case) -> None:
    """ "A middle ground between I and H": closer to the exact hypergradient than one step, where KFAC is not exact."""
    exact = oracles.implicit(case, case.hessian())
    kfac = (
        hk.Implicit(hk.curvature.KFAC(1e-6, fisher="type-2", split="exact"), hk.solvers.Direct())
        .compute(*case.arguments)
        .grads
    )
    one = hk.identity(rate(case)).compute(*case.arguments).grads
    assert oracles.relative(kfac, exact) < oracles.relative(one, exact)
