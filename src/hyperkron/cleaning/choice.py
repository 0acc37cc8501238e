"""Which candidate wins, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from hyperkron.cleaning.config import OURS

Z = 1.96
"""Of a 95 % interval."""
SIGNIFICANCE_LEVEL = 0.05
"""How often an alternative may be preferred to ours by chance."""


@dataclass(frozen=True)
class Judged:
    """A candidate on the trusted rows it did not see.

    Attributes:
        name: of the candidate.
        accuracy, low, high: with Wilson's 95 % interval.
        rows: how many trusted rows.
        right: which of them were answered correctly (M,).
    """

    name: str
    accuracy: float
    low: float
    high: float
    rows: int
    right: Tensor


def wilson(right: int, rows: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    Example:
        >>> low, high = wilson(9, 10)
        >>> round(low, 3), round(high, 3)
        (0.596, 0.982)
    """
    share, z2 = right / rows, Z * Z
    middle = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    reach = Z / (1 + z2 / rows) * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows * rows))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def judge(name: str, predicted: Tensor, labels: Tensor) -> Judged:
    """Count the right answers of a candidate."""
    right = predicted.argmax(1) == labels
    low, high = wilson(int(right.sum()), len(labels))
    return Judged(name, float(right.float().mean()), low, high, len(labels), right.cpu())


def choose(candidates: list[Judged]) -> str:
    """Ours, unless an alternative is better on the same rows by more than z standard errors of the difference.

        z = Φ⁻¹(1 − 0.05/k)  for k alternatives: 1.64 for one, 2.45 for seven

    so that of alternatives that are no better one is taken by chance in at most 5 % of cases, however many there are
    (Bonferroni). Among those that are better, the one with the highest accuracy.
    """
    ours = next((c for c in candidates if c.name == OURS), None)
    if ours is None:
        return max(candidates, key=lambda c: c.accuracy).name
    better = []
    others = [c for c in candidates if c is not ours]
    z = NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / max(1, len(others)))
    for other in others:
        difference = other.right.double() - ours.right.double()
        error = float(difference.std(correction=0)) / math.sqrt(len(difference))
        if float(difference.mean()) > z * error:
            better.append(other)
    return max(better, key=lambda c: c.accuracy).name if better else OURS


def verdict(chosen: str, candidates: list[Judged], rate: float, suspects: int, rows: int) -> str:
    """One or two sentences for a person."""
    by_name = {c.name: c for c in candidates}
    noise = f"About {rate:.0%} of the {rows} labels look wrong; {suspects} rows are marked as suspects."
    won = by_name[chosen]
    score = f"{won.accuracy:.1%} on {won.rows} trusted rows it had not seen"
    if chosen == "trusted":
        return f"Train on the trusted set alone: {score}; the noisy rows make the model worse here. {noise}"
    if chosen != OURS:
        return (
            f"The alternative '{chosen}' was better than the cleaned data here ({score}), so it is the result. {noise}"
        )
    others = [c for c in candidates if c.name != OURS]
    if not others:
        return f"The cleaned model reaches {score}. {noise}"
    best = max(others, key=lambda c: c.accuracy)
    return f"The cleaned model reaches {score}; the best alternative, '{best.name}', {best.accuracy:.1%}. {noise}"
