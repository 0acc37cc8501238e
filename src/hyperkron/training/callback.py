"""The base class of callbacks: what may happen around the steps of a run."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hyperkron.algorithms import StepReport
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.training.history import Value


class Verdict(enum.Enum):
    """What to do with a failed step."""

    SKIP = "Undo the step and continue with the next batches."
    RETRY = "Undo the step and repeat it with the same batches and random states."


class Callback:
    """Base class of callbacks. Every method does nothing by default; override the ones you need.

    ``run`` is the :class:`Run` whose step it is.
    ``on_step`` may return values for the step's row of the history, and may call ``run.stop(reason)``.

    Attributes:
        catches_signals: whether SIGTERM and SIGINT wait for the end of the step, so that this callback can save.
        undoes: whether steps must be undoable, so that ``on_failure`` can skip or retry them.
        folder: where the run is saved, or ``None``; no other run can write there meanwhile.
        remembers: the names of attributes that the next call depends on: they are saved with the run.
    """

    catches_signals: bool = False
    undoes: bool = False
    folder: Path | None = None
    remembers: tuple[str, ...] = ()

    def on_start(self, run: Any) -> None:
        """Before the first step of a call of :meth:`Run.advance`."""

    def on_report(self, run: Any, report: StepReport) -> None:
        """After a step, while it can still be undone (with ``undoes``): raise an error to reject it."""

    def on_failure(self, run: Any, error: Exception) -> Verdict | None:
        """After an error in a step (with ``undoes``): what to do; ``None`` leaves it to the next callback."""
        return None

    def on_step(self, run: Any, report: StepReport) -> dict[str, Value] | None:
        """After every step."""
        return None

    def on_boundary(self, run: Any) -> None:
        """After every step and all ``on_step`` calls, when its row is in the history: the place to save."""

    def on_end(self, run: Any) -> None:
        """After the last step, also if the run was stopped or interrupted."""

    def on_exit(self, run: Any) -> None:
        """At the very end, also after an error: the place to close files."""

    def state_dict(self) -> dict[str, Any]:
        """What the next call depends on, as plain values."""
        return {name.lstrip("_"): copy.copy(getattr(self, name)) for name in self.remembers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        for name in self.remembers:
            setattr(self, name, copy.copy(state[name.lstrip("_")]))


def checked(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks of a run; classes and functions in their place are refused, and misspelt methods named."""
    if not isinstance(callbacks, Iterable):
        raise HyperkronError(f"callbacks is a {type(callbacks).__name__}, not a list; pass callbacks=[…].")
    found = list(callbacks)  # a generator is read once
    for one in found:
        if not isinstance(one, Callback):
            remedy = f"pass an instance, {one.__name__}(…)" if isinstance(one, type) else "derive it from Callback"
            raise HyperkronError(f"callbacks holds {one!r:.60}, which is not a hyperkron.training.Callback; {remedy}.")
        for name in dir(one):
            if name.startswith("on_") and not hasattr(Callback, name) and callable(getattr(one, name)):
                known = ", ".join(own for own in vars(Callback) if own.startswith("on_"))
                warn_once(
                    f"callback {type(one).__name__}.{name}",
                    f"{type(one).__name__}.{name} is never called: the methods of a Callback are {known}.",
                )
    return found
