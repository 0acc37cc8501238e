"""Checks of the arguments of loss functions; errors name the argument, the value and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

from hyperkron.solution import HyperkronError


def check_output(output: object) -> torch.dtype:
    """Refuse an unusable model output; return the precision in which the loss is computed."""
    if not isinstance(output, Tensor):
        raise HyperkronError(
            f"output is a {type(output).__name__}, not a tensor; pass the model's logits or predictions "
            "(for a model that returns a record, its .logits)."
        )
    if not output.is_floating_point():
        raise HyperkronError(f"output has dtype {output.dtype}; it must be floating point.")
    if output.ndim == 0:
        raise HyperkronError(
            "output has no dimensions (a scalar); pass the model's output (N, ...), not a finished loss."
        )
    if output.numel() == 0:
        raise HyperkronError(
            f"output has shape {tuple(output.shape)}, an empty batch; skip empty batches before computing the loss."
        )
    return torch.promote_types(output.dtype, torch.float32)


def check_companion(x: object, output: Tensor, argument: str) -> Tensor:
    """Refuse a target or weight that is not a tensor or lives on another device."""
    if not isinstance(x, Tensor):
        raise HyperkronError(f"{argument} is a {type(x).__name__}, not a tensor; wrap it with torch.as_tensor(...).")
    if x.device != output.device:
        raise HyperkronError(
            f"{argument} is on {x.device} but output is on {output.device}; move it with "
            f"{argument}.to({str(output.device)!r})."
        )
    return x


def answers_at_once(x: Tensor) -> bool:
    """Whether the values of ``x`` can be read without waiting for a device."""
    return x.device.type == "cpu"


def check_dense_target(target: Tensor, output: Tensor, work: torch.dtype) -> Tensor:
    """A floating point target of exactly the output's shape, in the precision of the loss."""
    target = check_companion(target, output, "target")
    if target.shape != output.shape:
        raise HyperkronError(
            f"target has shape {tuple(target.shape)} but output has shape {tuple(output.shape)}; give both "
            "the same shape (targets are not broadcast): output.squeeze(-1), or target.reshape(output.shape)."
        )
    if not target.is_floating_point():
        raise HyperkronError(f"target has dtype {target.dtype}; use floating point targets: target.float().")
    return target.to(work)


def row_weights(weight: Tensor | float | None, output: Tensor, rows: torch.Size, work: torch.dtype) -> Tensor | None:
    """The weights as a tensor of one number per row, attached to the graph; ``None`` if there are none."""
    if weight is None:
        return None
    if isinstance(weight, (int, float)):
        raise HyperkronError(
            f"weight={weight!r} is one number, but weights are per example; scale the whole loss with "
            f"{weight!r} * loss."
        )
    weight = check_companion(weight, output, "weight")
    if not weight.is_floating_point():
        raise HyperkronError(f"weight has dtype {weight.dtype}; use floating point weights: weight.float().")
    if weight.shape == rows:
        return weight.to(work)
    if weight.shape == rows[:1]:
        return weight.to(work).reshape(rows[:1] + (1,) * (len(rows) - 1)).expand(rows)
    wanted = f"({rows[0]},), one per example" + (f", or {tuple(rows)}, one per row" if len(rows) > 1 else "")
    remedy = "use weight.squeeze(-1)" if weight.shape == (*rows, 1) else "pick the weights of this batch"
    raise HyperkronError(f"weight has shape {tuple(weight.shape)} but must have shape {wanted}; {remedy}.")


def reduce_rows(
    row_losses: Tensor, weights: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor | float, ...]]:
    """The value (1/R) Σ_r σ_r c_r over the R valid rows, the detached coefficients σ_r·valid_r/R, and their factors.

    If no row is valid, all are nan on a GPU, because a check would wait for the device.
    """
    total = (row_losses if weights is None else row_losses * weights).sum()
    if valid is None:
        share = 1.0 / row_losses.numel()
        ones = torch.ones_like(row_losses.detach()) if weights is None else weights.detach()
        return total * share, ones * share, (share,) if weights is None else (weights, share)
    count = valid.sum()
    shares = valid.to(row_losses.dtype) / count
    if weights is None:
        return total / count, shares, (shares,)
    return total / count, shares * weights.detach(), (weights, shares)
