"""Which candidate wins, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from hyperkron.cleaning.config import OURS

Z = 1.96
"""Of a 95 % interval."""
SIGNIFICANCE_LEVEL = 0.05
"""How often an alternative may be preferred to ours by chance."""
FEW_PER_CLASS = 5
"""Trusted rows a class, on average, below which nothing is concluded from them."""


@dataclass(frozen=True)
class Judged:
    """A candidate on the trusted rows it did not see.

    Attributes:
        name: of the candidate.
        accuracy, low, high: on new rows, with its 95 % interval.
        rows: how many trusted rows.
        right: which of them were answered correctly (M,).
        weight: what each of them stands for among new rows (M,); the sum is 1.
    """

    name: str
    accuracy: float
    low: float
    high: float
    rows: int
    right: Tensor
    weight: Tensor


def wilson(share: float, rows: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of this many rows.

    Example:
        >>> low, high = wilson(0.9, 10)
        >>> round(low, 3), round(high, 3)
        (0.596, 0.982)
    """
    z2 = Z * Z
    middle = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    reach = Z / (1 + z2 / rows) * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows * rows))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def judge(name: str, predicted: Tensor, labels: Tensor, frequent: Tensor) -> Judged:
    """The accuracy of a candidate on rows whose classes are as frequent as among the noisy rows.

        a = Σ_m w_m [right_m] ,      w_m = π_{y_m} / n_{y_m} (over classes with trusted rows) ,

    with Wilson's interval for the rows that a has the variance of, n_eff = 1 / Σ_m w_m².

    Args:
        name: of the candidate.
        predicted: probabilities of the trusted rows (M, C).
        labels: of those rows.
        frequent: π, the estimated frequency of each class among the noisy rows (C,).
    """
    right = (predicted.argmax(1) == labels).cpu()
    labels, frequent = labels.cpu(), frequent.double().cpu()
    weight = (frequent / torch.bincount(labels, minlength=len(frequent)).clamp(min=1))[labels]
    weight = weight / weight.sum()
    accuracy = float(weight[right].sum())
    low, high = wilson(accuracy, 1 / float(weight.square().sum()))
    return Judged(name, accuracy, low, high, len(labels), right, weight)


def choose(candidates: list[Judged]) -> str:
    """Ours, unless an alternative is better on the same rows by more than z standard errors of the difference.

        z = Φ⁻¹(1 − 0.05/k)  for k alternatives: 1.64 for one, 2.45 for seven

    so that of alternatives that are no better one is taken by chance in at most 5 % of cases, however many there are
    (Bonferroni). Among those that are better, the one with the highest accuracy.
    """
    ours = next((c for c in candidates if c.name == OURS), None)
    if ours is None:
        return max(candidates, key=lambda c: c.accuracy).name
    others = [c for c in candidates if c is not ours]
    better = [other for other in others if exceeds(other, ours, len(others))]
    return max(better, key=lambda c: c.accuracy).name if better else OURS


def exceeds(one: Judged, other: Judged, tried: int = 1) -> bool:
    """Whether a candidate is significantly better than another on the same rows, as one of ``tried``."""
    difference = one.right.double() - other.right.double()
    mean = float((one.weight * difference).sum())
    error = float((one.weight * (difference - mean)).square().sum().sqrt())
    return mean > NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / max(1, tried)) * error


def different(one: Judged, other: Judged, tried: int = 1) -> bool:
    """Whether one of two candidates is significantly better than the other."""
    return exceeds(one, other, tried) or exceeds(other, one, tried)


def few(rows: int, classes: int) -> bool:
    """Whether there are too few trusted rows to conclude anything: on average under 5 a class."""
    return rows < FEW_PER_CLASS * classes


def _score(low: float, high: float) -> str:
    return f"at least {low:.1%}" if high >= 0.9995 else f"{low:.1%} to {high:.1%}"


def verdict(
    chosen: str,
    candidates: list[Judged],
    rate: float,
    suspects: int,
    rows: int,
    *,
    classes: int,
    test: tuple[int, int] | None = None,
) -> str:
    """Two or three sentences for a person: the model, how it compares, and the labels.

    Args:
        chosen: the name of the chosen candidate.
        candidates: all of them.
        rate: the share of labels that look wrong.
        suspects, rows: how many training rows are suspects, of how many.
        classes: how many there are.
        test: right answers of the chosen one on the test rows, and how many those are.
    """
    won = next(c for c in candidates if c.name == chosen)
    noise = f"About {rate:.0%} of the {rows} labels look wrong; {suspects} rows are marked as suspects."
    named = {OURS: "The cleaned model", "trusted": "Train on the trusted set alone: its model"}
    name = named.get(chosen, f"The alternative '{chosen}'")
    held = f"{int(won.right.sum())} of {won.rows} trusted rows it had not seen"
    if test is not None:
        low, high = wilson(test[0] / test[1], test[1])
        said = f"{name} is right on {test[0] / test[1]:.1%} of the {test[1]} test rows ({_score(low, high)})."
    elif few(won.rows, classes):
        return (
            f"{name} is right on {held}: too few to conclude anything about its accuracy, or about which model is "
            f"best. Add trusted rows, at least {FEW_PER_CLASS} of each class. {noise}"
        )
    else:
        said = f"{name} is right on {_score(won.low, won.high)} of new rows (95 % interval, from {held})."
    return f"{said}{_compared(won, candidates, test is not None)} {noise}"


def first_verdict(rate: float, suspects: int, alternatives: int) -> str:
    """What can be said before the alternatives are known."""
    return (
        f"First result: about {rate:.0%} of the labels look wrong; {suspects} rows are marked as suspects. The "
        f"comparison with {alternatives} alternatives is still running."
    )


def _compared(won: Judged, candidates: list[Judged], tested: bool) -> str:
    """How the chosen candidate stands against the best of the others."""
    others = [c for c in candidates if c.name != won.name]
    if not others:
        return ""
    if won.name != OURS:
        worse = "; the noisy rows make the model worse here" if won.name == "trusted" else ""
        return f" It was significantly better than the cleaned model on trusted rows{worse}."
    best = max(others, key=lambda c: c.accuracy)
    where = "On trusted rows " if tested else ""
    counts = f"'{best.name}': {int(best.right.sum())} of {best.rows}"
    if different(won, best, len(others)):
        return f" {where}{'it' if where else 'It'} is significantly better than the best alternative ({counts})."
    return f" {where}{'there' if where else 'There'} is no significant difference to the best alternative ({counts})."
