"""Products of a model in half precision with vectors in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.evaluation.point import Point
from hyperkron.trees import Tree


def unit_roundoff(point: Point) -> float:
    """The unit roundoff of a model in half precision, whose products with float32 vectors have it; else 0."""
    return float(torch.finfo(point.dtype).eps) if point.dtype in (torch.float16, torch.bfloat16) else 0.0


def lowered(v: Tree, params: Tree) -> tuple[Tree, Tensor | None]:
    """(v/c, c) in the dtypes of the parameters; c, which keeps v within the narrow range of float16, or ``None``."""
    narrow = any(p.dtype == torch.float16 and v[name].dtype != p.dtype for name, p in params.items())
    unit = trees.largest(v).clamp_min(1e-30) if narrow else None
    return trees.cast(v if unit is None else trees.scale(v, 1.0 / unit), params), unit


def damped(
    params: Tree, products: tuple[Tensor | None, ...], v: Tree, damping: float, unit: Tensor | None = None
) -> Tree:
    """(c·Av + δv) in the dtypes of v, from the products of :func:`lowered` vectors; missing ones are zero."""
    whole = {
        name: torch.zeros_like(p) if x is None else x.detach().contiguous()
        for (name, p), x in zip(params.items(), products, strict=True)
    }
    whole = trees.cast(whole, v)
    if unit is not None:
        whole = trees.scale(whole, unit)
    return trees.add(whole, v, alpha=damping) if damping else whole
