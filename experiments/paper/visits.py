"""How often a weight λ_n was updated. Where many weights never moved, or runs are much shorter than the paper's, a
comparison of learned weights decides nothing.

An outer step updates the weights of one batch, so that u updates with batches of b out of N rows visit a weight u·b/N
times on average and leave a share (1 − b/N)^u of them where they began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.trial import MEASURED

STEPS = 1000
"""Outer steps of the paper's runs."""
MOST = 0.2
"""The largest share of weights that may never have been updated in a comparison that is judged."""


@dataclass(frozen=True)
class Visits:
    """Of the weights in one run: its name, the updates of λ, the rows of a batch, and all rows.

    Example:
        >>> found = Visits("AID-KFAC", 10, 100, 1000)
        >>> found.mean, round(found.never, 3)
        (1.0, 0.349)
    """

    name: str
    updates: float
    batch: int
    rows: int

    @property
    def mean(self) -> float:
        """Visits of a weight."""
        return self.updates * min(self.batch, self.rows) / self.rows

    @property
    def never(self) -> float:
        """The expected share of weights that were never updated."""
        return (1 - min(self.batch, self.rows) / self.rows) ** max(0.0, self.updates)


def refusal(found: Sequence[Visits]) -> str:
    """Why runs that learned weights get no verdict: they are too short, or too many weights were never updated.

    Example:
        >>> refusal([Visits("AID-KFAC", 1000, 500, 40_000)])
        ''
        >>> refusal([Visits("AID-KFAC", 23, 40_000, 40_000)])
        'Too short: λ was updated 23 times; a verdict needs runs of 1000 outer steps.'
    """
    return " ".join(text for text in (too_short(found), unvisited(found)) if text)


def too_short(found: Sequence[Visits]) -> str:
    """The rule on length: a verdict needs runs of as many outer steps as the paper's; nothing where they have them."""
    counts = [round(x.updates) for x in found]
    if not counts or min(counts) >= STEPS - MEASURED:
        return ""
    shown = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"Too short: λ was updated {shown} times; a verdict needs runs of {STEPS} outer steps."


def unvisited(found: Sequence[Visits]) -> str:
    """Where too many weights were never updated in one of the runs; else nothing."""
    short = [x for x in found if x.never > MOST]
    if not short:
        return ""
    worst = max(short, key=lambda x: x.never)
    return (
        f"In {len(short)} of {len(found)} runs more than {MOST:.0%} of the weights were never updated; in {worst.name} "
        f"a weight was visited {worst.mean:.2g} times and {worst.never:.0%} of them kept their first value."
    )
