"""A run of an algorithm, with the callbacks around its steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hyperkron.algorithms import Algorithm, BatchSources, State, StepReport, derivatives
from hyperkron.collectives import Group
from hyperkron.problem import Both
from hyperkron.solution import HyperkronError, Status
from hyperkron.training import checkpoint
from hyperkron.training.callback import Callback, checked
from hyperkron.training.encoding import CheckpointError
from hyperkron.training.history import History, JSONLog, Value
from hyperkron.training.locks import FolderLock
from hyperkron.training.program import Program, listed, settings, tensors
from hyperkron.training.randomness import kept_random_state, random_state, set_random_state
from hyperkron.training.sharded_checkpoint import holds_rows, of_all_ranks, own_buffers, resharded, write_rows
from hyperkron.training.signals import Interrupted, Signals
from hyperkron.training.undo import RecordedBatches, undoable_step
from hyperkron.validation import check_callable, check_nonnegative, check_whole


class Run:
    """A run of an algorithm: advance it, inspect it, save it and continue it.

    Attributes:
        algorithm, state, batches: the algorithm, its state, and the source of its batches.
        history: one row of values per step.
        row: the row of the current step, for callbacks.
        seconds: time spent in steps so far, without callbacks and saving.
        stopped: why it ended early, or ``None``.
        failure: the error of a step that ended the run (with ``record_failure``), or ``None``.
        goal: the step at which the current call of :meth:`advance` ends, or ``None`` if only time ends it.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        state: State,
        batches: BatchSources,
        callbacks: Sequence[Callback] = (),
        *,
        clock: Callable[[], float] = time.perf_counter,
        record_failure: bool = False,
    ) -> None:
        self.algorithm, self.state = algorithm, state
        derivatives.check_curvature_data(state, batches)
        self.batches = RecordedBatches(batches)
        self.callbacks = checked(callbacks)
        check_callable("clock", clock, "pass a function that returns seconds, such as time.perf_counter")
        self.clock, self.record_failure = clock, record_failure
        self.history = History()
        self.row: dict[str, Value] = {}
        self.seconds = 0.0
        self.stopped: str | None = None
        self.failure: Exception | None = None
        self.goal: int | None = state.step
        self._goal_seconds = math.inf
        self._waits_for: torch.device | None = None
        self._random: dict[str, Any] | None = None
        self._log: JSONLog | None = None
        self._locks: dict[Path, FolderLock] = {}
        self._settings = Program(settings(algorithm, state), [state.model, state.hyper])
        parts: dict[str, Any] = {f"{level}_data": source for level, source in batches.sources.items()}
        parts |= {"problem": state.problem, "model": state.model, "hyper": state.hyper}
        self._program = Program(parts, [state.model, state.hyper])

    @property
    def group(self) -> Group:
        """The processes that share this run (:class:`DataParallel`); the first of them writes its files."""
        return self.state.problem.group

    def stop(self, reason: str) -> None:
        """End the run after this step."""
        self.stopped = reason

    def advance(self, steps: int | None = None, *, seconds: float | None = None, progress: bool = False) -> Run:
        """Run ``steps`` more steps or ``seconds`` more seconds, whichever comes first; less if a callback stops it.

        With a :class:`Checkpoint` callback, SIGTERM and SIGINT end the run after the current step: it is saved, and
        :class:`Interrupted` exits with code 143 or 130. While it runs, no other run can write into its folders. The
        arguments are those of :func:`fit`; ``None`` is no limit.
        """
        return advance_all([self], steps, seconds=seconds, progress=progress)[0]

    @property
    def progress(self) -> float:
        """The share of the steps or of the time that is used up, whichever is larger."""
        steps = 0.0 if self.goal is None else self.state.step / self.goal if self.goal else 1.0
        return max(steps, self.seconds / self._goal_seconds if self._goal_seconds > 0 else 1.0)

    @property
    def _ended(self) -> bool:
        return self.stopped is not None or self.state.step == self.goal or self.seconds >= self._goal_seconds

    def _set_goal(self, steps: int | None, seconds: float | None) -> None:
        if steps is None and seconds is None:
            raise HyperkronError("neither steps nor seconds was given; say how long the run is, such as steps=100.")
        if steps is not None:
            check_whole("steps", steps, 0)
        if seconds is not None and seconds != math.inf:
            check_nonnegative("seconds", seconds, "it is the time to train for")
        device = next(iter(self.state.params.values())).device
        self._waits_for = device if seconds is not None and device.type == "cuda" else None
        self.stopped = None if self.failure is None else str(self.failure)
        self.goal = None if steps is None else self.state.step + steps
        self._goal_seconds = math.inf if seconds is None else self.seconds + seconds

    @property
    def folder(self) -> Path | None:
        """The folder of the run's files: that of its first callback that has one, such as a :class:`Checkpoint`."""
        return next((Path(callback.folder) for callback in self.callbacks if callback.folder is not None), None)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock the folders of the log and the checkpoints, so that no other run writes there."""
        with ExitStack() as stack:
            for callback in self.callbacks:
                if callback.folder is not None and self.group.rank == 0:
                    stack.enter_context(self._lock(callback.folder))
            yield

    def _lock(self, folder: str | Path) -> FolderLock:
        """This run's lock of a folder; the run may already hold it."""
        return self._locks.setdefault(Path(folder).resolve(), FolderLock(Path(folder).resolve()))

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Locks, log and callbacks around the steps of one call of :meth:`advance`."""
        with ExitStack() as stack:
            stack.enter_context(self._writing())
            for callback in self.callbacks:
                stack.callback(callback.on_exit, self)
            for callback in self.callbacks:
                callback.on_start(self)
            if self.folder is not None and self.group.rank == 0:
                self._log = JSONLog(self.folder)
                self._log.begin(self.history)
            yield

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Inside the block, the global random state is that of this run."""
        if self._random is not None:
            set_random_state(self._random)
        yield
        self._random = random_state()

    def _take_step(self) -> None:
        """Take one step, measure its time, and add its row."""
        self.state.check_trainable()
        begin = self.clock()
        try:
            guards = [callback for callback in self.callbacks if callback.undoes]
            report = undoable_step(self, guards) if guards else self.algorithm.step(self.state, self.batches)
        except (HyperkronError, torch.linalg.LinAlgError) as error:
            if not self.record_failure:
                raise
            self.failure, self.stopped = error.with_traceback(None), str(error)
        finally:
            if self._waits_for is not None:
                torch.cuda.synchronize(self._waits_for)
            self.seconds += self.clock() - begin
        if self.failure is None:
            self._record(report)
        else:
            self._append({"step": self.state.step, "outer_loss": None, "failure": str(self.failure)[:300]})

    def _agree(self, signals: Signals) -> None:
        """Give all processes the clock of the first one, and stop all if one has stopped."""
        table = self.group.numbers(self.seconds, self.stopped is not None, signals.received or 0)
        self.seconds = table[0][0]
        if any(stopped for _, stopped, _ in table) and self.stopped is None:
            self.stopped = "another process has stopped"
        signals.received = int(max(received for *_, received in table)) or None

    def _record(self, report: StepReport) -> None:
        """Add the row of a step, and call the callbacks."""
        outer_loss = None if report.status is Status.SKIPPED else report.outer_loss
        self.row = {"step": report.step, "outer_loss": outer_loss, "inner_loss": report.inner_loss}
        self.row["direction"] = report.direction
        if report.status is not None:
            self.row["status"] = report.status.name
        self.row.update(report.stats)
        try:
            for callback in self.callbacks:
                self.row.update(callback.on_step(self, report) or {})
        finally:  # the step is done, also if a callback raises an error or is interrupted
            self._append(self.row)
        for callback in self.callbacks:
            callback.on_boundary(self)

    def _append(self, row: dict[str, Value]) -> None:
        self.row = row
        self.history.append(row)
        if self._log is not None:
            self._log.write(self.history)

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on, the global random state included."""
        return {
            "state": self.state.state_dict(),
            "batches": self.batches.state_dict(),
            "history": self.history.state_dict(),
            "seconds": self.seconds,
            "callbacks": dict(zip(self._callback_names(), [c.state_dict() for c in self.callbacks], strict=True)),
            "random": random_state(),
            "ranks": {},
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
        own = {**state, **state["ranks"].get(str(self.group.rank), {})}  # what differs between ranks: else of the first
        if "buffers" in own and len(state["ranks"]) == self.group.size:
            live = Both(self.state.model, self.state.hyper).state_dict()
            for name, x in own["buffers"].items():
                live[name].copy_(x)
        self.batches.load_state_dict(own["batches"])
        self.history.load_state_dict(state["history"])
        self.seconds = state["seconds"]
        for callback in self.callbacks:
            found = next((name for name in saved if name.split()[1] == type(callback).__name__), None)
            if found is not None:
                callback.load_state_dict(saved.pop(found))
        set_random_state(own["random"])
        self._random = None

    def about(self) -> checkpoint.About:
        """A description of this run; a checkpoint is resumed only if its description is the same."""
        model, hyper = tensors(self.state.model), tensors(self.state.hyper)
        kinds = {f"callbacks.{i}": type(callback).__qualname__ for i, callback in enumerate(self.callbacks)}
        config = {**self._settings.begin(), **kinds}
        spread = 1 if self.state.problem.divides else self.group.size
        return checkpoint.About(model, hyper, config, spread, self._program.lines())

    def save(self, folder: str | Path) -> Path:
        """Write everything the rest of the run depends on to ``folder/step-…``, and return that path.

        It is complete or absent, even after a crash; see ``docs/checkpoints.md``. With several processes all must call
        this: the first writes the checkpoint, the others only their rows of sharded tensors. A process that waits for
        the others for ten seconds says so.
        """
        self.group.meet("Run.save")
        with contextlib.nullcontext() if self.state.hypergradient is None else self.state.hypergradient.collected():
            return self._save(folder)

    def _save(self, folder: str | Path) -> Path:
        rows, path = None, checkpoint.place(folder, self.state.step)
        own: dict[str, Any] = {}  # of this rank
        if self.group.size > 1:
            if buffers := own_buffers(self.state, self.group):
                own["buffers"] = buffers
            if not self.state.problem.divides:  # data of its own may draw random numbers of its own
                own |= {"batches": self.batches.state_dict(), "random": random_state()}
        ranks = {"ranks": of_all_ranks(own, self.group) if own else {}}
        if self._sharded:
            staging = checkpoint.staging(folder, self.state.step)
            rows = staging, write_rows(staging, self.state_dict(), self.group)
        failure: CheckpointError | None = None
        if self.group.rank == 0:
            try:
                with self._lock(folder):
                    checkpoint.write(folder, self.state.step, self.state_dict() | ranks, self.about(), rows)
            except CheckpointError as error:
                failure = error
        if rows is not None and not self.group.all(failure is None) and failure is None:
            failure = CheckpointError(f"the first process could not save step {self.state.step} in {folder}.")
        if failure is not None:
            raise failure
        return path

    @property
    def _sharded(self) -> bool:
        """Whether parts of θ or λ are sharded."""
        return holds_rows(self.state.model, self.state.hyper)

    def resume(self, folder: str | Path, *, step: int | None = None, allow_changes: bool = False) -> Run:
        """Continue from the newest intact checkpoint in ``folder``, bit for bit (on the CPU).

        Args:
            folder: where :meth:`save` or :class:`Checkpoint` has written.
            step: take the checkpoint of this step.
            allow_changes: continue even if the model, the configuration, the code, the data or the number of processes
                differ, instead of raising an error that lists the differences. What does not fit is still an error,
                after which this run is as it was.
        """
        first = self.group.rank == 0  # it chooses and compares; its error ends all
        group = self.group if self._sharded else None
        saved = checkpoint.newest(folder, step, group=group) if first else None
        lines = [] if saved is None else checkpoint.differences(saved, self.about(), allow=allow_changes)
        found, differs = self.group.numbers(0 if saved is None else saved.step, len(lines))[0]
        saved = saved or checkpoint.newest(folder, int(found), group=group)
        content = saved.state if group is None else resharded(saved.state, self.state)
        if not differs:
            try:
                self.load_state_dict(content)
            except HyperkronError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"{saved.path} is consistent but cannot be continued ({type(error).__name__}: {error!s:.200}); "
                    "this run may hold parts of it: make it again, and take another checkpoint with step=."
                ) from error
            return self
        its = saved.about.config.get("algorithm")
        if its != type(self.algorithm).__qualname__:
            raise CheckpointError(
                f"{saved.path} is of a run of {its}, whose memory {type(self.algorithm).__qualname__} cannot continue; "
                f"resume it with {its} and no further steps, then call fit again with the same model and hyper."
            )
        before = self.state_dict()
        try:
            self.load_state_dict(content, strict=False)
        except Exception as error:
            self.load_state_dict(before)
            raise CheckpointError(
                f"{saved.path} does not fit into this run ({error}), which differs in:{listed(lines)}"
            ) from error
        return self


def advance_all(
    runs: Collection[Run],
    steps: int | None = None,
    *,
    seconds: float | None = None,
    block: int = 1,
    progress: bool = False,
) -> list[Run]:
    """Advance several runs side by side in one process: ``block`` steps of each in turn.

    Each run has its own random state, clock and callbacks, so that each gets the result it would get alone, and machine
    noise falls on all of them alike. A run that ends early, by its time or by a failure, leaves the others.

    Args:
        runs: made by ``fit(…, steps=0)``, or advanced before.
        steps, seconds: more of each; ``None`` for no limit.
        block: steps of one run before the next has its turn.
        progress: show one progress bar for all.

    Example:
        >>> import torch, hyperkron as hk
        >>> x, rates = torch.ones(2, 1), (0.1, 1e9)
        >>> problem = hk.BilevelProblem(lambda m, h, batch: hk.losses.mse(m(batch), batch))
        >>> plain = [hk.algorithms.InnerOnly(inner_rate=rate) for rate in rates]
        >>> runs = [hk.fit(problem, torch.nn.Linear(1, 1), None, a, x, steps=0, record_failure=True) for a in plain]
        >>> [run.failure is None for run in hk.training.advance_all(runs, steps=20)]
        [True, False]
    """
    check_whole("block", block)
    if not isinstance(runs, Collection) or not all(isinstance(run, Run) for run in runs):
        raise HyperkronError(f"runs={runs!r:.60} is not a list of runs; pass [fit(…, steps=0), …], also for one.")
    for run in runs:
        run._set_goal(steps, seconds)
    several = len(runs) > 1
    with kept_random_state() if several else nullcontext(), ExitStack() as stack:
        signals = stack.enter_context(Signals(any(c.catches_signals for run in runs for c in run.callbacks)))
        total = None if steps is None else steps * len(runs)
        bar = stack.enter_context(tqdm(total=total, disable=not progress, unit="step", dynamic_ncols=True))
        for run in runs:
            stack.enter_context(run._session())
        waiting = [run for run in runs if not run._ended]
        while waiting and signals.received is None:
            for run in waiting:
                with run._own_random_state() if several else nullcontext():
                    _take_steps(run, block, signals, bar if progress else None)
            waiting = [run for run in waiting if not run._ended]
        for run in runs:
            with run._own_random_state() if several else nullcontext():
                for callback in run.callbacks if run.failure is None else ():
                    callback.on_end(run)
    if signals.received is not None:
        raise Interrupted(signals.received)
    return list(runs)


def _take_steps(run: Run, count: int, signals: Signals, bar: Any) -> None:
    for _ in range(count):
        if run._ended or signals.received is not None:
            return
        run._take_step()
        if run.group.size > 1:
            run._agree(signals)
        if bar is not None:
            bar.update()
            loss = run.row["outer_loss"] if run.row.get("outer_loss") is not None else run.row.get("inner_loss")
            bar.set_postfix(loss=f"{loss:.4g}" if isinstance(loss, float) else "none", refresh=False)
