"""Guards keep a long run alive: they handle NaNs, memory errors, collapsing weights and stale inverses.

Each guard is a callback of ``fit`` for one problem; :func:`default_guards` returns all of them.
"""

from __future__ import annotations

import gc
import json
import tempfile
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor

from hyperkron.algorithms import StepReport
from hyperkron.hyper import DomainWeights, SampleWeights
from hyperkron.solution import FactorizationError, HyperkronError, HyperkronWarning, NonFiniteError, Status
from hyperkron.training.accumulation import Accumulated, batch_norms, length
from hyperkron.training.callback import Callback, Verdict
from hyperkron.training.history import Value
from hyperkron.training.run import Run
from hyperkron.training.writing import whole_file
from hyperkron.validation import check_folder, check_interval, check_whole

MAX_DUMPS = 100
"""The largest number of files about failed batches in one run."""


def default_guards(folder: str | Path | None = None) -> list[Callback]:
    """All guards with their usual limits; ``folder`` is for the batches of skipped steps.

    Example:
        >>> [type(guard).__name__ for guard in default_guards()]
        ['SkipFailures', 'HalveOnOutOfMemory', 'WatchWeights', 'WatchInverses']
    """
    return [SkipFailures(folder=folder), HalveOnOutOfMemory(), WatchWeights(), WatchInverses()]


class SkipFailures(Callback):
    """Undoes a step that ends in a NaN, an infinity or a failed factorisation, and continues with the next batches.

    θ, λ, optimizers and all states are restored. The step counts, with the status ``SKIPPED`` in the history. Its
    batches are described in ``folder/failed-rank00000-step-….json``, one file per skipped step and at most 100 in a
    run. A file lists integers such as indices and labels, and the rows that are not finite. After ``limit`` skipped
    steps in a row the run stops with the error of the step, which names the last file. The cost per step is a copy and
    a check of θ, λ and the states of their optimizers.

    Args:
        limit: how many skipped steps in a row end the run.
        folder: where to write the files; ``None`` uses the folder of the run's checkpoints, or a temporary one.
        statuses: also skip steps whose hypergradient has one of these statuses, such as ``{Status.DIVERGED}``.

    Attributes:
        skipped: how many steps were skipped so far.
        streak: how many of the last steps in a row were skipped.
        path: the file of the last skipped step, or ``None`` if none was written.

    Example:
        >>> SkipFailures(limit=3, statuses={Status.DIVERGED, Status.NONPOSITIVE_CURVATURE}).limit
        3
    """

    undoes = True
    remembers = ("skipped", "streak", "_files")

    def __init__(
        self, limit: int = 5, folder: str | Path | None = None, statuses: Collection[Status] = frozenset()
    ) -> None:
        check_whole("limit", limit)
        if not isinstance(statuses, Collection) or any(not isinstance(status, Status) for status in statuses):
            raise HyperkronError(f"statuses={statuses!r} must hold hyperkron.Status members, such as Status.DIVERGED.")
        self.limit, self.statuses = limit, tuple(sorted(status.name for status in statuses))
        self._dumps = None if folder is None else check_folder("folder", folder)
        self.skipped = self.streak = self._files = 0
        self.path: Path | None = None
        self._reason = ""

    def on_report(self, run: Run, report: StepReport) -> None:
        if report.status is not None and report.status.name in self.statuses:
            raise NonFiniteError(
                f"the hypergradient of step {report.step} is {report.status.name}: {report.status.value}"
            )

    def on_failure(self, run: Run, error: Exception) -> Verdict | None:
        if not isinstance(error, (NonFiniteError, FactorizationError)):
            return None
        self.streak, self.skipped = self.streak + 1, self.skipped + 1
        self._reason = str(error)
        self.path = self._dump(run)
        if self.streak >= self.limit:
            where = f"its batches are described in {self.path}" if self.path else "its batches could not be written"
            raise type(error)(f"{error} It was step {self.streak} in a row that failed; {where}.") from error
        return Verdict.SKIP

    def on_step(self, run: Run, report: StepReport) -> dict[str, Value] | None:
        if report.status is not Status.SKIPPED:
            self.streak = 0
            return None
        return {"skipped": self.skipped, "reason": self._reason[:300]}

    def _dump(self, run: Run) -> Path | None:
        """Write the file of the failed step; returns its path, or ``None`` if it was not written."""
        if self._files >= MAX_DUMPS:
            if self._files == MAX_DUMPS:
                _warn(f"{MAX_DUMPS} files describe skipped steps; further ones get none.")
            self._files += 1
            return None
        if self._dumps is None:
            self._dumps = run.folder or Path(tempfile.mkdtemp(prefix="hyperkron-"))
        path = self._dumps / f"failed-rank{run.group.rank:05d}-step-{run.state.step:08d}.json"
        content = {"step": run.state.step, "error": self._reason, "batches": run.batches.describe()}
        try:
            self._dumps.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as temporary:
                temporary.write_text(json.dumps(content, indent=1), "utf-8")
        except OSError as error:
            _warn(f"{path} could not be written: {error}")
            return None
        self._files += 1
        return path


class HalveOnOutOfMemory(Callback):
    """Repeats a step that runs out of memory in micro-batches of half the size, with the same result.

    The step is undone and repeated with the same batches and random states. If J_in and J_out are means over examples,
    the result is that of the whole batch up to rounding. If they are not, or the model has BatchNorm in training mode,
    an error gives the reason (see :class:`Accumulated`). The size stays halved for the rest of the run, and in its
    checkpoints.

    Args:
        micro_batch: the initial size; ``None`` for whole batches.
        least: the smallest size to try.

    Attributes:
        micro_batch: the current size.

    Example:
        >>> HalveOnOutOfMemory(micro_batch=256).micro_batch
        256
    """

    undoes = True
    remembers = ("micro_batch",)

    def __init__(self, micro_batch: int | None = None, least: int = 1) -> None:
        check_whole("least", least)
        if micro_batch is not None:
            check_whole("micro_batch", micro_batch)
        self.micro_batch, self.least = micro_batch, least

    def on_start(self, run: Run) -> None:
        self._problem(run).resize(self.micro_batch)

    def _problem(self, run: Run) -> Accumulated:
        problem = run.state.problem
        if not isinstance(problem, Accumulated):
            problem = run.state.problem = Accumulated(problem)
        elif self.micro_batch is None:
            self.micro_batch = problem.micro_batch
        return problem

    def on_failure(self, run: Run, error: Exception) -> Verdict | None:
        if not out_of_memory(error):
            return None
        sizes = [length(run.batches.examples(note)) for note in run.batches.notes]
        now = min(max(sizes, default=0), self.micro_batch or max(sizes, default=0))
        mixing = batch_norms(run.state.model)
        if mixing:
            raise HyperkronError(
                f"out of memory at step {run.state.step}, and BatchNorm ({mixing[0]}) in training mode has no exact "
                "micro-batches; use smaller batches, GroupNorm or LayerNorm."
            ) from error
        if now <= self.least:
            return None
        self.micro_batch = max(self.least, -(-now // 2))
        problem = self._problem(run)
        problem.resize(self.micro_batch)
        run.state.problem = problem  # a recorded inner step was for larger pieces
        _warn(
            f"out of memory at step {run.state.step} with {now} examples; the step is repeated, and the run continues, "
            f"in micro-batches of {self.micro_batch}."
        )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return Verdict.RETRY

    def on_step(self, run: Run, report: StepReport) -> dict[str, Value] | None:
        return None if self.micro_batch is None else {"micro_batch": self.micro_batch}


def _warn(message: str, before: bool = False) -> bool:
    if not before:
        warnings.warn(message, HyperkronWarning, stacklevel=3)
    return True


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the machine has no memory left."""
    messages = ("can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, (RuntimeError, MemoryError)) and any(text in str(error) for text in messages)
    )


class WatchWeights(Callback):
    """Warns when the weights of the examples collapse: all are zero, or a few have nearly all the weight.

    It checks the effective sample size (Σw)²/Σw² of Kish (1965), which is N for equal weights and 1 if one example has
    all the weight. It warns once and writes ``COLLAPSED`` into the column ``guard`` of the history.

    Args:
        fraction: weights have collapsed if the effective sample size is below this share of the examples.
        every: how often to check, in steps.
        stop: also end the run.
        weights: a function from the run to the weights; ``None`` supports :class:`SampleWeights` and
            :class:`DomainWeights`, and does nothing for other λ.

    Example:
        >>> effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        2.0
    """

    remembers = ("_warned",)

    def __init__(
        self, fraction: float = 0.01, every: int = 1, stop: bool = False, weights: Callable[[Run], Tensor] | None = None
    ) -> None:
        check_interval("fraction", fraction, 0, 1, brackets="()")
        check_whole("every", every)
        self.fraction, self.every, self.stop, self.weights = fraction, every, stop, weights
        self._warned = False

    def on_step(self, run: Run, report: StepReport) -> dict[str, Value] | None:
        if (report.step + 1) % self.every:
            return None
        weights = example_weights(run) if self.weights is None else self.weights(run)
        if weights is None:
            return None
        effective, count = effective_sample_size(weights), weights.numel()
        if effective >= self.fraction * count:
            return {"effective_sample_size": effective}
        message = (
            f"the weights have collapsed at step {report.step}: an effective sample size of {effective:.4g} of {count} "
            f"examples. {Status.COLLAPSED.value}"
        )
        self._warned = _warn(message, self._warned)
        if self.stop:
            run.stop(message)
        return {"effective_sample_size": effective, "guard": Status.COLLAPSED.name}


def effective_sample_size(weights: Tensor) -> float:
    """(Σw)²/Σw²; 0 if all weights are zero. Weights below 1e-12 count as zero."""
    w = weights.detach().double().flatten()
    w = torch.where(w.abs() < 1e-12, 0.0, w)
    squares = float(w.square().sum())
    return float(w.sum()) ** 2 / squares if squares > 0 else 0.0


@torch.no_grad()
def example_weights(run: Run) -> Tensor | None:
    """The weights of all examples (or sources) of λ; ``None`` for modules of other types."""
    hyper = run.state.hyper
    if isinstance(hyper, SampleWeights):
        return hyper(torch.arange(hyper.weight.numel(), device=hyper.weight.device))
    return hyper.proportions() if isinstance(hyper, DomainWeights) else None


class WatchInverses(Callback):
    """Warns when hypergradients use an inverse that is too old, and stops the run if that continues.

    An inverse is stale if its age, the number of hypergradients before this one that used it, is above ``age``, or if
    refreshing it failed (``KEPT_PREVIOUS``) ``kept`` times within the last ``window`` steps. The guard warns once and
    writes ``STALE`` into the column ``guard``.

    Args:
        age: how many earlier hypergradients may have used an inverse.
        kept: how many failed refreshes make it stale.
        window: the number of last steps in which failed refreshes are counted.
        limit: how many stale steps in a row end the run.
    """

    remembers = ("_failed", "_streak", "_warned")

    def __init__(self, age: int = 100, kept: int = 3, window: int = 20, limit: int = 50) -> None:
        for name, value in (("age", age), ("kept", kept), ("window", window), ("limit", limit)):
            check_whole(name, value)
        self.age, self.kept, self.window, self.limit = age, kept, window, limit
        self._failed: list[int] = []
        self._streak, self._warned = 0, False

    def on_step(self, run: Run, report: StepReport) -> dict[str, Value] | None:
        if report.status is Status.KEPT_PREVIOUS:
            self._failed.append(report.step)
        self._failed = [step for step in self._failed if step > report.step - self.window]
        age = report.stats.get("curvature_age", 0)
        old = isinstance(age, int) and age > self.age
        if not old and len(self._failed) < self.kept:
            self._streak = 0
            return None
        self._streak += 1
        why = f"its age is {age}" if old else f"refreshing it failed {len(self._failed)} times in {self.window} steps"
        message = f"the inverse used at step {report.step} is stale: {why}. {Status.STALE.value}"
        self._warned = _warn(message, self._warned)
        if self._streak >= self.limit:
            run.stop(message)
        return {"guard": Status.STALE.name}
