"""A diagonal matrix as an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperkron.curvature.base import Invertible
from hyperkron.trees import Tree


@dataclass
class DiagonalOperator(Invertible):
    """A = diag(1/inverse): ``solve`` multiplies by ``inverse``, ``matvec`` divides."""

    inverse: dict[str, Tensor | float]
    products: int = 0

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        return {name: (x / self.inverse[name]).to(x.dtype) for name, x in v.items()}

    def solve(self, b: Tree) -> Tree:
        found: Tree = {}
        for kind in (Tensor, float):  # one launch for all parameters of a kind
            names = [name for name in b if isinstance(self.inverse[name], kind)]
            if names:
                factors: Any = [self.inverse[name] for name in names]
                found.update(zip(names, torch._foreach_mul([b[name] for name in names], factors), strict=True))
        return {name: found[name].to(x.dtype) for name, x in b.items()}
