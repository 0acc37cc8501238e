"""The settings of a cleaning run, and the names of its candidates and learners."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from hyperkron.solution import HyperkronError
from hyperkron.validation import check_positive, check_whole

OURS = "hyperkron"
ESTIMATORS = ("estimator", "estimator-cleaned")
"""Candidates made with the user's own estimator."""
DESCRIPTIONS = {
    OURS: "evidence of experts and given labels, plus the trusted rows",
    "noisy": "the training rows as they are, without the trusted ones",
    "trusted": "the trusted rows alone",
    "pooled": "training and trusted rows together, labels as they are",
    "small-loss": "each row weighted by the confidence of a network of all rows in its label",
    "trusted-confidence": "each row weighted by the confidence of a network of the trusted rows in its label",
    "cleanlab": "the rows that cleanlab keeps, by predictions of networks that did not see them, plus the trusted rows",
    "neighbours": "the rows whose label is that of most of their nearest neighbours, plus the trusted rows",
    "gold-loss": "all rows, through the noise matrix that a network of the noisy rows shows on the trusted ones (GLC)",
    "forest": "a random forest of the rows that confident learning keeps by a first forest, plus the trusted rows",
    "boosted": "gradient-boosted trees of the rows that confident learning keeps by a forest, plus the trusted rows",
    "estimator": "your estimator on training and trusted rows, labels as they are",
    "estimator-cleaned": "your estimator on the cleaned labels and the trusted rows",
    "sama": "one free weight per row, learnt by SAMA without curvature, plus the trusted rows",
}
"""What each candidate learns from."""
ALTERNATIVES = tuple(name for name in DESCRIPTIONS if name not in (OURS, *ESTIMATORS))
"""What the user could have done instead; every one is trained and judged in the same way."""

NETWORK, FOREST, BOOSTED = "network", "random forest", "boosted trees"
"""Learners: what the delivered model can be, beside an estimator of the user's."""


@dataclass(frozen=True)
class CleanConfig:
    """Settings; the defaults are meant for every dataset.

    Attributes:
        seed: of initialisations, batches and folds.
        epochs: of one full training; None takes 15, or fewer under a ``budget``.
        budget: seconds for everything; the run first shortens training, then leaves out alternatives.
        compare: the alternatives to compare with, from :data:`ALTERNATIVES`; empty for none.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ...
        encoder: for texts, a Hugging Face encoder by name or path; None takes the default one.
        layers: how many of the encoder's last layers to train; 0 keeps it frozen.
    """

    seed: int = 0
    epochs: int | None = None
    budget: float | None = None
    compare: tuple[str, ...] = ALTERNATIVES
    device: str = "auto"
    encoder: str | None = None
    layers: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.compare, str) or not isinstance(self.compare, Collection):
            raise HyperkronError(f"compare={self.compare!r:.60} is not a tuple of names; pass one, such as ('noisy',).")
        unknown = [name for name in self.compare if name not in ALTERNATIVES]
        if unknown:
            raise HyperkronError(f"compare={unknown[0]!r} is unknown; choose from {', '.join(ALTERNATIVES)}.")
        for name, low in (("epochs", 1), ("layers", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None or name != "epochs":
                check_whole(name, value, low, bits=63)  # seeds are added to
                object.__setattr__(self, name, int(value))  # plain values, as a run records them
        if self.budget is not None:
            check_positive("budget", self.budget, "give seconds, or None for no limit", finite=False)
            object.__setattr__(self, "budget", None if math.isinf(self.budget) else float(self.budget))
        object.__setattr__(self, "device", str(self.device))
