"""Two rules for the damping: what a training of finite length amounts to, and what agrees with an exact solve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hyperkron.attribution.result import Attribution
from hyperkron.solution import HyperkronError, NonFiniteError
from hyperkron.validation import check_interval, check_nonnegative, check_positive


def training_time(rates: Sequence[float], *, momentum: float = 0.0) -> float:
    """τ = Σ_t η_t / (1 − μ), how long SGD trained a network, or a part of that training.

    Args:
        rates: the learning rate of every step.
        momentum: μ.

    Example:
        >>> training_time([0.25] * 100, momentum=0.5)
        50.0
    """
    return 1 / training_damping(rates, momentum=momentum)


def training_damping(rates: Sequence[float], *, momentum: float = 0.0) -> float:
    """δ = 1/τ for a network trained by SGD for the time τ = Σ_t η_t / (1 − μ).

    Gradient descent of a quadratic shrinks the error along a direction of curvature h by e^(−hτ): directions with
    h ≪ 1/τ have hardly been learnt, and removing an example hardly changes the network along them. (A + δI)⁻¹ with
    δ = 1/τ treats them alike, h⁻¹(1 − e^(−hτ)) ≈ (h + 1/τ)⁻¹; without it, an exact solve is dominated by them. Use it
    with solvers of the Gauss–Newton system, such as ``hk.pcg(10, δ)``.

    Args:
        rates: the learning rate of every step of the training.
        momentum: μ.

    References: Ali, Kolter & Tibshirani (AISTATS 2019); Bae et al., "Training data attribution via approximate unrolled
    differentiation" (2024).

    Example:
        >>> training_damping([0.25] * 100, momentum=0.5)
        0.02
    """
    check_interval("momentum", momentum, 0, 1, brackets="[)")
    rates = rates.tolist() if isinstance(rates, Tensor) else rates
    if not isinstance(rates, Iterable):
        raise HyperkronError(f"rates={rates!r:.60} is not a list; pass that of every step, such as [rate] * steps.")
    rates = list(rates)
    for rate in rates:
        check_nonnegative("rates", rate)
    total = sum(rates)
    if not total > 0:
        raise HyperkronError(f"rates={rates[:5]!r} add up to {total}; pass the learning rate of every step.")
    return (1 - momentum) / total


def agreeing_damping(
    scored: Callable[[float], Attribution],
    exact: Attribution,
    dampings: Sequence[float] = (1e-2, 1e-3, 1e-4, 1e-5),
) -> float:
    """The damping of a fast method whose scores agree best with those of a more exact one; nothing is trained again.

        δ = argmax_δ mean_q corr(scores_δ[q], exact[q])

    A few queries are enough: ten, where it was measured.

    Args:
        scored: the scores of these queries by the fast method with damping δ.
        exact: their scores by the more exact method, such as ``hk.pcg(10, δ)`` with δ by :func:`training_damping`.
        dampings: those to try.

    Example:
        >>> import torch, hyperkron as hk
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> model = torch.nn.Linear(3, 1)
        >>> loss = lambda m, batch: hk.losses.mse(m(batch[0]), batch[1])
        >>> few = x[:2], y[:2]
        >>> exact = hk.attribute(loss, model, (x, y), few, method=hk.pcg(10, 0.1))
        >>> agreeing_damping(lambda delta: hk.attribute(loss, model, (x, y), few, method=hk.ekfac(delta)), exact, [0.1])
        0.1
    """
    if len(dampings) == 0:
        raise HyperkronError("dampings is empty; pass those to try, such as [1e-2, 1e-3, 1e-4].")
    found = {}
    for damping in dampings:
        check_positive("dampings", damping)
        scores = scored(damping).scores
        if scores.shape != exact.scores.shape:
            raise HyperkronError(
                f"scored({damping}) has scores of shape {tuple(scores.shape)}, and exact of "
                f"{tuple(exact.scores.shape)}; score the same queries and examples."
            )
        fast, slow = _directions(f"scored({damping})", scores), _directions("exact", exact.scores).to(scores.device)
        found[damping] = float((fast * slow).sum(1).mean())
    return max(found, key=lambda damping: found[damping])


def _directions(name: str, scores: Tensor) -> Tensor:
    """The scores of each query less their mean, as a vector of length 1; zero where all are alike."""
    if not bool(scores.isfinite().all()):
        raise NonFiniteError(f"{name} has scores that are not finite; give other dampings, or other queries.")
    centred = scores.double() - scores.double().mean(1, keepdim=True)
    return torch.nn.functional.normalize(centred, eps=torch.finfo(centred.dtype).tiny)
