"""Everything can be added from outside: a curvature, a solver, a loss, a layer for KFAC and an algorithm.

They are in ``extensions.py``, written with public names only, each in under 30 lines; here they are held to dense
oracles and closed forms.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import extensions
import hyperkron as hk
import oracles
import replaying
from extensions import (
    DELTA,
    Diagonal,
    GraphHessian,
    GraphOperator,
    HeavyBall,
    KeptDiagonal,
    LazySquaredGradient,
    PoissonTerm,
    Quadratics,
    QuadraticsLayer,
    SquaredGradient,
    SteepestDescent,
    poisson,
    quadratics,
)
from hyperkron.curvature import Curvature, CurvatureState, Invertible, Operator
from hyperkron.losses import Loss
from hyperkron.solvers import Solver
from quadratic import Quadratic

device = replaying.device


# --- a curvature -----------------------------------------------------------------------------------------------------


@dataclass
class TwoHeads:
    """J_in = mean σ_n ½‖first(x_n) − y_n‖², J_out = mean ½‖first(x'_n) + second(x'_n) − y'_n‖²."""

    model: nn.ModuleDict
    hyper: nn.Module
    inner_batch: tuple[Tensor, Tensor]
    outer_batch: tuple[Tensor, Tensor]

    def outputs(self) -> tuple[Tensor, Tensor]:
        (x, _), (z, _) = self.inner_batch, self.outer_batch
        return self.model["first"](x), self.model["first"](z) + self.model["second"](z)

    def plain_inner(self) -> Tensor:
        return cases.plain_mse(self.outputs()[0], self.inner_batch[1], self.hyper())

    def plain_outer(self) -> Tensor:
        return cases.plain_mse(self.outputs()[1], self.outer_batch[1], None)

    @property
    def arguments(self) -> tuple[Any, ...]:
        problem = hk.BilevelProblem(
            lambda model, hyper, batch: hk.losses.mse(model["first"](batch[0]), batch[1], weight=hyper()),
            lambda model, hyper, batch: hk.losses.mse(sum(head(batch[0]) for head in model.values()), batch[1]),
        )
        return problem, self.model, self.hyper, self.inner_batch, self.outer_batch


def two_heads() -> TwoHeads:
    torch.manual_seed(0)
    inner, outer = ((torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in (6, 5))
    heads = {name: nn.Linear(3, 2, dtype=torch.float64) for name in ("first", "second")}
    return TwoHeads(nn.ModuleDict(heads), cases.random_weights(6), inner, outer)


def solution(case: TwoHeads, matrix: Tensor) -> Tensor:
    """v = A⁺b."""
    params = list(oracles.trainable(case.model).values())
    return torch.linalg.pinv(matrix) @ oracles.gradient(case.plain_outer(), params).detach()


def test_a_curvature_solves_directly() -> None:
    case = two_heads()
    params = list(oracles.trainable(case.model).values())
    matrix = torch.diag(oracles.gradient(case.plain_inner(), params).detach().square())
    result = hk.Implicit(SquaredGradient(), hk.solvers.Direct()).compute(*case.arguments)
    assert oracles.relative(oracles.flat(result.solution.value), solution(case, matrix)) < 1e-12
    cross = oracles.hessian(case.plain_inner, params, list(case.hyper.parameters()))
    assert oracles.relative(oracles.flat(result.grads), -cross.T @ solution(case, matrix)) < 1e-6  # a difference
    assert result.status is hk.Status.DIRECT and result.stats["iterations"] == 0


def test_a_curvature_is_made_definite_to_precondition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first head's parameters alone have curvature; a preconditioner that is zero elsewhere never gets there.

    On a curvature batch of its own, for else the other head is left out of the solve.
    """
    case = two_heads()
    other = tuple(x.clone() for x in case.inner_batch)
    params = list(oracles.trainable(case.model).values())
    matrix = oracles.hessian(case.plain_inner, params) + DELTA * torch.eye(16, dtype=torch.float64)
    method = hk.pcg(60, curvature=hk.curvature.Hessian(DELTA), preconditioner=SquaredGradient())

    def error() -> float:
        found = method.compute(*case.arguments, curvature_batch=other).solution
        assert found is not None
        return oracles.relative(oracles.flat(found.value), solution(case, matrix))

    assert error() < 1e-6
    monkeypatch.setattr(Diagonal, "definite", Invertible.definite)
    assert error() > 0.1


def test_a_curvature_says_what_it_is_for() -> None:
    with pytest.raises(hk.HyperkronError, match="SquaredGradient cannot be used in SOBA"):
        hk.algorithms.SOBA(curvature=SquaredGradient())
    with pytest.raises(hk.HyperkronError, match="graph=True does not work with SquaredGradient and CG"):
        hk.Implicit(SquaredGradient(), hk.solvers.CG(), graph=True)
    assert hk.Implicit(SquaredGradient(), hk.solvers.Direct()).measures_curvature


# --- its memory ------------------------------------------------------------------------------------------------------


def test_what_a_curvature_remembers_is_reported_and_saved() -> None:
    case = two_heads()
    first, second = (hk.Implicit(LazySquaredGradient(), hk.solvers.Direct()) for _ in range(2))
    problem, model, hyper, inner, outer = case.arguments
    results = [first.compute(problem, model, hyper, (inner[0] * k, inner[1]), outer) for k in range(1, 5)]
    assert [result.stats["curvature_age"] for result in results] == [0, 1, 2, 0]
    solved = [oracles.flat(result.solution.value) for result in results]
    assert torch.equal(solved[0], solved[2]) and not torch.equal(solved[2], solved[3])
    second.load_state_dict(first.state_dict())
    assert second.compute(*case.arguments).stats["curvature_age"] == 1


@pytest.mark.parametrize(("curvature", "recordings"), [(SquaredGradient(), 1), (LazySquaredGradient(), 2)])
@pytest.mark.parametrize("odd", [0, 6])  # a step that measures anew on a batch of another size, which is not recorded
def test_a_curvature_is_recorded(device: str, curvature: Curvature, recordings: int, odd: int) -> None:
    def run(graph: bool) -> list[Any]:
        replaying.METHOD[:] = [hk.Implicit(curvature, hk.solvers.Direct(), graph=graph)]
        return replaying.trained(replaying.METHOD[0], device, size=lambda i: 5 if 0 < i == odd else 8)

    expected, found = run(False), run(True)
    replaying.close(found, expected)
    assert replaying.Rerun.made == recordings
    assert [r.stats.get("curvature_age") for r in found] == [r.stats.get("curvature_age") for r in expected]


@pytest.mark.parametrize("method", ["replayed", "adopt"])
def test_a_memory_that_cannot_be_recorded_is_refused(device: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptDiagonal, method, getattr(CurvatureState, method))
    replaying.METHOD[:] = [hk.Implicit(LazySquaredGradient(), hk.solvers.Direct(), graph=True)]
    with pytest.raises(hk.HyperkronError, match=rf"KeptDiagonal .* has no {method}\(\); write it, or use graph=False"):
        replaying.trained(replaying.METHOD[0], device, size=lambda i: 5 if i == 6 else 8)


def test_a_replay_that_fails_lets_go_of_what_it_has_written_over(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, gone = hk.Implicit(LazySquaredGradient(1), hk.solvers.Direct(), graph=True), []
    monkeypatch.setattr(KeptDiagonal, "let_go", lambda state: gone.append(state.kept))
    replaying.METHOD[:] = [method]
    arguments = replaying.PROBLEM, replaying.network(device), hk.SampleWeights(80).to(device)
    batches, others = [replaying.batch(i, device) for i in range(4)], [replaying.batch(i, device) for i in (50, 60)]
    for b in batches[:3]:
        method.compute(*arguments, b, others[0], curvature_batch=others[1])
    assert (replaying.Rerun.made, gone) == (1, [])
    kept = method.state.curvature.kept
    batches[3][0][0] = float("nan")  # in the cross term alone
    with pytest.raises(hk.NonFiniteError):
        method.compute(*arguments, batches[3], others[0], curvature_batch=others[1])
    assert len(gone) == 1 and gone[0] is kept


# --- a curvature of products ------------------------------------------------------------------------------------------


def counted(case: cases.Case, calls: list[int]) -> tuple[Any, ...]:
    """The case's arguments; evaluations of J_in are noted."""

    def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> Loss:
        calls.append(1)
        return case.inner(model, hyper, batch)

    return hk.BilevelProblem(inner, case.outer), *case.arguments[1:]


def test_an_operator_gives_the_cross_term_from_its_own_graph() -> None:
    case = cases.make(cases.mlp(3, 2), (3,), hyper=cases.random_weights(5))
    wanted, evaluations = oracles.implicit(case, case.hessian()), {}
    for curvature in (hk.curvature.Hessian(), GraphHessian()):
        calls: list[int] = []
        method = hk.Implicit(curvature, hk.solvers.CG(40, tolerance=1e-12))
        arguments = counted(case, calls)
        assert oracles.relative(method.compute(*arguments).grads, wanted) < 1e-8
        assert method.compute(*arguments).stats["cross"] == "reverse"
        evaluations[type(curvature)] = len(calls)
    assert evaluations[GraphHessian] == evaluations[hk.curvature.Hessian]


def test_single_loop_algorithms_take_any_curvature_of_products() -> None:
    found = []
    for curvature in (hk.curvature.Hessian(), GraphHessian()):
        problem = Quadratic()
        model, hyper = problem.modules()
        data = (hk.algorithms.Examples(*part, batch_size=problem.examples) for part in problem.data())
        hk.fit(problem.problem(), model, hyper, hk.algorithms.SOBA(curvature=curvature), *data, steps=5)
        found.append(hyper().detach().clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0.0)


# --- a solver --------------------------------------------------------------------------------------------------------


def test_a_solver() -> None:
    case = cases.make(cases.mlp(3, 2), (3,), hyper=cases.random_weights(5))
    b = oracles.gradient(case.plain_outer(), list(case.params.values())).detach()
    matrix = case.hessian() + DELTA * torch.eye(len(b), dtype=b.dtype)
    one = hk.Implicit(hk.curvature.Hessian(DELTA), SteepestDescent(1)).compute(*case.arguments)
    first = (b @ b) / (b @ matrix @ b) * b
    assert oracles.relative(oracles.flat(one.solution.value), first) < 1e-12
    assert one.stats["residual"] == pytest.approx(float((b - matrix @ first).norm() / b.norm()), rel=1e-9)
    many = hk.Implicit(hk.curvature.Hessian(DELTA), SteepestDescent(300)).compute(*case.arguments)
    assert oracles.relative(many.grads, oracles.implicit(case, case.hessian(), damping=DELTA)) < 1e-9
    assert (many.status, many.stats["products"]) == (hk.Status.BUDGET, 300)


def test_what_a_solver_does_not_do_is_refused_by_its_flags() -> None:
    for options, named in (
        ({"preconditioner": hk.curvature.KFAC()}, "SteepestDescent takes no preconditioner"),
        ({"warm_start": True}, "SteepestDescent has no use for warm_start"),
        ({"graph": True}, "solver=SteepestDescent.*may read from the device"),
    ):
        with pytest.raises(hk.HyperkronError, match=named):
            hk.Implicit(hk.curvature.Hessian(), SteepestDescent(), **options)  # type: ignore[arg-type]
    with pytest.raises(hk.HyperkronError, match=r"SteepestDescent.*cannot be warm-started"):
        hk.algorithms.AmIGO(hypergradient=hk.Implicit(hk.curvature.Hessian(), SteepestDescent()))


# --- a loss ----------------------------------------------------------------------------------------------------------


def plain_poisson(output: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    rows = nn.functional.poisson_nll_loss(output, target, reduction="none").sum(1)
    return (rows if weight is None else weight * rows).mean()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> cases.Case:
    monkeypatch.setitem(cases.LOSSES, "poisson", (poisson, plain_poisson))
    return cases.make(cases.mlp(3, 4, 2), (3,), loss="poisson", hyper=cases.random_weights(5))


def test_a_loss(counts: cases.Case) -> None:
    inner = counts.inner(counts.model, counts.hyper, counts.inner_batch)
    assert inner.item() == pytest.approx(counts.plain_inner().item(), rel=1e-12)
    [term] = inner.terms
    leaf, y = term.output.detach().requires_grad_(), counts.inner_batch[1]
    dense = oracles.hessian(lambda: plain_poisson(leaf, y, counts.hyper().detach()), [leaf])
    v = torch.randn(leaf.shape, dtype=leaf.dtype)
    assert oracles.relative(term.hessian_product(v).reshape(-1), dense @ v.reshape(-1)) < 1e-12
    drawn = term.vectors("mc", 20000, torch.Generator().manual_seed(0))
    for vectors, tolerance in ((term.vectors("type-2"), 1e-12), (drawn, 0.05)):
        blocks = torch.stack([torch.einsum("ni,nj->nij", s, s) for s in vectors]).sum(0)
        assert oracles.relative(torch.block_diag(*blocks), dense) < tolerance
    [empirical] = term.vectors("empirical")
    slopes = oracles.gradient(plain_poisson(leaf, y, None), [leaf]).reshape(leaf.shape)  # 1/N inside
    assert oracles.relative(empirical, slopes * (len(leaf) * counts.hyper().detach()).sqrt()[:, None]) < 1e-12


def test_every_curvature_reads_a_loss(counts: cases.Case) -> None:
    """The Gauss–Newton matrix and its blocks, dense, with the output Hessian by autograd."""
    wanted = oracles.implicit(counts, counts.ggn(), damping=DELTA)
    found = hk.cg(40, DELTA, curvature=hk.curvature.GGN(DELTA)).compute(*counts.arguments)
    assert oracles.relative(found.grads, wanted) < 1e-8
    one = cases.make(cases.mlp(3, 1), (3,), loss="poisson", count=1)  # one example: B ⊗ A is the block itself
    exact = hk.kfac(DELTA, fisher="type-2", split="exact").compute(*one.arguments)
    assert oracles.relative(exact.grads, oracles.implicit(one, one.ggn(), damping=DELTA)) < 1e-5  # a difference


# --- a layer for KFAC ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "curvature",
    [
        hk.curvature.KFAC(DELTA, fisher="type-2", split="exact", strict=True, layers=[quadratics]),
        hk.curvature.EKFAC(DELTA, fisher="type-2", strict=True, layers=[quadratics]),
    ],
)
@pytest.mark.parametrize("count", [4, 30])  # fewer rows than columns, and more
def test_a_layer(curvature: Any, count: int) -> None:
    """For the squared error of one layer and equal weights the block B ⊗ A is the Gauss–Newton matrix."""
    torch.manual_seed(0)
    case = cases.make(Quadratics(3, 2), (3,), count=count)
    result = hk.Implicit(curvature, hk.solvers.Direct(), cross="reverse").compute(*case.arguments)
    assert oracles.relative(result.grads, oracles.implicit(case, case.ggn(), damping=DELTA)) < 1e-10
    assert result.stats["coverage"] == 1.0


# --- an algorithm ----------------------------------------------------------------------------------------------------


def sources(problem: Quadratic) -> tuple[Any, Any]:
    return tuple(hk.algorithms.Examples(*part, batch_size=problem.examples) for part in problem.data())  # type: ignore[return-value]


def test_an_algorithm_is_run_by_fit(tmp_path: Path) -> None:
    problem = Quadratic(direct=0.5)

    def run(steps: int, **options: Any) -> tuple[Tensor, Any]:
        model, hyper = problem.modules()
        algorithm = HeavyBall(inner_rate=0.3, outer_rate=0.3)
        done = hk.fit(problem.problem(), model, hyper, algorithm, *sources(problem), steps=steps, **options)
        return hyper().detach().clone(), done

    found, done = run(80)
    assert oracles.relative(found, problem.solution()) < 1e-8
    assert done.history.column("outer_loss")[-1] == pytest.approx(float(problem.value(found)), rel=1e-6)
    for steps in (10, 20):
        resumed, _ = run(steps, resume=tmp_path, callbacks=[hk.Checkpoint(tmp_path, every=5)])
    assert torch.equal(resumed, run(20)[0])


# --- the rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        (Diagonal, SquaredGradient),
        (KeptDiagonal,),
        (LazySquaredGradient,),
        (GraphOperator,),
        (SteepestDescent,),
        (PoissonTerm, poisson),
        (QuadraticsLayer, quadratics),
        (HeavyBall,),
    ],
)
def test_each_takes_less_than_thirty_lines(parts: tuple[Any, ...]) -> None:
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) < 30


def test_public_names_are_enough() -> None:
    tree = ast.parse(Path(extensions.__file__).read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = {node.module for node in imports if str(node.module).startswith("hyperkron")}
    parts = {f"hyperkron.{part}" for part in ("algorithms", "curvature", "losses", "solvers", "trees")}
    assert own == {"hyperkron"} | parts
    assert not [name.name for node in imports for name in node.names if name.name.startswith("_")]


def concrete(kind: type) -> set[str]:
    """The names of the library's classes of a kind that can be made."""
    made = {kind.__name__} if kind.__module__.startswith("hyperkron.") and not inspect.isabstract(kind) else set()
    below = {c.__name__ for c in kind.__subclasses__() if c.__module__.startswith("hyperkron.")}
    return made.union(below, *(concrete(c) for c in kind.__subclasses__())) - {"Invertible", "CurvatureState"}


@pytest.mark.parametrize("part", ["hypergradient", "cross", "algorithms", "training"])
def test_nothing_above_asks_for_the_type_of_a_curvature_or_solver(part: str) -> None:
    kinds = set().union(*map(concrete, (Operator, CurvatureState, Curvature, Solver)))
    assert {"KFAC", "EKFAC", "KroneckerState", "KroneckerOperator", "HessianOperator", "Identity", "Direct"} <= kinds
    asked: list[str] = []
    for path in (Path(hk.__file__).parent / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                names |= {n.attr for n in ast.walk(node.args[1]) if isinstance(n, ast.Attribute)}
                asked += [f"{path.name}: {ast.unparse(node)}" for _ in names & kinds]
    assert not asked
