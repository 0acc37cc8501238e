"""The settings of a cleaning run, and how it tells what it is doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hyperkron.solution import HyperkronError
from hyperkron.validation import check_positive, check_whole

ALTERNATIVES = (
    "noisy",
    "trusted",
    "pooled",
    "small-loss",
    "trusted-confidence",
    "cleanlab",
    "neighbours",
    "gold-loss",
    "forest",
    "boosted",
    "sama",
)
"""What the user could have done instead; every one is trained and judged in the same way."""

OURS = "hyperkron"


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
        unknown = [name for name in self.compare if name not in ALTERNATIVES]
        if unknown:
            raise HyperkronError(f"compare={unknown[0]!r} is unknown; choose from {', '.join(ALTERNATIVES)}.")
        for name, low in (("epochs", 1), ("layers", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, low)
        if self.budget is not None:
            check_positive("budget", self.budget, "give seconds, or None for no limit", finite=False)


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
