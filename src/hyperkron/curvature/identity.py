"""A = I / scale: no curvature at all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hyperkron.curvature.base import Curvature, CurvatureState, Invertible
from hyperkron.curvature.diagonal import DiagonalOperator
from hyperkron.evaluation.point import Point
from hyperkron.validation import check_positive


@dataclass(frozen=True)
class Identity(Curvature):
    """A = I / scale, so that A⁻¹b = scale·b: no curvature at all.

    This is the choice of DARTS (Liu et al., 2019) and of one-step unrolling with learning rate ``scale``.

    Args:
        scale: the number that stands for A⁻¹.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("scale", self.scale, "1.0 gives v = b")

    def operator(self, point: Point, state: CurvatureState) -> Invertible:
        """The identity, scaled."""
        return DiagonalOperator(dict.fromkeys(point.params, self.scale))

    def constants(self, state: CurvatureState) -> Hashable:
        return ()
