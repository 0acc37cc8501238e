"""One system for the tests of the solvers, and dense float64 closed forms of what they find."""

from __future__ import annotations

import torch
from torch import Tensor

from dense_operator import flatten, random_spd, random_vector
from hyperkron.solution import Solution
from hyperkron.solvers import CG, GradientDescent, Neumann, Solver
from hyperkron.trees import Tree

N = 12
A = random_spd(N, condition=100.0, seed=0)
B = random_vector(N, seed=1)
EYE = torch.eye(N, dtype=torch.float64)
ITERATIVE: list[Solver] = [
    CG(4),
    Neumann(4),
    GradientDescent(4),
    Neumann(4, step=0.01),
    GradientDescent(4, step=0.01),
]


def close(actual: Tree | Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Equal to a relative error in norm."""
    vector = flatten(actual) if isinstance(actual, dict) else actual
    assert (vector - expected).norm() <= tolerance * expected.norm()


def true_residual(solution: Solution, matrix: Tensor, b: Tensor) -> float:
    return ((b - matrix @ flatten(solution.value)).norm() / b.norm()).item()


def krylov_minimiser(matrix: Tensor, b: Tensor, steps: int, start: Tensor | None = None) -> Tensor:
    """argmin of ½vᵀAv − bᵀv over v₀ + span{r₀, Ar₀, …}, by an orthonormal basis of that space."""
    v0 = torch.zeros_like(b) if start is None else start
    basis = torch.empty(len(b), 0, dtype=b.dtype)
    new = b - matrix @ v0
    for _ in range(steps):
        for _ in range(2):
            new = new - basis @ (basis.T @ new)
        basis = torch.cat([basis, (new / new.norm())[:, None]], dim=1)
        new = matrix @ basis[:, -1]
    return v0 + basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ (b - matrix @ v0))


def singular_float32() -> Tensor:
    """A positive semi-definite matrix of rank 10 and size 40, whose products carry float32 rounding."""
    basis, _ = torch.linalg.qr(random_spd(40, 10.0, seed=9))
    return ((basis[:, :10] * torch.linspace(1.0, 3.0, 10)) @ basis[:, :10].T).float()


def neumann_sum(matrix: Tensor, b: Tensor, terms: int, step: float) -> Tensor:
    """η Σ_{k=0}^{terms} (I − ηA)^k b, each power on its own."""
    m = torch.eye(len(b), dtype=b.dtype) - step * matrix
    return step * sum((torch.linalg.matrix_power(m, k) @ b for k in range(terms + 1)), torch.zeros_like(b))
