"""How far an approximate inverse is from the exact one, for linear regression, where everything is a function of H.

With H = XXᵀ/N = U diag(h) Uᵀ, a method that is a function of H (KFAC, EKFAC, a Neumann series, the identity) is known
from its values f(h) on the spectrum, which one solve of the library gives. The error is a maximum over the spectrum:

    min_α ‖αM − (H + δI)⁻¹‖₂ / ‖(H + δI)⁻¹‖₂ = min_α max_h |α f(h) − 1/(h + δ)| · (h_min + δ)

Conjugate gradients are no linear map: their matrix is made of its columns, the answers to unit vectors. In the basis U
all columns are iterated at once, and since H is zero on the rest of the space one number stands for all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Spectrum:
    """H in its own basis.

    Attributes:
        h: its eigenvalues on the range of X (r,).
        basis: their eigenvectors, as columns (d, r).
        damping: δ.
    """

    h: Tensor
    basis: Tensor
    damping: float

    @property
    def null(self) -> bool:
        """Whether there are directions that no example sees."""
        return self.basis.shape[0] > self.basis.shape[1]

    def padded(self, null: float | Tensor) -> Tensor:
        """The eigenvalues, followed by ``null`` for the rest of the space where there is one."""
        return torch.cat((self.h, torch.as_tensor([null], dtype=self.h.dtype))) if self.null else self.h

    def exact(self) -> Tensor:
        """1/(h + δ), with 1/δ for the rest of the space."""
        return 1 / (self.padded(0.0) + self.damping)


def spectrum(x: Tensor, damping: float) -> Spectrum:
    """The spectrum of XᵀX/N for examples in the rows of ``x`` (N, d)."""
    _, values, basis = torch.linalg.svd(x / len(x) ** 0.5, full_matrices=False)
    return Spectrum(values.square(), basis.T.contiguous(), damping)


def best_scale(error: Callable[[float], float], most: float, steps: int = 60) -> tuple[float, float]:
    """Where a convex ``error(α)`` is least for α in [0, most], and its value there, by golden section.

    Example:
        >>> [round(x, 6) for x in best_scale(lambda a: abs(a - 0.3) + 1, 2.0)]
        [0.3, 1.0]
    """
    low, high = 0.0, most
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = error(a), error(b)
    for _ in range(steps):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = error(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = error(b)
    return (a, at_a) if at_a <= at_b else (b, at_b)


def function_error(values: Tensor, exact: Tensor, most: float | None = None) -> float:
    """The relative error of f(h) against 1/(h + δ) after the best scale (at most ``most``)."""
    limit = float(2 * exact.max() / values.abs().max())
    limit = limit if most is None else min(limit, most)
    return best_scale(lambda scale: float((scale * values - exact).abs().max() / exact.max()), limit)[1]


def cg_columns(of: Spectrum, counts: tuple[int, ...], preconditioner: Tensor | None = None) -> dict[int, Tensor]:
    """CG on every unit vector, from zero, after each of ``counts`` iterations.

    Returns for each count the ratios (r or r + 1, d) of solution to right-hand side in the basis of H, the last row
    for the rest of the space. ``preconditioner`` holds the values of M⁻¹ on the spectrum.
    """
    h = (of.padded(0.0) + of.damping)[:, None]
    inside = of.basis.T  # unit vector i has the coordinates inside[:, i]
    square = (
        torch.cat((inside.square(), (1 - inside.square().sum(0)).clamp(min=0)[None])) if of.null else inside.square()
    )
    apply = 1.0 if preconditioner is None else preconditioner[:, None]
    # ratios to the right-hand side: r = 1, v = 0; inner products weigh them by the squared coordinates
    r, v = torch.ones_like(square), torch.zeros_like(square)
    z = r * apply
    p, rz = z, (square * r * z).sum(0)
    found: dict[int, Tensor] = {}
    for done in range(1, max(counts) + 1):
        product = h * p
        curvature = (square * p * product).sum(0)
        live = (rz > 0) & (curvature > 0) & ((square * r * r).sum(0) > torch.finfo(h.dtype).eps ** 2)
        step = torch.where(live, rz / curvature, torch.zeros_like(rz))
        v, r = v + step * p, r - step * product
        z = r * apply
        after = (square * r * z).sum(0)
        p = z + torch.where(live, after / rz, torch.zeros_like(rz)) * p
        rz = after
        if done in counts:
            found[done] = v
    return found


def columns_error(of: Spectrum, ratios: Tensor, most: float | None = None) -> float:
    """The relative operator-norm error of a matrix given by :func:`cg_columns` after the best scale."""
    exact, inside = of.exact(), of.basis.T
    count = len(of.h)

    def apply(x: Tensor, values: Tensor) -> Tensor:
        """Columns with the ratios ``values`` in the basis of H, followed by their part outside of it."""
        y = (values[:count] * inside) @ x
        if not of.null:
            return y
        z = values[count] * x if x.ndim == 1 else values[count][:, None] * x
        return torch.cat((y, z - of.basis @ (inside @ z)))

    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return apply(x, ratios), apply(x, exact[:, None].expand_as(ratios))

    def top(scale: float) -> tuple[float, Tensor]:
        """‖αM − A⁻¹‖ and the vectors that it stretches most."""
        block = (scale * ratios[:count] - exact[:count, None]) * inside
        rest = scale * ratios[count] - exact[count] if of.null else None

        def squared(x: Tensor) -> Tensor:
            y = block.T @ (block @ x)
            if rest is not None:
                z = rest * x
                y = y + rest * (z - of.basis @ (inside @ z))
            return y

        value, vectors = largest_eigenvalue(squared, of.basis.shape[0])
        return value**0.5, vectors

    limit = 2 * float(exact.max()) / float(ratios.abs().max())
    return least_norm(top, pair, limit if most is None else min(limit, most)) / float(exact.max())


def least_norm(
    top: Callable[[float], tuple[float, Tensor]],
    pair: Callable[[Tensor], tuple[Tensor, Tensor]],
    most: float,
    rounds: int = 40,
) -> float:
    """min_α ‖αM − D‖₂ for α in [0, most], from few norms.

    ‖(αM − D)V‖ for orthonormal V is a lower bound at every α and costs nothing once MV and DV are known. Its minimum
    gives the next α, at which the norm is an upper bound and its vectors join V, until both agree to nine digits (or,
    where αM is nearly D, to twelve of ‖DV‖).

    Args:
        top: ‖αM − D‖ at an α, and (n, k) vectors near those that are stretched most.
        pair: MV and DV for V (n, k).
    """
    value, vectors = top(most / 2)
    best, basis = value, torch.linalg.qr(vectors).Q
    left, right = pair(basis)
    for _ in range(rounds):
        small = torch.linalg.qr(torch.cat((left, right), 1)).R  # (αM − D)V = Q(αR₁ − R₂)
        m, d = small[:, : left.shape[1]], small[:, left.shape[1] :]

        def bound(scale: float, m: Tensor = m, d: Tensor = d) -> float:
            return float(torch.linalg.matrix_norm(scale * m - d, 2))

        scale, low = best_scale(bound, most)
        value, vectors = top(scale)
        best = min(best, value)
        if best - low <= 1e-9 * best + 1e-12 * float(torch.linalg.matrix_norm(d, 2)):
            break
        for _ in range(2):
            vectors = vectors - basis @ (basis.T @ vectors)
        added = torch.linalg.qr(vectors).Q
        basis, new = torch.cat((basis, added), 1), pair(added)
        left, right = torch.cat((left, new[0]), 1), torch.cat((right, new[1]), 1)
    return best


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], size: int, steps: int = 80, wanted: int = 3
) -> tuple[float, Tensor]:
    """The largest eigenvalue of a symmetric positive semi-definite map, by Lanczos with full orthogonalisation.

    Beside it the ``wanted`` leading vectors of the Krylov space, as columns.

    Example:
        >>> values = torch.linspace(0, 3, 50, dtype=torch.float64)
        >>> round(largest_eigenvalue(lambda x: values * x, 50)[0], 9)
        3.0
    """
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known = torch.empty(min(steps, size) + 1, size, dtype=torch.float64)
    known[0] = vector / vector.norm()
    matrix = torch.zeros(len(known), len(known), dtype=torch.float64)
    value, vectors = 0.0, known[:1].T
    for i in range(len(known) - 1):
        y = product(known[i])
        matrix[i, i] = known[i] @ y
        for _ in range(2):
            y = y - known[: i + 1].T @ (known[: i + 1] @ y)
        left = float(y.norm())
        over = left <= 1e-14 * float(matrix.diagonal().abs().max())
        if over or i % 10 == 9 or i == len(known) - 2:
            values, inside = torch.linalg.eigh(matrix[: i + 1, : i + 1])
            before, value = value, max(0.0, float(values[-1]))
            vectors = known[: i + 1].T @ inside[:, -wanted:]
            if over or abs(value - before) <= 1e-10 * value:
                break
        matrix[i, i + 1] = matrix[i + 1, i] = left
        known[i + 1] = y / left
    return value, vectors
