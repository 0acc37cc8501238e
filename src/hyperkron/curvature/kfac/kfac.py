"""KFAC: each layer's block of the Gauss–Newton matrix as a Kronecker product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperkron.curvature.kfac.coverage import Plan
from hyperkron.curvature.kfac.eigen import Bases, eigen_bases
from hyperkron.curvature.kfac.factors import FactoredInverses, Factors
from hyperkron.curvature.kfac.inverse import BlockInverses, Split, factored_inverses, max_parts, split_blocks
from hyperkron.curvature.kfac.kronecker import Kronecker, finite
from hyperkron.curvature.kfac.measured import Measured
from hyperkron.curvature.kfac.owners import agreed
from hyperkron.curvature.kfac.state import KroneckerState
from hyperkron.evaluation.point import Point
from hyperkron.kernels.execution import Pending
from hyperkron.kernels.linalg import tf32_products
from hyperkron.solution import HyperkronError, Status


@dataclass(frozen=True)
class KFAC(Kronecker):
    """Kronecker-factored approximate curvature: each layer's block of the Gauss–Newton matrix as B ⊗ A.

        A = mean_n a_n a_nᵀ ,   B = Σ_n (σ_n/N) g_n g_nᵀ ,   (B ⊗ A + damping)⁻¹ vec V

    with a_n the layer's input (and a 1 for its bias) and g_n = (∂z_n f)ᵀ s_n the output gradient of a vector s_n whose
    second moment is the output Hessian of the loss. A averages over all examples, also those labelled ``ignore_index``
    (their inputs are inputs like others), and over all their tokens; if the loss masks some tokens of an example, over
    those that a gradient reaches. The L2 penalties in the loss are added to the damping: 2α on the columns of weight
    and bias each. This is exact with ``split="exact"``; otherwise it is part of δ on A's side.

    Args:
        damping: δ. Default: 1e-3.
        split: how δ is divided between the factors: ``"pi"`` (Martens & Grosse), ``"plain"`` (√δ each), ``"exact"``
            (B ⊗ A + δI inverted exactly, by eigendecomposition), or a callable (A, B, δ) → (δ_A, δ_B).
        fisher: where s_n comes from: ``"mc"`` draws it from the model's own predictions, ``"type-2"`` uses all C exact
            vectors, ``"rademacher"`` sums them with random signs (one backward pass, and less noise than a drawn
            label), ``"empirical"`` uses the gradient at the given labels. With a loss at every token the exact vectors
            of all tokens share one backward pass. Then ``"type-2"`` is biased for layers that mix tokens and for
            EKFAC's spectrum; ``"mc"`` and ``"rademacher"`` are not.
        samples: draws per example, of ``"mc"`` and ``"rademacher"``.
        sharing: ``"expand"`` or ``"reduce"``, for weights used at several positions.
        refresh_every: τ; factors and inverses are reused for this many calls.
        ema: β of the moving average of factors.
        fallback: curvature of parameters outside Linear and Conv layers: ``"diagonal"`` measures it (exactly per
            example for norm layers and embeddings, without the products of several calls of one layer; for anything
            else as a multiple of the identity, estimated with random numbers), ``"identity"`` takes 1, ``"zero"``
            keeps such parameters fixed.
        strict: refuse a model with parameters outside the Kronecker blocks.
        seed: of the Monte-Carlo draws.
        keep_previous: keep the inverses until new ones are ready, and use them if the new factorisation fails.
            ``False`` frees them first (with ``refresh_every=1`` right after use), which saves memory; a refresh that
            fails is then an error, and the next call measures the curvature again.
        layers: functions module → :class:`Layer` or ``None``, for modules of your own; they are asked before the
            built-in layers, in this order.

    References: Martens & Grosse (2015); Grosse & Martens (2016) for convolutions; Eschenhagen et al. (2023) for weight
    sharing; Liao, Dangel & Yu (2026) for hypergradients.
    """

    split: Split = "pi"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.split) and self.split not in ("pi", "plain", "exact"):
            raise HyperkronError(
                f"split={self.split!r} is unknown; use 'pi', 'plain', 'exact' or a callable (A, B, δ) -> (δ_A, δ_B)."
            )

    @property
    def deferred(self) -> bool:
        return self.ema == 0 and self.split != "exact"

    def check_graph(self) -> None:
        if not self.deferred:
            raise HyperkronError(
                f"graph=True needs KFAC with ema=0 and a factored damping, not ema={self.ema!r} and "
                f"split={self.split!r}; change these, or use graph=False."
            )

    @property
    def _low_rank(self) -> bool:
        return self.ema == 0 and self.damping > 0 and self.split in ("pi", "plain", "exact")

    def _damped(self, diagonals: list[Tensor], damping: list[Any]) -> Sequence[Tensor]:
        """(√d + √δ)², because splitting δ between the factors turns a balanced eigenvalue λ into (√λ + √δ)²."""
        if self.split == "exact":
            return super()._damped(diagonals, damping)
        roots: Any = [
            math.sqrt(x) if isinstance(x, float) else x.to(d.device, d.dtype).sqrt()
            for d, x in zip(diagonals, damping, strict=True)
        ]
        shifted = torch._foreach_add(torch._foreach_sqrt(diagonals), roots)
        return torch._foreach_mul(shifted, shifted)

    def _invert(
        self, point: Point, state: KroneckerState, plan: Plan, measured: Measured, factors: Factors, keep: bool = False
    ) -> Pending[tuple[BlockInverses, Status]]:
        all_finite, queued = finite(measured), point.execution.queued
        group = point.problem.group
        if self.split == "exact":
            bases, status = agreed(group, lambda: self._bases(point, measured, factors))
            spectra = ((n, q_a, q_b, b[..., :, None] * a[..., None, :]) for n, (a, q_a, b, q_b) in bases.items())
            return Pending.ready((self._eigen_inverses(point, plan, measured, spectra), status))
        damping = {name: self._block_damping(plan, measured, name) for name in factors}
        if not queued and group.size == 1:
            self._finite(point, measured, bool(all_finite))
        # not if they are moving averages, or are needed to name those that are not finite
        overwrite = self.ema == 0 and not (keep and queued) and group.size == 1
        if overwrite:
            measured.release()
        # gradients in half precision have no more bits than float16
        half = measured.in_half and tf32_products(point.device) and group.size == 1
        half = half and self.damping > 0 and not callable(self.split)
        options = {
            "keep": keep or not queued or group.size > 1,
            "overwrite": overwrite,
            "lean": self.lean,
            "half": half,
        }
        in_parts = overwrite and queued and point.reuses_pass_memory
        parts = split_blocks(factors, max_parts(not self._used_once)) if in_parts else [factors]
        pending = [
            factored_inverses(part, damping, self.split, all_finite, point.execution, at_once=len(parts) > 1, **options)
            for part in parts
        ]

        def checked_factors() -> tuple[BlockInverses, Status]:
            found = [one.wait() for one in pending]
            self._finite(point, measured, all(value for _, _, value in found))
            inverses = FactoredInverses(tuple(c for some, _, _ in found for c in some.classes))
            return inverses, next((status for _, status, _ in found if status is not Status.DIRECT), Status.DIRECT)

        return Pending(lambda: agreed(group, checked_factors))

    def _bases(self, point: Point, measured: Measured, factors: Factors) -> tuple[Bases, Status]:
        self._finite(point, measured, bool(finite(measured)))
        return eigen_bases(factors, (True, True))
