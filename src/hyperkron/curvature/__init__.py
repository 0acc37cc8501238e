"""A: the curvature of the inner problem as a linear operator."""

from hyperkron.curvature.base import Curvature, CurvatureState, Invertible, Operator
from hyperkron.curvature.kfac import EKFAC, KFAC, Coverage, KroneckerState, Layer
from hyperkron.curvature.products import GGN, Hessian
from hyperkron.curvature.simple import AdamDiagonal, Identity
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
]
