"""Losses in which every output entry stands for itself: squared error and binary cross-entropy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from hyperkron.losses._checks import answers_at_once, check_dense_target, check_output, reduce_rows, row_weights
from hyperkron.losses.base import Loss, Term
from hyperkron.solution import HyperkronError


def mse(output: Tensor, target: Tensor, *, weight: Tensor | None = None) -> Loss:
    r"""Half the squared error, summed over an example's output and averaged over examples.

        J = (1/N) Σ_n σ_n ½‖f_n − y_n‖²,    ∂²c_n/∂f_n² = I

    This is the negative log-likelihood of N(f, I) up to a constant. ``torch.nn.functional.mse_loss`` is 2/D times this,
    with D the number of outputs per example.

    Args:
        output: predictions (N, ...); everything after the first dimension belongs to one example.
        target: the same shape, floating point; may carry a gradient to λ.
        weight: σ, one per example (N,); may carry a gradient to λ.

    Example:
        >>> import torch
        >>> loss = mse(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.zeros(2, 2))
        >>> loss.per_example
        tensor([2.5000, 0.0000])
        >>> loss.item()
        1.25
    """
    work = check_output(output)
    target = check_dense_target(target, output, work)
    entries = 0.5 * (output.to(work) - target).square()
    return _elementwise(SquaredTerm, output, target, entries, weight)


def binary_cross_entropy(output: Tensor, target: Tensor, *, weight: Tensor | None = None) -> Loss:
    r"""Binary cross-entropy of logits, summed over an example's output and averaged over examples.

        J = (1/N) Σ_n σ_n Σ_k [−y_nk log p_nk − (1−y_nk) log(1−p_nk)],    p = sigmoid(f)
        ∂²c_n/∂f_n² = diag(p_n (1 − p_n))

    With one logit per example this is ``torch.nn.functional.binary_cross_entropy_with_logits``; with D logits
    (multi-label) it is D times that, because the labels of an example are independent events.

    Args:
        output: logits (N, ...); everything after the first dimension belongs to one example.
        target: probabilities in [0, 1], the same shape, floating point; may carry a gradient to λ. Values
            outside [0, 1] are an error on the CPU; other devices do not check this, because it would be slow.
        weight: σ, one per example (N,); may carry a gradient to λ.

    Example:
        >>> import torch
        >>> binary_cross_entropy(torch.zeros(3), torch.tensor([0.0, 1.0, 0.5]))
        Loss(0.6931, terms=1, l2=0, opaque=False)
    """
    work = check_output(output)
    target = check_dense_target(target, output, work)
    if answers_at_once(target):
        low, high = (bound.item() for bound in target.detach().aminmax())
        if low < 0 or high > 1:
            raise HyperkronError(
                f"target ranges over [{low:.4g}, {high:.4g}] but must lie in [0, 1]; map labels ±1 with "
                "(target + 1) / 2, and corrected labels into range with .clamp(0, 1) or a sigmoid."
            )
    logits = output.to(work)
    entries = -F.logsigmoid(-logits) - target * logits
    return _elementwise(BernoulliTerm, output, target, entries, weight)


def _elementwise(
    kind: type[_ElementwiseTerm], output: Tensor, target: Tensor, entries: Tensor, weight: Tensor | None
) -> Loss:
    """The loss whose examples' losses are the sums of their entries."""
    row_losses = entries.reshape(len(entries), -1).sum(1)
    weights = row_weights(weight, output, row_losses.shape, entries.dtype)
    value, coefficients, factors = reduce_rows(row_losses, weights, None)
    return Loss(value, (kind(output, coefficients, row_losses, None, target.detach(), factors=factors),))


@dataclass(frozen=True, eq=False)
class _ElementwiseTerm(Term):
    """−log q(y|f) with independent entries: ∂c/∂f = mean(f) − y, ∂²c/∂f² = diag(variance(f)); rows are examples.

    Unless overridden, the mean is f and the variance 1.
    """

    target: Tensor

    @cached_property
    def mean(self) -> Tensor:
        return self.point

    @cached_property
    def variance(self) -> Tensor:
        return torch.ones_like(self.point)

    @abstractmethod
    def _noise(self, generator: torch.Generator | None) -> Tensor:
        """mean − ỹ for one draw ỹ ~ q(·|f)."""

    def _sampled(self, root: Tensor, samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        return (self._noise(generator).mul_(root) for _ in range(samples))

    def _exact(self, root: Tensor) -> Iterator[Tensor]:
        # one vector per output entry of an example, zero elsewhere
        roots = (self.variance.sqrt() * root).reshape(len(self.output), -1)
        for k in range(roots.shape[1]):
            vector = torch.zeros_like(roots)
            vector[:, k] = roots[:, k]
            yield vector.reshape(self.output.shape)

    def _signed(self, root: Tensor, samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        scale = self.variance.sqrt() * root
        for _ in range(samples):
            yield self._signs(self.output.shape, generator).mul_(scale)

    def _empirical(self, root: Tensor) -> Tensor:
        return (self.mean - self.target).mul_(root)

    def _criterion_product(self, v: Tensor) -> Tensor:
        return self.variance * v


@dataclass(frozen=True, eq=False)
class SquaredTerm(_ElementwiseTerm):
    """½‖output − target‖² for each example."""

    def _noise(self, generator: torch.Generator | None) -> Tensor:
        f = self.point
        return self._drawn(torch.randn, f.shape, generator=generator, dtype=f.dtype, device=f.device)


@dataclass(frozen=True, eq=False)
class BernoulliTerm(_ElementwiseTerm):
    """Binary cross-entropy of sigmoid(output) against the target, summed over an example's entries."""

    @cached_property
    def mean(self) -> Tensor:
        return torch.sigmoid(self.point)

    @cached_property
    def variance(self) -> Tensor:
        """p (1 − p), without cancellation where p is near 1."""
        return self.mean * torch.sigmoid(-self.point)

    def _noise(self, generator: torch.Generator | None) -> Tensor:
        p = self.mean
        uniform = self._drawn(torch.rand, p.shape, generator=generator, dtype=p.dtype, device=p.device)
        return p - (uniform < p).to(p.dtype)
