"""A fair comparison of methods on a cleaning problem: tuned alike, run alike, with the reference lines."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from experiments.paper import cleaning, datasets
from experiments.paper.cleaning import Budget, Case, Split
from experiments.paper.methods import Method, Rates
from experiments.paper.recipe import Job, Result
from experiments.paper.tuning import Difference, Search, Setting, at_edge, tune
from experiments.paper.visits import Visits
from experiments.trial import MEASURED

Source = Literal["mnist", "cifar10", "vectors", "images"]
"""Real data by name, or made-up vectors (20) or images (3 × 8 × 8)."""


@dataclass(frozen=True)
class Contest:
    """What all methods of a comparison share.

    Attributes:
        source: the data.
        counts: training, validation and second validation examples.
        case: network, batch, decay and start.
        rates: what the grids are made of.
        search: trials of every method.
        budget: of every run.
    """

    source: Source
    counts: tuple[int, int, int]
    case: Case
    rates: Rates
    search: Search
    budget: Budget

    def with_batch(self, batch: int) -> Contest:
        """The same with another batch size, and the steps of λ in proportion to it.

        The hypergradient of an example's weight is that of a mean over the batch: it falls as 1/batch.
        """
        outer = tuple(rate * batch / self.case.batch for rate in self.rates.outer)
        return replace(self, case=replace(self.case, batch=batch), rates=replace(self.rates, outer=outer))


MNIST, SMALL_MNIST = (50_000, 5_000, 5_000), (10_000, 5_000, 5_000)
CIFAR, SMALL_CIFAR = (40_000, 5_000, 5_000), (6_000, 2_000, 2_000)
"""Training, validation and second validation examples of contests at the scales ``paper`` and ``small``."""


class Splits(Mapping[int, Split]):
    """The split of every seed, made when it is first asked for, so that a run from the cache needs no data."""

    def __init__(self, job: Job, contest: Contest) -> None:
        self.job, self.contest = job, contest
        self._data: datasets.Images | None = None
        self._made: dict[int, Split] = {}

    def _load(self) -> datasets.Images:
        source, count = self.contest.source, sum(self.contest.counts)
        if source == "mnist":
            return datasets.mnist(self.job.data)
        if source == "cifar10":
            return datasets.cifar10(self.job.data)
        return cleaning.made_up((20,) if source == "vectors" else (3, 8, 8), count, max(100, count // 4))

    def __getitem__(self, seed: int) -> Split:
        if seed not in self._made:
            if self._data is None:
                self._data = self._load()
            self._made[seed] = cleaning.noisy_split(self._data, self.contest.counts, seed).to(self.job.device)
        return self._made[seed]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((0, *self.job.seeds))

    def __len__(self) -> int:
        return 1 + len(self.job.seeds)


def tuned(
    job: Job,
    key: Sequence[Any],
    contest: Contest,
    splits: Splits,
    method: Method,
    *,
    relative: bool = False,
) -> dict[str, Any]:
    """The setting of a method with the lowest second validation loss on the split of seed 0."""

    warm = False

    def score(setting: Setting, share: float) -> float:
        nonlocal warm
        if not warm:
            cleaning.warm_up(contest.case, splits[0], method, setting, relative=relative)
            warm = True
        budget = contest.budget.share(share)
        return cleaning.tuning_loss(contest.case, splits[0], method, setting, budget, relative=relative)

    found = tune(job, [*key, method.name], method.grid, contest.search, score)
    return {"setting": found.setting, "second_loss": found.loss, "edge": at_edge(found.setting, method.grid)}


def runs(
    job: Job,
    key: Sequence[Any],
    contest: Contest,
    splits: Splits,
    method: Method,
    setting: Setting,
    *,
    relative: bool = False,
) -> list[dict[str, Any]]:
    """The final run of every seed, with the test part looked at."""

    def one(seed: int) -> dict[str, Any]:
        return cleaning.final(contest.case, splits[seed], method, setting, contest.budget, seed, relative=relative)

    return [job.cell([*key, method.name, seed], partial(one, seed)) for seed in job.seeds]


def compete(
    job: Job, key: Sequence[Any], contest: Contest, splits: Splits, methods: Sequence[Method]
) -> dict[str, dict[str, Any]]:
    """Every method tuned and run."""
    choices = {method.name: tuned(job, key, contest, splits, method) for method in methods}
    return {
        method.name: choices[method.name]
        | summary(runs(job, key, contest, splits, method, choices[method.name]["setting"]))
        for method in methods
    }


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a method's seeds side by side; a run that failed at once has no test loss."""
    return {
        "test_loss": [run["best"]["test_loss"] for run in found],
        "test_error": [run["best"]["test_error"] for run in found],
        "lowest_test_loss": [run["lowest_test_loss"] for run in found],
        "seconds_to_best": [run["best"]["seconds"] for run in found],
        "steps": [run["steps"] for run in found],
        "step_seconds": [run["step_seconds"] for run in found],
        "f1": [run["f1"] for run in found],
        "failed": [run["failed"] for run in found],
        "curve": found[0]["curve"],
    }


def method_figures(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of the entries of a stage (:class:`experiments.paper.entries.Found`), with the chosen settings."""
    return {name: {"setting": x["setting"], "edge": x["edge"], **summary(x["runs"])} for name, x in found.items()}


def reference_figures(found: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The figures of a reference line's seeds side by side."""
    return {key: [run["best"][key] for run in found] for key in ("test_loss", "test_error")}


def known(values: Sequence[float | None]) -> list[float]:
    """The values that are numbers."""
    return [float(x) for x in values if x is not None]


def mean(values: Sequence[float | None]) -> float:
    """Their mean; infinite where a run failed and has none."""
    numbers = known(values)
    return statistics.fmean(numbers) if numbers and len(numbers) == len(values) else float("inf")


def clearly_below(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    """Whether a's values are lower than b's, seed by seed: the 95 % interval of the mean difference is below zero.

    One seed decides nothing. A run that failed, and so has no value, is above all that did not.

    Example:
        >>> clearly_below([1.0, 2.0, 3.0], [1.5, 2.4, 3.6]), clearly_below([1.0, 2.0, 3.0], [1.5, 1.9, 3.6])
        (True, False)
    """
    if None in a or None in b:
        return None not in a
    difference = Difference.of(b, a)
    return difference is not None and difference.sign < 0


def setting_text(
    setting: Mapping[str, float], edge: Collection[str] = (), rates: Mapping[str, Any] | None = None
) -> str:
    """A chosen setting in a table, and which of its values are at an edge of their grid.

    Args:
        edge: names that are at an edge.
        rates: the values of every grid, for results that did not count an edge of a grid of two values.

    Example:
        >>> setting_text({"inner": 0.1, "outer": 100.0}, ["outer"])
        'inner 0.1, outer 100 (at an edge: outer)'
        >>> setting_text({"inner": 0.1, "outer": 1.0}, rates={"inner": (0.1,), "outer": (1.0, 2.0)})
        'inner 0.1, outer 1 (at an edge: outer)'
    """
    grid = {name: values for name, values in (rates or {}).items() if name in setting}
    found = {*edge, *at_edge(dict(setting), grid)}
    text = ", ".join(f"{name} {value:g}" for name, value in setting.items())
    return text + (f" (at an edge: {', '.join(name for name in setting if name in found)})" if found else "")


def chosen_text(result: Result, x: Mapping[str, Any]) -> str:
    """The setting of a method in a result of this module."""
    rates = result.settings.get("contest", {}).get("rates")
    return setting_text(x["setting"], x.get("edge", ()), rates)


def of_contest(result: Result, *, relative: bool | None = None) -> list[Visits]:
    """How often every method of a result of this module updated a weight; none where the settings are not known.

    A number among the names that lead to a method is its batch size if the settings list it as one. With relative step
    sizes the first steps only measure; ``None`` leaves it to the settings whether they are relative.
    """
    contest = result.settings.get("contest")
    if contest is None:
        return []
    rows, usual = int(contest["counts"][0]), int(contest["case"]["batch"])
    sizes = {str(size) for size in result.settings.get("batches", ())}
    idle = MEASURED if (result.settings.get("relative") if relative is None else relative) else 0

    def walk(part: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[Visits]:
        if isinstance(part.get("steps"), Sequence):
            batch = next((int(name) for name in names if name in sizes), usual)
            yield Visits(", ".join(names), statistics.fmean(part["steps"]) - idle, batch, rows)
            return
        for name, inside in part.items():
            yield from walk(inside, (*names, name))

    return list(walk(result.figures["found"], ()))
