"""Which candidate wins, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from hyperkron.cleaning.config import NETWORK, OURS
from hyperkron.cleaning.data.files import listing

Z = 1.96
"""Of a 95 % interval of rows that one model answers."""
FOLDS_Z = 2.4
"""The same for answers of several models that shared most of their training rows, and so their luck."""
SIGNIFICANCE_LEVEL = 0.05
"""How often a difference may be called significant by chance."""
RATE_ERROR = 0.025
"""Standard error of the noise rate that no comparison of views shows."""
STABLE = 2 / 3
"""Share of suspects that must stay when trusted rows and seeds change; with less, the result says so."""
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


def wilson(share: float, rows: float, z: float = Z) -> tuple[float, float]:
    """Wilson's interval of a share of this many rows, of 95 % by default.

    Example:
        >>> low, high = wilson(0.9, 10)
        >>> round(low, 3), round(high, 3)
        (0.596, 0.982)
    """
    z2 = z * z
    middle = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    reach = z / (1 + z2 / rows) * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows * rows))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def judge(name: str, predicted: Tensor, labels: Tensor, frequent: Tensor, folds: int = 5) -> Judged:
    """The accuracy of a candidate on rows whose classes are as frequent as among the noisy rows.

        a = Σ_m w_m [right_m] ,      w_m = π_{y_m} / n_{y_m} (over classes with trusted rows)

    The interval is Wilson's, for as many rows as a has the variance of, n_eff = 1 / Σ_m w_m², with FOLDS_Z. What is
    delivered saw all trusted rows, its judges 1 − 1/K of them. An error that falls with their square root is smaller by
    √(1 − 1/K), so the upper end is moved by that factor of the error.

    ``predicted`` are probabilities (M, C) of the trusted rows, each by a model that did not see its fold, and
    ``frequent`` is π (C,), the estimated frequency of each class among the noisy rows; ``folds`` is K.
    """
    right = (predicted.argmax(1) == labels).cpu()
    labels, frequent = labels.cpu(), frequent.double().cpu()
    weight = (frequent / torch.bincount(labels, minlength=len(frequent)).clamp(min=1))[labels]
    weight = weight / weight.sum()
    accuracy = float(weight[right].sum())
    low, high = wilson(accuracy, 1 / float(weight.square().sum()), FOLDS_Z)
    high = max(accuracy, 1 - (1 - high) * math.sqrt(1 - 1 / folds))  # of 1 rounding can take a bit
    return Judged(name, accuracy, low, high, len(labels), right, weight)


def choose(candidates: list[Judged]) -> str:
    """Ours, unless alternatives are significantly better on the same rows; then the most accurate of those."""
    ours = next((c for c in candidates if c.name == OURS), None)
    if ours is None:
        return max(candidates, key=lambda c: c.accuracy).name
    better = [c for c in candidates if c is not ours and exceeds(c, ours, len(candidates) - 1)]
    return max(better, key=lambda c: c.accuracy).name if better else OURS


def advantage(one: Judged, other: Judged) -> float:
    """By how many standard errors a candidate is better than another on the same rows.

        Σ_m w_m d_m / √(Σ_m w_m² (d_m − d̄)² + 2 (Σ_m w_m²)²) ,      d_m = [one right] − [other right]

    The second term is one more row won by each: of few rows that differ little can be said.
    """
    weight, difference = one.weight, one.right.double() - other.right.double()
    mean = float((weight * difference).sum())
    error = (weight * (difference - mean)).square().sum() + 2 * weight.square().sum().square()
    return mean / math.sqrt(float(error))


def exceeds(one: Judged, other: Judged, tried: int = 1) -> bool:
    """Whether a candidate is significantly better than another, as one of ``tried`` (Bonferroni)."""
    return advantage(one, other) > NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / max(1, tried))


def different(one: Judged, other: Judged, tried: int = 1) -> bool:
    """Whether one of two candidates is significantly better than the other."""
    return exceeds(one, other, tried) or exceeds(other, one, tried)


def few(rows: int, classes: int) -> bool:
    """Whether there are too few trusted rows to conclude anything: on average under 5 a class."""
    return rows < FEW_PER_CLASS * classes


def interval(low: float, high: float) -> str:
    """An interval of shares.

    Example:
        >>> interval(0.9, 0.95), interval(0.94, 1.0)
        ('90.0% to 95.0%', 'at least 94.0%')
    """
    return f"at least {low:.1%}" if high >= 0.9995 else f"{low:.1%} to {high:.1%}"


def _marked(suspects: int) -> str:
    return "1 row is marked as a suspect" if suspects == 1 else f"{suspects} rows are marked as suspects"


@dataclass(frozen=True)
class Noise:
    """The share of labels that look wrong, with its interval, and how many of the suspects are so in every view.

    Attributes:
        rate, low, high: the mean error probability; ± 1.96 standard errors of a jackknife over the folds.
        suspects, rows: how many training rows are suspects, of how many.
        stable: share of the rows that are suspects in the whole or a view and are so in both, on average.
    """

    rate: float
    low: float
    high: float
    suspects: int
    rows: int
    stable: float

    def __str__(self) -> str:
        told = (
            f"About {self.rate:.0%} of the {self.rows} labels look wrong ({self.low:.0%} to {self.high:.0%}); "
            f"{_marked(self.suspects)}."
        )
        if self.suspects and self.stable < STABLE:
            told += f" Only {self.stable:.0%} of them stay the same with another seed and other trusted rows."
        return told


def noise_of(doubt: Tensor, views: Sequence[Tensor], cut: float) -> Noise:
    """From the error probabilities (N,) of the whole and of the views; NaN without a label, a suspect above ``cut``."""
    rates = torch.stack([view.double().nanmean() for view in views])
    jackknife = (len(rates) - 1) / len(rates) * float((rates - rates.mean()).square().sum())
    reach, rate = Z * math.sqrt(jackknife + RATE_ERROR**2), float(doubt.double().nanmean())
    mine, others = doubt > cut, [view > cut for view in views]
    shared = [
        float((mine & other).sum() / (mine | other).sum().clamp(min=1)) for other in others if (mine | other).any()
    ]
    stable = sum(shared) / len(shared) if shared else 1.0
    return Noise(
        rate, max(0.0, rate - reach), min(1.0, rate + reach), int(mine.sum()), int((~doubt.isnan()).sum()), stable
    )


def verdict(
    chosen: str,
    candidates: list[Judged],
    noise: Noise,
    *,
    classes: int,
    test: tuple[int, int] | None = None,
    learner: str = NETWORK,
    unseen: Sequence[str] = (),
) -> str:
    """Two or three sentences for a person: the model, how it compares, and the labels.

    ``test`` is how many answers of the chosen one on the test rows are right, and how many those rows are; ``learner``
    what kind of model it is; ``unseen`` the classes without a trusted row.
    """
    won = next(c for c in candidates if c.name == chosen)
    kind = "" if learner == NETWORK else f" ({learner})"
    named = {OURS: f"The cleaned model{kind}", "trusted": "Train on the trusted set alone: its model"}
    name = named.get(chosen, f"The alternative '{chosen}'")
    held = f"{int(won.right.sum())} of {won.rows} trusted rows it had not seen"
    if test is not None:
        low, high = wilson(test[0] / test[1], test[1])
        said = f"{name} is right on {test[0] / test[1]:.1%} of the {test[1]} test rows ({interval(low, high)})."
    elif few(won.rows, classes):
        return (
            f"{name} is right on {held}: too few to conclude anything about its accuracy, or about which model is "
            f"best. Add trusted rows, at least {FEW_PER_CLASS} of each class. {noise}"
        )
    else:
        plain = float(won.right.sum()) / won.rows
        if not won.low - 1e-6 <= plain <= won.high + 1e-6:  # else the two figures would seem to contradict each other
            held += ", each class counted as often as it seems to be among the training rows"
        which = " of classes that have trusted rows" if unseen else ""
        said = f"{name} is right on {interval(won.low, won.high)} of new rows{which} (95% interval, from {held})."
        said += f" It is not known how often on {listing(map(repr, unseen))}." if unseen else ""
    return f"{said}{_compared(won, candidates, test is not None)} {noise}"


def first_verdict(rate: float, suspects: int, alternatives: int) -> str:
    """What can be said before the alternatives are known."""
    return (
        f"First result: about {rate:.0%} of the labels look wrong; {_marked(suspects)}. The "
        f"comparison with {alternatives} alternative{'s' * (alternatives != 1)} is still running."
    )


def _compared(won: Judged, candidates: list[Judged], tested: bool) -> str:
    """How the chosen candidate stands against the best of the others."""
    others = [c for c in candidates if c.name != won.name]
    if not others:
        return ""
    if won.name != OURS:
        ours = next((c for c in others if c.name == OURS), None)
        if ours is None:
            return ""
        worse = "; the noisy rows make the model worse here" if won.name == "trusted" else ""
        counts = f"{int(won.right.sum())} against {int(ours.right.sum())} of {won.rows}"
        return f" It was significantly better than the cleaned model on trusted rows ({counts}){worse}."
    best = max(others, key=lambda c: c.accuracy)
    where = "On trusted rows " if tested else ""
    counts = f"'{best.name}': {int(best.right.sum())} of {best.rows}"
    if different(won, best, len(others)):
        return f" {where}{'it' if where else 'It'} is significantly better than the best alternative ({counts})."
    return f" {where}{'there' if where else 'There'} is no significant difference to the best alternative ({counts})."
