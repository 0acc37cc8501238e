"""The losses of the examples of a batch, of which the inner loss is the sum beside its penalties."""

from __future__ import annotations

import operator
from functools import reduce

import torch
from torch import Tensor

from hyperkron.losses import Loss, Term


def without_penalties(loss: Loss, weights: Tensor | None = None) -> Tensor:
    """Σ_n w_n c_n, the part of a loss that its examples make; w_n = 1 by default, and where it does not tell rows."""
    if loss.opaque or not loss.terms:
        return loss.value
    moving = weights_move(loss)
    rows = [weighted_rows(term, moving) for term in loss.terms]
    if weights is not None and not any(len(each) % len(weights) for each in rows):
        rows = [each * spread(weights, each) for each in rows]
    return torch.stack([each.sum() for each in rows]).sum()


def weights_move(loss: Loss) -> bool:
    """Whether weights of the loss carry a gradient to θ, as those of a focal loss do."""
    return any(isinstance(x, Tensor) and x.requires_grad for term in loss.terms for x in term.factors)


def weighted_rows(term: Term, moving: bool) -> Tensor:
    """w_r c_r, with what moves w_r along θ if ``moving``."""
    weights = reduce(operator.mul, term.factors) if moving and term.factors else term.coefficients
    return weights * term.row_losses


def telling(count: int, loss: Loss) -> Tensor:
    """A weight for each example, few of them alike and exact in every precision; ones, if the loss tells no rows."""
    lengths = [len(term.row_losses) for term in loss.terms]
    if loss.opaque or not lengths or any(length % count for length in lengths):
        return loss.value.new_ones(count)
    return 1 + (torch.arange(count, device=loss.value.device) % 61).to(loss.value.dtype) / 64


def spread(weights: Tensor, rows: Tensor) -> Tensor:
    """The weights of examples, as those of their rows."""
    each = weights.repeat_interleave(len(rows) // len(weights)).to(rows.dtype)
    return each.reshape(-1, *[1] * (rows.dim() - 1))
