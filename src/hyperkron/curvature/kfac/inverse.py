"""Damped inverses of Kronecker blocks: factorise once, apply many times.

For a block B ⊗ A with damping δ the inverse acts on a matrix V of the weight's shape as

- factored damping (``pi``, ``plain`` or a callable):  V ↦ (B + δ_B I)⁻¹ V (A + δ_A I)⁻¹, by Cholesky;
- ``exact`` and EKFAC:  V ↦ Q_B [(Q_Bᵀ V Q_A) / (S + δ)] Q_Aᵀ, by eigendecomposition.

Martens & Grosse (2015) split δ as δ_A = π√δ, δ_B = √δ/π with π = √((tr A/dim A) / (tr B/dim B)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hyperkron.curvature.kfac.factors import (
    DenseInverse,
    DualInverse,
    Factor,
    FactorInverse,
    LowRank,
    dense,
    mean_diagonal,
)
from hyperkron.linalg import full_precision, spd_inverse
from hyperkron.solution import FactorizationError, HyperkronError, Status

Split = Literal["pi", "plain", "exact"] | Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""How δ is shared between the factors; a callable takes (A, B, δ) and returns (δ_A, δ_B), one number per group."""


@dataclass(frozen=True)
class FactoredInverse:
    """The inverses of both damped factors."""

    a: FactorInverse
    b: FactorInverse

    def solve(self, v: Tensor) -> Tensor:
        """(B + δ_B I)⁻¹ V (A + δ_A I)⁻¹."""
        return self.a.left(self.b.left(v).mT).mT

    def matvec(self, v: Tensor) -> Tensor:
        """(B + δ_B I) V (A + δ_A I)."""
        return self.a.times(self.b.times(v).mT).mT

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors it is made of, by name."""
        return {f"{side}.{key}": x for side, part in (("a", self.a), ("b", self.b)) for key, x in vars(part).items()}


@dataclass(frozen=True)
class EigenInverse:
    """Eigenvectors of both factors and the damped spectrum between them."""

    a: Tensor
    b: Tensor
    spectrum: Tensor

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors it is made of, by name."""
        return dict(vars(self))

    def solve(self, v: Tensor) -> Tensor:
        """Q_B [(Q_Bᵀ V Q_A) / spectrum] Q_Aᵀ."""
        return self.b @ ((self.b.mT @ v @ self.a) / self.spectrum) @ self.a.mT

    def matvec(self, v: Tensor) -> Tensor:
        """Q_B [(Q_Bᵀ V Q_A) · spectrum] Q_Aᵀ."""
        return self.b @ ((self.b.mT @ v @ self.a) * self.spectrum) @ self.a.mT


BlockInverse = FactoredInverse | EigenInverse


def load_inverse(state: dict[str, Tensor]) -> BlockInverse:
    """A block's inverse from its :meth:`state_dict`."""
    if "spectrum" in state:
        return EigenInverse(**state)
    sides: list[FactorInverse] = []
    for side in "ab":
        parts = {key[2:]: x for key, x in state.items() if key.startswith(f"{side}.")}
        sides.append(DenseInverse(**parts) if "matrix" in parts else DualInverse(**parts))
    return FactoredInverse(*sides)


def split_damping(a: Factor, b: Factor, damping: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """(δ_A, δ_B) for each group of a block."""
    if callable(split):
        return split(dense(a), dense(b), damping)
    root = damping.sqrt()
    mean_a, mean_b = mean_diagonal(a), mean_diagonal(b)
    if split == "plain":
        return root.expand_as(mean_a), root.expand_as(mean_b)
    if split != "pi":
        raise HyperkronError(f"split={split!r} is unknown; use 'pi', 'plain', 'exact' or a callable (A, B, δ).")
    pi = (mean_a / mean_b).sqrt()
    pi = torch.where((mean_a > 0) & (mean_b > 0), pi, torch.ones_like(pi))
    return pi * root, root / pi


def factored_inverses(
    factors: dict[str, tuple[Factor, Factor]], damping: dict[str, Tensor], split: Split
) -> tuple[dict[str, BlockInverse], Status]:
    """The damped inverse of every block, all systems of one size in one batch."""
    parts: list[tuple[Factor, Tensor]] = []
    for name, (a, b) in factors.items():
        delta_a, delta_b = split_damping(a, b, damping[name], split)
        parts += [(a, delta_a), (b, delta_b)]
    with full_precision():
        matrices = [m.rows @ m.rows.mT if isinstance(m, LowRank) else m for m, _ in parts]
    inverses, status = spd_inverses(matrices, [shift for _, shift in parts])
    made: list[FactorInverse] = [
        DualInverse(m.rows, inverse, shift) if isinstance(m, LowRank) else DenseInverse(inverse)
        for (m, shift), inverse in zip(parts, inverses, strict=True)
    ]
    return {name: FactoredInverse(made[2 * i], made[2 * i + 1]) for i, name in enumerate(factors)}, status


def eigen_bases(
    factors: dict[str, tuple[Factor, Factor]],
) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(eigenvalues of A, Q_A, eigenvalues of B, Q_B) of every block, negative rounding set to zero."""
    found = {}
    for name, (a, b) in factors.items():
        (values_a, q_a), (values_b, q_b) = _eigh(dense(a)), _eigh(dense(b))
        found[name] = (values_a.clamp_min(0), q_a, values_b.clamp_min(0), q_b)
    return found


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        try:
            values, vectors = torch.linalg.eigh(matrix.double())
        except torch.linalg.LinAlgError as error:
            raise FactorizationError(f"the eigendecomposition of a factor did not converge: {error}") from error
        values, vectors = values.to(matrix.dtype), vectors.to(matrix.dtype)
    return values, vectors


def spd_inverses(matrices: list[Tensor], shifts: list[Tensor]) -> tuple[list[Tensor], Status]:
    """(M + shift·I)⁻¹ for every M (groups, n, n), batched by size.

    A matrix whose Cholesky factorisation fails is tried in float64, then with 10, 100 and 1000 times its shift;
    then :class:`FactorizationError` is raised.
    """
    by_size: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for i, m in enumerate(matrices):
        by_size.setdefault((m.shape[-1], m.dtype, m.device), []).append(i)
    batches: list[tuple[list[int], Tensor, Tensor]] = []
    for members in by_size.values():
        stacked = torch.cat([matrices[i] for i in members])
        stacked.diagonal(dim1=-2, dim2=-1).add_(torch.cat([shifts[i] for i in members])[:, None])
        inverse, info = spd_inverse(stacked)
        batches.append((members, inverse, info))
    status = Status.DIRECT
    failed = torch.cat([info.ne(0) for _, _, info in batches]).tolist()
    out: list[Tensor] = [matrices[0]] * len(matrices)
    position = 0
    for members, inverse, info in batches:
        bad = failed[position : position + info.numel()]
        position += info.numel()
        row = 0
        for i in members:
            groups = matrices[i].shape[0]
            out[i] = inverse[row : row + groups]
            if any(bad[row : row + groups]):
                out[i] = _rescued(matrices[i], shifts[i])
                status = Status.MORE_DAMPING
            row += groups
    return out, status


def _rescued(matrix: Tensor, shift: Tensor) -> Tensor:
    """The inverse in float64, with more damping where that is not enough."""
    wide = matrix.double()
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    for factor in (1.0, 10.0, 100.0, 1000.0):
        inverse, info = spd_inverse(wide + factor * shift.double()[:, None, None] * eye)
        if not bool(info.any()) and bool(torch.isfinite(inverse).all()):
            return inverse.to(matrix.dtype)
    raise FactorizationError(
        f"a factor of size {matrix.shape[-1]} could not be factorised, even in float64 with 1000 times the damping "
        f"(largest entry {float(matrix.abs().max()):.3g}); raise damping."
    )
