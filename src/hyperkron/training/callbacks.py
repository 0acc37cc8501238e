"""What may happen around a step: callbacks look at the run, add figures to its history, or stop it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyperkron.algorithms import StepReport
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    from hyperkron.training.fit import Run
    from hyperkron.training.history import Value


class Callback:
    """Override what is needed; every method does nothing by default.

    ``on_step`` may return figures for the step's row of the history, and may call ``run.stop(reason)``.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step of a call of :meth:`Run.advance`."""

    def on_step(self, run: Run, report: StepReport) -> dict[str, Value] | None:
        """After every step."""
        return None

    def on_end(self, run: Run) -> None:
        """After the last step, also of a stopped run."""

    def state_dict(self) -> dict[str, Any]:
        """What the next call depends on, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""


class Every(Callback):
    """Calls ``function(run)`` every ``count`` steps; the figures it returns join the history.

    Args:
        count: how often, in steps.
        function: takes the run, returns a dictionary of figures or ``None``.

    Example:
        >>> Every(10, lambda run: {"weight": float(run.state.hyper.value.mean())}).count
        10
    """

    def __init__(self, count: int, function: Callable[[Run], dict[str, Value] | None]) -> None:
        if count < 1:
            raise HyperkronError(f"count={count!r} must be at least 1: every how many steps to call.")
        self.count, self.function = count, function

    def on_step(self, run: Run, report: StepReport) -> dict[str, Value] | None:
        """Call where it is due."""
        return self.function(run) if (report.step + 1) % self.count == 0 else None


class EarlyStopping(Callback):
    """Stops the run when a figure has not improved for ``patience`` of its readings.

    Args:
        figure: a column of the history, such as ``outer_loss`` or one that :class:`Every` adds. Callbacks see the
            figures of those before them.
        patience: readings without improvement.
        mode: ``min`` or ``max``, which is better.
        margin: by how much a reading must beat the best.
    """

    def __init__(self, figure: str = "outer_loss", patience: int = 10, mode: str = "min", margin: float = 0.0) -> None:
        if patience < 1:
            raise HyperkronError(f"patience={patience!r} must be at least 1.")
        if mode not in ("min", "max"):
            raise HyperkronError(f"mode={mode!r} is unknown; choose min or max.")
        self.figure, self.patience, self.mode, self.margin = figure, patience, mode, margin
        self.best, self.waited = math.inf, 0

    def on_step(self, run: Run, report: StepReport) -> None:
        """Read the figure, if this step has it."""
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
