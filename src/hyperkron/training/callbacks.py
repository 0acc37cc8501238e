"""Callbacks around the steps of a run: evaluation, early stopping and checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from hyperkron.algorithms import StepReport
from hyperkron.solution import HyperkronError, HyperkronWarning
from hyperkron.training import checkpoint
from hyperkron.training.callback import Callback
from hyperkron.training.encoding import CheckpointError
from hyperkron.training.history import Value
from hyperkron.training.randomness import kept_random_state
from hyperkron.training.run import Run
from hyperkron.validation import check_folder, check_one_of, check_whole


class Evaluate(Callback):
    """Calls ``function(run)`` after chosen steps; the values it returns go into the history. Not on the run's clock.

    Args:
        function: takes the run, returns a dictionary of values or ``None``. Its names must not be those of
            other values of the step. Modules that it leaves in another mode, as by ``model.eval()``, get theirs back,
            and the run continues with its own random numbers, whatever the function draws or seeds (another ``fit``).
        every: after every ``every`` steps.
        at: after these numbers of steps, such as ``(1, 10, 100)``.
        times: this many times at equal distances of the steps or seconds that the run is given, the last at its end.
        start: also before the first step; these values are in :attr:`rows` alone.

    Attributes:
        rows: the values of every evaluation, with the ``step`` and the ``seconds`` of training before it.

    Example:
        >>> Evaluate(lambda run: {"weight": float(run.state.hyper.weight.mean())}, every=10).every
        10
    """

    remembers = ("rows",)

    def __init__(
        self,
        function: Callable[[Run], dict[str, Value] | None],
        *,
        every: int | None = None,
        at: Collection[int] = (),
        times: int | None = None,
        start: bool = False,
    ) -> None:
        for name, value in (("every", every), ("times", times)):
            if value is not None:
                check_whole(name, value)
        if every is None and times is None and not at and not start:
            raise HyperkronError(
                "when to evaluate was not given; pass every=10, at=(1, 10, 100), times=5 or start=True."
            )
        self.function, self.every, self.at, self.times, self.start = function, every, frozenset(at), times, start
        self.rows: list[dict[str, Value]] = []

    def _evaluate(self, run: Run, taken: Collection[str] = ()) -> dict[str, Value] | None:
        modes = {module: module.training for root in (run.state.model, run.state.hyper) for module in root.modules()}
        try:
            with kept_random_state():
                found = self.function(run)
        finally:
            for module, mode in modes.items():
                module.training = mode
        if found is None:
            return None
        values = _figures(found, {"step", "seconds", *taken})
        self.rows.append({"step": run.state.step, "seconds": run.seconds, **values})
        return values

    def _parts(self, run: Run) -> int:
        """How many of the ``times`` equal parts of the run are over."""
        return math.floor(run.progress * (self.times or 0) + 1e-9)

    def on_start(self, run: Run) -> None:
        self._reached = self._parts(run)
        if self.start and not self.rows:
            self._evaluate(run)

    def on_step(self, run: Run, report: StepReport) -> dict[str, Value] | None:
        step, before, self._reached = report.step + 1, self._reached, self._parts(run)
        due = self._reached > before or step in self.at or (self.every is not None and step % self.every == 0)
        return self._evaluate(run, run.row) if due else None

    def on_end(self, run: Run) -> None:
        if self.times is not None and (not self.rows or self.rows[-1]["step"] != run.state.step):
            self._evaluate(run)


def _figures(found: Any, taken: Collection[str]) -> dict[str, Value]:
    """What a function of :class:`Evaluate` returned, as numbers and strings under names that are not ``taken``."""
    if not isinstance(found, Mapping):
        raise HyperkronError(
            f"function of Evaluate returned a {type(found).__name__}; return a dictionary such as {{'accuracy': 0.9}}, "
            "or None."
        )
    values: dict[str, Value] = {}
    for name, value in found.items():
        if name in taken:
            raise HyperkronError(f"function of Evaluate returned {name!r}, which this row already has; rename it.")
        one = getattr(value, "ndim", None) == 0 and hasattr(value, "item")  # a number of torch or numpy
        values[name] = value.item() if one else value
        if not isinstance(values[name], (float, int, str, type(None))):
            raise HyperkronError(
                f"function of Evaluate returned {name}={value!r:.60}; return a number, a string or None for each name."
            )
    return values


class EarlyStopping(Callback):
    """Stops the run when a value has not improved ``patience`` times in a row.

    Args:
        figure: a column of the history, such as ``outer_loss`` or one of :class:`Evaluate`. That callback must come
            before this one in the list.
        patience: how many values without improvement to wait for.
        mode: ``min`` if smaller is better, ``max`` if larger is better.
        margin: the smallest change that counts as an improvement.
    """

    remembers = ("best", "waited")
    _resumed = False

    def __init__(self, figure: str = "outer_loss", patience: int = 10, mode: str = "min", margin: float = 0.0) -> None:
        check_whole("patience", patience)
        check_one_of("mode", mode, ("min", "max"))
        self.figure, self.patience, self.mode, self.margin = figure, patience, mode, margin
        self.best, self.waited = math.inf, 0

    def on_step(self, run: Run, report: StepReport) -> None:
        value = run.row.get(self.figure)
        if not isinstance(value, (int, float)):
            return
        score = value if self.mode == "min" else -value
        if score < self.best - self.margin:
            self.best, self.waited = score, 0
            return
        self.waited += 1
        self._stop_if_due(run)

    def _stop_if_due(self, run: Run) -> None:
        if self.waited >= self.patience:
            run.stop(f"{self.figure} has not improved for {self.patience} readings")

    def on_start(self, run: Run) -> None:
        if self._resumed:  # a run that had stopped is over, and takes no further step
            self._stop_if_due(run)
        self._resumed = False

    def on_end(self, run: Run) -> None:
        if self.waited == 0 and self.best == math.inf and run.state.step > 0:
            warnings.warn(
                f"EarlyStopping saw no number in the column {self.figure!r} so far, so it cannot stop the run; "
                "check the name, and put the callback that gives it before this one.",
                HyperkronWarning,
                stacklevel=2,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._resumed = True


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
    remembers = ("_saved", "best_step", "best_value")

    def __init__(
        self, folder: str | Path, every: int = 100, keep: int = 3, best: str | None = None, mode: str = "min"
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            check_whole(name, value)
        check_one_of("mode", mode, ("min", "max"))
        self.folder: Path = check_folder("folder", folder)
        self.every, self.keep, self.best, self.mode = every, keep, best, mode
        self.best_step: int | None = None
        self.best_value: float | None = None
        self._saved: int | None = None

    def on_start(self, run: Run) -> None:
        checkpoint.refuse_overtaken(self.folder, run.state.step)

    def on_boundary(self, run: Run) -> None:
        if run.state.step % self.every == 0:
            try:
                self._save(run)
            except CheckpointError as error:
                warnings.warn(f"{error} The run continues.", HyperkronWarning, stacklevel=2)

    def on_end(self, run: Run) -> None:
        if self._saved != run.state.step:
            self._save(run)
        if self.best is not None and self.best_step is None and run.state.step > 0:
            warnings.warn(
                f"Checkpoint found no finite number in the column best={self.best!r} at the steps it saved, so "
                "it kept no best step; check the name, and save at steps that have this figure.",
                HyperkronWarning,
                stacklevel=2,
            )

    def _save(self, run: Run) -> None:
        before = self.state_dict()
        self._saved = run.state.step
        value = run.history[-1].get(self.best) if self.best is not None and len(run.history) else None
        if isinstance(value, (int, float)) and math.isfinite(value):
            best = self.best_value
            if best is None or (value < best if self.mode == "min" else value > best):
                self.best_step, self.best_value = run.state.step, float(value)
        try:
            run.save(self.folder)
        except CheckpointError:
            self.load_state_dict(before)
            raise
        if run.group.rank == 0:
            checkpoint.prune(self.folder, self.keep, [] if self.best_step is None else [self.best_step])
