"""The settings of a cleaning run, and how it tells what it is doing."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

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
                check_whole(name, value, low)
                object.__setattr__(self, name, int(value))  # plain values, as a run records them
        if self.budget is not None:
            check_positive("budget", self.budget, "give seconds, or None for no limit", finite=False)
            object.__setattr__(self, "budget", None if math.isinf(self.budget) else float(self.budget))
        object.__setattr__(self, "device", str(self.device))


class Progress(Protocol):
    """Receives what a person would like to see while waiting; units are training steps, or tokens while embedding."""

    def start(self, total: int) -> None:
        """Announce ``total`` steps; may be called again when the plan changes."""
        return None

    def advance(self, steps: int, stage: str) -> None:
        """This many steps of a stage were done."""
        return None

    def message(self, text: str) -> None:
        """A sentence for the user."""
        return None

    def stop(self) -> None:
        """Close the bar; a later start begins another one."""
        return None


class SilentProgress(Progress):
    """A progress that shows nothing."""


class BarProgress(Progress):
    """A bar by tqdm, with messages above it; ``wording`` is what becomes of a text before it is shown."""

    def __init__(self, wording: Callable[[str], str] = str) -> None:
        self._bar: Any = None
        self._wording = wording

    def start(self, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, leave=False, bar_format="{desc} {percentage:3.0f}%|{bar}| {remaining} left")
        self._bar.total = total

    def advance(self, steps: int, stage: str) -> None:
        if self._bar is not None:
            self._bar.set_description_str(stage, refresh=not steps)  # where nothing moves, say what is being done
            self._bar.update(min(steps, self._bar.total - self._bar.n))

    def message(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(self._wording(text), file=sys.stderr)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def shown_progress(asked: Progress | bool | None) -> Progress:
    """The progress to use: the one given; for None or True one that fits the place, for False none."""
    if isinstance(asked, bool) or asked is None:
        watched = asked or (asked is None and (sys.stderr.isatty() or _in_notebook()))
        return BarProgress() if watched else SilentProgress()
    return asked


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class EmbeddingBar:
    """A bar of its own while texts are embedded; its unit is tokens, and every list of texts begins again."""

    def __init__(self, progress: Progress, check: Callable[[], None]) -> None:
        self.progress, self.check = progress, check
        self.done, self.total = 0, 0

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` tokens are embedded."""
        if total != self.total or done < self.done:
            self.stop()
            self.progress.start(total)
            self.total = total
        self.progress.advance(done - self.done, "embedding texts")
        self.done = done
        self.check()

    def stop(self) -> None:
        """Close the bar, if there is one."""
        if self.total:
            self.progress.stop()
        self.done, self.total = 0, 0
