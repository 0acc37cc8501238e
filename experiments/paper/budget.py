"""GPU minutes: what the recorded runs of a recipe have taken, and what figure 4 with MPNet misses for a verdict.

What is missing is the measured time of an outer step × the steps of all runs that the rule needs and that are not
recorded. Times are those of a method alone on one H200; runs that share the device take about as long together.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.paper import encoder_length
from experiments.paper.poisoning_page import AS_PRINTED, NETWORKS
from experiments.paper.recipe import Result
from experiments.pieces import Lines

SEEDS, STEPS = 3, 1000
ENCODER_SECONDS = 22.5
"""GPU seconds of a run of MiniLM at full length whose record has no time; they were 20 to 30."""


class Missing(NamedTuple):
    """What a verdict still needs: GPU minutes, and what they are for."""

    minutes: float
    what: str

    def __str__(self) -> str:
        return f"Missing for a verdict: about {rounded(self.minutes)} GPU-minutes ({self.what})."


def rounded(minutes: float) -> str:
    """Two digits are all that such a figure has.

    Example:
        >>> rounded(0.42), rounded(3.26), rounded(147.2)
        ('0.4', '3.3', '150')
    """
    return f"{minutes:.1f}" if minutes < 10 else f"{float(f'{minutes:.2g}'):.0f}"


DEEP = ("7", "12")
"""Tuned layers, beside one."""
LONGEST = {"trec": 41, "youtube": 100, "semeval": 100}
"""Tokens of the longest text, to which batches are padded on a GPU; MPNet's steps were timed with 40."""


def missing(result: Result) -> Missing | None:
    """SAMA, KFAC and CG with the last layer tuned, by the smaller plan of :mod:`experiments.paper.encoder_length`; and
    what one run of each on TREC would take with seven and with twelve layers. ``result`` is that of ``encoder-base``,
    whose times serve; nothing where it was not timed at these depths.
    """
    prices, timed = result.figures["prices"], result.settings["case"]["tokens"]
    if not prices.keys() >= {"1", *DEEP}:
        return None
    grids = encoder_length.around(Lines(encoder_length.RESULT).rows)
    done = {encoder_length.key(row) for row in Lines(encoder_length.MPNET).rows}
    seeds = {(dataset, name, seed) for dataset, name, _, seed in done}
    todo = [pair for pair, rates in grids.items() for rate in rates if (*pair, rate, 0) not in done]
    todo += [pair for pair in grids for seed in range(1, SEEDS) if (*pair, seed) not in seeds]
    if not todo:
        return None

    def run_minutes(layers: str, dataset: str, name: str) -> float:
        price = prices[layers][encoder_length.TRIALS.get(name, name)]["seconds"]
        return price * LONGEST[dataset] / timed * STEPS / 60

    deep = {layers: sum(run_minutes(layers, "trec", name) for name in encoder_length.METHODS) for layers in DEEP}
    more = " and ".join(f"{rounded(x)} with {layers}" for layers, x in deep.items())
    least = sum(run_minutes("1", dataset, "Baseline") for dataset, _ in todo)
    plan = f"SAMA, KFAC and CG, last layer, {len(todo)} runs, at most: timed before hypergradients were recorded"
    what = f"{plan}, and the steps of θ alone take {rounded(least)}; one run of each on TREC with more layers: {more}"
    return Missing(sum(run_minutes("1", *pair) for pair in todo), what)


def spent(result: Result | None, name: str) -> float | None:
    """GPU minutes of all recorded runs of a recipe, also those of the paper's length; ``None`` where none was used."""
    short = None if result is None or "gpu" not in result.hardware else result.seconds / 60 / _workers(result.command)
    files = {
        "encoder": ([encoder_length.RESULT], ENCODER_SECONDS),
        "encoder-base": ([encoder_length.MPNET], 0.0),  # of its first three runs the time is not known
        "poisoning": ([NETWORKS, AS_PRINTED], 0.0),
    }
    if name not in files:
        return short
    paths, unknown = files[name]
    return (short or 0.0) + sum(_shared(Lines(path).rows, unknown) for path in paths)


def _workers(command: str) -> float:
    """Processes that shared the device; the mean where a command was called with several numbers of them.

    Example:
        >>> _workers("run x --workers 8"), _workers("run x"), _workers("run x --workers 5, later --workers 7")
        (8.0, 1.0, 6.0)
    """
    found = [float(x) for x in re.findall(r"--workers (\d+)", command)]
    return statistics.fmean(found) if found else 1.0


def _shared(rows: Sequence[Mapping[str, Any]], unknown: float) -> float:
    """GPU minutes of runs that shared the device; ``unknown``: seconds of one whose record has no time."""
    return sum(row["seconds"] / row["workers"] if "seconds" in row else unknown for row in rows) / 60
