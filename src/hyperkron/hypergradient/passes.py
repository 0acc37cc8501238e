"""Records each pass of a hypergradient through the model as a CUDA graph; the rest of the step runs eagerly.

In eager PyTorch the passes of a large model wait for Python: the outer gradient, the factors, the cross term.
Factorisations and solves are few large kernels and do not wait. So only the passes are recorded. All recordings share
one memory pool, for intermediate values and for results, because b, the factors and v are never needed at the same
time. A recording of a whole step (:mod:`hyperkron.hypergradient.replay`) needs more: the memory of all stages, and the
inverses.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperkron.batch_tensors import map_tensors, shapes_of
from hyperkron.evaluation.passes import Pass, Passes
from hyperkron.evaluation.point import Point
from hyperkron.hypergradient.recordings import Recordings, Request
from hyperkron.kernels.graphs import GeneratorCopies, Recording, StaticBatch, alias_of
from hyperkron.kernels.selection import LayoutError
from hyperkron.kernels.weight_casts import recast_in_backward
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class _RecordedPass:
    """A recorded pass, its input vectors, and the ids of its temporary results, which the next pass overwrites."""

    key: object
    given: dict[str, Tensor]
    recording: Recording[tuple[Any, list[Any]]]
    temporary: set[int]
    generator_copies: GeneratorCopies

    def replay(self, point: Point, given: dict[str, Tensor]) -> Any:
        """The results of the pass; all but the temporary ones are copied out of the recording's memory."""
        if given:
            torch._foreach_copy_(list(self.given.values()), [given[name] for name in self.given])
        point.rewind_random()
        self.generator_copies.before_replay()
        found, checks = self.recording.replay()
        for value, error in checks:
            point.execution.check_finite(value.clone(), error)  # the next pass may overwrite the value
        return map_tensors(lambda x: x if id(x) in self.temporary else x.clone(), found)


class RecordedPasses(Recordings):
    """The recorded passes of one hypergradient; each is recorded after the first step that used it."""

    no_effect = "graph='passes' has no effect, because a pass cannot be recorded as a CUDA graph"

    def __init__(self) -> None:
        super().__init__()
        self._recorded: dict[str, _RecordedPass] = {}
        self._to_record: dict[str, Pass[Any]] = {}  # with empty tensors in place of vectors
        self._batches: StaticBatch | None = None
        self._wanted: Request | None = None
        self._dropped = 0
        self._fitting = False

    def step(self, wanted: Request) -> None:
        """Begin a step: find out whether the recordings can be used, and copy its batches."""
        self._wanted, self._to_record = wanted, {}
        self._refuse_kept_casts(wanted)
        self._fitting = not self._given_up and wanted.problem.group.size == 1 and self._fits(wanted)
        if self._fitting and self._batches is not None:
            self._batches.fill(wanted.batches[:3])

    def _fits(self, wanted: Request) -> bool:
        fit = self._hold(wanted.surroundings(), lambda: self._batches is None or self._batches.fits(wanted.batches[:3]))
        self._refuse_waste(self._dropped)
        return fit and not self._given_up

    def _drop(self) -> None:
        self._dropped += bool(self._recorded)
        self._recorded, self._batches = {}, None

    @property
    def passes(self) -> Passes | None:
        """The function that runs the passes of this step; ``None``: they run eagerly."""
        return self._run if self._fitting else None

    def _run(self, point: Point, wanted: Pass[Any]) -> Any:
        """Replay a pass, or run it eagerly and remember to record it after the step."""
        recorded = self._recorded.get(wanted.name)
        alike = recorded is not None and shapes_of(recorded.given) == shapes_of(wanted.given)
        if recorded is not None and alike and recorded.key == wanted.key():
            self._served += 1
            return recorded.replay(point, wanted.given)
        found = wanted.work(point, wanted.given)
        empty = {name: x.new_empty(x.shape, device="meta") for name, x in wanted.given.items()}
        self._to_record[wanted.name] = dataclasses.replace(wanted, given=empty)
        return found

    def after_eager_step(self, point: Point) -> None:
        """Record the passes that ran eagerly in the step at ``point``."""
        if not self._fitting or not self._to_record:
            return
        self._refuse_draws_on_host(point)
        if self._given_up:
            return
        new, self._to_record = list(self._to_record.values()), {}
        try:
            if self._batches is None:
                assert self._wanted is not None
                self._batches = StaticBatch(self._wanted.batches[:3])
            copies = [GeneratorCopies(self._device) for _ in new]
            for one, generators in zip(new, copies, strict=True):
                self._warm_up(one, generators)
            torch.cuda.empty_cache()  # recordings cannot use the memory that eager steps have cached
            for one, generators in zip(new, copies, strict=True):
                self._recorded[one.name] = self._record(one, generators)
        except LayoutError:
            return  # the next attempt keeps the layout
        except (RuntimeError, HyperkronError) as failure:
            self._give_up(str(failure).splitlines()[0])

    @property
    def _device(self) -> torch.device:
        assert self._wanted is not None
        return next(self._wanted.model.parameters()).device

    def _point(self, generator_copies: GeneratorCopies) -> Point:
        """The point at which passes are recorded."""
        assert self._wanted is not None and self._batches is not None
        point = self._wanted.recording_point(self._batches.value, generator_copies)
        point.consumes_vectors = True
        return point

    def _warm_up(self, one: Pass[Any], generator_copies: GeneratorCopies) -> None:
        """Run a pass once: libraries choose their algorithms, and the generator copies are counted."""
        given = {name: torch.zeros_like(x, device=self._device) for name, x in one.given.items()}
        drawn = [(generator, generator.get_state()) for generator in one.generators]
        try:
            with generator_copies.active(), self._point(generator_copies) as point:
                _run(one, point, given)
        finally:
            for generator, before in drawn:
                generator.set_state(before)

    def _record(self, one: Pass[Any], generator_copies: GeneratorCopies) -> _RecordedPass:
        """Record a pass without running it; passes that are recorded later can use its memory."""
        gc.collect()  # reference cycles would keep the memory of passes recorded before
        inputs: dict[str, Callable[[], Tensor]] = {}

        def work() -> tuple[Any, list[Any]]:
            if inputs:  # only tests call this twice
                given = {name: alias() for name, alias in inputs.items()}
            else:  # in the memory of the recordings
                given = {name: torch.empty_like(x, device=self._device) for name, x in one.given.items()}
                inputs.update((name, alias_of(x)) for name, x in given.items())
            return _run(one, point, given), point.execution.take_checks()

        with generator_copies.active(), self._point(generator_copies) as point:
            recording = Recording(
                work,
                generators=[*one.generators, *generator_copies.copies],
                pool=next((x.recording.pool for x in self._recorded.values()), None),
            )
        aliases: dict[int, Tensor] = {}  # one alias per tensor, even if it occurs twice
        recording.outputs = map_tensors(lambda x: aliases.setdefault(id(x), alias_of(x.detach())()), recording.outputs)
        temporary = {id(x) for x in one.temporary(recording.outputs[0])}
        given = {name: alias() for name, alias in inputs.items()}
        return _RecordedPass(one.key(), given, recording, temporary, generator_copies)


def _run(one: Pass[Any], point: Point, given: dict[str, Tensor]) -> Any:
    """The results of a pass, with cast weights recomputed: less memory, but slow unless it is recorded."""
    with recast_in_backward(point.params.values()):
        return one.work(point, given)
