"""How accurate changes along v are, by the precision in which the model runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hyperkron.evaluation.point import Point
from hyperkron.kernels.linalg import tf32_products
from hyperkron.trees import HALF_TYPES


class Precision(NamedTuple):
    """Radii and tolerances for one precision of the model."""

    radii: tuple[float, ...]  # of finite differences, in the order they are tried; low precision needs larger ones
    tolerance: float
    """The largest relative error of an acceptable finite difference; 5 % is an angle of 3°. Models with smooth
    activations stay far below, models with ReLU and batch norm come close."""
    agreement: float  # the largest difference to the gradients that rounding explains
    exact: float  # the same between a finite difference and an exact way


FLOAT64 = Precision((1e-4, 1e-5, 1e-6), tolerance=1e-6, agreement=1e-6, exact=1e-5)
FLOAT32 = Precision((1e-2, 3e-3, 1e-3, 3e-4), tolerance=0.05, agreement=0.03, exact=0.05)
TF32 = Precision((1e-1, 3e-2, 1e-2, 3e-3), tolerance=0.05, agreement=0.06, exact=0.1)
HALF = Precision((1e-1, 3e-2, 1e-2, 3e-3), tolerance=0.05, agreement=0.25, exact=0.1)  # autocast, too


def precision(point: Point) -> Precision:
    """The precision of the model at ``point``."""
    if point.dtype == torch.float64:
        return FLOAT64
    if point.autocast is not None or any(p.dtype in HALF_TYPES for p in point.model.parameters()):  # frozen ones, too
        return HALF
    return TF32 if tf32(point) else FLOAT32


def tf32(point: Point) -> bool:
    """Whether the model's float32 products may run in TF32."""
    on_gpu = point.device.type == "cuda" and point.dtype == torch.float32
    return on_gpu and (tf32_products(point.device) or torch.backends.cudnn.allow_tf32)
