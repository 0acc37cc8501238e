"""Rules for the damping of KFAC and EKFAC. Each sees only what a run has.

    v_δ = (K + δI)⁻¹ b ,   b = ∂_θ J_out

with K the Kronecker curvature. Some rules read the factors of K, others try a grid of δ and need products with the
Gauss–Newton matrix G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import trees
from hyperkron.curvature import EKFAC, GGN, KFAC, Invertible, Point
from hyperkron.hypergradient import Hypergradient
from hyperkron.solution import HypergradientResult
from hyperkron.trees import Tree

At = tuple[hk.BilevelProblem, nn.Module, nn.Module, Any, Any]
Curved = type[KFAC] | type[EKFAC]


def solved(kind: Curved, damping: float, seed: int = 0) -> hk.Implicit:
    """A direct solve with this curvature; it does not look for the fastest cross term, as it is used for one call."""
    return hk.Implicit(kind(damping, seed=seed), hk.solvers.Direct(), cross="reverse")


class Ruled(Hypergradient):
    """KFAC with the δ that a rule takes at every call; every call draws other labels."""

    def __init__(self, rule: Callable[[At, int], float]) -> None:
        self.rule, self.calls = rule, 0

    def fresh(self) -> Ruled:
        return Ruled(self.rule)

    def compute(
        self, problem: hk.BilevelProblem, model: nn.Module, hyper: nn.Module, inner_batch: Any, outer_batch: Any
    ) -> HypergradientResult:
        at = problem, model, hyper, inner_batch, outer_batch
        self.calls += 1
        return solved(KFAC, self.rule(at, self.calls), self.calls).compute(*at)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Eigenvalues:
    """The mean and the largest eigenvalue of KFAC's product B ⊗ A, over all blocks."""

    def __init__(self, at: At) -> None:
        self.total, self.size, self.largest = 0.0, 0, 0.0
        with Point(*at) as point:
            _operator(KFAC(0.0, split=self._look), point)
        self.mean = self.total / self.size

    def _look(self, a: Tensor, b: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
        self.total += float((_trace(a) * _trace(b)).sum())
        self.size += a.shape[0] * a.shape[-1] * b.shape[-1]
        self.largest = max(self.largest, float((_top(a) * _top(b)).max()))
        return torch.ones(()), torch.ones(())


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _top(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(x)[..., -1]


def by_layer(share: float, largest: bool = False) -> hk.Implicit:
    """KFAC with a δ of its own in each block: a share of the block's mean, or largest, eigenvalue."""

    def split(a: Tensor, b: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
        mean_a, mean_b = _trace(a) / a.shape[-1], _trace(b) / b.shape[-1]
        unit = _top(a) * _top(b) if largest else mean_a * mean_b
        root, pi = (damping + share * unit).sqrt(), (mean_a / mean_b).sqrt()
        return pi * root, root / pi

    return hk.Implicit(KFAC(0.0, split=split), hk.solvers.Direct(), cross="reverse")


class Trials:
    """What a grid of dampings gives at one point, and which of them each rule takes."""

    def __init__(self, at: At, kind: Curved, grid: Sequence[float], seed: int = 0) -> None:
        self.at, self.grid = at, grid
        with Point(*at) as point:
            exact = GGN(0.0).operator(point, GGN(0.0).init())
            inverses = {d: _operator(kind(d, seed=seed), point) for d in grid}
            self.b = _gradients(point.outer().value, point.params)
            loss = point.inner().value
            self.start, self.g = float(loss.detach()), _gradients(loss, point.params)
            self.v = {d: inverse.solve(self.b) for d, inverse in inverses.items()}
            self.product = {d: exact.matvec(v) for d, v in self.v.items()}
            self.product_of_b = exact.matvec(self.b)
            self.steps = {d: trees.scale(inverse.solve(self.g), -1.0) for d, inverse in inverses.items()}
            self.bend = {d: float(trees.dot(s, exact.matvec(s))) for d, s in self.steps.items()}
            self.inverses = inverses

    def model(self, extra: float) -> float:
        """The δ with the lowest quadratic model of (G + extra·I)v = b along v_δ (Martens & Grosse, section 6)."""

        def fall(d: float) -> float:
            bend = float(trees.dot(self.v[d], self.product[d])) + extra * float(trees.dot(self.v[d], self.v[d]))
            return float(trees.dot(self.b, self.v[d])) ** 2 / bend

        return max(self.grid, key=fall)

    def residual(self, extra: float) -> float:
        """The δ whose (G + extra·I)v_δ has the highest cosine with b."""
        return max(self.grid, key=lambda d: cosine(trees.add(self.product[d], self.v[d], alpha=extra), self.b))

    def one_product(self, extra: float) -> float:
        """The δ with the highest cosine of (K + δI)⁻¹(G + extra·I)b with b: one product for all δ."""
        moved = trees.add(self.product_of_b, self.b, alpha=extra)
        return max(self.grid, key=lambda d: cosine(self.inverses[d].solve(moved), self.b))

    def levenberg(self) -> float:
        """The smallest δ whose Newton step lowers J_in by at least half of what the quadratic model says."""
        problem, model, hyper, inner, _ = self.at
        before, good = {n: p.detach().clone() for n, p in model.named_parameters()}, [max(self.grid)]
        for d, step in self.steps.items():
            expected = float(trees.dot(self.g, step)) + 0.5 * self.bend[d]
            state = torch.random.get_rng_state()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.add_(step[name])
                change = problem.inner(model, hyper, inner).item() - self.start
                for name, p in model.named_parameters():
                    p.copy_(before[name])
            torch.random.set_rng_state(state)
            good += [d] if expected < 0 and change / expected >= 0.5 else []
        return min(good)


def _operator(curvature: KFAC | EKFAC, point: Point) -> Invertible:
    return curvature.operator(point, curvature.init())


def _gradients(loss: Tensor, params: Tree) -> Tree:
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return trees.filled(params, found)


def cosine(a: Tree, b: Tree) -> float:
    """Of two vectors, in float64."""
    a, b = trees.map(Tensor.double, a), trees.map(Tensor.double, b)
    return float(trees.dot(a, b) / trees.norm(a) / trees.norm(b))
