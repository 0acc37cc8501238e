"""A dense matrix as an operator over several tensors of different shapes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hyperkron.curvature.base import Invertible, Operator
from hyperkron.solution import Status
from hyperkron.trees import Tree


def shapes_for(size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a matrix, a scalar and a vector that hold ``size`` numbers together, whichever fit."""
    shapes: dict[str, tuple[int, ...]] = {}
    if size >= 5:
        shapes["weight"] = (2, 2)
        size -= 4
    if size >= 2:
        shapes["scale"] = ()
        size -= 1
    shapes["bias"] = (size,)
    return shapes


def unflatten(vector: Tensor) -> Tree:
    """A tree of the shapes of :func:`shapes_for` from one vector."""
    shapes = shapes_for(len(vector))
    parts = vector.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def flatten(tree: Tree) -> Tensor:
    """The inverse of :func:`unflatten`."""
    names = shapes_for(sum(x.numel() for x in tree.values()))
    return torch.cat([tree[name].reshape(-1) for name in names])


def random_spd(size: int, condition: float, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A symmetric matrix with eigenvalues spread geometrically from 1 to ``condition``."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    eigenvalues = torch.logspace(0.0, math.log10(condition), size, dtype=torch.float64)
    return ((basis * eigenvalues) @ basis.T).to(dtype)


def random_vector(size: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A standard normal vector."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class DenseOperator(Operator):
    """v ↦ (A + δI) v for a dense A."""

    def __init__(self, matrix: Tensor, damping: float = 0.0) -> None:
        self.matrix = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        vector = flatten(v)  # in float32 also where the matrix, as a model might be, is in half precision
        return unflatten((self.matrix @ vector.to(self.matrix.dtype)).to(vector.dtype))


class DenseInvertible(DenseOperator, Invertible):
    """v ↦ (A + δI) v and its inverse, with a status to report."""

    def __init__(self, matrix: Tensor, damping: float = 0.0, status: Status = Status.DIRECT) -> None:
        super().__init__(matrix, damping)
        self.status = status

    def solve(self, b: Tree) -> Tree:
        return unflatten(torch.linalg.solve(self.matrix, flatten(b)))


class FailingOperator(DenseOperator):
    """A dense operator whose products become NaN after ``good`` of them."""

    def __init__(self, matrix: Tensor, good: int) -> None:
        super().__init__(matrix)
        self.good = good

    def matvec(self, v: Tree) -> Tree:
        product = super().matvec(v)
        return product if self.products <= self.good else {k: x * math.nan for k, x in product.items()}
