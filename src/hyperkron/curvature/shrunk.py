"""αG + (1 − α)K, the Gauss–Newton matrix shrunk towards its Kronecker approximation."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron import trees
from hyperkron.curvature.base import Curvature, CurvatureState, Operator, check_damping
from hyperkron.curvature.ggn import GGN
from hyperkron.curvature.kfac import EKFAC
from hyperkron.evaluation.point import Point
from hyperkron.losses import Fisher
from hyperkron.trees import Tree
from hyperkron.validation import check_interval


class ShrunkOperator(Operator):
    """v ↦ αGv + (1 − α)Kv."""

    def __init__(self, exact: Operator, kronecker: Operator, share: float) -> None:
        self.exact, self.kronecker, self.share = exact, kronecker, share
        self.products, self.roundoff = 0, exact.roundoff

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        return self._mixed(self.exact.matvec(v), self.kronecker.matvec(v))

    def matvec_stacked(self, v: Tree) -> Tree:
        self.products += len(next(iter(v.values())))
        return self._mixed(self.exact.matvec_stacked(v), self.kronecker.matvec_stacked(v))

    def _mixed(self, exact: Tree, kronecker: Tree) -> Tree:
        return trees.add(trees.scale(exact, self.share), kronecker, alpha=1.0 - self.share)


@dataclass(frozen=True)
class ShrunkGGN(Curvature):
    """A = αG + (1 − α)K + δI, with G the Gauss–Newton matrix and K its approximation by EKFAC.

    G is often measured on fewer rows than it has dimensions, and depends strongly on the choice of rows. K has few free
    numbers and is stable, but ignores interactions between layers. As with covariance matrices (Ledoit & Wolf,
    2004), a mixture can be a better estimate than both; for attribution it was (docs/attribution.md). With EKFAC as
    preconditioner K⁻¹A has no eigenvalue below 1 − α, and few products are enough.

    Args:
        damping: δ, added once.
        share: α, the share of G. Default: 0.25.
        fisher: how K is measured, as in :class:`KFAC`. Default: ``"rademacher"``.
        seed: of the draws.

    Reference: Ledoit & Wolf, "A well-conditioned estimator for large-dimensional covariance matrices" (2004).

    Example:
        >>> import hyperkron as hk
        >>> d = 5e-3
        >>> method = hk.pcg(10, curvature=hk.curvature.ShrunkGGN(d), preconditioner=hk.curvature.EKFAC(d))
    """

    damping: float = 1e-3
    share: float = 0.25
    fisher: Fisher = "rademacher"
    seed: int = 0

    def __post_init__(self) -> None:
        check_damping(self.damping)
        check_interval("share", self.share, 0, 1, remedy="it is the share of the Gauss–Newton matrix")
        self.init()  # refuses other options that are wrong

    @property
    def _kronecker(self) -> EKFAC:
        return EKFAC(self.damping, fisher=self.fisher, seed=self.seed)

    def init(self) -> CurvatureState:
        return self._kronecker.init()

    def operator(self, point: Point, state: CurvatureState) -> Operator:
        exact = GGN(self.damping)
        kronecker = self._kronecker.operator(point, state).definite()
        return ShrunkOperator(exact.operator(point, exact.init()), kronecker, self.share)
