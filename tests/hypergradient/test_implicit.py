"""Implicit hypergradients with every solver against the dense formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Case, Mean, make, mlp, random_weights


def convex() -> Case:
    """Damping 1 makes the Hessian positive definite here, which the tests check."""
    torch.manual_seed(0)
    return make(mlp(3, 4, 3), (3,), loss="cross_entropy", hyper=random_weights(5), decay={"0.weight": 0.1})


SOLVERS: dict[str, Callable[[hk.curvature.Hessian | hk.curvature.GGN], hk.Implicit]] = {
    "cg": lambda a: hk.Implicit(a, hk.solvers.CG(200, 1e-12)),
    "pcg": lambda a: hk.Implicit(a, hk.solvers.CG(200, 1e-12), preconditioner=hk.curvature.KFAC(1.0)),
    "pcg by ekfac": lambda a: hk.Implicit(a, hk.solvers.CG(200, 1e-12), preconditioner=hk.curvature.EKFAC(1.0)),
    "neumann": lambda a: hk.Implicit(a, hk.solvers.Neumann(300)),
    "gradient descent": lambda a: hk.Implicit(a, hk.solvers.GradientDescent(300)),
    "gradient descent by kfac": lambda a: hk.Implicit(
        a, hk.solvers.GradientDescent(100), preconditioner=hk.curvature.KFAC(1.0)
    ),
    "gradient descent by ekfac": lambda a: hk.Implicit(
        a, hk.solvers.GradientDescent(100), preconditioner=hk.curvature.EKFAC(1.0)
    ),
}


@pytest.mark.parametrize("curvature", [hk.curvature.Hessian, hk.curvature.GGN])
@pytest.mark.parametrize(
    ("solver", "cross"),
    [
        pytest.param(solver, cross, marks=pytest.mark.long if i % 2 == j else ())  # each with one way by ``make test``
        for i, solver in enumerate(SOLVERS)
        for j, cross in enumerate(("auto", "reverse"))
    ],
)
def test_converged_solvers_give_the_dense_hypergradient(
    solver: str, curvature: type[hk.curvature.Hessian] | type[hk.curvature.GGN], cross: str
) -> None:
    case = convex()
    matrix = case.hessian() if curvature is hk.curvature.Hessian else case.ggn()
    assert float(torch.linalg.eigvalsh(matrix)[0]) > -0.9
    made = SOLVERS[solver](curvature(1.0))
    made.cross = hk.Implicit(hk.curvature.Identity(), hk.solvers.Direct(), cross=cross).cross  # type: ignore[arg-type]
    result = made.compute(*case.arguments)
    assert result.status.ok
    assert oracles.relative(result.grads, oracles.implicit(case, matrix, damping=1.0)) < 1e-6
    assert result.outer_loss == pytest.approx(float(case.plain_outer().detach()), rel=1e-12)


@pytest.mark.parametrize(
    ("made", "curvature"),
    [
        (lambda: hk.cg(200, 1.0, tolerance=1e-12), "hessian"),
        (lambda: hk.cg(200, curvature=hk.curvature.GGN(1.0), tolerance=1e-12), "ggn"),
        (lambda: hk.pcg(200, 1.0, tolerance=1e-12), "ggn"),
        (lambda: hk.neumann(300, 1.0), "hessian"),
        (lambda: hk.gradient_descent(300, 1.0), "hessian"),
        (lambda: hk.gradient_descent(100, 1.0, preconditioner=hk.curvature.KFAC(1.0)), "hessian"),
    ],
    ids=["cg", "cg on the ggn", "pcg", "neumann", "gradient descent", "gradient descent by kfac"],
)
def test_named_methods_are_the_formula(made: Callable[[], hk.Implicit], curvature: str) -> None:
    case = convex()
    wanted = oracles.implicit(case, getattr(case, curvature)(), damping=1.0)
    assert oracles.relative(made().compute(*case.arguments).grads, wanted) < 1e-6


def test_identity_is_the_formula_with_the_identity() -> None:
    case = convex()
    eye = torch.eye(sum(p.numel() for p in case.params.values()), dtype=DOUBLE)
    found = hk.identity(0.3, cross="reverse").compute(*case.arguments).grads
    assert oracles.relative(found, oracles.implicit(case, eye / 0.3)) < 1e-12


def test_sama_is_the_formula_with_the_adam_diagonal() -> None:
    case = convex()
    optimizer = torch.optim.Adam(case.model.parameters(), lr=0.1)
    case.plain_inner().backward()
    optimizer.step()
    case.plain_inner().backward()
    before = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in case.model.parameters()}
    optimizer.step()
    slopes = []
    for p in case.params.values():
        g, m, s = p.grad, before[p]["exp_avg"], before[p]["exp_avg_sq"]
        assert g is not None
        after = 0.999 * s + 0.001 * g.square()
        slopes.append(0.1 * (0.1 * 0.999 * s - 0.9 * 0.001 * g * m) / (after.sqrt() + 1e-8) ** 3)
    matrix = torch.diag(1 / oracles.flat(slopes))
    found = hk.sama(optimizer, alpha=1e-4).compute(*case.arguments)
    assert oracles.relative(found.grads, oracles.implicit(case, matrix)) < 1e-6
    assert found.stats["cross"] == "difference"
    plain = hk.sama(None, alpha=1e-4).compute(*case.arguments)
    eye = torch.eye(len(matrix), dtype=DOUBLE)
    assert oracles.relative(plain.grads, oracles.implicit(case, eye)) < 1e-6


def test_the_direct_term_is_included() -> None:
    """J_out = … + ½‖λ‖²/10 adds λ/10, whatever the curvature."""
    case = convex()
    bare = hk.BilevelProblem(case.inner, lambda m, h, b: hk.losses.cross_entropy(m(b[0]), b[1]))
    for made in (hk.kfac(1.0, fisher="type-2"), hk.cg(50, 1.0), hk.identity(), hk.sama()):
        without = made.compute(bare, *case.arguments[1:]).grads["weight"]
        fresh = type(made)(made.curvature, made.solver)
        fresh.cross = made.cross
        total = fresh.compute(*case.arguments).grads["weight"]
        assert oracles.relative(total - without, 0.1 * case.hyper().detach()) < 1e-8


def test_backward_adds_to_the_gradient_of_lambda() -> None:
    case = convex()
    made = hk.cg(50, 1.0)
    wanted = made.compute(*case.arguments).grads["weight"]
    for turn in (1, 2):
        made.backward(*case.arguments)
        assert oracles.relative(case.hyper.weight.grad, turn * wanted) < 1e-10
    assert all(p.grad is None for p in case.model.parameters())


def ill_conditioned() -> Case:
    """Inputs of very different sizes, more examples than parameters: CG needs many products, KFAC knows the sizes."""
    torch.manual_seed(0)
    case = make(mlp(8, 6, 3), (8,), loss="cross_entropy", count=300)
    scales = torch.logspace(-1.5, 1.5, 8, dtype=DOUBLE)
    case.inner_batch = (case.inner_batch[0] * scales, case.inner_batch[1])
    case.outer_batch = (case.outer_batch[0] * scales, case.outer_batch[1])
    return case


def test_preconditioning_by_kfac_saves_products() -> None:
    case = ill_conditioned()
    damping = 1e-4
    exact = (
        hk.Implicit(hk.curvature.GGN(damping), hk.solvers.CG(2000, 1e-14), cross="reverse")
        .compute(*case.arguments)
        .grads
    )
    preconditioners = {
        "none": None,
        "kfac": hk.curvature.KFAC(damping, fisher="type-2"),
        "kfac, mc": hk.curvature.KFAC(damping),
        "kfac, exact damping": hk.curvature.KFAC(damping, fisher="type-2", split="exact"),
        "ekfac": hk.curvature.EKFAC(damping, fisher="type-2"),
    }
    spent, early = {}, {}
    for name, preconditioner in preconditioners.items():
        made = hk.Implicit(
            hk.curvature.GGN(damping), hk.solvers.CG(2000, 1e-6), preconditioner=preconditioner, cross="reverse"
        )
        result = made.compute(*case.arguments)
        assert result.status is hk.Status.CONVERGED
        assert oracles.relative(result.grads, exact) < 1e-4
        spent[name] = int(result.stats["products"])
        made = hk.Implicit(hk.curvature.GGN(damping), hk.solvers.CG(10), preconditioner=preconditioner, cross="reverse")
        early[name] = oracles.relative(made.compute(*case.arguments).grads, exact)
    print(f"products to a residual of 1e-6: {spent}; error of the hypergradient after 10 products: {early}")
    for name in list(preconditioners)[1:]:
        assert spent[name] < 0.9 * spent["none"]
        assert early[name] < 0.75 * early["none"]
    assert max(spent["kfac, exact damping"], spent["ekfac"]) < 0.6 * spent["none"]


def test_warm_start_continues_from_the_previous_solution() -> None:
    case = convex()
    warm, cold = hk.gradient_descent(10, 1.0), hk.gradient_descent(10, 1.0, warm_start=False)
    wanted = oracles.implicit(case, case.hessian(), damping=1.0)
    errors = [
        [oracles.relative(made.compute(*case.arguments).grads, wanted) for _ in range(6)] for made in (warm, cold)
    ]
    assert errors[0][0] == errors[1][0] == errors[1][-1]
    assert errors[0][-1] < 1e-2 * errors[0][0]
    again = hk.cg(3, 1.0, warm_start=True)
    for _ in range(10):
        result = again.compute(*case.arguments)
    assert oracles.relative(result.grads, wanted) < 1e-6


def kfac_matrix(case: Case, curvature: hk.curvature.KFAC) -> Tensor:
    """B ⊗ A and its damping at the point of ``case``, column by column."""
    with case.point() as point:
        return oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)


def test_a_solver_that_overrides_solve_is_asked_by_it() -> None:
    asked = []

    class Noted(hk.solvers.CG):
        def solve(self, operator: Any, b: Any, **options: Any) -> Any:
            asked.append(sorted(options))
            return super().solve(operator, b, **options)

    hk.Implicit(hk.curvature.GGN(1.0), Noted(3)).compute(*convex().arguments)
    assert asked == [["preconditioner", "start"]]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("curvature", [hk.curvature.Hessian, hk.curvature.GGN])
def test_a_few_preconditioned_steps_are_the_formula_with_their_polynomial(
    curvature: type[hk.curvature.Hessian] | type[hk.curvature.GGN], steps: int
) -> None:
    """v_k = (I − (I − ηM⁻¹A)^k) A⁻¹b, all dense, as the inverse of one matrix."""
    case, second = convex(), hk.curvature.KFAC(1.0, fisher="type-2")
    matrix, m = case.hessian() if curvature is hk.curvature.Hessian else case.ggn(), kfac_matrix(case, second)
    eye = torch.eye(len(m), dtype=DOUBLE)
    power = torch.linalg.matrix_power(eye - 0.7 * torch.linalg.solve(m, matrix + eye), steps)
    approximate = (eye - power) @ torch.linalg.inv(matrix + eye)
    made = hk.Implicit(
        curvature(1.0), hk.solvers.GradientDescent(steps, step=0.7), preconditioner=second, cross="reverse"
    )
    result = made.compute(*case.arguments)
    assert result.status is hk.Status.BUDGET and result.stats["products"] == steps - 1
    assert oracles.relative(result.grads, oracles.implicit(case, torch.linalg.inv(approximate))) < 1e-9


def test_amigo_follows_by_preconditioned_steps_from_the_last_solution() -> None:
    """v of two steps, the second from where the first ended, by hand on the full batch at the θ and λ of each."""
    case, second = convex(), hk.curvature.KFAC(1.0, fisher="type-2")
    algorithm = hk.algorithms.AmIGO(
        3, hypergradient=hk.gradient_descent(2, 1.0, step=0.5, preconditioner=second), outer_rate=0.1
    )
    state = algorithm.init(case.problem, case.model, case.hyper)
    batches, params = hk.algorithms.BatchSources(case.inner_batch, case.outer_batch), list(case.params.values())
    v = torch.zeros(sum(p.numel() for p in params), dtype=DOUBLE)
    for _ in range(2):
        before = case.hyper.weight.detach().clone()
        report = algorithm.step(state, batches)
        assert report.status is hk.Status.BUDGET and isinstance(state.hypergradient, hk.Implicit)
        after = case.hyper.weight.detach().clone()
        assert not torch.equal(before, after)
        with torch.no_grad():
            case.hyper.weight.copy_(before)  # where v was found
        matrix, m = case.hessian() + torch.eye(len(v), dtype=DOUBLE), kfac_matrix(case, second)
        b = oracles.gradient(case.plain_outer(), params).detach()
        for _ in range(2):
            v = v - 0.5 * torch.linalg.solve(m, matrix @ v - b)
        with torch.no_grad():
            case.hyper.weight.copy_(after)
        found = state.hypergradient.state.start
        assert found is not None and oracles.relative(found, oracles.tree(v, case.params)) < 1e-10


def test_negative_curvature_is_reported() -> None:
    torch.manual_seed(0)
    case = make(mlp(3, 6, 3), (3,), loss="cross_entropy", hyper=random_weights(5))
    assert float(torch.linalg.eigvalsh(case.hessian())[0]) < -1e-3
    result = hk.cg(50).compute(*case.arguments)
    assert result.status is hk.Status.NONPOSITIVE_CURVATURE
    assert not result.status.ok
    assert hk.pcg(50).compute(*case.arguments).status.ok


@pytest.mark.parametrize("solver", ["kfac", "cg", "pcg"])
def test_curvature_can_come_from_another_batch(solver: str) -> None:
    case = convex()
    torch.manual_seed(1)
    other = make(mlp(3, 4, 3), (3,), loss="cross_entropy", hyper=case.hyper, seed=7, decay=case.decay)
    other.model = case.model
    made = {
        "kfac": hk.Implicit(hk.curvature.KFAC(1.0, fisher="type-2", split="exact"), hk.solvers.Direct()),
        "cg": hk.cg(200, curvature=hk.curvature.GGN(1.0), tolerance=1e-12),
        "pcg": hk.pcg(200, 1.0, tolerance=1e-12),
    }[solver]
    found = made.compute(*case.arguments, curvature_batch=other.inner_batch).grads
    if solver == "kfac":
        with other.point() as point:
            curvature = hk.curvature.KFAC(1.0, fisher="type-2", split="exact")
            matrix = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
    else:
        matrix = other.ggn() + torch.eye(len(other.ggn()), dtype=DOUBLE)
    assert oracles.relative(found, oracles.implicit(case, matrix)) < 1e-6


def test_combinations_without_sense_are_refused() -> None:
    with pytest.raises(hk.HyperkronError, match="takes no preconditioner"):
        hk.Implicit(hk.curvature.GGN(), hk.solvers.Neumann(3), preconditioner=hk.curvature.KFAC())
    with pytest.raises(hk.HyperkronError, match="warm_start"):
        hk.Implicit(hk.curvature.KFAC(), hk.solvers.Direct(), warm_start=True)
    case = convex()
    with pytest.raises(hk.HyperkronError, match="no inverse"):
        hk.Implicit(hk.curvature.GGN(1.0), hk.solvers.Direct()).compute(*case.arguments)
    with pytest.raises(hk.HyperkronError, match="no inverse"):
        hk.Implicit(hk.curvature.GGN(1.0), hk.solvers.CG(3), preconditioner=hk.curvature.GGN(1.0)).compute(
            *case.arguments
        )
    with pytest.raises(hk.HyperkronError, match="no inverse"):
        hk.gradient_descent(3, 1.0, preconditioner=hk.curvature.Hessian(1.0)).compute(*case.arguments)
    with pytest.raises(hk.HyperkronError, match="cross='backward'"):
        hk.kfac(cross="backward")  # type: ignore[arg-type]


class Pool(nn.Module):
    """A convolution, a norm and a head: every kind of curvature KFAC knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4)
        self.mean, self.head, self.scale = Mean(True), nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mean(torch.tanh(self.norm(self.conv(x))))) * self.scale


@pytest.mark.parametrize(
    "curvature", [hk.curvature.KFAC(0.5), hk.curvature.KFAC(0.5, split="exact"), hk.curvature.EKFAC(0.5)]
)
def test_a_direct_solve_is_the_inverse_of_the_product(curvature: hk.curvature.KFAC | hk.curvature.EKFAC) -> None:
    """And the hypergradient is the formula with exactly this matrix in the place of A."""
    case = make(Pool(), (2, 3, 3), loss="cross_entropy", hyper=random_weights(5))
    with case.point() as point:
        operator = curvature.operator(point, curvature.init())
        matrix = oracles.dense(operator.matvec, case.params)
        inverse = oracles.dense(operator.solve, case.params)
    eye = torch.eye(len(matrix), dtype=DOUBLE)
    assert oracles.relative(matrix @ inverse, eye) < 1e-10
    found = hk.Implicit(curvature, hk.solvers.Direct(), cross="reverse").compute(*case.arguments).grads
    assert oracles.relative(found, oracles.implicit(case, matrix)) < 1e-8


class TwoHeads(nn.Module):
    """A head for each level on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)


@pytest.mark.parametrize(
    "made",
    [
        lambda: hk.cg(3, damping=0.0),
        lambda: hk.cg(3, curvature=hk.curvature.GGN(1e-3)),
        lambda: hk.neumann(20),
        lambda: hk.gradient_descent(20),
        lambda: hk.pcg(3),
    ],
)
def test_parameters_of_the_outer_loss_alone_do_not_disturb_the_solve(made: Any) -> None:
    """A is zero there, and iterations would be spent on them, but their v has no effect: as if they were frozen."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    model, hyper = TwoHeads().double(), hk.as_hyper(torch.randn(8, dtype=torch.float64))

    def inner(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
        decay = hk.losses.l2([*model.body.parameters(), *model.inner.parameters()], 0.3)
        return hk.losses.cross_entropy(model.inner(model.body(x).tanh()), y, weight=hyper().sigmoid()) + decay

    def outer(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
        return 10 * hk.losses.cross_entropy(model.outer(model.body(x + 0.3).tanh()), y)

    problem = hk.BilevelProblem(inner, outer)
    found = made().compute(problem, model, hyper, None, None)
    model.outer.requires_grad_(False)
    wanted = made().compute(problem, model, hyper, None, None)
    assert found.status is wanted.status
    assert oracles.relative(found.grads, wanted.grads) < 1e-6


def test_parameters_of_weights_alone_are_not_left_out_of_a_gauss_newton_solve() -> None:
    """The outputs do not depend on a network of weights, but ∂²_λθ J_in is not zero there: v = b / δ counts."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    model, hyper = TwoHeads().double(), hk.as_hyper(torch.randn(8, dtype=torch.float64))

    def inner(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
        weights = (model.outer(model.body(x))[:, 0] * hyper()).sigmoid()
        return hk.losses.cross_entropy(model.inner(model.body(x).tanh()), y, weight=weights)

    def outer(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model.outer(model.body(x + 0.3).tanh()), y)

    problem = hk.BilevelProblem(inner, outer)
    found = hk.cg(60, curvature=hk.curvature.GGN(0.1)).compute(problem, model, hyper, None, None)
    (b,) = torch.autograd.grad(outer(model, hyper, None).value, [model.outer.weight])
    torch.testing.assert_close(found.solution.value["outer.weight"], b / 0.1)
