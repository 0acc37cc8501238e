"""Trials and runs of one recipe in several processes on one device.

For recipes that measure their times beforehand, so that the runs need not have the device to themselves. The cells are
written here, and the recipe's own ``work`` then finds everything in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from experiments.paper.entries import Stage, Task, carry_out, missing
from experiments.paper.recipe import Job, Recipe
from experiments.workers import share


def fill(job: Job, recipe: Recipe, count: int) -> None:
    """Carry out what is missing among the stages of ``recipe`` in ``count`` processes."""
    assert recipe.stages is not None
    fill_stages(job, *recipe.stages(job), count, partial(_again, recipe, *job.place))


def fill_stages(
    job: Job, stages: Sequence[Stage], trials: int, count: int, make: Callable[[], Callable[[Task], Any]]
) -> None:
    """Carry out what is missing among ``stages`` in ``count`` processes; ``make`` as in :func:`workers.share`."""

    share_cells(job, count, make, lambda: missing(job, stages, trials), near=lambda task: task.stage)


def share_cells(
    job: Job,
    count: int,
    make: Callable[[], Callable[[Any], dict[str, Any]]],
    ready: Callable[[], Iterable[tuple[list[Any], Any]]],
    told: Callable[[dict[str, Any]], str] = lambda value: "",
    **options: Any,
) -> None:
    """:func:`workers.share` with the cells of a job: each is written and named as soon as it comes, with its time and
    what ``told`` says of it. No cell begins after the deadline.
    """

    def keep(key: list[Any], value: dict[str, Any], seconds: float, busy: float) -> None:
        job.say(f"{' '.join(map(str, key))}: {seconds:.1f} s{told(value)}")
        job.cells.put(key, value, seconds, busy)

    share(count, make, ready, keep, late=lambda: job.late, **options)


def _again(recipe: Recipe, *place: Any) -> Callable[[Task], dict[str, Any]]:
    """The recipe's stages, made in another process."""
    assert recipe.stages is not None
    return partial(carry_out, recipe.stages(recipe.job(*place))[0])
