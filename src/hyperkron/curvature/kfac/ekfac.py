"""EKFAC: KFAC's eigenbasis with the spectrum that fits it best."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from hyperkron.curvature.base import CurvatureState
from hyperkron.curvature.kfac.coverage import Plan
from hyperkron.curvature.kfac.eigen import Bases, EigenInverses, completed, eigen_bases
from hyperkron.curvature.kfac.factors import Factors
from hyperkron.curvature.kfac.inverse import BlockInverses
from hyperkron.curvature.kfac.kronecker import Kronecker, finite
from hyperkron.curvature.kfac.measured import Basis, Measured
from hyperkron.curvature.kfac.owners import agreed
from hyperkron.curvature.kfac.state import KroneckerState, layout, own_diagonal
from hyperkron.evaluation.point import Point
from hyperkron.kernels.execution import Pending
from hyperkron.losses import DRAWN
from hyperkron.solution import FactorizationError, NonFiniteError, Status
from hyperkron.validation import check_whole


@dataclass(frozen=True)
class EKFAC(Kronecker):
    """KFAC with its spectrum corrected: the best diagonal in KFAC's eigenbasis (George et al., 2018).

        A⁻¹: V ↦ Q_B [(Q_Bᵀ V Q_A) / (S + δ)] Q_Aᵀ ,   S = Σ_n (σ_n/N) (Q_Bᵀ G_n Q_A)²

    with G_n the gradient of one example in the layer's weight (calls of one module count as separate examples). S
    minimises ‖G − Q diag(S) Qᵀ‖_F over all diagonals. It costs a second pass over the batch and an eigendecomposition;
    damping is exact (δ is added to the spectrum). If a layer has few rows for its size, only a basis of their span is
    computed, because S is zero outside it (see :mod:`~hyperkron.curvature.kfac.eigen`); the result is the same. With
    ``sharing="reduce"`` S is not zero outside the span of the factors; there the basis is that of the factors that
    ``expand`` would make.

    S is the best diagonal in any basis, so a basis can be used longer than its spectrum: with ``basis_every`` above 1
    most refreshes are one pass over the batch, without factors or eigendecompositions (George et al., algorithm 2).

    Args:
        damping, fisher, samples, sharing, refresh_every, ema, fallback, strict, seed, keep_previous, layers: as in
            :class:`KFAC`. With ``keep_previous=False`` a refresh that fails loses the basis too.
        basis_every: compute a new eigenbasis at every ``basis_every``-th refresh; the others measure only S. A moving
            average of factors runs over the refreshes that measure factors. The bases are then complete, because later
            batches have other rows; for factors with few rows any orthonormal vectors complete them.

    Reference: George et al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis" (2018).

    Example:
        >>> import hyperkron as hk
        >>> method = hk.Implicit(hk.curvature.EKFAC(damping=1e-2, basis_every=10), hk.solvers.Direct())
    """

    basis_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("basis_every", self.basis_every, remedy="1 makes a new eigenbasis at every refresh")

    @property
    def _low_rank(self) -> bool:
        return self.ema == 0 and (self.basis_every > 1 or self._thin)

    @property
    def _wide(self) -> bool:
        """True for ``reduce``: gradients of single positions leave the span of the reduced factors."""
        return self.sharing == "reduce"

    @property
    def _thin(self) -> bool:
        """Whether bases may be thin; a thin basis is valid only for the rows of this batch at every position."""
        return self.basis_every == 1 and self.damping > 0 and self.sharing == "expand"

    @property
    def _reuses(self) -> bool:
        return super()._reuses or self.basis_every > 1

    @property
    def _used_once(self) -> bool:
        return super()._used_once and self.basis_every == 1

    def _refresh(self, point: Point, state: KroneckerState, plan: Plan) -> Pending[None]:
        basis = self._reusable_basis(point, state)
        if basis is not None and self._refreshed_within(basis, point, state, plan):
            return Pending.ready(None)
        del basis  # with keep_previous=False it must be freed before a new one is computed
        return super()._refresh(point, state, plan)

    def _reuses_basis(self, state: KroneckerState) -> bool:
        """Whether the next refresh uses the current basis again."""
        return (
            state.basis_age + 1 < self.basis_every
            and isinstance(state.inverses, EigenInverses)
            and all(block.outside is None for block in state.inverses.blocks.values())
        )

    def _reusable_basis(self, point: Point, state: KroneckerState) -> Basis | None:
        """The current eigenbasis if this refresh uses it again, else ``None``."""
        if not self._reuses_basis(state):
            return None
        assert isinstance(state.inverses, EigenInverses)
        own = {name: (block.a, block.b) for name, block in state.inverses.blocks.items()}
        place = point.device, torch.promote_types(point.dtype, torch.float32)
        fits = point.problem.group.all(all((a.device, a.dtype) == place for a, _ in own.values()))
        return {name: own.get(name) for name in state.reached} if fits else None

    @property
    def records_refreshes(self) -> bool:
        return self.basis_every > 1

    @property
    def keeps_parts(self) -> bool:
        return self.basis_every > 1

    def constants(self, state: CurvatureState) -> Hashable | None:
        """An empty tuple; ``None`` if an eigendecomposition is due, because it cannot be recorded."""
        assert isinstance(state, KroneckerState)
        return None if self.due(state) and not self._reuses_basis(state) else ()

    def _refreshed_within(self, basis: Basis, point: Point, state: KroneckerState, plan: Plan) -> bool:
        """Measure S and the diagonals outside the blocks in one pass; False if ``basis`` is of other blocks."""
        if self.lean:
            state.let_go()
        try:
            measured = self._measure(point, state, plan, basis, checked=not point.recording)
            self._check(point, state, plan, measured)
            if set(measured.reached) != basis.keys():  # layers that some batches do not use
                return False
            if measured.diagonal:
                self._finite(point, measured, not any(point.execution.read_flags(~finite(measured)[None])))
            found = ((name, *pair, measured.corrected[name]) for name, pair in basis.items() if pair is not None)
            inverses = self._eigen_inverses(point, plan, measured, found)
        except (FactorizationError, NonFiniteError) as error:
            self._fall_back(point, state, error)
            return True
        diagonal, age = own_diagonal(self._diagonal(plan, measured), point.params), state.basis_age + 1
        state.renew(inverses, Status.DIRECT, diagonal, measured, layout(point.params), age)
        return True

    def _invert(
        self, point: Point, state: KroneckerState, plan: Plan, measured: Measured, factors: Factors, keep: bool = False
    ) -> Pending[tuple[BlockInverses, Status]]:
        bases, status = agreed(point.problem.group, lambda: self._bases(point, measured, factors))
        if self.ema == 0:
            measured.release()
            factors.clear()
        own = {name: (q_a, q_b) for name, (_, q_a, _, q_b) in bases.items()}
        basis: Basis = {name: own.get(name) for name in measured.reached}
        kept, measured.kept = measured.kept, None
        if kept is not None and kept.complete:
            spectra = kept.spectra(own, measured.scales)
        else:
            spectra = self._measure(point, state, plan, basis, diagonal=False).corrected
        found = ((name, *pair, spectra[name]) for name, pair in own.items())
        return Pending.ready((self._eigen_inverses(point, plan, measured, found), status))

    def _keeps_gradients(self, point: Point) -> bool:
        """Whether gradients are kept; never with exact vectors, because there is one for each class."""
        return point.keeps and self.fisher in DRAWN

    def _bases(self, point: Point, measured: Measured, factors: Factors) -> tuple[Bases, Status]:
        self._finite(point, measured, bool(finite(measured)))
        # S is measured with new drawn vectors, which leave the span of the vectors of B
        thin = self._thin, self._thin and self.fisher not in DRAWN
        bases, status = eigen_bases(factors, thin)
        return (completed(bases, measured.wide, measured.scales) if self._wide else bases), status
