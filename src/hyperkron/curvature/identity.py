"""A = I / scale: no curvature at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyperkron.curvature.base import Curvature, CurvatureState, DiagonalOperator, Invertible
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

    uses_data: ClassVar[bool] = False
    invertible: ClassVar[bool] = True
    records_products: ClassVar[bool] = True
    records_inverse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("scale", self.scale, "1.0 gives v = b")

    def operator(self, point: Point, state: CurvatureState) -> Invertible:
        return DiagonalOperator(dict.fromkeys(point.params, self.scale))
