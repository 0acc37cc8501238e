"""J_in and J_out: the two plain functions of a bilevel problem.

    min_λ  J_out(λ, θ*(λ))    subject to    θ*(λ) ∈ argmin_θ J_in(λ, θ)

Each function takes the model (θ), the hyperparameter module (λ) and a batch of any kind. It returns a
:class:`hyperkron.losses.Loss` or, if its curvature is not needed, a scalar tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from hyperkron.collectives import ONE_PROCESS, Group
from hyperkron.kernels.checkpoints import differentiable_checkpoints
from hyperkron.losses import Loss, Term
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_callable, check_takes

Objective = Callable[[nn.Module, nn.Module, Any], Loss | Tensor]


def no_outer(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
    """In place of an outer objective that was not given: an error."""
    raise HyperkronError("outer was not given: use BilevelProblem(inner, outer), or an algorithm that moves θ alone.")


@dataclass(frozen=True)
class BilevelProblem:
    """The two objectives of a bilevel problem, as plain functions ``f(model, hyper, batch)``.

    Args:
        inner: J_in(λ, θ), minimised over the model's trainable parameters.
        outer: J_out(λ, θ), minimised over the parameters of ``hyper`` through θ*(λ); may be left out where only θ is
            trained (:class:`hyperkron.algorithms.InnerOnly`).
        autocast: whether hypergradients use ``torch.autocast`` if the caller, an objective or the model enables it.
            ``None`` (default): implicit hypergradients check, on their first call and after every 100 calls, whether
            autocast changes ∂θ J_in or ∂θ J_out too much (cosine below 0.99); if so, they run without it from then on,
            with a warning. ``True``: always use it. ``False``: never use it, also not in the gradients that algorithms
            use in place of a hypergradient. Inner steps are not affected.

    Example:
        >>> import torch, hyperkron as hk
        >>> def inner(model, weights, batch):
        ...     x, y, index = batch
        ...     return hk.losses.cross_entropy(model(x), y, weight=weights(index))
        >>> def outer(model, weights, batch):
        ...     x, y, _ = batch
        ...     return hk.losses.cross_entropy(model(x), y)
        >>> problem = hk.BilevelProblem(inner, outer)
    """

    inner: Objective
    outer: Objective = no_outer
    autocast: bool | None = None

    def __post_init__(self) -> None:
        for name in ("inner", "outer"):
            function = getattr(self, name)
            check_callable(name, function, "pass a function (model, hyper, batch) -> loss")
            check_takes(name, function, "model", "hyper", "batch")
        if self.autocast not in (None, True, False):
            raise HyperkronError(
                f"autocast={self.autocast!r} must be True, False, or None to check whether it is precise enough."
            )

    def parts(self, batch: Any) -> list[Any]:
        """The pieces of ``batch`` in which curvature is measured, one after the other; by default ``batch`` itself."""
        return [batch]

    def words(self, level: str) -> tuple[str, str]:
        """What errors call an objective, ``inner`` or ``outer``, and its batch."""
        return level, f"{level}_batch"

    @property
    def group(self) -> Group:
        """The processes among which batches are divided; by default this one alone."""
        return ONE_PROCESS

    @property
    def divided(self) -> bool:
        """Whether the problem is evaluated by a group of processes, be it of one."""
        return False

    @property
    def divides(self) -> bool:
        """Whether each of several processes is given the whole batch, and takes its part of it."""
        return True


def check_problem(problem: object) -> None:
    """Refuse what is not a problem, as a bare objective."""
    if not isinstance(problem, BilevelProblem):
        raise HyperkronError(f"problem is a {type(problem).__name__}; pass hyperkron.BilevelProblem(inner, outer).")


class Both(nn.Module):
    """θ and λ in one module, so that :func:`call_with` can substitute parameters of either."""

    def __init__(self, model: nn.Module, hyper: nn.Module) -> None:
        super().__init__()
        self.model, self.hyper = model, hyper

    def forward(self, function: Objective, batch: Any) -> Loss | Tensor:
        return function(self.model, self.hyper, batch)


def call_with(module: nn.Module, values: dict[str, Tensor], *args: Any) -> Any:
    """``module(*args)`` with ``values`` in place of the parameters of these names, wherever they are used.

    With its default ``tie_weights=True`` torch substitutes twice in a module that is registered under two names, and
    leaves its substitute there. Activation checkpoints keep their activations, as they would be computed again with
    other parameters.
    """
    given = {id(p): values[name] for name, p in module.named_parameters() if name in values}
    uses = ((f"{path}.{name}", p) for path, part in module.named_modules() for name, p in part._parameters.items())
    found = {name.removeprefix("."): given[id(p)] for name, p in uses if id(p) in given}
    with differentiable_checkpoints(keep=True):
        return functional_call(module, found, args, tie_weights=False)


def rows(terms: Sequence[Term], examples: int) -> tuple[float, ...]:
    """Over how many rows the mean in each criterion of a loss runs; the number of examples where it has none."""
    counts = (float(t.row_losses.numel() if t.valid is None else t.valid.sum()) for t in terms)
    return tuple(counts) or (float(examples),)


def shares(counts: list[tuple[float, ...]]) -> list[float]:
    """What each part of a batch counts in the whole, from its :func:`rows`: J(batch) = Σ_k share_k J(part k)."""
    found = [[part / sum(column) for part in column] for column in zip(*counts, strict=True)]
    if any(abs(x - y) > 1e-9 for column in found[1:] for x, y in zip(found[0], column, strict=True)):
        raise HyperkronError(
            f"the criteria of the loss run over different shares of the rows ({found}), so no single weight of a "
            "micro-batch is right; give all criteria the same mask, or use whole batches."
        )
    return found[0]
