"""Parts of a bilevel method that are not the library's, made of public names: one or two of each kind.

``test_extending.py`` holds each to under 30 lines, and to a dense oracle or a closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import trees
from hyperkron.algorithms import Algorithm, BatchSources, State, StepReport, derivatives
from hyperkron.curvature import Curvature, CurvatureState, Invertible, Layer, Operator, Point
from hyperkron.losses import Loss, Term
from hyperkron.solvers import LinearSystem, Solver
from hyperkron.trees import Tree

DELTA = 0.3


# --- a curvature ------------------------------------------------------------------------------------------------------


class Diagonal(Invertible):
    """diag(d); the inverse is zero where d is, unless it is made definite."""

    def __init__(self, d: Tree) -> None:
        self.d = d

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        return {name: self.d[name] * x for name, x in v.items()}

    def solve(self, b: Tree) -> Tree:
        return {name: (x / self.d[name]).masked_fill(self.d[name] == 0, 0.0) for name, x in b.items()}

    def definite(self) -> Diagonal:
        return Diagonal({name: d.masked_fill(d == 0, 1.0) for name, d in self.d.items()})


@dataclass(frozen=True)
class SquaredGradient(Curvature):
    """A = diag((∂_θ J_in)²)."""

    invertible: ClassVar[bool] = True
    records_inverse: ClassVar[bool] = True

    def operator(self, point: Point, state: CurvatureState) -> Diagonal:
        return Diagonal(squared_gradient(point))


def squared_gradient(point: Point) -> Tree:
    loss, params = point.inner(point.curvature_batch), point.params
    found = torch.autograd.grad(loss.value, list(params.values()), materialize_grads=True, allow_unused=True)
    return {name: g.square() for name, g in zip(params, found, strict=True)}


# --- a curvature with a memory ----------------------------------------------------------------------------------------


class KeptDiagonal(CurvatureState):
    """A diagonal and how many calls have reused it."""

    d: Tree | None = None
    age: int = 0

    def stats(self) -> dict[str, float | int | str]:
        return {"curvature_age": self.age}

    def state_dict(self) -> dict[str, Any]:
        return {"d": self.d, "age": self.age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.d, self.age = state["d"], state["age"]

    @property
    def kept(self) -> Tree | None:
        return self.d

    def adopt(self, other: CurvatureState) -> None:
        self.d = other.kept

    def let_go(self) -> None:
        self.d = None

    def replayed(self, made: CurvatureState | None) -> None:
        self.d, self.age = (self.d, self.age + 1) if made is None else (made.kept, 0)


@dataclass(frozen=True)
class LazySquaredGradient(Curvature):
    """The same, measured in every ``every``-th call."""

    every: int = 3

    invertible: ClassVar[bool] = True
    records_inverse: ClassVar[bool] = True

    def init(self) -> KeptDiagonal:
        return KeptDiagonal()

    def due(self, state: Any) -> bool:
        return state.d is None or state.age + 1 >= self.every

    def operator(self, point: Point, state: Any) -> Diagonal:
        if self.due(state):
            state.d, state.age = {n: d + DELTA for n, d in squared_gradient(point).items()}, 0
        else:
            state.age += 1
        return Diagonal(state.d)


# --- a curvature of products, whose graph gives the cross term and the gradient as well -------------------------------


class GraphOperator(Operator):
    """v ↦ ∇²_θθ J_in v from one graph, which gives the cross term as well."""

    def __init__(self, point: Point) -> None:
        self.params = point.params
        value = point.inner(point.curvature_batch, differentiable=True).value
        self.graph = torch.autograd.grad(value, list(self.params.values()), create_graph=True)

    def along(self, v: Tree, inputs: Tree) -> Tree:
        vectors = [v[name] for name in self.params]
        found = torch.autograd.grad(self.graph, list(inputs.values()), vectors, retain_graph=True)
        return dict(zip(inputs, found, strict=True))

    @property
    def gradients(self) -> Tree:
        return {name: g.detach() for name, g in zip(self.params, self.graph, strict=True)}

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        return self.along(v, self.params)

    def cross(self, v: Tree, hypers: Tree) -> Any:
        return self.along(v, hypers)


@dataclass(frozen=True)
class GraphHessian(Curvature):
    """The Hessian."""

    def operator(self, point: Point, state: CurvatureState) -> GraphOperator:
        return GraphOperator(point)


# --- a solver ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SteepestDescent(Solver):
    """v ← v + (rᵀr / rᵀAr) r with r = b − Av (Cauchy, 1847)."""

    iterations: int = 10

    def _solve(self, system: LinearSystem) -> hk.solution.Solution:
        v, r = trees.zeros_like(system.b), system.b
        for _ in range(self.iterations):
            product = system.operator.matvec(r)
            step = trees.dot(r, r) / trees.dot(r, product)
            v, r = trees.add(v, r, alpha=step), trees.add(r, product, alpha=-step)
        residual = float(trees.norm(r) / trees.norm(system.b))
        return hk.solution.Solution(v, hk.Status.BUDGET, self.iterations, self.iterations, residual)


# --- a loss -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PoissonTerm(Term):
    """e^f − y·f, summed over an example's entries: ∂²c/∂f² = diag(e^f)."""

    target: Tensor

    def _sampled(self, root: Tensor, samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        for _ in range(samples):
            yield (self.point.exp() - torch.poisson(self.point.exp(), generator=generator)) * root

    def _exact(self, root: Tensor) -> Iterator[Tensor]:
        for unit in torch.eye(self.output.shape[1]).to(root):
            yield (self.point / 2).exp() * root * unit

    def _empirical(self, root: Tensor) -> Tensor:
        return (self.point.exp() - self.target) * root

    def _criterion_product(self, v: Tensor) -> Tensor:
        return self.point.exp() * v


def poisson(output: Tensor, target: Tensor, weight: Tensor | None = None) -> Loss:
    rows, share = (output.exp() - target * output).sum(1), 1 / len(output)
    weight = torch.ones_like(rows.detach()) if weight is None else weight
    term = PoissonTerm(output, weight.detach() * share, rows, None, target, factors=(weight, share))
    return Loss((weight * rows).sum() * share, (term,))


# --- a module and its layer for KFAC ----------------------------------------------------------------------------------


class Quadratics(nn.Module):
    """z = W [x, x²] + b."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, 2 * d_in) / 4)
        self.bias = nn.Parameter(torch.randn(d_out))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.cat((x, x * x), -1), self.weight, self.bias)


@dataclass(frozen=True)
class QuadraticsLayer(Layer):
    """Its rows are a = [x, x²]."""

    d_in: int
    d_out: int
    groups: int = 1

    def inputs(self, x: Tensor, sharing: str) -> Iterator[Tensor]:
        yield torch.cat((x, x * x), -1)[None]

    def gradients(self, g: Tensor, sharing: str) -> Iterator[Tensor]:
        yield g[None]

    def positions(self, x: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.cat((x, x * x), -1)[:, None, None], g[:, None, None]


def quadratics(module: nn.Module) -> Layer | None:
    return QuadraticsLayer(*reversed(module.weight.shape)) if isinstance(module, Quadratics) else None


# --- an algorithm -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeavyBall(Algorithm):
    """Several steps on θ, then m ← βm + dΦ/dλ and λ ← λ − γm (Polyak, 1964)."""

    hypergradient: hk.hypergradient.Hypergradient = field(default_factory=lambda: hk.cg(10, 0.0))
    inner_steps: int = 10
    momentum: float = 0.5

    def prepare(self, state: State) -> None:
        state.trees["m"] = trees.zeros_like(state.outer.values())

    def step(self, state: State, batches: BatchSources) -> StepReport:
        inner_loss = derivatives.descend(state, batches, self.inner_steps)
        result = derivatives.hypergradient(state, batches)
        state.trees["m"] = trees.add(result.grads, state.trees["m"], alpha=self.momentum)
        state.outer.step(state.trees["m"])
        return state.finish(result.outer_loss, state.trees["m"], inner_loss, status=result.status, stats=result.stats)
