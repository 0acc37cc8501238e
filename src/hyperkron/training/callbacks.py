"""Callbacks: they run around each step, can add values to the history, and can stop the run."""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperkron.algorithms import StepReport
from hyperkron.solution import HyperkronWarning
from hyperkron.training import checkpoint
from hyperkron.training.encoding import CheckpointError
from hyperkron.validation import check_one_of, check_whole

if TYPE_CHECKING:
    from hyperkron.training.fit import Run
    from hyperkron.training.history import Value


class Verdict(enum.Enum):
    """What to do with a failed step."""

    SKIP = "Undo the step and continue with the next batches."
    RETRY = "Undo the step and repeat it with the same batches and random states."


class Callback:
    """Base class of callbacks. Every method does nothing by default; override the ones you need.

    ``on_step`` may return values for the step's row of the history, and may call ``run.stop(reason)``.

    Attributes:
        catches_signals: whether SIGTERM and SIGINT wait for the end of the step, so that this callback can save.
        undoes: whether steps must be undoable, so that ``on_failure`` can skip or retry them.
    """

    catches_signals: bool = False
    undoes: bool = False

    def on_start(self, run: Run) -> None:
        """Before the first step of a call of :meth:`Run.advance`."""

    def on_report(self, run: Run, report: StepReport) -> None:
        """After a step, while it can still be undone (with ``undoes``): raise an error to reject it."""

    def on_failure(self, run: Run, error: Exception) -> Verdict | None:
        """After an error in a step (with ``undoes``): what to do; ``None`` leaves it to the next callback."""
        return None

    def on_step(self, run: Run, report: StepReport) -> dict[str, Value] | None:
        """After every step."""
        return None

    def on_boundary(self, run: Run) -> None:
        """After every step and all ``on_step`` calls, when its row is in the history: the place to save."""

    def on_end(self, run: Run) -> None:
        """After the last step, also if the run was stopped or interrupted."""

    def on_exit(self, run: Run) -> None:
        """At the very end, also after an error: the place to close files."""

    def state_dict(self) -> dict[str, Any]:
        """What the next call depends on, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""


class Every(Callback):
    """Calls ``function(run)`` every ``count`` steps and adds the values it returns to the history.

    Args:
        count: how often, in steps.
        function: takes the run, returns a dictionary of values or ``None``.

    Example:
        >>> Every(10, lambda run: {"weight": float(run.state.hyper.value.mean())}).count
        10
    """

    def __init__(self, count: int, function: Callable[[Run], dict[str, Value] | None]) -> None:
        check_whole("count", count, remedy="the function is called every count steps")
        self.count, self.function = count, function

    def on_step(self, run: Run, report: StepReport) -> dict[str, Value] | None:
        """Call the function every ``count`` steps."""
        return self.function(run) if (report.step + 1) % self.count == 0 else None


class EarlyStopping(Callback):
    """Stops the run when a value has not improved ``patience`` times in a row.

    Args:
        figure: a column of the history, such as ``outer_loss`` or one added by :class:`Every`. That callback must come
            before this one in the list.
        patience: how many values without improvement to wait for.
        mode: ``min`` if smaller is better, ``max`` if larger is better.
        margin: the smallest change that counts as an improvement.
    """

    def __init__(self, figure: str = "outer_loss", patience: int = 10, mode: str = "min", margin: float = 0.0) -> None:
        check_whole("patience", patience)
        check_one_of("mode", mode, ("min", "max"))
        self.figure, self.patience, self.mode, self.margin = figure, patience, mode, margin
        self.best, self.waited = math.inf, 0

    def on_step(self, run: Run, report: StepReport) -> None:
        """Read the value, if this step has it."""
        value = run.row.get(self.figure)
        if not isinstance(value, (int, float)):
            return
        score = value if self.mode == "min" else -value
        if score < self.best - self.margin:
            self.best, self.waited = score, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            run.stop(f"{self.figure} has not improved for {self.patience} readings")

    def state_dict(self) -> dict[str, Any]:
        """The best reading and how long ago it was."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue waiting."""
        self.best, self.waited = state["best"], state["waited"]


class Checkpoint(Callback):
    """Saves the run every ``every`` steps, at its end, and when SIGTERM or SIGINT asks it to stop.

    If saving fails during the run (a full disk), a warning is given and the run continues; at the end it is an error.
    Old checkpoints are deleted only after the new one is on disk.

    Args:
        folder: where to write the checkpoints; use one folder per run.
        every: how often, in steps.
        keep: how many of the newest checkpoints to keep.
        best: a column of the history; the saved step with the best value is kept too.
        mode: ``min`` if smaller is better, ``max`` if larger is better.

    Attributes:
        best_step, best_value: the best saved step so far and its value, or ``None``.

    Example:
        >>> Checkpoint("runs/first", every=50, keep=2, best="outer_loss").every
        50
    """

    catches_signals = True

    def __init__(
        self, folder: str | Path, every: int = 100, keep: int = 3, best: str | None = None, mode: str = "min"
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            check_whole(name, value)
        check_one_of("mode", mode, ("min", "max"))
        self.folder, self.every, self.keep, self.best, self.mode = Path(folder), every, keep, best, mode
        self.best_step: int | None = None
        self.best_value: float | None = None
        self._saved: int | None = None

    def on_start(self, run: Run) -> None:
        """Refuse a folder whose newest checkpoint this run has not reached."""
        checkpoint.refuse_overtaken(self.folder, run.state.step)

    def on_boundary(self, run: Run) -> None:
        """Save every ``every`` steps."""
        if run.state.step % self.every == 0:
            try:
                self._save(run)
            except CheckpointError as error:
                warnings.warn(f"{error} The run continues.", HyperkronWarning, stacklevel=2)

    def on_end(self, run: Run) -> None:
        """Save, unless the last step is saved already."""
        if self._saved != run.state.step:
            self._save(run)

    def _save(self, run: Run) -> None:
        before = self.state_dict()
        self._saved = run.state.step
        value = run.history[-1].get(self.best) if self.best is not None and len(run.history) else None
        if isinstance(value, (int, float)) and math.isfinite(value) and self._improves(value):
            self.best_step, self.best_value = run.state.step, float(value)
        try:
            run.save(self.folder)
        except CheckpointError:
            self.load_state_dict(before)
            raise
        checkpoint.prune(self.folder, self.keep, [] if self.best_step is None else [self.best_step])

    def _improves(self, value: float) -> bool:
        if self.best_value is None:
            return True
        return value < self.best_value if self.mode == "min" else value > self.best_value

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and the last step saved."""
        return {"saved": self._saved, "best_step": self.best_step, "best_value": self.best_value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue comparing."""
        self._saved, self.best_step, self.best_value = state["saved"], state["best_step"], state["best_value"]
