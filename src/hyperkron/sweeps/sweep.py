"""``sweep``: search over the settings of a method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from hyperkron.solution import HyperkronError
from hyperkron.sweeps.queue import TrialQueue
from hyperkron.sweeps.result import SweepResult, result_of
from hyperkron.sweeps.space import Space
from hyperkron.training import Evaluate, Run
from hyperkron.training.program import Program
from hyperkron.validation import check_callable, check_one_of, check_whole

DIVERGENCE = (HyperkronError, ArithmeticError, torch.OutOfMemoryError, torch.linalg.LinAlgError)
"""Errors that come from settings: the trial has failed, and the sweep continues."""


class Trial:
    """One point of the space: ``trial["damping"]`` is its damping.

    Attributes:
        settings: the suggested settings by name.
        number: of the trial. A retry has the number of the trial it repeats, so that it can resume from a checkpoint
            folder that is named after the number.
    """

    def __init__(self, queue: TrialQueue, asked: Any) -> None:
        self._optuna, self._asked = queue.optuna, asked
        self._way = "max" if queue.study.direction.name == "MAXIMIZE" else "min"
        self.settings: dict[str, Any] = dict(asked.params)
        origin = asked.user_attrs.get("origin", asked.number)
        self.number = [chain[0].number for chain in queue.chains()].index(origin)

    def __getitem__(self, name: str) -> Any:
        if name not in self.settings:
            raise KeyError(f"{name} is not searched, only {', '.join(self.settings)}; add it to the space (--search).")
        return self.settings[name]

    def pruning(self, figure: str = "outer_loss", every: int = 10, mode: str | None = None) -> Evaluate:
        """A callback for ``fit``: reports a column of the history every ``every`` steps.

        Args:
            figure: the column; that of another callback must be there at these steps, and come before this one.
            every: how often, in steps.
            mode: ``min`` if smaller is better, ``max`` if larger is better. Default: ``min`` for a loss of ``fit``, and
                for other columns as for the value of ``function``.
        """
        mode = mode or ("min" if figure in ("outer_loss", "inner_loss") else self._way)
        check_one_of("mode", mode, ("min", "max"))

        def function(run: Run) -> None:
            if figure not in run.row:
                raise KeyError(f"step {run.state.step} has no column {figure}, only {', '.join(run.row)}.")
            value = run.row[figure]
            if value is not None:  # as after a step that was skipped
                self.report(value if mode == self._way else -float(value), run.state.step)

        return Evaluate(function, every=every)

    def report(self, value: Any, step: int) -> None:
        """Report a value on the way; a trial that is worse than the median of the others at this step ends here.

        Worse is larger, or with ``maximize`` smaller.
        """
        try:
            self._asked.report(float(value), step)
        except self._optuna.exceptions.UpdateFinishedTrialError as error:
            raise self._optuna.TrialPruned("another worker has this trial") from error
        if self._asked.should_prune():
            raise self._optuna.TrialPruned(f"worse than the median after {step} steps")


def sweep(
    function: Callable[[Trial], float],
    space: Space,
    *,
    trials: int = 50,
    storage: str = "sweep.db",
    study: str = "sweep",
    maximize: bool = False,
    retries: int = 1,
    heartbeat: int = 15,
    seed: int = 0,
    progress: bool = False,
) -> SweepResult:
    """Search for the settings that minimise ``function``, by a tree-structured Parzen estimator.

    The same call in another process is one more worker, with PostgreSQL also on another machine. After an interruption
    the same call continues, with a warning if the code of ``function`` has changed. A trial whose worker was killed is
    repeated with the same settings; each ends exactly once.

    Args:
        function: takes a :class:`Trial`, trains with its settings and returns the loss or error on held-out data.
            Errors that settings cause (divergence, too little memory) fail the trial; others are recorded and raised.
        space: for each setting a :class:`Range` or a list of choices.
        trials: how many in all, by all workers and earlier calls; a retry is not counted.
        storage: an SQLite file on a local disk, or ``postgresql://user@host/database``.
        study: name of the sweep in the storage.
        maximize: search for the largest value.
        retries: how often to repeat a trial whose worker was lost.
        heartbeat: seconds between signs of life; a worker that misses four of them is lost.
        seed: of the search.
        progress: show a progress bar.

    Example:
        >>> import tempfile
        >>> from hyperkron.sweeps import Range
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = sweep(lambda t: (t["x"] - 2) ** 2, {"x": Range(0, 4)}, trials=8, storage=f"{folder}/s.db")
        >>> found.best.settings, found.best.value
        ({'x': 2}, 0.0)

    Reference: Akiba et al., Optuna: A next-generation hyperparameter optimization framework, KDD 2019.
    """
    for name, value, least in (
        ("trials", trials, 1),
        ("retries", retries, 0),
        ("heartbeat", heartbeat, 1),
        ("seed", seed, 0),
    ):
        check_whole(name, value, least)
    check_callable("function", function, "pass a function that takes a trial and returns a number")
    queue = TrialQueue(storage, study, space, maximize, retries, heartbeat, Program({"function": function}, []).code())
    with tqdm(total=trials, disable=not progress, unit="trial", dynamic_ncols=True) as bar:
        while True:
            ended = sum(map(queue.ended, chains := queue.chains()))
            bar.update(ended - bar.n)
            if len(chains) >= trials and ended == len(chains):
                return result_of(queue)
            asked = queue.take(trials, seed)
            if asked is None:
                time.sleep(min(1.0, heartbeat / 4))  # others run the last trials, and may yet be lost
            else:
                _run(queue, function, asked)


def _run(queue: TrialQueue, function: Callable[[Trial], float], asked: Any) -> None:
    """Run a trial and record how it ended."""
    try:
        with queue.beating(asked):
            value = float(function(Trial(queue, asked)))
        if not math.isfinite(value):
            raise ArithmeticError(f"the function returned {value}")
    except queue.optuna.TrialPruned:
        queue.record(asked, "PRUNED")
    except Exception as error:
        queue.record(asked, "FAIL", error=f"{type(error).__name__}: {error}"[:500])
        if not isinstance(error, DIVERGENCE):
            raise
    except BaseException:  # Ctrl-C: another worker, or the next call, repeats the trial
        queue.record(asked, "FAIL", interrupted=True)
        raise
    else:
        queue.record(asked, "COMPLETE", value)
