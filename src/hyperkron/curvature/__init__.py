"""A: the curvature of the inner problem as a linear operator."""

from hyperkron.curvature.adam_diagonal import AdamDiagonal
from hyperkron.curvature.base import Curvature, CurvatureState, Invertible, Operator
from hyperkron.curvature.ggn import GGN
from hyperkron.curvature.hessian import Hessian
from hyperkron.curvature.identity import Identity
from hyperkron.curvature.kfac import EKFAC, KFAC, Coverage, KroneckerState, Layer
from hyperkron.curvature.shrunk import ShrunkGGN
from hyperkron.evaluation.point import Point

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "AdamDiagonal",
    "Coverage",
    "Curvature",
    "CurvatureState",
    "Hessian",
    "Identity",
    "Invertible",
    "KroneckerState",
    "Layer",
    "Operator",
    "Point",
    "ShrunkGGN",
]
