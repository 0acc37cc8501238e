"""A whole hypergradient as a CUDA graph: recorded once, replayed for every later step.

A small model on a large GPU waits for Python; a recording makes one launch of a thousand. It is optimistic: it takes
for granted that factorisations succeed and that all numbers are finite. Everything that a step would have read from the
device on its way is read in one piece at the end; if something is not as it should be, the same step is done again in
the ordinary way. An iterative solver that ends early does all its iterations, but holds the value that it ended with.
All evaluations of a step draw the same random numbers (dropout), and those of the next step others.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hyperkron import trees
from hyperkron.cross.state import inner_key
from hyperkron.curvature import CurvatureState
from hyperkron.evaluation.point import Point
from hyperkron.hypergradient.recordings import Answer, Recordings, Request
from hyperkron.kernels.execution import Execution, Pending
from hyperkron.kernels.graphs import GeneratorCopies, Recording, StaticBatch
from hyperkron.kernels.selection import LayoutError
from hyperkron.solution import HyperkronError, Status

REFUSED = 2
"""After this many replays that had to be done again, and fewer that served, no more are made."""


@dataclass(frozen=True)
class _Step:
    """A recorded step; ``made`` is the state of a curvature that it measures again."""

    batches: StaticBatch
    recording: Recording[tuple[Tensor, Answer]]
    generator_copies: GeneratorCopies
    execution: Execution
    made: CurvatureState | None

    def replay(self, batches: Any) -> Answer | None:
        """Its answers on ``batches``, in memory of their own; ``None`` where something is not as it should be."""
        self.batches.fill(batches)
        self.generator_copies.before_replay()
        unread, answer = self.recording.replay()
        if not self.execution.replayed(unread):
            return None
        solution = answer.solution.wait()
        if solution.status is Status.NON_FINITE:
            return None
        solution = replace(solution, value=trees.map(Tensor.clone, solution.value))
        return answer._replace(grads=trees.map(Tensor.clone, answer.grads), solution=Pending.ready(solution))


class Replays(Recordings):
    """The recordings of one hypergradient, made when they are needed and dropped when they no longer fit."""

    no_effect = "graph=True has no effect, because a step cannot be recorded as a CUDA graph"

    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[bool, _Step] = {}  # by whether the curvature is measured again
        self._home: CurvatureState | None = None  # whose measurement they use
        self._made = self._refused = 0
        self._possible = False  # after an ordinary step

    @property
    def passes(self) -> None:
        """An ordinary step is carried out as it comes."""

    def saw(self, point: Point) -> None:
        """An ordinary step was done at ``point``: whether the next one can be recorded."""
        self._possible = True
        self._refuse_draws_on_host(point)

    def step(self, wanted: Request) -> Answer | None:
        """One step by its recording, which is made first where there is none; ``None``: do it the ordinary way."""
        self._refuse_kept_casts(wanted)
        decided = wanted.cross.decided(inner_key(wanted.problem, wanted.model, wanted.hyper))
        recordable = wanted.method.constants(wanted.curvature) is not None
        if self._given_up or not self._possible or not decided or not recordable or not self._fits(wanted):
            return None
        if not self._at_home(wanted):
            return None
        if wanted.refreshing not in self._steps:
            step = self._recorded(wanted)
            if step is None:
                return None
            self._steps[wanted.refreshing] = step
            self._home = self._home if step.made is None else step.made
        return self._replayed(wanted)

    def _fits(self, wanted: Request) -> bool:
        return self._hold(wanted.key(), lambda: all(step.batches.fits(wanted.batches) for step in self._steps.values()))

    def _drop(self) -> None:
        self._steps, self._home = {}, None

    def _at_home(self, wanted: Request) -> bool:
        """Whether the measurement in use, if the step needs one, lies where recordings take it from.

        That of a refresh that was not recorded lies elsewhere, and is copied there where it has the same shape.
        """
        state, home = wanted.curvature, self._home
        if state.kept is None:
            return wanted.refreshing
        if home is None:
            if not wanted.refreshing and not wanted.method.records_refreshes:
                self._home = copy.copy(state)  # all later ones will be copied there
            return wanted.refreshing or self._home is not None
        if state.kept is home.kept or (wanted.refreshing and not wanted.method.keeps_parts):
            return True
        place, given = (StaticBatch(s.tensors(), own=False) for s in (home, state))
        if not place.fits(given.value):
            self._drop()
            return False
        place.fill(given.value)
        state.adopt(home)
        return True

    def _recorded(self, wanted: Request) -> _Step | None:
        """Record a step, leaving all states as they were; ``None`` with a warning where it cannot be recorded."""
        self._made += 1
        self._refuse_waste(self._made)
        if self._given_up:
            return None
        static, generators = StaticBatch(wanted.batches), wanted.generators
        inner, outer, other, start = static.value
        states = [(state, copy.copy(state)) for state in (wanted.curvature, wanted.cross)]
        at = wanted.problem, wanted.model, wanted.hyper, inner, outer
        generator_copies = GeneratorCopies(next(wanted.model.parameters()).device)
        place = functools.partial(
            Point, *at, curvature_batch=other, recording=True, generator_copies=generator_copies, plain=wanted.plain
        )
        drawn = [(generator, generator.get_state()) for generator in generators]
        try:
            with generator_copies.active(), place() as point:  # not recorded yet: libraries try their algorithms out
                wanted.work(point, start)
            for generator, before in drawn:
                generator.set_state(before)
            _restore(states)
            with generator_copies.active(), place() as point:
                recording = Recording(
                    lambda: _recorded(point, wanted.work(point, start)),
                    generators=[*generators, *generator_copies.copies],
                    pool=self._steps[True].recording.pool if True in self._steps else None,
                )
            made = copy.copy(wanted.curvature) if wanted.refreshing else None
        except LayoutError:
            return None  # it will not be changed again
        except (RuntimeError, HyperkronError) as failure:
            self._give_up(str(failure).splitlines()[0])
            return None
        finally:
            _restore(states)
        return _Step(static, recording, generator_copies, point.execution, made)

    def _replayed(self, wanted: Request) -> Answer | None:
        """Carry the recording out; where it fails, leave the states as they were but for tensors it has spoilt."""
        step, state = self._steps[wanted.refreshing], wanted.curvature
        drawn = [(generator, generator.get_state()) for generator in wanted.generators]
        answer = step.replay(wanted.batches)
        if answer is None:
            for generator, before in drawn:
                generator.set_state(before)
            if step.made is not None and state.kept is not None and state.kept is step.made.kept:
                state.let_go()  # it has been written over
            self._refused += 1
            if self._refused >= REFUSED and self._refused > self._served:
                self._give_up(
                    "most replays had to be done again, because numbers were extreme or factorisations failed"
                )
            return None
        self._served += 1
        wanted.cross.calls += 1
        state.replayed(step.made)
        return answer


def _recorded(point: Point, answer: Answer) -> tuple[Tensor, Answer]:
    """What a replay has to read, and what it answers."""
    return point.execution.unread(), answer


def _restore(states: list[tuple[Any, Any]]) -> None:
    """What states were, from copies made before."""
    for state, before in states:
        vars(state).clear()  # also of what was not there before
        vars(state).update(vars(before))
