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
    damping is exact (δ is added to the spectrum). Where a layer has few rows for its size only the basis of their span
    is computed, for outside it S is zero (see :mod:`~hyperkron.curvature.kfac.eigen`); the answer is the same. With
    ``sharing="reduce"`` S is not zero outside the span of the factors; there the basis is that of the factors which
    ``expand`` would make.

    S is the best diagonal in whatever basis, so a basis may serve longer than its spectrum: with ``basis_every`` above
    1 most refreshes are one pass over the batch, without factors or eigendecompositions (George et al., algorithm 2).

    Args:
        damping, fisher, samples, sharing, refresh_every, ema, fallback, strict, seed, keep_previous, layers: as in
            :class:`KFAC`. With ``keep_previous=False`` a refresh that fails loses the basis too.
        basis_every: refreshes between two eigenbases; in between only S is measured. A moving average of
            factors runs over the refreshes that measure them. Bases are complete then, for later batches have other
            rows; of factors with few rows they are completed by any orthonormal vectors.

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
        """Gradients of single positions leave the span of reduced factors; there the wide ones give the basis."""
        return self.sharing == "reduce"

    @property
    def _thin(self) -> bool:
        """A thin basis holds for the rows it was made of: of this batch, at every position."""
        return self.basis_every == 1 and self.damping > 0 and self.sharing == "expand"

    @property
    def _reuses(self) -> bool:
        return super()._reuses or self.basis_every > 1

    @property
    def _serves_once(self) -> bool:
        return super()._serves_once and self.basis_every == 1

    def _refresh(self, point: Point, state: KroneckerState, made: Plan) -> Pending[None]:
        basis = self._at_hand(point, state)
        if basis is not None and self._refreshed_within(basis, point, state, made):
            return Pending.ready(None)
        del basis  # a new one is made, and with keep_previous=False this one is to be gone by then
        return super()._refresh(point, state, made)

    def _serves_on(self, state: KroneckerState) -> bool:
        """Whether the next refresh finds a basis that is to serve once more."""
        return (
            state.basis_age + 1 < self.basis_every
            and isinstance(state.inverses, EigenInverses)
            and all(block.outside is None for block in state.inverses.blocks.values())
        )

    def _at_hand(self, point: Point, state: KroneckerState) -> Basis | None:
        """The eigenbasis in use, where it is to serve once more."""
        if not self._serves_on(state):
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
        """Nothing; but eigendecompositions cannot be recorded."""
        assert isinstance(state, KroneckerState)
        return None if self.due(state) and not self._serves_on(state) else ()

    def _refreshed_within(self, basis: Basis, point: Point, state: KroneckerState, made: Plan) -> bool:
        """Measure S, and what lies outside the blocks, in one pass; whether ``basis`` has the blocks it takes."""
        if self.lean:
            state.let_go()
        try:
            measured = self._measure(point, state, made, basis, checked=not point.recording)
            self._check(point, state, made, measured)
            if set(measured.reached) != basis.keys():  # layers that some batches do not use
                return False
            if measured.diagonal:
                self._finite(point, measured, not any(point.execution.read_flags(~finite(measured)[None])))
            found = ((name, *pair, measured.corrected[name]) for name, pair in basis.items() if pair is not None)
            inverses = self._eigen_inverses(point, made, measured, found)
        except (FactorizationError, NonFiniteError) as error:
            self._keep(point, state, error)
            return True
        diagonal, age = own_diagonal(self._diagonal(made, measured), point.params), state.basis_age + 1
        state.renew(inverses, Status.DIRECT, diagonal, measured, layout(point.params), age)
        return True

    def _invert(
        self, point: Point, state: KroneckerState, made: Plan, measured: Measured, factors: Factors, keep: bool = False
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
            spectra = self._measure(point, state, made, basis, diagonal=False).corrected
        found = ((name, *pair, spectra[name]) for name, pair in own.items())
        return Pending.ready((self._eigen_inverses(point, made, measured, found), status))

    def _keeps(self, point: Point) -> bool:
        """Not of exact vectors, which are as many as classes."""
        return point.keeps and self.fisher in DRAWN

    def _bases(self, point: Point, measured: Measured, factors: Factors) -> tuple[Bases, Status]:
        self._finite(point, measured, bool(finite(measured)))
        # S is measured with drawn vectors of its own, which leave the span of those that B is made of
        thin = self._thin, self._thin and self.fisher not in DRAWN
        bases, status = eigen_bases(factors, thin)
        return (completed(bases, measured.wide, measured.scales) if self._wide else bases), status
