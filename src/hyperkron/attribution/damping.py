"""The damping that a training of finite length amounts to."""

from __future__ import annotations

from collections.abc import Sequence

from hyperkron.solution import HyperkronError
from hyperkron.validation import check_interval, check_nonnegative


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
    for rate in rates:
        check_nonnegative("rates", rate)
    total = sum(rates)
    if not total > 0:
        raise HyperkronError(f"rates={list(rates)[:5]!r} add up to {total}; pass the learning rate of every step.")
    return (1 - momentum) / total
