"""The passes of a hypergradient through the model, each recorded as a CUDA graph, and all else in the ordinary way.

A large model in eager PyTorch waits for Python in its passes: the outer gradient, the factors, the cross term. It does
not in what lies between, factorisations and solves, which are few large kernels. So only the passes are recorded. They
have one memory, for what they compute on their way and for what they hand over: b, the factors and v are never needed
at the same time. A recording of a whole step (:mod:`hyperkron.hypergradient.replay`) also holds the inverses, and the
memory of all stages.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperkron.evaluation.passes import Pass, Passes
from hyperkron.evaluation.point import Point
from hyperkron.hypergradient.recordings import Recordings, Request
from hyperkron.kernels.graphs import GeneratorCopies, Recording, StaticBatch, place_of
from hyperkron.kernels.selection import LayoutError
from hyperkron.kernels.weight_casts import made_again
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class _RecordedPass:
    """A recorded pass; its vectors, and the ids of its brief results: they are gone when another one is replayed."""

    key: object
    given: dict[str, Tensor]
    recording: Recording[tuple[Any, list[Any]]]
    brief: set[int]
    generator_copies: GeneratorCopies

    def replay(self, point: Point, given: dict[str, Tensor]) -> Any:
        """Its results; all but the brief ones in memory of their own."""
        if given:
            torch._foreach_copy_(list(self.given.values()), [given[name] for name in self.given])
        point.rewind_random()
        self.generator_copies.before_replay()
        found, checks = self.recording.replay()
        for value, error in checks:
            point.execution.check_finite(value.clone(), error)  # the next pass may have its memory
        return _mapped(found, lambda x: x if id(x) in self.brief else x.clone())


class RecordedPasses(Recordings):
    """The recorded passes of one hypergradient, made after the step that first needed them."""

    no_effect = "graph='passes' has no effect, because a pass cannot be recorded as a CUDA graph"

    def __init__(self) -> None:
        super().__init__()
        self._recorded: dict[str, _RecordedPass] = {}
        self._noted: dict[str, Pass[Any]] = {}  # with shapes in place of vectors
        self._batches: StaticBatch | None = None
        self._wanted: Request | None = None
        self._dropped = 0
        self._fitting = False

    def step(self, wanted: Request) -> None:
        """A step begins: whether recordings hold for it."""
        self._wanted, self._noted = wanted, {}
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
        """What carries out the passes of this step."""
        return self._run if self._fitting else None

    def _run(self, point: Point, wanted: Pass[Any]) -> Any:
        """A pass by its recording, or else in the ordinary way, to be recorded after the step."""
        recorded = self._recorded.get(wanted.name)
        if recorded is not None and recorded.key == wanted.key() and _alike(recorded.given, wanted.given):
            self._served += 1
            return recorded.replay(point, wanted.given)
        found = wanted.work(point, wanted.given)
        shapes = {name: _shape(x) for name, x in wanted.given.items()}
        self._noted[wanted.name] = dataclasses.replace(wanted, given=shapes)
        return found

    def saw(self, point: Point) -> None:
        """The step at ``point`` is over: record the passes that were not."""
        if not self._fitting or not self._noted:
            return
        self._refuse_draws_on_host(point)
        if self._given_up:
            return
        noted, self._noted = list(self._noted.values()), {}
        try:
            if self._batches is None:
                assert self._wanted is not None
                self._batches = StaticBatch(self._wanted.batches[:3])
            copies = [GeneratorCopies(self._device) for _ in noted]
            for one, own in zip(noted, copies, strict=True):
                self._try(one, own)
            torch.cuda.empty_cache()  # what only the first steps needed; recordings could not use it
            for one, own in zip(noted, copies, strict=True):
                self._recorded[one.name] = self._record(one, own)
        except LayoutError:
            return  # it will not be changed again
        except (RuntimeError, HyperkronError) as failure:
            self._give_up(str(failure).splitlines()[0])

    @property
    def _device(self) -> torch.device:
        assert self._wanted is not None
        return next(self._wanted.model.parameters()).device

    def _place(self, generator_copies: GeneratorCopies) -> Point:
        """Where passes are recorded."""
        assert self._wanted is not None and self._batches is not None
        wanted, (inner, outer, other) = self._wanted, self._batches.value
        point = Point(
            wanted.problem,
            wanted.model,
            wanted.hyper,
            inner,
            outer,
            curvature_batch=other,
            recording=True,
            generator_copies=generator_copies,
            plain=wanted.plain,
        )
        point.gives_vectors = True
        return point

    def _try(self, one: Pass[Any], generator_copies: GeneratorCopies) -> None:
        """Carry a pass out once.

        Libraries try their algorithms out, and it is seen how many copies of a generator are needed.
        """
        given = {name: torch.zeros_like(x, device=self._device) for name, x in one.given.items()}
        drawn = [(generator, generator.get_state()) for generator in one.generators]
        try:
            with generator_copies.active(), self._place(generator_copies) as point:
                _carried_out(one, point, given)
        finally:
            for generator, before in drawn:
                generator.set_state(before)

    def _record(self, one: Pass[Any], generator_copies: GeneratorCopies) -> _RecordedPass:
        """Record a pass; it is not carried out. Its memory is free again for those that are recorded later."""
        gc.collect()  # what lies in reference cycles would keep the memory of the passes recorded before
        taken: dict[str, Callable[[], Tensor]] = {}

        def work() -> tuple[Any, list[Any]]:
            if taken:  # the stand-in of tests is called again
                given = {name: place() for name, place in taken.items()}
            else:  # in the memory of the recordings
                given = {name: torch.empty_like(x, device=self._device) for name, x in one.given.items()}
                taken.update((name, place_of(x)) for name, x in given.items())
            return _carried_out(one, point, given), point.execution.handed_over()

        with generator_copies.active(), self._place(generator_copies) as point:
            recording = Recording(
                work,
                generators=[*one.generators, *generator_copies.copies],
                pool=next((x.recording.pool for x in self._recorded.values()), None),
            )
        places: dict[int, Tensor] = {}  # a tensor that is there twice stays one
        recording.outputs = _mapped(recording.outputs, lambda x: places.setdefault(id(x), place_of(x.detach())()))
        brief = {id(x) for x in one.brief(recording.outputs[0])}
        given = {name: place() for name, place in taken.items()}
        return _RecordedPass(one.key(), given, recording, brief, generator_copies)


def _carried_out(one: Pass[Any], point: Point, given: dict[str, Tensor]) -> Any:
    """The results of a pass, by a way that needs less memory and would take more time if it were not recorded."""
    with made_again(point.params.values()):
        return one.work(point, given)


def _shape(x: Tensor) -> Tensor:
    """A tensor of this shape and dtype without memory."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _alike(mine: dict[str, Tensor], its: dict[str, Tensor]) -> bool:
    """Whether two trees have the same names, shapes and dtypes."""
    return mine.keys() == its.keys() and all(
        x.shape == its[name].shape and x.dtype == its[name].dtype for name, x in mine.items()
    )


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with all tensors in it, in dictionaries, tuples, lists and dataclasses, replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _mapped(x, function) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(x, function) for x in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _mapped(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value
