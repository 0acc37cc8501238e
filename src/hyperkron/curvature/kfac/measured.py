"""A pass over a batch for KFAC: what to measure, and the result: factors of every block, EKFAC's spectra, diagonals."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hyperkron.curvature.kfac.factors import Factor, scaled, stored
from hyperkron.curvature.kfac.kept import KeptGradients
from hyperkron.curvature.kfac.layers import WeightSharing
from hyperkron.curvature.kfac.owners import Owners
from hyperkron.losses import Fisher

Basis = dict[str, tuple[Tensor, Tensor] | None]
"""Eigenvectors (Q_A, Q_B) of every block; ``None`` where another process has them."""


@dataclass(frozen=True)
class Measurement:
    """What a pass over a batch measures, and how.

    Attributes:
        fisher, samples, sharing, generator: the vectors to backpropagate, as in :class:`KFAC`.
        basis: the eigenbasis of every block in which to measure EKFAC's spectrum; ``None`` measures the factors.
        low_rank: return a factor with few rows as its rows (:class:`LowRank`).
        checked: refuse negative weights, which waits for the device; otherwise they make the factors nan.
        diagonal: measure parameters outside the blocks too.
        wide: measure the factors over all positions too (:attr:`Measured.wide`).
        damping: δ for :attr:`Measured.scales`; ``None`` leaves them out.
        owners: which process gets the factors or spectra of a block, if the batch is divided among processes.
        unmasked: in a recording: assume that the loss masks no tokens; factors are nan if it does.
        keep: for a batch in parts: keep gradients of single examples (:attr:`Measured.kept`).
        first: warn of parameters that are also used outside their layers, and of weights that depend on θ.
    """

    fisher: Fisher
    samples: int
    sharing: WeightSharing
    generator: torch.Generator
    basis: Basis | None = None
    low_rank: bool = False
    checked: bool = True
    diagonal: bool = True
    wide: bool = False
    damping: float | None = None
    owners: Owners | None = None
    unmasked: bool = False
    keep: bool = False
    first: bool = False


@dataclass
class Measured:
    """The result of one pass over a batch; with several processes, each has the factors and spectra of its blocks."""

    a: dict[str, Factor] = field(default_factory=dict)  # the mean of a aᵀ over rows, (groups, d_in [+1], d_in [+1])
    b: dict[str, Factor] = field(default_factory=dict)  # the sum of g gᵀ over rows, (groups, d_out, d_out)
    diagonal: dict[str, Tensor] = field(default_factory=dict)  # outside blocks; shaped like them or a single number
    wide: tuple[dict[str, Factor], dict[str, Factor]] = field(default_factory=lambda: ({}, {}))
    """A and B of every block over all positions, not normalised, if requested in addition to reduced ones."""
    corrected: dict[str, Tensor] = field(default_factory=dict)
    """EKFAC's S of every block in the given basis, scaled by ``scales``: (groups, d_out, d_in [+1])."""
    l2: dict[str, Tensor | float] = field(default_factory=dict)  # 2α of the penalties α‖p‖² in the inner loss
    scales: dict[str, Tensor] = field(default_factory=dict)  # E of the blocks that are penalised unevenly
    reached: tuple[str, ...] = ()  # the blocks that a gradient reached, with or without a basis
    rows: dict[str, int | Tensor] = field(default_factory=dict)  # the number of rows in the mean A, by block
    uncalled: list[str] = field(default_factory=list)  # parameters of layers that were never called as modules
    in_half: bool = False  # whether gradients at layers were in half precision
    unmasked: bool = False  # whether the loss has a row for every token and masks none
    kept: KeptGradients | None = None
    """Gradients from which the spectrum can be computed without another pass, if requested."""

    def large(self) -> list[Tensor]:
        """The tensors of factors and diagonals, each once."""
        sides = (self.a, self.b, *self.wide)
        found = [*(stored(factor) for side in sides for factor in side.values()), *self.diagonal.values()]
        return list({id(x): x for x in found}.values())

    def divide_by_rows(self) -> None:
        """Turn sums of a aᵀ into means; a sum that several blocks share is divided once."""
        sums: dict[int, tuple[Tensor, float]] = {}
        rescaled: dict[int, Factor] = {}
        for name, total in self.a.items():
            rows = self.rows[name]
            share = 1.0 / (rows.clamp_min(1) if isinstance(rows, Tensor) else rows)
            if isinstance(total, Tensor) and not isinstance(share, Tensor):
                sums[id(total)] = (total, share)
            elif id(total) not in rescaled:
                rescaled[id(total)] = scaled(total, share)
        if sums:
            torch._foreach_mul_([x for x, _ in sums.values()], [share for _, share in sums.values()])
        self.a = {name: rescaled.get(id(total), total) for name, total in self.a.items()}

    def release(self) -> None:
        """Free the factors; everything else stays."""
        self.a, self.b, self.wide = {}, {}, ({}, {})
