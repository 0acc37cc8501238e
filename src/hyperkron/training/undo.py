"""Steps that can be undone: saves everything that a step may change, and its batches, to repeat or describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.algorithms import BatchSources, Examples, State, StepReport
from hyperkron.batch_tensors import tensors_of
from hyperkron.optimizers import load_scaler
from hyperkron.solution import NonFiniteError
from hyperkron.training.callback import Callback, Verdict
from hyperkron.training.randomness import random_state, same_random_state, set_random_state

MAX_IDS = 10_000
"""A description lists at most this many numbers of one tensor."""

# --- θ, λ and what they depend on --------------------------------------------------------------------------


class TrainingSnapshot:
    """A copy of θ with buffers, λ, optimizers, schedules, and the states of algorithm and hypergradient.

    Factors and inverses are shared and not copied.
    """

    def __init__(self, state: State) -> None:
        self.step = state.step
        self._state, self._random = state, random_state()
        self._saved = state.state_dict(copy_caches=False)

    def restore(self, *, random: bool) -> None:
        """Restore everything; the random states only with ``random``, to repeat the same step.

        A gradient scaler keeps its new scale, because the old one would overflow again.
        """
        scaler = self._state.inner.scaler
        learnt = None if scaler is None else scaler.state_dict()
        self._state.load_state_dict(self._saved)
        for level_optimizer in (self._state.inner, self._state.outer, *self._state.twins.values()):
            level_optimizer.optimizer.zero_grad(set_to_none=True)
        if scaler is not None and learnt is not None:
            load_scaler(scaler, learnt)
        if random:
            set_random_state(self._random)

    def meant(self, name: str) -> bool:
        """Whether what :func:`_updated` calls ``name`` is a buffer that was not finite before, as a mask of −inf, or
        one that is not saved."""
        if not name.startswith("buffer "):
            return False
        own, _, part = name.removeprefix("buffer ").rpartition(" of ")
        earlier = self._saved[part].get(own)
        return earlier is None or not trees.is_finite({own: earlier})


def refuse_non_finite(state: State, before: TrainingSnapshot) -> None:
    """Raise an error if a step has produced NaN or infinity; for each device one copy to the host, and one for buffers,
    of which some may be infinite as they should."""
    groups: dict[tuple[torch.device, bool], trees.Tree] = {}
    for name, x in _updated(state):
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0:
            groups.setdefault((x.device, name.startswith("buffer ")), {})[name] = x.detach()
    wrong = {name: x for found in groups.values() if not trees.is_finite(found) for name, x in found.items()}
    bad = [name for name, x in wrong.items() if not trees.is_finite({name: x}) and not before.meant(name)]
    if bad:
        raise NonFiniteError(
            f"step {state.step - 1} left nan or infinite values in {', '.join(bad[:5])}; lower the step sizes, clip "
            "with Updates(optimizer, clip=1.0), or look for extreme values in the batches."
        )


def _updated(state: State) -> Iterator[tuple[str, Any]]:
    """Every value that a step may change, by name."""
    for level, level_optimizer in (("θ", state.inner), ("λ", state.outer), *state.twins.items()):
        for name, p in level_optimizer.params.items():
            yield f"{level} {name}", p
            for key, x in level_optimizer.optimizer.state.get(p, {}).items():
                if key != "step":  # a count, often on another device than θ
                    yield f"{level} {name} ({key} of the optimizer)", x
    for key, tree in state.trees.items():
        yield from ((f"{key} {name}", x) for name, x in tree.items())
    for part, module in (("model", state.model), ("hyper", state.hyper)):
        yield from ((f"buffer {name} of {part}", x) for name, x in module.named_buffers())


# --- steps -------------------------------------------------------------------------------------------------


def undoable_step(run: Any, guards: Sequence[Callback]) -> StepReport:
    """One step of a run; if it fails, it is undone, and its guards decide whether to repeat or skip it."""
    state, before = run.state, TrainingSnapshot(run.state)
    run.batches.begin()
    try:
        while True:
            try:
                report: StepReport = run.algorithm.step(state, run.batches)
                refuse_non_finite(state, before)
                for guard in guards:
                    guard.on_report(run, report)
                return report
            except Exception as error:
                verdict = _verdict(run, guards, error, before)
            if verdict is Verdict.SKIP:
                skipped: StepReport = state.skip()
                return skipped
            run.batches.rewind()  # outside the except block, so that the failed attempt's tensors are free
    finally:
        run.batches.end()


def _verdict(run: Any, guards: Sequence[Callback], error: Exception, before: TrainingSnapshot) -> Verdict:
    """The verdict of the first guard that handles the error; raises the error if there is none."""
    step = run.state.step
    run.state.step = before.step
    for guard in guards:
        try:
            verdict = guard.on_failure(run, error)
        except Exception:
            before.restore(random=False)
            raise
        if verdict is not None:
            before.restore(random=verdict is Verdict.RETRY)
            return verdict
    run.state.step = step
    raise error


# --- batches -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """One draw of a step."""

    level: str  # inner, outer or curvature
    kind: str  # "batch", or "index" if a finite-sum method drew the number of a batch
    value: Any
    random: dict[str, Any] | None  # the random state after the draw, if it changed


class RecordedBatches(BatchSources):
    """Records the batches of a step after :meth:`begin`, and returns the same ones again after :meth:`rewind`."""

    def __init__(self, batches: BatchSources) -> None:
        self.sources = batches.sources
        self.end()

    def begin(self) -> None:
        """Begin to record, without the batches of earlier steps."""
        self.notes: list[Note] = []
        self._active, self._next = True, 0

    def rewind(self) -> None:
        """Return the recorded batches again, in the same order and with the same effect on random states."""
        self._next = 0

    def end(self) -> None:
        """Forget the recorded batches and stop recording."""
        self.begin()
        self._active = False

    def note(self, level: str, kind: str, take: Callable[[], Any]) -> Any:
        """The result of ``take()``, or the recorded result."""
        if not self._active:
            return take()
        self._next += 1
        found = self.notes[self._next - 1] if self._next <= len(self.notes) else None
        if found is not None and (found.level, found.kind) == (level, kind):
            if found.random is not None:
                set_random_state(found.random)
            return found.value
        del self.notes[self._next - 1 :]
        before = random_state()
        value = take()
        after = random_state()
        self.notes.append(Note(level, kind, value, None if same_random_state(before, after) else after))
        return value

    def next(self, level: str) -> Any:
        return self.note(level, "batch", partial(super().next, level))

    def finite(self, algorithm: str) -> tuple[Examples, Examples]:
        given = super().finite(algorithm)
        watched = copy(given[0]), copy(given[1])
        for level, examples, own in zip(("inner", "outer"), given, watched, strict=True):
            own.index = partial(self.note, level, "index", examples.index)  # type: ignore[method-assign]
        return watched

    def examples(self, note: Note) -> Any:
        """The batch of a note, also if the note has only its number."""
        source: Any = self.sources[note.level]
        return note.value if note.kind == "batch" else source.batch(note.value)

    def describe(self) -> list[dict[str, Any]]:
        """The batches of the step as plain values: integers that identify examples, and rows that are not finite."""
        described = []
        for note in self.notes:
            found: dict[str, Any] = {"level": note.level}
            batch, source = self.examples(note), self.sources[note.level]
            if note.kind == "index" and isinstance(source, Examples):
                first = note.value * source.batch_size
                found |= {"batch": note.value, "examples": [first, first + len(batch[0]) - 1]}
            described.append({**found, "tensors": [_tensor(place, x) for place, x in tensors_of("batch", batch)]})
        return described


def _tensor(place: str, x: Tensor) -> dict[str, Any]:
    """Integers in full (indices and labels identify examples); for floats, the rows that are not finite."""
    found: dict[str, Any] = {"where": place, "dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
    if x.is_floating_point():
        rows = x.detach().reshape(len(x) if x.dim() else 1, -1)
        found["non_finite_rows"] = (~rows.isfinite()).any(1).nonzero().flatten().tolist()[:MAX_IDS]
    elif x.dim() <= 1 and x.numel() <= MAX_IDS and x.dtype != torch.bool:
        found["values"] = x.tolist()
    return found
