"""KFAC and EKFAC: layers, coverage, capture, inverses, and the curvatures made of them."""

from hyperkron.curvature.kfac.coverage import Coverage
from hyperkron.curvature.kfac.ekfac import EKFAC
from hyperkron.curvature.kfac.kfac import KFAC
from hyperkron.curvature.kfac.layers import Layer
from hyperkron.curvature.kfac.state import KroneckerState

__all__ = ["EKFAC", "KFAC", "Coverage", "KroneckerState", "Layer"]
