"""``fit``: run an algorithm for a number of steps, with optimizers, projection, callbacks and a history."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from hyperkron.algorithms import Algorithm, BatchSources, State, StepReport, Updates, derivatives
from hyperkron.optimizers import LevelOptimizer, Project
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError, HyperkronWarning, Status
from hyperkron.training import checkpoint, fingerprint
from hyperkron.training.callbacks import Callback, Checkpoint, Verdict
from hyperkron.training.encoding import CheckpointError
from hyperkron.training.history import History, Value
from hyperkron.training.jsonl import JSONLog
from hyperkron.training.locks import FolderLock
from hyperkron.training.program import Program
from hyperkron.training.randomness import random_state, seed_all, set_random_state
from hyperkron.training.recording import RecordedBatches
from hyperkron.training.rollback import TrainingSnapshot, refuse_non_finite
from hyperkron.training.signals import Interrupted, Signals
from hyperkron.validation import check_whole


class Run:
    """A run of an algorithm: advance it, inspect it, save it and continue it.

    Attributes:
        algorithm, state, batches: the algorithm, its state, and the source of its batches.
        history: one row of values per step.
        row: the row of the current step, for callbacks.
        stopped: why it ended early, or ``None``.
        goal: the step at which the current call of :meth:`advance` ends.
        rank: the number of this process among those of the run.
    """

    rank = 0

    def __init__(
        self, algorithm: Algorithm, state: State, batches: BatchSources, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.algorithm, self.state = algorithm, state
        derivatives.check_curvature_data(state, batches)
        self.batches = RecordedBatches(batches.inner_source, batches.outer_source, batches.curvature_source)
        self.callbacks = list(callbacks)
        self.history = History()
        self.row: dict[str, Value] = {}
        self.stopped: str | None = None
        self.goal = state.step
        self._log: JSONLog | None = None
        self._locks: dict[Path, FolderLock] = {}
        parts = {
            "algorithm": algorithm,
            **{level: _settings(getattr(state, level)) for level in ("inner", "outer")},
            "inner_data": batches.inner_source,
            "outer_data": batches.outer_source,
            **({} if batches.curvature_source is None else {"curvature_data": batches.curvature_source}),
        }
        kinds = [type(callback) for callback in self.callbacks]
        self._config = fingerprint.describe({**parts, "callbacks": kinds})
        parts |= {"problem": state.problem, "model": state.model, "hyper": state.hyper}
        self._program = Program(parts, [state.model, state.hyper], self._config)

    def stop(self, reason: str) -> None:
        """End the run after this step."""
        self.stopped = reason

    def advance(self, steps: int, progress: bool = False) -> Run:
        """Run ``steps`` more steps, or fewer if a callback stops the run.

        With a :class:`Checkpoint` callback, SIGTERM and SIGINT end the run after the current step: it is saved, and
        :class:`Interrupted` exits with code 143 or 130. While it runs, no other run can write into its folders.
        """
        self.stopped, self.goal = None, self.state.step + steps
        catches = any(callback.catches_signals for callback in self.callbacks)
        bar = tqdm(total=steps, disable=not progress, unit="step", dynamic_ncols=True)
        with ExitStack() as stack:
            signals = stack.enter_context(Signals(catches))
            stack.enter_context(bar)
            stack.enter_context(self._writing())
            for callback in self.callbacks:
                stack.callback(callback.on_exit, self)
            self._start()
            for _ in range(steps):
                if self.stopped is not None or signals.received is not None:
                    break
                report = self._step()
                self._record(report)
                for callback in self.callbacks:
                    callback.on_boundary(self)
                bar.update()
                bar.set_postfix(outer=f"{report.outer_loss:.4g}", refresh=False)
            for callback in self.callbacks:
                callback.on_end(self)
        if signals.received is not None:
            raise Interrupted(signals.received)
        return self

    @property
    def folder(self) -> Path | None:
        """Where the run's files go: the folder of its first callback that has one, such as a :class:`Checkpoint`."""
        folders = (getattr(callback, "folder", None) for callback in self.callbacks)
        return next((Path(folder) for folder in folders if folder is not None), None)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the folders of the log and the checkpoints: no other run writes there meanwhile."""
        saved = [callback.folder for callback in self.callbacks if isinstance(callback, Checkpoint)]
        with ExitStack() as stack:
            for folder in saved if self.folder is None else [self.folder, *saved]:
                stack.enter_context(self._lock(folder))
            yield

    def _lock(self, folder: str | Path) -> FolderLock:
        """This run's lock of a folder, which it may hold already."""
        folder = Path(folder).resolve()
        return self._locks.setdefault(folder, FolderLock(folder))

    def _start(self) -> None:
        for callback in self.callbacks:
            callback.on_start(self)
        if self.folder is not None:
            self._log = JSONLog(self.folder, self.rank)
            self._log.begin(self.history)

    def _step(self) -> StepReport:
        """One step of the algorithm; where a guard can undo it, one that is undone, repeated or left out as it says."""
        guards = [callback for callback in self.callbacks if callback.undoes]
        if not guards:
            return self.algorithm.step(self.state, self.batches)
        before = TrainingSnapshot(self.state)
        self.batches.begin()
        try:
            while True:
                try:
                    report = self.algorithm.step(self.state, self.batches)
                    refuse_non_finite(self.state)
                    for guard in guards:
                        guard.on_report(self, report)
                    return report
                except Exception as error:
                    verdict = self._verdict(guards, error, before)
                if verdict is Verdict.SKIP:
                    return self.state.skip()
                self.batches.rewind()  # outside the except block, so that the failed attempt's tensors are free
        finally:
            self.batches.end()

    def _verdict(self, guards: Sequence[Callback], error: Exception, before: TrainingSnapshot) -> Verdict:
        """What the first guard that knows the error makes of it; the error again if there is none."""
        step = self.state.step
        self.state.step = before.step
        for guard in guards:
            try:
                verdict = guard.on_failure(self, error)
            except Exception:
                before.restore(random=False)
                raise
            if verdict is not None:
                before.restore(random=verdict is Verdict.RETRY)
                return verdict
        self.state.step = step
        raise error

    def _record(self, report: StepReport) -> None:
        outer_loss = None if report.status is Status.SKIPPED else report.outer_loss
        self.row = {"step": report.step, "outer_loss": outer_loss, "inner_loss": report.inner_loss}
        self.row["direction"] = report.direction
        if report.status is not None:
            self.row["status"] = report.status.name
        self.row.update(report.stats)
        for callback in self.callbacks:
            self.row.update(callback.on_step(self, report) or {})
        self.history.append(self.row)
        if self._log is not None:
            self._log.write(self.history)

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on, the global random state included."""
        return {
            "state": self.state.state_dict(),
            "draw": self.batches.state_dict(),
            "history": self.history.state_dict(),
            "callbacks": dict(zip(self._callback_names(), [c.state_dict() for c in self.callbacks], strict=True)),
            "random": random_state(),
        }

    def _callback_names(self) -> list[str]:
        return [f"{i} {type(callback).__name__}" for i, callback in enumerate(self.callbacks)]

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Continue from a :meth:`state_dict` of a run made with the same arguments.

        ``strict=False`` lets the callbacks differ: each takes the state of the first unused one of its class.
        """
        saved, names = dict(state["callbacks"]), self._callback_names()
        if strict and list(saved) != names:
            raise HyperkronError(
                f"the state has the callbacks {list(saved)} but this run has {names}; "
                "make the run with the callbacks it was saved with."
            )
        self.state.load_state_dict(state["state"])
        self.batches.load_state_dict(state["draw"])
        self.history.load_state_dict(state["history"])
        for callback in self.callbacks:
            found = next((name for name in saved if name.split()[1] == type(callback).__name__), None)
            if found is not None:
                callback.load_state_dict(saved.pop(found))
        set_random_state(state["random"])

    def about(self) -> checkpoint.About:
        """What this run is made of; a checkpoint is resumed only where it is the same."""
        model, hyper = fingerprint.tensors(self.state.model), fingerprint.tensors(self.state.hyper)
        return checkpoint.About(model, hyper, self._config, program=self._program.lines())

    def save(self, folder: str | Path) -> Path:
        """Write everything the rest of the run depends on to ``folder/step-…``, and return that path.

        It is complete or absent, whatever happens meanwhile; see ``docs/checkpoints.md``.
        """
        with self._lock(folder):
            return checkpoint.write(folder, self.state.step, self.state_dict(), self.about())

    def resume(self, folder: str | Path, *, step: int | None = None, allow_changes: bool = False) -> Run:
        """Continue from the newest intact checkpoint in ``folder``, bit for bit (on the CPU).

        Args:
            folder: where :meth:`save` or :class:`Checkpoint` has written.
            step: take the checkpoint of this step.
            allow_changes: continue even if the model, the configuration, the code, the data or the number of processes
                differ, instead of raising an error that lists the differences. What does not fit is still an error,
                after which this run is as it was. Settings of optimizers and schedulers come from the checkpoint in
                any case.
        """
        saved = checkpoint.newest(folder, step)
        lines = saved.about.differences(self.about())
        if lines and not allow_changes:
            raise CheckpointError(
                f"{saved.path} belongs to another run:{fingerprint.listed(lines)}\n"
                "Make this run as that one was made, choose another folder, or continue with these changes by "
                "fit(…, allow_changes=True) or run.resume(folder, allow_changes=True)."
            )
        _warn_of_changes(saved)
        if not lines:
            try:
                self.load_state_dict(saved.state)
            except HyperkronError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"{saved.path} is consistent but cannot be continued ({type(error).__name__}: {error!s:.200}); "
                    "this run may hold parts of it: make it again, and take another checkpoint with step=."
                ) from error
            return self
        before = self.state_dict()
        try:
            self.load_state_dict(saved.state, strict=False)
        except Exception as error:
            self.load_state_dict(before)
            raise CheckpointError(
                f"{saved.path} does not fit into this run ({error}), which differs in:{fingerprint.listed(lines)}"
            ) from error
        return self


def fit(
    problem: BilevelProblem,
    model: nn.Module,
    hyper: nn.Module,
    algorithm: Algorithm,
    inner_data: Any,
    outer_data: Any,
    *,
    steps: int,
    curvature_data: Any = None,
    inner_optimizer: torch.optim.Optimizer | Updates | None = None,
    outer_optimizer: torch.optim.Optimizer | Updates | None = None,
    projection: Project | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int | None = 0,
    resume: str | Path | None = None,
    allow_changes: bool = False,
    progress: bool = False,
) -> Run:
    """Train λ and θ for ``steps`` steps of ``algorithm``.

    Args:
        problem: the two objectives.
        model: θ; trained in place.
        hyper: λ; trained in place.
        algorithm: ``AID(hk.kfac())``, ``AmIGO()``, …
        inner_data: batches of J_in: a loader, a function, a fixed batch, or :class:`hyperkron.algorithms.Examples`.
        outer_data: batches of J_out.
        curvature_data: separate batches of J_in to measure A on, for example larger ones; ``None`` uses the inner batch
            of the cross term.
        steps: number of steps of the algorithm (each may contain several steps of θ); 0 only prepares the run.
        inner_optimizer: optimizer of θ, or :class:`hyperkron.algorithms.Updates` with scheduler and clipping; ``None``
            uses the algorithm's own step sizes.
        outer_optimizer: the same for λ.
        projection: applied to every parameter of λ: :class:`Box`, :class:`Simplex`, :class:`Ball` or a function.
        callbacks: see :class:`Callback`.
        seed: seed of torch, numpy and ``random``, set before the first step (default: 0); ``None`` sets none.
        resume: a checkpoint folder, usually that of a :class:`Checkpoint` callback. If it has an intact checkpoint, the
            run continues from the newest one, and ``steps`` includes the steps already done.
        allow_changes: continue even if this run differs from the saved one; see :meth:`Run.resume`.
        progress: show a progress bar.

    Returns:
        The run, with its ``history`` and ``state``; ``run.advance(more)`` continues it.

    Example:
        >>> import torch, hyperkron as hk
        >>> model, shift = torch.nn.Linear(1, 1, bias=False), hk.as_hyper(torch.zeros(1))
        >>> problem = hk.BilevelProblem(
        ...     lambda m, h, batch: hk.losses.mse(m(batch), h() * batch),
        ...     lambda m, h, batch: hk.losses.mse(m(batch), 3 * batch),
        ... )
        >>> x = torch.ones(2, 1)
        >>> run = hk.fit(problem, model, shift, hk.algorithms.aid_cg(1, outer_rate=0.5), x, x, steps=50)
        >>> round(float(shift().detach()), 3)  # inner targets that fit the outer ones
        3.0
        >>> run.history.column("outer_loss")[-1] < 1e-6
        True
    """
    if not isinstance(algorithm, Algorithm):
        raise HyperkronError(
            f"algorithm={algorithm!r:.60} is a {type(algorithm).__name__}, not an Algorithm; wrap a hypergradient "
            "as hyperkron.AID(hypergradient, inner_steps=10)."
        )
    check_whole("steps", steps, 0)
    if seed is not None:
        seed_all(seed)
    state = algorithm.init(problem, model, hyper, inner=inner_optimizer, outer=outer_optimizer, project=projection)
    run = Run(algorithm, state, BatchSources(inner_data, outer_data, curvature_data), callbacks)
    with run._writing() if steps else nullcontext():  # what is read here is not overtaken by another run
        if resume is not None and checkpoint.candidates(resume):
            run.resume(resume, allow_changes=allow_changes)
            steps = max(0, steps - run.state.step)
        return run.advance(steps, progress) if steps else run


def _warn_of_changes(saved: checkpoint.Saved) -> None:
    """Say that versions differ, or that the checkpoint does not record what its run computed."""
    versions = checkpoint.changed_versions(saved.versions)
    if versions:
        text = f"{saved.path} {versions}: the run continues, but perhaps not bit for bit."
        warnings.warn(text, HyperkronWarning, stacklevel=3)
    if saved.about.program is None:
        text = f"{saved.path} does not record code and data of its run: whether they are the same is not known."
        warnings.warn(text, HyperkronWarning, stacklevel=3)


def _settings(level_optimizer: LevelOptimizer) -> dict[str, Any]:
    """What decides how a level moves."""
    return {name: getattr(level_optimizer, name) for name in ("rate", "optimizer", "scheduler", "clip", "project")} | {
        name: value for name in ("autocast", "scaler") if (value := getattr(level_optimizer, name)) is not None
    }
