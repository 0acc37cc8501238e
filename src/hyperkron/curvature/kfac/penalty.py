"""L2 penalties that are uneven within a block, such as weight decay on weights but not on biases.

With 2α different for the columns of [W | b] the damped block is

    B ⊗ A + I ⊗ D ,   D = diag(δ + 2α) = δ̄ E² ,   so   (I ⊗ E) [B ⊗ E⁻¹AE⁻¹ + δ̄ I] (I ⊗ E) ,

with E diagonal and δ̄ the mean of D. After scaling the columns by E it is damped evenly, like any other block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hyperkron.curvature.kfac.coverage import Block, Plan
from hyperkron.curvature.kfac.factors import Factor, LowRank
from hyperkron.solution import warn_once

Penalties = Mapping[str, Tensor | float]
"""2α by parameter."""


def mean_damping(plan: Plan, block: Block, penalties: Penalties, damping: float) -> Tensor | float:
    """δ̄ = δ + the mean of 2α over the numbers of the block."""
    if not any(name in penalties for name in block.names):
        return damping
    parts = [(plan.rows[name].count, penalties.get(name, 0.0)) for name in block.names]
    total = sum(count for count, _ in parts)
    return damping + sum(count / total * (p.mean() if isinstance(p, Tensor) else p) for count, p in parts)


def column_scales(plan: Plan, penalties: Penalties, damping: float, like: Tensor) -> dict[str, Tensor]:
    """E of every block that is penalised unevenly, (groups, 1, d_in [+1]), on the device and in the dtype of ``like``.

    A penalty that differs between the rows of a weight is averaged over the rows, because E acts on columns only.
    """
    found: dict[str, Tensor] = {}
    for name, block in plan.blocks.items() if penalties else ():
        values = [penalties.get(part, 0.0) for part in block.names]
        if not any(part in penalties for part in block.names) or _even(values):
            continue
        d = damping + _columns(plan, block, penalties, like)
        d = torch.where(d > 0, d, torch.finfo(d.dtype).eps ** 0.5 * d.amax())  # without damping, where α = 0
        mean = mean_damping(plan, block, penalties, damping)
        found[name] = (d / (mean.to(d) if isinstance(mean, Tensor) else mean)).sqrt()[:, None]
    return found


def scaled_factor(factor: Factor, scale: Tensor | None) -> Factor:
    """E⁻¹AE⁻¹; A itself if there is no E."""
    if scale is None:
        return factor
    return LowRank(factor.wide / scale) if isinstance(factor, LowRank) else factor / scale / scale.mT


def _even(values: list[Tensor | float]) -> bool:
    """Whether all numbers of a block are known to have the same penalty, without reading from the device."""
    numbers = {value for value in values if not isinstance(value, Tensor)}
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(value.numel() > 1 for value in tensors):
        return False
    return len(numbers) + len({id(value) for value in tensors}) == 1


def _columns(plan: Plan, block: Block, penalties: Penalties, like: Tensor) -> Tensor:
    """2α of every column of [W | b], (groups, d_in [+1])."""
    layer, parts = block.layer, []
    for name, width in ((block.weight, layer.d_in), (block.bias, 1)):
        if name is None:
            continue
        value = penalties.get(name, 0.0)
        if isinstance(value, Tensor) and value.numel() > 1:
            shape = plan.rows[name].shape
            if value.dim() == len(shape) and value.shape[layer.output_dim] > 1:
                warn_once(
                    "l2-rows",
                    f"the l2 penalty of {name} has coefficients of its own for the rows of a layer; KFAC and EKFAC "
                    "take their mean over the rows. Use one coefficient per parameter or per input, or GGN() with CG.",
                )
            whole = value.to(like).expand(shape)
            matrix = layer.to_matrix(whole) if width > 1 else whole.reshape(layer.groups, layer.d_out, 1)
            parts.append(matrix.mean(1))
        elif isinstance(value, Tensor):
            parts.append(value.to(like).reshape(1, 1).expand(layer.groups, width))
        else:
            parts.append(like.new_full((layer.groups, width), value))
    return torch.cat(parts, 1)
