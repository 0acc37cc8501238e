"""A whole hypergradient as a CUDA graph: recorded once, replayed for every later step.

A small model on a large GPU waits for Python; a recording replaces a thousand launches by one. A recording assumes that
factorisations succeed and that all numbers are finite. All values that an eager step would read from the device are
read together after the replay. If one of them shows a problem, the step is repeated eagerly. An iterative solver runs
all its iterations, but keeps the value with which it would have stopped. All evaluations of one step draw the same
random numbers (dropout); the next step draws new ones.
"""

from __future__ import annotations

import copy
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

MAX_FAILED_REPLAYS = 2
"""Stop recording after this many failed replays, if fewer succeeded."""


@dataclass(frozen=True)
class _Step:
    """A recorded step; ``made`` is the curvature state it writes if it measures the curvature, else ``None``."""

    batches: StaticBatch
    recording: Recording[tuple[Tensor, Answer]]
    generator_copies: GeneratorCopies
    execution: Execution
    made: CurvatureState | None

    def replay(self, batches: Any) -> Answer | None:
        """The results on ``batches``, copied out of the recording's memory; ``None`` if the replay failed."""
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
        self._home: CurvatureState | None = None  # the state whose tensors the recordings read
        self._made = self._failed_replays = 0
        self._possible = False  # until an eager step has run

    @property
    def passes(self) -> None:
        """``None``: passes of an eager step are not recorded on their own."""

    def after_eager_step(self, point: Point) -> None:
        """Called after an eager step at ``point``: allow recording, unless it drew random numbers on the CPU."""
        self._possible = True
        self._refuse_draws_on_host(point)

    def step(self, wanted: Request) -> Answer | None:
        """Replay one step, after recording it if necessary; ``None`` if the step must run eagerly."""
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
        """Whether the measured curvature, if the step needs one, is in the memory that the recordings read.

        The result of an eager refresh is in other memory. It is copied if the shapes are the same.
        """
        state, home = wanted.curvature, self._home
        if state.kept is None:
            return wanted.refreshing
        if home is None:
            if not wanted.refreshing and not wanted.method.records_refreshes:
                self._home = copy.copy(state)  # later measurements are copied there
            return wanted.refreshing or self._home is not None
        if state.kept is home.kept or (wanted.refreshing and not wanted.method.keeps_parts):
            return True
        place, given = (StaticBatch(s.tensors(), copy=False) for s in (home, state))
        if not place.fits(given.value):
            self._drop()
            return False
        place.fill(given.value)
        state.adopt(home)
        return True

    def _recorded(self, wanted: Request) -> _Step | None:
        """Record a step without changing any state; ``None``, with a warning, if it cannot be recorded."""
        self._made += 1
        self._refuse_waste(self._made)
        if self._given_up:
            return None
        generators = wanted.generators
        states = [(state, copy.copy(state)) for state in (wanted.curvature, wanted.cross)]
        copies = GeneratorCopies(next(wanted.model.parameters()).device)
        drawn = [(generator, generator.get_state()) for generator in generators]
        try:
            static = StaticBatch(wanted.batches)
            *batches, start = static.value
            with copies.active(), wanted.recording_point(batches, copies) as point:  # warm-up: libraries choose kernels
                wanted.work(point, start)
            for generator, before in drawn:
                generator.set_state(before)
            _restore(states)
            with copies.active(), wanted.recording_point(batches, copies) as point:

                def work() -> tuple[Tensor, Answer]:
                    answer = wanted.work(point, start)
                    return point.execution.unread(), answer

                recording = Recording(
                    work,
                    generators=[*generators, *copies.copies],
                    pool=self._steps[True].recording.pool if True in self._steps else None,
                )
            made = copy.copy(wanted.curvature) if wanted.refreshing else None
        except LayoutError:
            return None  # the next attempt keeps the layout
        except (RuntimeError, HyperkronError) as failure:
            self._give_up(str(failure).splitlines()[0])
            return None
        finally:
            _restore(states)
        return _Step(static, recording, copies, point.execution, made)

    def _replayed(self, wanted: Request) -> Answer | None:
        """Replay a recording; if it fails, restore the states and forget the tensors it has overwritten."""
        step, state = self._steps[wanted.refreshing], wanted.curvature
        drawn = [(generator, generator.get_state()) for generator in wanted.generators]
        answer = step.replay(wanted.batches)
        if answer is None:
            for generator, before in drawn:
                generator.set_state(before)
            if step.made is not None and state.kept is not None and state.kept is step.made.kept:
                state.let_go()  # the replay has overwritten it
            self._failed_replays += 1
            if self._failed_replays >= MAX_FAILED_REPLAYS and self._failed_replays > self._served:
                self._give_up("most replays had to be repeated, because numbers were extreme or factorisations failed")
            return None
        self._served += 1
        wanted.cross.calls += 1
        state.replayed(step.made)
        return answer


def _restore(states: list[tuple[Any, Any]]) -> None:
    """Restore states from copies made before."""
    for state, before in states:
        vars(state).clear()
        vars(state).update(vars(before))
