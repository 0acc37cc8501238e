"""AID: approximate implicit differentiation, with any hypergradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.curvature import GGN
from hyperkron.hypergradient import Hypergradient, cg, ekfac, gradient_descent, kfac, neumann


@dataclass(frozen=True)
class AID(Algorithm):
    r"""T steps on θ, warm-started, then one step on λ along the given hypergradient.

        θ ← θ − α ∂_θ g(λ, θ)                              T times, each on a fresh batch
        λ ← λ − γ (∂_λ f − X(v)),   (A + δI) v = ∂_θ f      by ``hypergradient``

    Which curvature A and which solver is the one argument that tells AID-CG, AID-Neumann, AID-FP, AID-KFAC and
    AID-EKFAC apart; the functions :func:`aid_cg`, … name them. A is measured on the batch of X(v), or, with
    ``hk.fit(…, curvature_data=…)``, on batches of its own.

    Args:
        hypergradient: any :class:`~hyperkron.hypergradient.Hypergradient`, such as ``hk.kfac(damping=1e-3)``.
        inner_steps: T.
        inner_rate, outer_rate: step sizes α and γ if no optimizer of that level is given to ``hk.fit``.
        seed: of random numbers that an algorithm draws itself; AID draws none.

    Reference: Grazzi, Franceschi, Pontil & Salzo, "On the iteration complexity of hypergradient computation"
    (ICML 2020); with KFAC: Liao, Dangel & Yu (AISTATS 2026).

    Example:
        >>> import hyperkron as hk
        >>> algorithm = hk.AID(hk.kfac(damping=1e-3, refresh_every=5), inner_steps=10)
        >>> algorithm.inner_steps
        10
    """

    hypergradient: Hypergradient
    inner_steps: Count = 10

    def step(self, state: State, batches: BatchSources) -> StepReport:
        return derivatives.alternate(state, batches, self.inner_steps)


def aid_cg(iterations: int = 3, damping: float = 0.0, *, inner_steps: int = 10, **rates: Any) -> AID:
    """AID-CG: ``iterations`` of conjugate gradients on (H + δI)v = b from v = 0, on one batch (Grazzi et al., 2020).

    Example:
        >>> aid_cg(3).hypergradient.solver
        CG(iterations=3, tolerance=0.0)
    """
    return AID(cg(iterations, damping), inner_steps, **rates)


def aid_neumann(terms: int = 3, step: float | None = None, *, inner_steps: int = 10, **rates: Any) -> AID:
    """AID-Neumann: v = η Σ_{k≤K} (I − ηH)^k b (Lorraine et al., 2020).

    K is ``terms``, η is ``step``; ``None`` finds a safe one.
    """
    return AID(neumann(terms, step=step), inner_steps, **rates)


def aid_fp(iterations: int = 10, step: float | None = None, *, inner_steps: int = 10, **rates: Any) -> AID:
    r"""AID-FP: the fixed point u = J_Φᵀu + b of Φ(θ) = θ − η∂_θ g (Grazzi et al., 2020).

    With v = ηu this is v ← v − η(Hv − b), and ∂_λ f + (∂_λΦ)ᵀu = ∂_λ f − X(v).
    """
    return AID(gradient_descent(iterations, step=step, warm_start=False), inner_steps, **rates)


def aid_kfac(damping: float = 1e-3, *, refresh_every: int = 1, inner_steps: int = 10, **rates: Any) -> AID:
    """AID-KFAC: v by Kronecker-factored inverses, without an iteration (Liao, Dangel & Yu, 2026)."""
    return AID(kfac(damping, refresh_every=refresh_every), inner_steps, **rates)


def aid_ekfac(damping: float = 1e-3, *, refresh_every: int = 1, inner_steps: int = 10, **rates: Any) -> AID:
    """AID-EKFAC: v by the corrected Kronecker eigenbasis (George et al., 2018)."""
    return AID(ekfac(damping, refresh_every=refresh_every), inner_steps, **rates)


def aid_ggn_cg(iterations: int = 3, damping: float = 1e-3, *, inner_steps: int = 10, **rates: Any) -> AID:
    """AID-CG with the Gauss–Newton matrix, which is positive semi-definite: CG is safe away from a minimum."""
    return AID(cg(iterations, curvature=GGN(damping)), inner_steps, **rates)


def aid_ggn_neumann(
    terms: int = 3, step: float | None = None, damping: float = 0.0, *, inner_steps: int = 10, **rates: Any
) -> AID:
    """AID-Neumann with the Gauss–Newton matrix: v = η Σ_{k≤K} (I − η(G + δI))^k b, K ``terms``, η ``step``."""
    return AID(neumann(terms, step=step, curvature=GGN(damping)), inner_steps, **rates)
