"""Inverses of Kronecker blocks in the eigenbasis of their factors, for exact damping and EKFAC."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperkron.curvature.kfac.factors import Factor, dense
from hyperkron.point import Point
from hyperkron.solution import FactorizationError, NonFiniteError, Status

Matrices = dict[str, Tensor]
"""One matrix (groups, d_out, d_in [+1]) for each block."""


@dataclass(frozen=True)
class EigenInverses:
    """Eigenvectors (Q_A, Q_B) of the factors of every block, and the damped spectrum between them."""

    blocks: dict[str, tuple[Tensor, Tensor, Tensor]]

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks."""
        return tuple(self.blocks)

    def solve(self, v: Matrices) -> Matrices:
        """Q_B [(Q_Bᵀ V Q_A) / spectrum] Q_Aᵀ for every block."""
        return {n: b @ ((b.mT @ v[n] @ a) / spectrum) @ a.mT for n, (a, b, spectrum) in self.blocks.items()}

    def matvec(self, v: Matrices) -> Matrices:
        """Q_B [(Q_Bᵀ V Q_A) · spectrum] Q_Aᵀ for every block."""
        return {n: b @ ((b.mT @ v[n] @ a) * spectrum) @ a.mT for n, (a, b, spectrum) in self.blocks.items()}

    def strategies(self) -> str:
        """How the blocks are inverted, as words."""
        return f"{len(self.blocks)} eigenbasis"

    def state_dict(self) -> dict[str, Any]:
        """Nested dictionaries of tensors and strings."""
        parts = {n: {"a": a, "b": b, "spectrum": s} for n, (a, b, s) in self.blocks.items()}
        return {"kind": "eigen", "blocks": parts}


def checked(point: Point, inverses: EigenInverses) -> EigenInverses:
    """Refuse a damped spectrum that cannot be divided by; one copy to the host."""
    extremes = [torch.stack([s.min(), s.max()]) for _, _, s in inverses.blocks.values()]
    for name, (low, high) in zip(inverses.names, torch.stack(extremes).tolist() if extremes else [], strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            remedy = point.culprits() or "look for overflow in the model, or use float64"
            raise NonFiniteError(f"the spectrum of {name} is not finite; {remedy}.")
        if low <= 0:
            raise FactorizationError(f"the damped spectrum of {name} reaches down to {low:.3g}; raise damping.")
    return inverses


Bases = dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]
"""(eigenvalues of A, Q_A, eigenvalues of B, Q_B) of every block."""


def eigen_bases(factors: dict[str, tuple[Factor, Factor]]) -> tuple[Bases, Status]:
    """The eigenbases of all blocks, negative rounding of eigenvalues set to zero, and how they were obtained."""
    found: Bases = {}
    status = Status.DIRECT
    for name, pair in factors.items():
        (values_a, q_a, direct_a), (values_b, q_b, direct_b) = (_eigh(dense(factor)) for factor in pair)
        found[name] = (values_a.clamp_min(0), q_a, values_b.clamp_min(0), q_b)
        status = status if direct_a and direct_b else Status.MORE_DAMPING
    return found, status


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Eigenvalues, eigenvectors, and whether the first try was enough.

    The library's routine can fail on a matrix with many rows of zeros (the patches of a convolution that sees mostly
    padding). Then float64 is tried, and then float64 with a ramp of up to 1e-9 of the mean on the diagonal, which parts
    the equal eigenvalues.
    """
    wide = matrix.double()
    mean = wide.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    ramp = 1e-9 * mean * torch.linspace(0, 1, wide.shape[-1], dtype=wide.dtype, device=wide.device)
    reason = ""
    for attempt in (matrix, wide, wide + torch.diag_embed(ramp)):
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError as error:
            reason = str(error)
            continue
        return values.to(matrix.dtype), vectors.to(matrix.dtype), not reason
    raise FactorizationError(
        f"the eigendecomposition of a factor of size {matrix.shape[-1]} did not converge ({reason}); "
        "raise damping, or look for extreme values in the batch."
    )
