"""Figures of several seeds side by side: means, intervals, and differences that are more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % points of Student's t by degrees of freedom; beyond 30 the last one serves, which is a little wide."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (Student's t); the half-width of a single value is NaN.

    Example:
        >>> tuple(round(x, 3) for x in interval([1.0, 2.0, 3.0]))
        (2.0, 2.484)
        >>> round(interval([0.0, 1.0] * 8)[1], 3)
        0.275
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    t = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    return mean, t * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Difference:
    """A figure less another, seed by seed: the mean, half of its 95 % interval, and the number of seeds.

    Example:
        >>> str(Difference.of([60.0, 61.0], [61.0, 62.5])), f"{Difference.of([60.0], [61.0]):.2f}"
        ('+1.2 ± 3.2 (2 seeds)', '+1.00 (1 seed)')
    """

    mean: float
    half: float
    seeds: int

    @staticmethod
    def of(before: Sequence[float | None], after: Sequence[float | None]) -> Difference | None:
        """``after`` less ``before``, over the seeds that both have; ``None`` where there is none."""
        values = [b - a for a, b in zip(before, after, strict=False) if a is not None and b is not None]
        return Difference(*interval(values), len(values)) if values else None

    @property
    def sign(self) -> int:
        """1 or −1 where the whole interval is above or below zero, else 0; one seed decides nothing."""
        if math.isnan(self.half) or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1

    def vague(self, wanted: float, close: float) -> bool:
        """Whether it cannot tell: one seed, or an interval that holds 0 and ``wanted``, wider than ± that and ± close.

        Example:
            >>> [Difference(mean, half, 3).vague(1.0, 0.5) for mean, half in ((0.0, 3.0), (9.0, 3.0), (2.0, 1.5))]
            [True, False, False]
        """
        wide = self.half > max(close, abs(wanted)) and abs(self.mean - wanted) <= self.half
        return math.isnan(self.half) or (wide and not self.sign)

    def __format__(self, spec: str) -> str:
        """Its numbers formatted by ``spec``, one digit where there is none."""
        spec = spec or ".1f"
        half = "" if math.isnan(self.half) else f" ± {self.half:{spec}}"
        return f"{self.mean:+{spec}}{half} ({self.seeds} seed{'s' * (self.seeds > 1)})"

    def __str__(self) -> str:
        return format(self)


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± half-width as text, or the value alone where there is one.

    Example:
        >>> shown([1.0, 2.0, 3.0]), shown([0.5])
        ('2.000 ± 2.484', '0.500')
    """
    if not values:
        return "–"
    mean, half = interval(values)
    return f"{mean:.{digits}f}" if math.isnan(half) else f"{mean:.{digits}f} ± {half:.{digits}f}"


def known(values: Sequence[float | None]) -> list[float]:
    """The values that are numbers."""
    return [float(x) for x in values if x is not None]


def mean(values: Sequence[float | None]) -> float:
    """Their mean; infinite where a run failed and has none."""
    numbers = known(values)
    return statistics.fmean(numbers) if numbers and len(numbers) == len(values) else float("inf")


def clearly_below(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    """Whether a's values are lower than b's, seed by seed: the 95 % interval of the mean difference is below zero.

    One seed decides nothing. A run that failed, and so has no value, is above all that did not.

    Example:
        >>> clearly_below([1.0, 2.0, 3.0], [1.5, 2.4, 3.6]), clearly_below([1.0, 2.0, 3.0], [1.5, 1.9, 3.6])
        (True, False)
    """
    if None in a or None in b:
        return None not in a
    difference = Difference.of(b, a)
    return difference is not None and difference.sign < 0
