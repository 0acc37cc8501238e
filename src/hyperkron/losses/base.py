"""The record that a loss function returns: its value, and what is needed to compute its curvature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hyperkron.solution import HyperkronError
from hyperkron.validation import check_one_of, check_whole

Fisher = Literal["mc", "rademacher", "type-2", "empirical"]
"""Which vectors represent the output Hessian: sampled ones, all exact ones summed with random signs, all exact ones, or
the gradients at the targets."""
DRAWN: tuple[Fisher, ...] = ("mc", "rademacher")
"""The choices that draw at random, so that the vectors of different rows are independent."""


@dataclass(frozen=True, eq=False)
class L2:
    """The penalty α‖p‖² on one parameter p; it adds 2α to the diagonal of the Hessian at p.

    Attributes:
        parameter: p itself (compare with ``is``).
        coefficient: α, detached; a number, or a tensor that broadcasts to p.
        factors: what α is the product of, attached to the graph; empty if that is not known.
    """

    parameter: Tensor
    coefficient: Tensor | float
    factors: tuple[Tensor | float, ...] = ()

    def scale(self, factor: float | Tensor) -> L2:
        """The same penalty times ``factor``."""
        return replace(self, coefficient=self.coefficient * _detached(factor), factors=_extended(self.factors, factor))


@dataclass(frozen=True, eq=False)
class BatchPlace:
    """Where the examples of one rank are in a batch that is divided among several.

    Attributes:
        counts: the examples of every rank, one after the other in the batch.
        rank: which of them these are.
    """

    counts: Tensor
    rank: int

    def of(self, sample: Callable[..., Tensor], shape: Sequence[int], **options: Any) -> Tensor:
        """This rank's part of ``sample(shape of the whole batch)``: the same numbers whatever the number of ranks."""
        counts = [int(n) for n in self.counts.tolist()]
        return sample((sum(counts), *shape[1:]), **options).split(counts)[self.rank]


@dataclass(frozen=True, eq=False)
class Term(ABC):
    """One criterion c applied to one model output f: J = Σ_r w_r c_r(f_r), summed over rows r.

    A row is what the criterion sees at a time: the logits of one prediction for cross-entropy, the whole
    output of one example for the others. The Hessian of J with respect to f is block diagonal over rows.

    Attributes:
        output: f, attached to the graph.
        coefficients: w_r = σ_r · mask_r · scale / (number of valid rows), detached, one per row.
        row_losses: c_r, unweighted and attached to the graph, 0 where masked.
        valid: which rows are not masked; ``None`` if all are valid.
        factors: what w_r is the product of, attached to the graph, each one number or one per row; empty if that is
            not known. They tell which part of J reaches λ through the weights of examples.
        place: of these rows in the whole batch, where it is divided among ranks.
    """

    output: Tensor
    coefficients: Tensor
    row_losses: Tensor
    valid: Tensor | None
    factors: tuple[Tensor | float, ...] = field(default=(), kw_only=True)
    place: BatchPlace | None = field(default=None, kw_only=True)

    @property
    def per_example(self) -> Tensor:
        """Unweighted losses, one per example: the mean over an example's own valid rows, 0 if it has none."""
        rows = self.row_losses.reshape(len(self.row_losses), -1)
        if self.valid is None:
            return rows.mean(1)
        return rows.sum(1) / self.valid.reshape(rows.shape).sum(1).clamp(min=1)

    def vectors(
        self,
        fisher: Fisher = "mc",
        samples: int = 1,
        generator: torch.Generator | None = None,
        *,
        checked: bool = True,
    ) -> Iterator[Tensor]:
        r"""Vectors s shaped like the output, whose row-wise outer products add up to the output Hessian of J.

            mc:         Σ_m s_m s_mᵀ has expectation ∂²J/∂f²,   s_m = √(w/M) ∇_f(−log q(ỹ_m|f)),  ỹ_m ~ q(·|f)
            type-2:     Σ_c s_c s_cᵀ = ∂²J/∂f²                 (one vector per output entry of a row)
            rademacher: Σ_m s_m s_mᵀ has expectation ∂²J/∂f²,   s_m = Σ_c ±s_c/√M, the signs drawn for every row
            empirical:  s = √w ∇_f c, the gradient at the true target; not a Hessian (Kunstner et al., 2019)

        The weight enters as its square root, so that the outer products contain σ and not σ². A drawn label is mostly
        the likely one, and then ‖s‖² is small. With random signs ‖s‖² is near its expectation for every row, so sums
        over rows have less noise.

        Args:
            fisher: ``"mc"``, ``"rademacher"``, ``"type-2"`` or ``"empirical"``.
            samples: M, for ``"mc"`` and ``"rademacher"`` only.
            generator: on the device of the output; ``None`` draws from the global random state.
            checked: refuse negative weights, which waits for a GPU; otherwise they make the vectors nan.

        References:
            Martens and Grosse, 2015 (mc); Kunstner, Balles and Hennig, 2019 (empirical); Dangel et al., 2025.
        """
        check_one_of("fisher", fisher, get_args(Fisher))
        samples = samples if fisher in DRAWN else 1
        if fisher in DRAWN:
            check_whole("samples", samples, remedy="it is the number of Monte-Carlo vectors")
            _check_generator(generator, self.output)
        weights = self.coefficients if fisher == "empirical" else self.hessian_scale
        lowest = weights.min().item() if checked else 0.0
        if lowest < 0:
            raise HyperkronError(
                f"weight: a row of the loss counts negatively (coefficient {lowest:.3g} after weights, "
                "target mass and scale), so its curvature is not a sum of outer products; use weights ≥ 0 (a "
                "sigmoid or softplus of λ), or a curvature made of Hessian products."
            )
        root = self._per_entry(weights / samples).sqrt()
        if fisher in DRAWN:
            found = (self._sampled if fisher == "mc" else self._signed)(root, samples, generator)
        else:
            found = self._exact(root) if fisher == "type-2" else iter([self._empirical(root)])
        return map(self._in_output_dtype, found)  # which holds on to no vector

    def hessian_product(self, v: Tensor) -> Tensor:
        """(∂²J/∂f²) v for v shaped like the output; exact, also where weights are negative."""
        if v.shape != self.output.shape:
            raise HyperkronError(
                f"v has shape {tuple(v.shape)} but the output has shape {tuple(self.output.shape)}; "
                "pass one vector shaped like the output."
            )
        product = self._criterion_product(v.detach().to(self.coefficients.dtype))
        return self._in_output_dtype(product.mul_(self._per_entry(self.hessian_scale)))

    def scale(self, factor: float | Tensor) -> Term:
        """The same term times ``factor``."""
        return replace(
            self, coefficients=self.coefficients * _detached(factor), factors=_extended(self.factors, factor)
        )

    @property
    def point(self) -> Tensor:
        """The output, detached, in the precision in which the loss is computed."""
        return self.output.detach().to(self.coefficients.dtype)

    @property
    def hessian_scale(self) -> Tensor:
        """The factor of each row's criterion Hessian in J: the coefficient (times the target's mass)."""
        return self.coefficients

    @abstractmethod
    def _sampled(self, root: Tensor, samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """``samples`` vectors ``root`` · s with E[s sᵀ] = ∂²c/∂f²."""

    def _signed(self, root: Tensor, samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """``samples`` sums of the vectors of :meth:`_exact` with random signs, which differ from row to row."""
        for _ in range(samples):
            yield torch.stack([self._signs(root.shape, generator) * s for s in self._exact(root)]).sum(0)

    def _signs(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        """±1 with equal probability."""
        drawn = self._drawn(partial(torch.randint, 0, 2), shape, generator=generator, device=self.output.device)
        return drawn.to(self.coefficients.dtype).mul_(2).sub_(1)

    @abstractmethod
    def _exact(self, root: Tensor) -> Iterator[Tensor]:
        """Vectors ``root`` · s_k with Σ_k s_k s_kᵀ = ∂²c/∂f²."""

    @abstractmethod
    def _empirical(self, root: Tensor) -> Tensor:
        """``root`` · ∂c/∂f at the true target."""

    @abstractmethod
    def _criterion_product(self, v: Tensor) -> Tensor:
        """(∂²c/∂f²) v as a fresh tensor."""

    def _drawn(self, sample: Callable[..., Tensor], shape: Sequence[int], **options: Any) -> Tensor:
        """``sample(shape)``, random numbers for every example: those of its place in the whole batch."""
        return sample(shape, **options) if self.place is None else self.place.of(sample, shape, **options)

    def _in_output_dtype(self, x: Tensor) -> Tensor:
        return x.to(self.output.dtype)

    def _per_entry(self, rows: Tensor) -> Tensor:
        """One number per row, shaped to multiply the output."""
        return rows.reshape(rows.shape + (1,) * (self.output.ndim - rows.ndim))


@dataclass(frozen=True, eq=False, repr=False)
class Loss:
    """A scalar J attached to the graph, with the criteria and penalties it is made of.

    Losses add (``a + b``, ``sum([a, b])``), and scale by numbers or by scalar tensors, which may carry a
    gradient to λ. A plain scalar tensor can be added; its curvature is unknown, which ``plain`` records.

    Attributes:
        value: J, a scalar tensor.
        terms: the criteria in J, each with its model output.
        l2: the L2 penalties in J, one per parameter.
        plain: the plain tensors in J, whose curvature only differentiation can tell.

    Example:
        >>> import torch
        >>> from hyperkron.losses import cross_entropy, mse
        >>> output, target = torch.zeros(4, 2, requires_grad=True), torch.tensor([0, 1, 1, 0])
        >>> loss = cross_entropy(output, target) + 0.5 * mse(output, torch.zeros(4, 2))
        >>> loss
        Loss(0.6931, terms=2, l2=0, opaque=False)
        >>> loss.backward()
        >>> (loss + output.sum()).opaque
        True
    """

    value: Tensor
    terms: tuple[Term, ...] = ()
    l2: tuple[L2, ...] = ()
    plain: tuple[Tensor, ...] = ()

    __array_ufunc__ = None  # numpy scalars leave the arithmetic to this class

    @property
    def opaque(self) -> bool:
        """Whether J contains plain tensors."""
        return bool(self.plain)

    @property
    def per_example(self) -> Tensor:
        """The unweighted losses of the examples, (N,), attached to the graph, if J has a single criterion."""
        if len(self.terms) != 1:
            raise HyperkronError(
                f"per_example: the loss has {len(self.terms)} criteria, so it is not clear whose examples are meant; "
                "read loss.terms[i].per_example, or ask the loss before adding to it."
            )
        return self.terms[0].per_example

    def scale(self, factor: float | Tensor) -> Loss:
        """J times a number or a scalar tensor, with its curvature."""
        if isinstance(factor, Tensor):
            _require_scalar(factor, "factor")
        return Loss(
            self.value * factor,
            tuple(term.scale(factor) for term in self.terms),
            tuple(penalty.scale(factor) for penalty in self.l2),
            tuple(x * factor for x in self.plain),
        )

    def backward(
        self,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Backpropagate from the value, as :meth:`torch.Tensor.backward`."""
        torch.autograd.backward(self.value, None, retain_graph, create_graph, inputs=inputs)

    def item(self) -> float:
        """The value as a number."""
        return float(self.value.item())

    def detach(self) -> Tensor:
        """The value, detached from the graph."""
        return self.value.detach()

    def __float__(self) -> float:
        return self.item()

    def __repr__(self) -> str:
        return f"Loss({self.item():.4g}, terms={len(self.terms)}, l2={len(self.l2)}, opaque={self.opaque})"

    def __add__(self, other: Loss | Tensor | float) -> Loss:
        if isinstance(other, Real):
            return self if other == 0 else replace(self, value=self.value + other)
        if isinstance(other, Tensor):
            other = as_loss(other)
        if not isinstance(other, Loss):
            return NotImplemented
        plain = self.plain + other.plain
        return Loss(self.value + other.value, self.terms + other.terms, self.l2 + other.l2, plain)

    __radd__ = __add__

    def __mul__(self, factor: float | Tensor) -> Loss:
        return self.scale(factor) if isinstance(factor, (Real, Tensor)) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Tensor) -> Loss:
        return self.scale(1 / divisor) if isinstance(divisor, (Real, Tensor)) else NotImplemented

    def __neg__(self) -> Loss:
        return self.scale(-1.0)

    def __sub__(self, other: Loss | Tensor | float) -> Loss:
        return self + (-other)

    def __rsub__(self, other: Tensor | float) -> Loss:
        return -self + other


def as_loss(x: Any, objective: str = "") -> Loss:
    """``x`` as a :class:`Loss`: itself, or a scalar tensor as a loss whose curvature is unknown.

    ``objective`` is the name of the function that returned ``x``, for error messages.

    Example:
        >>> import torch
        >>> as_loss(torch.tensor(2.0))
        Loss(2, terms=0, l2=0, opaque=True)
    """
    if isinstance(x, Loss):
        return x
    name = f"{objective} did not return a loss: loss" if objective else "loss"
    if not isinstance(x, Tensor):
        raise HyperkronError(f"{name} is a {type(x).__name__} ({x!r:.60}); return a hyperkron Loss or a scalar tensor.")
    _require_scalar(x, name)
    return Loss(x, plain=(x,))


def _require_scalar(x: Tensor, argument: str) -> None:
    if x.ndim != 0:
        raise HyperkronError(
            f"{argument} has shape {tuple(x.shape)} but must be a scalar; reduce it with .mean() or .sum()."
        )
    if not x.is_floating_point():
        raise HyperkronError(f"{argument} has dtype {x.dtype}; use a floating point tensor.")


def _check_generator(generator: Any, output: Tensor) -> None:
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise HyperkronError(
            f"generator={generator!r:.60} is a {type(generator).__name__}; pass "
            f"torch.Generator(device={str(output.device)!r}).manual_seed(seed), or None."
        )
    mine, theirs = generator.device, output.device
    if mine.type != theirs.type or (None not in (mine.index, theirs.index) and mine.index != theirs.index):
        raise HyperkronError(
            f"generator is on {mine} but the output is on {theirs}; use torch.Generator(device={str(theirs)!r})."
        )


def _extended(factors: tuple[Tensor | float, ...], factor: float | Tensor) -> tuple[Tensor | float, ...]:
    """The factors of a scaled coefficient; unknown ones stay unknown."""
    return (*factors, factor) if factors else ()


def _detached(factor: float | Tensor) -> float | Tensor:
    return factor.detach() if isinstance(factor, Tensor) else factor
