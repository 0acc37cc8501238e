"""Sends the values of a run to TensorBoard, Weights & Biases, MLflow or Trackio, and shows a progress bar by rich.

Each is a callback that imports its package, an extra, when a run starts. A resumed run goes on in the same place.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from hyperkron.training.callback import Callback
from hyperkron.training.history import Value, plain
from hyperkron.training.run import Run
from hyperkron.validation import check_folder, check_whole, need


class Tracker(Callback):
    """Sends the row of every ``every``-th step somewhere: override :meth:`open`, :meth:`log` and :meth:`close`.

    Args:
        every: how often, in steps.
    """

    def __init__(self, every: int = 1) -> None:
        check_whole("every", every)
        self.every = every
        self._open = False

    @abstractmethod
    def open(self, run: Run) -> None:
        """Begin, or go on where an earlier part of this run has ended."""

    @abstractmethod
    def log(self, step: int, figures: dict[str, float], words: dict[str, str]) -> None:
        """Send the finite figures of a step, and its texts."""

    @abstractmethod
    def close(self) -> None:
        """Send the remaining values and close."""

    def on_start(self, run: Run) -> None:
        if run.group.rank == 0:  # of several processes the first reports
            self.open(run)
            self._open = True

    def on_boundary(self, run: Run) -> None:
        row = run.history[-1]
        step = int(row["step"])  # type: ignore[arg-type]
        if self._open and step % self.every == 0:
            self.log(step, *_sorted(row))

    def on_exit(self, run: Run) -> None:
        if self._open:
            self._open = False
            self.close()


def _sorted(row: dict[str, Value]) -> tuple[dict[str, float], dict[str, str]]:
    """The finite figures of a row, without its step, and its texts."""
    shown = {name: plain(value) for name, value in row.items() if name != "step"}
    figures = {name: value for name, value in shown.items() if isinstance(value, (int, float))}
    return figures, {name: value for name, value in shown.items() if isinstance(value, str)}


class TensorBoard(Tracker):
    """Scalars for TensorBoard; texts (statuses) where they change. Needs ``hyperkron[track]``.

    Steps that a resumed run does again replace their earlier figures.

    Args:
        folder: of the event files.
        every: how often, in steps.
    """

    def __init__(self, folder: str | Path, every: int = 1) -> None:
        super().__init__(every)
        self.logs = check_folder("folder", folder)
        self._writer: Any = None
        self._last: dict[str, str] = {}

    def open(self, run: Run) -> None:
        board = need("torch.utils.tensorboard", "track", "TensorBoard()")
        self._writer = board.SummaryWriter(str(self.logs), purge_step=run.state.step or None)

    def log(self, step: int, figures: dict[str, float], words: dict[str, str]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        for name, text in words.items():
            if self._last.get(name) != text:
                self._writer.add_text(name, text, step)
        self._last = words

    def close(self) -> None:
        self._writer.close()
        self._writer = None


class _Identified(Tracker):
    """A tracker whose service gives a run an identity, by which it is found again."""

    remembers = ("_id",)

    def __init__(self, project: str, name: str | None = None, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        self.project, self.name, self._options = project, name, options
        self._id: str | None = None
        self._service: Any = None  # takes figures, and is told the end

    def _given(self, run: Run, key: str) -> dict[str, Any]:
        """The arguments of the service's ``init``, which finds a run again by ``key``."""
        known = {} if self._id is None else {key: self._id, "resume": "allow"}
        config = run.about().config
        return {"project": self.project, "name": self.name, "config": config, **self._options, **known}

    def log(self, step: int, figures: dict[str, float], words: dict[str, str]) -> None:
        self._service.log({**figures, **words}, step=step)

    def close(self) -> None:
        self._service.finish()


class WandB(_Identified):
    """Weights & Biases. Needs ``hyperkron[wandb]``.

    Args:
        project: its project.
        name: of the run.
        every: how often, in steps.
        options: more arguments of ``wandb.init``.
    """

    def open(self, run: Run) -> None:
        self._service = need("wandb", "wandb", "WandB()").init(**self._given(run, "id"))
        self._id = str(self._service.id)


class Trackio(_Identified):
    """Trackio, which keeps its figures on this machine and finds a run by its name. Needs ``hyperkron[trackio]``.

    Args:
        project, name, every, options: as for :class:`WandB`; ``options`` are those of ``trackio.init``.
    """

    def open(self, run: Run) -> None:
        self._service = need("trackio", "trackio", "Trackio()")
        self._id = str(self._service.init(**self._given(run, "name")).name)


class MLflow(_Identified):
    """MLflow; the settings of the run are its parameters. Needs ``hyperkron[mlflow]``.

    Args:
        project: the experiment.
        name, every, options: as for :class:`WandB`; ``options`` are those of ``mlflow.start_run``.
    """

    def open(self, run: Run) -> None:
        self._service = need("mlflow", "mlflow", "MLflow()")
        self._service.set_experiment(self.project)
        fresh = self._id is None
        known = {"run_name": self.name} if fresh else {"run_id": self._id}
        self._id = str(self._service.start_run(**self._options, **known).info.run_id)
        if fresh:
            self._service.log_params({_allowed(name): value for name, value in run.about().config.items()})

    def log(self, step: int, figures: dict[str, float], words: dict[str, str]) -> None:
        self._service.log_metrics({_allowed(name): float(value) for name, value in figures.items()}, step=step)

    def close(self) -> None:
        self._service.end_run()


def _allowed(name: str) -> str:
    """A name as MLflow takes it.

    Example:
        >>> _allowed("inner.lr [θ]")
        'inner.lr _θ_'
    """
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


class RichProgress(Callback):
    """A bar by rich, with the outer loss and the time left. Needs ``hyperkron[cli]``."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def on_start(self, run: Run) -> None:
        rich = need("rich.progress", "cli", "RichProgress()")
        columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
        self._bar = rich.Progress(*columns)
        self._task = self._bar.add_task("fit", total=run.goal, completed=run.state.step)
        self._bar.start()

    def on_boundary(self, run: Run) -> None:
        loss = run.row.get("outer_loss")
        told = f"outer {loss:.4g}" if isinstance(loss, float) else "skipped"
        self._bar.update(self._task, completed=run.state.step, description=told)

    def on_exit(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
