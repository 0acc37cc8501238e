"""The passes of a hypergradient through the model, each recorded as a CUDA graph, and all else in the ordinary way.

A large model in eager PyTorch waits for Python in its passes: the outer gradient, the factors, the cross term. It does
not in what lies between, factorisations and solves, which are few large kernels. So only the passes are recorded. They
have one memory for what they compute on their way. The factors stay there until the next pass begins; b has memory
outside, that v is put into later (:class:`SharedMemory`). A recording of a whole step
(:mod:`hyperkron.hypergradient.replay`) also holds the inverses, and the memory of all stages.
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
from hyperkron.hypergradient.replay import MISFITS, WASTED, Request
from hyperkron.kernels.graphs import GeneratorCopies, Recording, SharedMemory, StaticBatch, peak_of, reserved
from hyperkron.kernels.selection import LayoutError
from hyperkron.solution import HyperkronError, warn_once


@dataclass(frozen=True)
class _Recorded:
    """A recorded pass, its vectors, and the ids of those of its results that are not copied."""

    key: object
    given: dict[str, Tensor]
    recording: Recording[tuple[Any, list[Any]]]
    own: set[int]
    generator_copies: GeneratorCopies

    def replay(self, point: Point, given: dict[str, Tensor]) -> Any:
        """Its results; all that are not brief in memory of their own."""
        if given:
            torch._foreach_copy_(list(self.given.values()), [given[name] for name in self.given])
        point.rewind_random()
        self.generator_copies.before_replay()
        found, checks = self.recording.replay()
        for value, error in checks:
            point.execution.check_finite(value, error)
        return _mapped(found, lambda x: x if id(x) in self.own else x.clone())


class RecordedPasses:
    """The recorded passes of one hypergradient, made after the step that first needed them."""

    def __init__(self) -> None:
        self._recorded: dict[str, _Recorded] = {}
        self._known: dict[str, Pass[Any]] = {}  # with shapes in place of vectors
        self._new = False  # whether one of them has not been recorded
        self._batches: StaticBatch | None = None
        self._memory: SharedMemory | None = None
        self._room: Recording[None] | None = None  # memory of the passes, in one piece
        self._wanted: Request | None = None
        self._key: object = None
        self._dropped = self._served = self._misfits = 0
        self._given_up = self._fitting = False

    def step(self, wanted: Request) -> None:
        """A step begins: whether recordings hold for it."""
        self._wanted, self._new = wanted, False
        if wanted.autocast is not None and torch.is_autocast_cache_enabled() and not self._given_up:
            self._give_up("autocast keeps casts of earlier weights; use torch.autocast(..., cache_enabled=False)")
        self._fitting = not self._given_up and wanted.problem.group.size == 1 and self._fits(wanted)
        if self._fitting and self._batches is not None:
            self._batches.fill(wanted.batches[:3])

    def _fits(self, wanted: Request) -> bool:
        key = wanted.surroundings()
        if key != self._key:
            self._key = key
            self._drop()
        if self._batches is None or self._batches.fits(wanted.batches[:3]):
            self._misfits = 0
            return True
        self._misfits += 1
        if self._misfits >= MISFITS:
            self._drop()
        return False

    def _drop(self) -> None:
        self._dropped += bool(self._recorded)
        self._recorded, self._known, self._batches, self._memory, self._room = {}, {}, None, None, None
        if self._dropped > WASTED and self._served < 2 * self._dropped:
            self._give_up("the objectives, or the memory of model and hyper, are others in every step")

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
        given, place = ({name: _shape(x) for name, x in tree.items()} for tree in (wanted.given, wanted.place))
        self._known[wanted.name], self._new = dataclasses.replace(wanted, given=given, place=place), True
        return wanted.work(point, wanted.given)

    def saw(self, point: Point) -> None:
        """The step at ``point`` is over: record the passes, all of them if one is new."""
        if not self._fitting or not self._new:
            return
        if point.drew_on_host:
            self._give_up("evaluations draw random numbers on the CPU, which would be the same ones in every step")
            return
        self._recorded, self._memory, self._room = {}, None, None
        try:
            self._record_all()
        except LayoutError:
            return  # it will not be changed again
        except (RuntimeError, HyperkronError) as failure:
            self._give_up(str(failure).splitlines()[0])

    def _record_all(self) -> None:
        """Those with brief results last: what is recorded before may use the memory of these on its way."""
        assert self._wanted is not None
        if self._batches is None:
            self._batches = StaticBatch(self._wanted.batches[:3])
        known = sorted(self._known.values(), key=lambda one: one.brief is not None)
        sizes = [SharedMemory.size_of(tree.values()) for one in known for tree in (one.given, one.place)]
        self._memory = SharedMemory(max(sizes), self._device)
        copies = [GeneratorCopies(self._device) for _ in known]
        peak = max(self._try(one, own) for one, own in zip(known, copies, strict=True))
        self._room = reserved(peak, self._device) if peak else None
        for one, own in zip(known, copies, strict=True):
            self._recorded[one.name] = self._record(one, own)

    @property
    def _device(self) -> torch.device:
        assert self._wanted is not None
        return next(self._wanted.model.parameters()).device

    def _place(self, generator_copies: GeneratorCopies) -> Point:
        """Where passes are recorded."""
        assert self._wanted is not None and self._batches is not None
        wanted, (inner, outer, other) = self._wanted, self._batches.value
        return Point(
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

    def _tree(self, one: Pass[Any]) -> dict[str, Tensor]:
        """The memory of a pass's vectors, or of its results."""
        assert self._memory is not None
        like = one.given or one.place
        return dict(zip(like, self._memory.views(like.values()), strict=True))

    def _try(self, one: Pass[Any], generator_copies: GeneratorCopies) -> int:
        """Carry a pass out once: by how many bytes it raises the memory.

        Libraries try their algorithms out, and it is seen how many copies of a generator are needed.
        """
        drawn = [(generator, generator.get_state()) for generator in one.generators]

        def work() -> None:
            with generator_copies.active(), self._place(generator_copies) as point:
                one.work(point, self._tree(one))

        peak = peak_of(work, self._device)
        for generator, before in drawn:
            generator.set_state(before)
        return peak

    def _record(self, one: Pass[Any], generator_copies: GeneratorCopies) -> _Recorded:
        """Record a pass; it is not carried out."""
        tree = self._tree(one)
        gc.collect()  # what lies in reference cycles would keep the memory of the passes recorded before
        earlier = [x.recording for x in self._recorded.values()]
        with generator_copies.active(), self._place(generator_copies) as point:
            recording = Recording(
                lambda: (one.work(point, tree), point.execution.handed_over()),
                generators=[*one.generators, *generator_copies.copies],
                pool=next((x.pool for x in (self._room, *earlier) if x is not None), None),
            )
        found, _ = recording.outputs
        own = {id(x) for x in (*(one.brief(found) if one.brief else ()), *(tree.values() if one.place else ()))}
        return _Recorded(one.key(), tree if one.given else {}, recording, own, generator_copies)

    def _give_up(self, reason: str) -> None:
        self._given_up, self._fitting = True, False
        self._recorded, self._known, self._batches, self._memory, self._room = {}, {}, None, None, None
        text = "graph='passes' has no effect, because a pass cannot be recorded as a CUDA graph"
        warn_once("graph-passes", f"{text}: {reason}.")


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
