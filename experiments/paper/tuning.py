"""A fair search: the same number of trials for every method, each over its own grid, judged on the second validation.

Test data are not seen here. A trial gets its place in the cell cache, so that an interrupted search continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from experiments.paper.recipe import Job
from hyperkron.solution import HyperkronError

Setting = dict[str, float]
"""What is tuned: a number for each name of the grid."""

Grid = Mapping[str, Sequence[float]]
"""The values of each name; a setting takes one of each."""


def settings_of(grid: Grid, trials: int, seed: int = 0) -> list[Setting]:
    """``trials`` different settings of a grid, drawn at random where the grid holds more.

    Example:
        >>> settings_of({"inner": (0.1, 0.01), "outer": (1.0,)}, 2, seed=1)
        [{'inner': 0.1, 'outer': 1.0}, {'inner': 0.01, 'outer': 1.0}]
    """
    everything = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if trials < 1 or len(everything) < trials:
        raise HyperkronError(
            f"trials={trials!r} cannot be drawn from a grid of {len(everything)} settings ({dict(grid)!r:.200}); every "
            "method must have the same number, so extend this grid or lower trials."
        )
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))[:trials]
    return [everything[i] for i in sorted(order.tolist())]


@dataclass(frozen=True)
class Search:
    """How much tuning every method gets.

    Attributes:
        trials: settings tried in the first, short round.
        kept: the best of them run again for the full budget; the best of those is chosen. With one, which decides
            nothing, the second round is left out.
        short: the budget of the first round as a share of the full one.
    """

    trials: int = 8
    kept: int = 2
    short: float = 0.25

    def __post_init__(self) -> None:
        if not (1 <= self.kept <= self.trials and 0 < self.short <= 1):
            raise HyperkronError(f"{self!r} needs 1 ≤ kept ≤ trials and 0 < short ≤ 1.")


@dataclass(frozen=True)
class Tuned:
    """The chosen setting, its loss on the second validation part, and all trials that led to it."""

    setting: Setting
    loss: float
    trials: list[dict[str, Any]]


def trial_key(key: Sequence[Any], setting: Setting, share: float) -> list[Any]:
    """The place of a trial in the cell cache."""
    return ["tune", *key, setting, share]


def tune(job: Job, key: Sequence[Any], grid: Grid, search: Search, score: Callable[[Setting, float], float]) -> Tuned:
    """The setting of a grid with the lowest score.

    Args:
        job: whose cell cache remembers the trials.
        key: names the method (and the case) being tuned.
        grid: of this method.
        search: the same for every method that is compared.
        score: ``score(setting, share)`` runs the setting for this share of the full budget and returns its lowest
            loss on the *second* validation part; not finite where the run failed.
    """

    def trial(setting: Setting, share: float) -> float:
        found = job.cell(trial_key(key, setting, share), lambda: {"loss": score(setting, share)})["loss"]
        return math.inf if found is None else float(found)

    candidates = settings_of(grid, search.trials)
    first = sorted(((trial(x, search.short), i) for i, x in enumerate(candidates)), key=lambda pair: pair)
    rows = [{**candidates[i], "share": search.short, "loss": loss} for loss, i in first]
    if search.kept > 1:
        first = sorted((trial(candidates[i], 1.0), i) for _, i in first[: search.kept])
        rows += [{**candidates[i], "share": 1.0, "loss": loss} for loss, i in first]
    best, index = first[0]
    if not math.isfinite(best):
        raise HyperkronError(f"every trial of {list(key)} failed; widen its grid ({dict(grid)!r:.200}).")
    return Tuned(candidates[index], best, rows)


def at_edge(setting: Setting, grid: Grid) -> list[str]:
    """The names whose chosen value is the least or greatest of its grid, where a wider grid might do better.

    Of a grid of two values both are at an edge.
    """
    return [name for name, values in grid.items() if len(values) > 1 and setting[name] in (min(values), max(values))]


def beyond(best: float, tried: Sequence[float], values: Sequence[float]) -> float | None:
    """The next of ``values`` beyond an edge of those tried that is best; ``None`` where the best lies inside or there
    is no further one.

    Example:
        >>> [beyond(best, (0.1, 0.2, 0.3), (0.01, 0.1, 0.2, 0.3, 1.0)) for best in (0.1, 0.2, 0.3)]
        [0.01, None, 1.0]
    """
    place = values.index(best)
    if best == max(tried) and place + 1 < len(values):
        return values[place + 1]
    return values[place - 1] if best == min(tried) and place > 0 else None


def edges(
    setting: Mapping[str, float], edge: Collection[str] = (), rates: Mapping[str, Any] | None = None
) -> list[str]:
    """The values of a chosen setting that are at an edge of their grid.

    Args:
        edge: names that are at an edge.
        rates: the values of every grid, for results that did not count an edge of a grid of two values.

    Example:
        >>> edges({"inner": 0.1, "outer": 100.0}, ["outer"])
        ['outer']
        >>> edges({"inner": 0.1, "outer": 1.0}, rates={"inner": (0.1,), "outer": (1.0, 2.0)})
        ['outer']
    """
    grid = {name: values for name, values in (rates or {}).items() if name in setting}
    found = {*edge, *at_edge(dict(setting), grid)}
    return [name for name in setting if name in found]
