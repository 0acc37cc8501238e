"""Inverses of Kronecker blocks in the eigenbasis of their factors, for exact damping and EKFAC.

A factor of few rows X (R, d) has at most R eigenvalues that are not zero. Their eigenvectors follow from

    Xᵀ = Q₀ T  (QR) ,    T Tᵀ = U Λ Uᵀ ,    Q = Q₀ U ,    XᵀX = Q Λ Qᵀ ,

an eigendecomposition of size R instead of d. Q spans all rows and is orthonormal to working precision for any rank.
(Xᵀ times the eigenvectors of XXᵀ would not be, because it divides by the roots of eigenvalues.) All other eigenvalues
are zero, so any vectors orthogonal to Q complete the basis, such as those of the QR decomposition. A basis without them
is called thin. Outside a thin basis the block is δI,

    A: V ↦ δV + Q_B [M ∘ S] Q_Aᵀ ,    A⁻¹: V ↦ (V − Q_B M Q_Aᵀ)/δ + Q_B [M/(S + δ)] Q_Aᵀ ,    M = Q_Bᵀ V Q_A .
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hyperkron.curvature.kfac.factors import Factor, Factors, LowRank, Matrices, dense, stored
from hyperkron.evaluation.point import Point
from hyperkron.kernels.split_products import full_precision
from hyperkron.kernels.streams import side_by_side
from hyperkron.solution import FactorizationError, NonFiniteError, Status

FLOAT64_SIZES = {"cuda": (33, 512)}
"""Sizes of float32 matrices that are decomposed in float64, by device type.

For these sizes torch uses a Jacobi routine in float32, but divide and conquer in float64. The latter's eigenvectors are
orthonormal to far more digits, and it is not slower on a GPU with fast float64.
"""


@dataclass(frozen=True)
class EigenBlock:
    """Q_A (groups, d_in, r), Q_B (groups, d_out, s), the damped spectrum S + δ between them (groups, s, r), and δ.

    ``outside`` is δ, the block outside a thin basis; ``None`` if both bases are complete.
    """

    a: Tensor
    b: Tensor
    spectrum: Tensor
    outside: Tensor | None = None

    def solve(self, v: Tensor) -> Tensor:
        """The damped inverse.

        The part of V outside a thin basis, V − P_B V P_A with P = QQᵀ, is divided by δ, and so are its rounding errors
        along the basis. Therefore it is projected twice, in full precision, which makes the result as accurate as with
        a complete basis.
        """
        if self.outside is None:
            return self.b @ ((self.b.mT @ v @ self.a) / self.spectrum) @ self.a.mT
        with full_precision():
            along = v @ self.a
            rest = v - self._projected(along) @ self.a.mT
            inside = self.b @ ((self.b.mT @ along) / self.spectrum)
            left = self._projected(rest @ self.a) / self.outside
            return rest / self.outside + (inside - left) @ self.a.mT

    def matvec(self, v: Tensor) -> Tensor:
        """The damped block itself."""
        return self.function(lambda spectrum: spectrum, v)

    def function(self, f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """f(block) V, with f applied to the eigenvalues."""
        if self.outside is None:
            return self.b @ ((self.b.mT @ v @ self.a) * f(self.spectrum)) @ self.a.mT
        elsewhere = f(self.outside)
        inside = self.b.mT @ (v @ self.a)
        return elsewhere * v + (self.b @ (inside * (f(self.spectrum) - elsewhere))) @ self.a.mT

    def _projected(self, v: Tensor) -> Tensor:
        """P_B V."""
        return v if self.b.shape[-1] == self.b.shape[-2] else self.b @ (self.b.mT @ v)

    def complete(self) -> EigenBlock:
        """The same block with complete bases."""
        if self.outside is None:
            return self
        a, b = (torch.cat([q, torch.linalg.qr(q, "complete")[0][..., q.shape[-1] :]], -1) for q in (self.a, self.b))
        spectrum = self.outside.expand(len(a), b.shape[-1], a.shape[-1]).clone()
        spectrum[:, : self.b.shape[-1], : self.a.shape[-1]] = self.spectrum
        return EigenBlock(a, b, spectrum)

    def state_dict(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if x is not None}


@dataclass(frozen=True)
class EigenInverses:
    """Eigenvectors (Q_A, Q_B) of the factors of every block, and the damped spectrum between them."""

    blocks: dict[str, EigenBlock]

    vectorizes: ClassVar[bool] = True
    """Whether ``torch.func.vmap`` takes :meth:`solve`."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.blocks)

    def solve(self, v: Matrices, overwrite: bool = False) -> Matrices:
        """Q_B [(Q_Bᵀ V Q_A) / spectrum] Q_Aᵀ for every block; ``overwrite`` has no effect."""
        return {name: self.blocks[name].solve(matrix) for name, matrix in v.items()}

    def matvec(self, v: Matrices) -> Matrices:
        """Q_B [(Q_Bᵀ V Q_A) · spectrum] Q_Aᵀ for every block."""
        return {name: block.matvec(v[name]) for name, block in self.blocks.items()}

    def function(self, f: Callable[[Tensor], Tensor], v: Matrices) -> Matrices:
        """Q_B [(Q_Bᵀ V Q_A) · f(spectrum)] Q_Aᵀ for every block."""
        return {name: block.function(f, v[name]) for name, block in self.blocks.items()}

    def only(self, names: Collection[str]) -> EigenInverses:
        """Those of some of the blocks, with complete bases."""
        return EigenInverses({name: block.complete() for name, block in self.blocks.items() if name in names})

    def strategies(self) -> str:
        """How the blocks are inverted, as words."""
        thin = sum(block.outside is not None for block in self.blocks.values())
        return f"{len(self.blocks)} eigenbasis" + (f", {thin} of them thin" if thin else "")

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "eigen", "blocks": {name: block.state_dict() for name, block in self.blocks.items()}}


def damped(a: Tensor, b: Tensor, spectrum: Tensor, damping: Tensor | float) -> EigenBlock:
    """The block with eigenvectors ``a`` and ``b``, the spectrum S between them, and δ everywhere."""
    if all(q.shape[-1] == q.shape[-2] for q in (a, b)):
        return EigenBlock(a, b, spectrum + damping)
    outside = damping.to(spectrum) if isinstance(damping, Tensor) else spectrum.new_full((), damping)
    return EigenBlock(a, b, spectrum + outside, outside)


def checked(point: Point, inverses: EigenInverses) -> EigenInverses:
    """``inverses``; raises an error if a damped spectrum is not positive and finite. One copy to the host."""
    if not inverses.blocks:
        return inverses
    extremes = torch.stack([torch.stack([_lowest(block), block.spectrum.max()]) for block in inverses.blocks.values()])
    if point.recording:
        point.execution.read_flags(~extremes.isfinite().all(1) | (extremes[:, 0] <= 0))
        return inverses
    for name, (low, high) in zip(inverses.names, extremes.tolist(), strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            remedy = point.culprits() or "look for overflow in the model, or use float64"
            raise NonFiniteError(f"the spectrum of {name} is not finite; {remedy}.")
        if low <= 0:
            raise FactorizationError(f"the damped spectrum of {name} reaches down to {low:.3g}")
    return inverses


def _lowest(block: EigenBlock) -> Tensor:
    low = block.spectrum.min()
    return low if block.outside is None else torch.minimum(low, block.outside)


Bases = dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]
"""(eigenvalues of A, Q_A, eigenvalues of B, Q_B) of every block."""


def eigen_bases(factors: Factors, thin: tuple[bool, bool] = (False, False)) -> tuple[Bases, Status]:
    """The eigenbases of all blocks, with negative eigenvalues set to zero, and their status.

    ``thin`` tells for A and for B whether a factor given as rows gets a thin basis instead of a complete one. Blocks
    that share a factor share its basis.
    """
    found: Bases = {}
    status = Status.DIRECT
    needed = {(id(f), may): f for pair in factors.values() for f, may in zip(pair, thin, strict=True)}
    jobs = [partial(_decomposed, factor, may) for (_, may), factor in needed.items()]
    device = next((stored(factor).device for factor in needed.values()), torch.device("cpu"))
    with full_precision():
        results = side_by_side(jobs, device)
    known = dict(zip(needed, results, strict=True))
    for name, pair in factors.items():
        (values_a, q_a, direct_a), (values_b, q_b, direct_b) = (
            known[id(factor), may] for factor, may in zip(pair, thin, strict=True)
        )
        found[name] = (values_a.clamp_min(0), q_a, values_b.clamp_min(0), q_b)
        status = status if direct_a and direct_b else Status.MORE_DAMPING
    return found, status


def completed(bases: Bases, wide: tuple[dict[str, Factor], dict[str, Factor]], scales: Matrices) -> Bases:
    """The bases, with the arbitrary eigenvectors of zero eigenvalues replaced by eigenvectors of the ``wide`` factors.

    With N the null space of a factor M and W the same factor over all positions: N ← N U, NᵀWN = U Λ Uᵀ. So the basis
    of a factor of low rank is the limit of the basis of M + εW for ε → 0 and does not depend on the routine.
    """
    found: Bases = {}
    with full_precision():
        for name, (values_a, q_a, values_b, q_b) in bases.items():
            a, b = (dense(factors[name]) for factors in wide)
            if name in scales:
                a = a / scales[name] / scales[name].mT
            found[name] = (values_a, _completed(values_a, q_a, a), values_b, _completed(values_b, q_b, b))
    return found


def _completed(values: Tensor, q: Tensor, wide: Tensor) -> Tensor:
    eps = torch.finfo(values.dtype).eps
    rounding = eps * values.shape[-1] * values.amax(-1, keepdim=True)
    # if sums over positions vanish, as for attention keys, squares of rounding errors remain
    rounding = rounding.clamp_min(100 * eps**2 * wide.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True))
    made = q.clone()
    for group, count in enumerate((values <= rounding).sum(-1).tolist()):  # eigenvalues ascend
        if count > 1:
            null = q[group, :, :count]
            made[group, :, :count] = null @ _eigh((null.mT @ wide[group] @ null)[None])[1][0]
    return made


def _decomposed(factor: Factor, thin: bool) -> tuple[Tensor, Tensor, bool]:
    """:func:`_eigh` of a factor; for rows X (groups, R, d) by an eigendecomposition of size R.

    With ``thin``, only R eigenvalues and eigenvectors are returned.
    """
    if not isinstance(factor, LowRank):
        return _eigh(factor)
    q, t = torch.linalg.qr(factor.wide.mT, mode="reduced" if thin else "complete")
    rank = min(t.shape[-2:])
    t = t[..., :rank, :]
    values, vectors, direct = _eigh(t @ t.mT)
    basis = q[..., :rank] @ vectors
    if thin:
        return values, basis, direct
    zeros = values.new_zeros(*values.shape[:-1], q.shape[-1] - rank)
    return torch.cat([zeros, values], -1), torch.cat([q[..., rank:], basis], -1), direct


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Eigenvalues, eigenvectors, and whether the first attempt succeeded.

    The library's routine can fail on a matrix with many rows of zeros (the patches of a convolution that sees mostly
    padding). The second attempt uses float64. The third also adds a ramp of up to 1e-9 of the mean to the diagonal,
    which separates equal eigenvalues. For some sizes float64 comes first, see :data:`FLOAT64_SIZES`.
    """
    reason = ""
    for attempt in _attempts(matrix):
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError as error:
            reason = str(error)
            continue
        if not bool(torch.isfinite(vectors).all()):  # the library reports no error in this case
            reason = "eigenvectors are not finite"
            continue
        return values.to(matrix.dtype), vectors.to(matrix.dtype), not reason
    raise FactorizationError(
        f"the eigendecomposition of a factor of size {matrix.shape[-1]} did not converge ({reason})",
        "raise damping, or look for extreme values in the batch",
    )


def _attempts(matrix: Tensor) -> Iterator[Tensor]:
    """The matrices to decompose, in order, until one succeeds; each is computed only when it is needed."""
    least, most = FLOAT64_SIZES.get(matrix.device.type, (1, 0))
    if matrix.dtype != torch.float32 or not least <= matrix.shape[-1] <= most:
        yield matrix
    wide = matrix.double()
    yield wide
    mean = wide.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    ramp = 1e-9 * mean * torch.linspace(0, 1, wide.shape[-1], dtype=wide.dtype, device=wide.device)
    yield wide + torch.diag_embed(ramp)
