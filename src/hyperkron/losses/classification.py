"""Softmax cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional as F

from hyperkron.losses._checks import answers_at_once, check_companion, check_output, reduce_rows, row_weights
from hyperkron.losses.base import Loss, Term
from hyperkron.losses.label_draws import SEEDS, drawn_classes
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_interval

PIECE = 2**24
"""Of more logits than this, as of a large vocabulary, probabilities are made a few rows at a time, and not kept."""


def cross_entropy(
    output: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Loss:
    r"""Softmax cross-entropy of logits, averaged over the valid rows.

        J = (1/R) Σ_r σ_r c_r,    c_r = −Σ_k q_rk log p_rk,    p_r = softmax(f_r)
        ∂²c_r/∂f_r² = |q_r| (diag(p_r) − p_r p_rᵀ)      with |q_r| = Σ_k q_rk, 1 for a distribution

    The sum is divided by the number R of valid rows, not by Σσ. On the CPU a class out of range or a batch
    without a valid row is an error; on other devices, where this check would be slow, J is nan.

    Args:
        output: logits (N, C), or (N, ..., C): the class dimension is the **last** one, unlike in torch. Use
            ``output.movedim(1, -1)`` for logits of shape (N, C, ...).
        target: class indices of shape ``output.shape[:-1]``, or soft targets q, floating point, of the shape
            of ``output``, which may carry a gradient to λ.
        weight: σ, one per example (N,) or one per row (``output.shape[:-1]``); may carry a gradient to λ.
        label_smoothing: ε in [0, 1]; q becomes (1−ε) q + ε/C.
        ignore_index: rows with this class index do not count (ignored for soft targets, as in torch).

    Example:
        >>> import torch
        >>> logits, classes = torch.zeros(2, 4), torch.tensor([3, 0])
        >>> cross_entropy(logits, classes)
        Loss(1.386, terms=1, l2=0, opaque=False)
        >>> cross_entropy(logits, classes, weight=torch.tensor([1.0, 0.5]))
        Loss(1.04, terms=1, l2=0, opaque=False)
        >>> tokens = torch.tensor([[1, 2, -100], [0, -100, -100]])  # three of six tokens count
        >>> cross_entropy(torch.zeros(2, 3, 4), tokens).terms[0].coefficients.sum()
        tensor(1.)
    """
    work = check_output(output)
    if output.ndim < 2:
        raise HyperkronError(
            f"output has shape {tuple(output.shape)} but logits need (N, ..., C); use output.unsqueeze(0) "
            "for one example, or binary_cross_entropy for one logit per example."
        )
    check_interval("label_smoothing", label_smoothing, 0, 1)
    if not isinstance(ignore_index, Integral):
        raise HyperkronError(f"ignore_index={ignore_index!r} must be a whole number, the class of rows to skip.")
    target = check_companion(target, output, "target")
    weights = row_weights(weight, output, output.shape[:-1], work)
    logp = torch.log_softmax(output.to(work), -1)
    valid = wrong = None
    if target.is_floating_point() and target.shape == output.shape:
        target = target.to(work)
        row_losses = -(target * logp).sum(-1)
    else:
        target, valid, wrong = _class_indices(target, output, ignore_index)
        flat = F.nll_loss(logp.flatten(0, -2), target.flatten(), reduction="none")
        row_losses = flat.reshape(target.shape)
    if label_smoothing:
        row_losses = row_losses * (1 - label_smoothing) - logp.mean(-1) * label_smoothing
    if wrong is not None:
        row_losses = row_losses.masked_fill(wrong, float("nan"))
    if valid is not None:
        row_losses = row_losses.masked_fill(~valid, 0.0)
    value, coefficients, factors = reduce_rows(row_losses, weights, valid)
    term = SoftmaxTerm(output, coefficients, row_losses, valid, target.detach(), label_smoothing, factors=factors)
    return Loss(value, (term,))


def _class_indices(target: Tensor, output: Tensor, ignore_index: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Indices that are safe to look up; which rows are valid (``None``: all); which are out of range.

    The third is ``None`` on the CPU, where a class out of range is refused here.
    """
    _check_classes(target, output)
    classes = output.shape[-1]
    target = target.long()
    if answers_at_once(target):
        low, high = (int(bound) for bound in target.aminmax())
        if low >= 0 and high < classes and not low <= ignore_index <= high:
            return target, None, None
    valid, safe = target != ignore_index, target.clamp(0, classes - 1)
    wrong = valid & (safe != target)
    if not answers_at_once(target):
        return safe, valid, wrong
    if bool(wrong.any()):
        raise HyperkronError(
            f"target contains class {int(target[wrong][0])} but output has C={classes} classes in its last "
            f"dimension; classes are 0..{classes - 1}, and rows to skip carry ignore_index={ignore_index}."
        )
    if not bool(valid.any()):
        raise HyperkronError(
            f"target: all {target.numel()} rows equal ignore_index={ignore_index}, so there is nothing to average; "
            "skip such batches, or change ignore_index."
        )
    return safe, valid, None


def _check_classes(target: Tensor, output: Tensor) -> None:
    """Refuse a target that is neither class indices nor soft targets for this output."""
    shapes = f"target is {target.dtype} of shape {tuple(target.shape)}, output of shape {tuple(output.shape)}"
    if target.shape == output.shape[:1] + output.shape[2:] != output.shape[:-1]:
        raise HyperkronError(
            f"{shapes}: the class dimension must be the last one; use output.movedim(1, -1) for (N, C, ...)."
        )
    if target.shape == output.shape:
        raise HyperkronError(f"{shapes}: soft or one-hot targets must be floating point; use target.float().")
    if target.shape != output.shape[:-1]:
        raise HyperkronError(
            f"{shapes}: class targets need shape {tuple(output.shape[:-1])}, soft targets the output's; the "
            "class dimension is the last one (use output.movedim(1, -1) if it is the second)."
        )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise HyperkronError(f"{shapes}: class targets must be integers; use target.long().")


@dataclass(frozen=True, eq=False)
class SoftmaxTerm(Term):
    """Cross-entropy of softmax(output) against class indices or soft targets; rows are the logit vectors."""

    target: Tensor
    smoothing: float

    @cached_property
    def probabilities(self) -> Tensor:
        """p = softmax(f), kept for the next product."""
        return torch.softmax(self.point, -1)

    @cached_property
    def mass(self) -> Tensor | None:
        """|q| of each row after smoothing; ``None`` where the target is a class, with mass 1."""
        if not self.target.is_floating_point():
            return None
        return self.target.sum(-1) * (1 - self.smoothing) + self.smoothing

    @property
    def hessian_scale(self) -> Tensor:
        return self.coefficients if self.mass is None else self.coefficients * self.mass

    def _sampled(self, root: Tensor, samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        # √w (p − e_ỹ), from one random number per row and sample
        f = self.output.detach()
        number = partial(torch.randint, *SEEDS, dtype=torch.int32, device=f.device, generator=generator)
        seeds = self._drawn(number, (*f.shape[:-1], samples)).flatten(0, -2)
        drawn = torch.cat([drawn_classes(p, seeds[some], PIECE) for some, p in self._pieces()])
        roots = root.expand(*f.shape[:-1], 1).flatten(0, -2)
        for m in range(samples):
            vector = torch.empty_like(f, memory_format=torch.contiguous_format)
            rows = vector.view(-1, f.shape[-1])
            for some, p in self._pieces():
                rows[some] = _less_at(p * roots[some], drawn[some, m : m + 1], roots[some])
            yield vector

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of rows with their p: one slice with the stored p, or several with a temporary p if it is large."""
        if self.output.numel() <= PIECE:
            yield slice(None), self.probabilities.flatten(0, -2)
            return
        rows, step = self.output.detach().flatten(0, -2), max(1, PIECE // self.output.shape[-1])
        for begin in range(0, len(rows), step):
            some = slice(begin, begin + step)
            yield some, torch.softmax(rows[some].to(self.coefficients.dtype), -1)

    def _exact(self, root: Tensor) -> Iterator[Tensor]:
        # s_c = √p_c (e_c − p)
        p = self.probabilities
        scale = p.sqrt().mul_(root)
        for c in range(p.shape[-1]):
            vector = p * -scale[..., c : c + 1]
            vector[..., c] += scale[..., c]
            yield vector

    def _signed(self, root: Tensor, samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        # Σ_c ±√p_c (e_c − p), from one sign per class
        f = self.output.detach()
        roots = root.expand(*f.shape[:-1], 1).flatten(0, -2)
        for _ in range(samples):
            vector = torch.empty_like(f, memory_format=torch.contiguous_format)
            rows, signs = vector.view(-1, f.shape[-1]), self._signs(f.shape, generator).view(-1, f.shape[-1])
            for some, p in self._pieces():
                signed = p.sqrt().mul_(signs[some])
                rows[some] = signed.sub_(p * signed.sum(-1, keepdim=True)).mul_(roots[some])
            yield vector

    def _empirical(self, root: Tensor) -> Tensor:
        # ∇c = |q| p − q, with q after smoothing
        keep, spread = 1 - self.smoothing, self.smoothing / self.probabilities.shape[-1]
        if self.mass is not None:
            gradient = self._per_entry(self.mass) * self.probabilities - keep * self.target
            return gradient.sub_(spread).mul_(root)
        vector = (self.probabilities - spread if spread else self.probabilities) * root
        return _less_at(vector, self.target.unsqueeze(-1), keep * root)

    def _criterion_product(self, v: Tensor) -> Tensor:
        p = self.probabilities
        return (v - (p * v).sum(-1, keepdim=True)).mul_(p)


def _less_at(vector: Tensor, index: Tensor, amount: Tensor) -> Tensor:
    """``vector`` minus ``amount`` at one index per row, in place (deterministic on every device)."""
    return vector.scatter_(-1, index, vector.gather(-1, index) - amount)
