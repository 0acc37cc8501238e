"""GPU minutes: what the recorded runs of a recipe have taken, and what is missing for a verdict of part one.

What is missing is the measured time of an outer step × the steps of all runs that the rule needs and that are not
recorded. Times are those of a method alone on one H200; runs that share the device take about as long together.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.paper import (
    encoder_length,
    image_contest,
    linear_contest,
    linear_page,
    resnet_batches,
    resnet_length_page,
)
from experiments.paper.image_contest import AS, BATCHES, LARGE, SHARED, Contest, plan_of
from experiments.paper.linear_runs import key
from experiments.paper.recipe import Result
from experiments.pieces import Lines

SEEDS, STEPS = 3, 1000
ENCODER_SECONDS = 22.5
"""GPU seconds of a run of MiniLM at full length whose record has no time; they were 20 to 30."""


LONGER = 2.25
"""How much longer a step takes with batches of 2500 than with 500, measured with KFAC."""
CHEAPEST = ("AID-CG-3", "AID-GGN-CG-3", "AID-GGN-CG-10")
"""Three solvers, as many as figure 1 needs for a verdict."""


def slower(size: int) -> float:
    """How much longer a step of ResNet-18 takes than with batches of 500, between that size and :data:`LARGE`.

    Example:
        >>> slower(500), slower(1250), slower(LARGE)
        (1.0, 1.46875, 2.25)
    """
    usual = BATCHES["resnet18"]
    return 1 + (LONGER - 1) * (size - usual) / (LARGE - usual)


class Missing(NamedTuple):
    """What a verdict still needs: GPU minutes, and what they are for."""

    minutes: float
    what: str
    unit: str = "GPU-minutes"

    def __str__(self) -> str:
        return f"Missing for a verdict: about {rounded(self.minutes)} {self.unit} ({self.what})."


def rounded(minutes: float) -> str:
    """Two digits are all that such a figure has.

    Example:
        >>> rounded(0.42), rounded(3.26), rounded(147.2)
        ('0.4', '3.3', '150')
    """
    return f"{minutes:.1f}" if minutes < 10 else f"{float(f'{minutes:.2g}'):.0f}"


def minutes(steps_by_ms: Mapping[float, float]) -> float:
    """GPU minutes of outer steps, given as the number of steps by the milliseconds that each takes.

    Example:
        >>> minutes({60.0: 1000, 30.0: 2000})
        2.0
    """
    return sum(ms * steps for ms, steps in steps_by_ms.items()) / 6e4


def missing(results: Mapping[str, Result]) -> dict[str, Missing]:
    """By the name of the recipe; ``results`` are those at small scale, whose times serve where no longer ones exist."""
    found = {**_resnet(), **_linear()}
    if "encoder-base" in results and results["encoder-base"].figures["prices"].keys() >= {"1", *DEEP}:  # not at smoke
        found["encoder-base"] = _mpnet(results["encoder-base"])
    if "encoder-frozen" in results:
        frozen = results["encoder-frozen"]
        last = max(frozen.figures["stops"])
        if last < STEPS:
            what = f"runs of {STEPS} outer steps in place of {last}"
            found["encoder-frozen"] = Missing(frozen.seconds / 60 * STEPS / last, what, "minutes on one CPU thread")
    return {name: x for name, x in found.items() if x.minutes > 0}


def _resnet() -> dict[str, Missing]:
    """For runs with batches of 2500 rows: with 500 rows the network memorises wrong labels before most weights have
    been updated, at every step size of θ tried, so that more of them would change nothing.
    """
    times = resnet_length_page.milliseconds(Lines(image_contest.TIMES).rows)
    contest = Contest(Lines(image_contest.result_of(LARGE)).rows, plan_of(LARGE))

    def of(names: Sequence[str]) -> float:
        ms = (times.get(AS.get(name, name), times["AID-KFAC"]) for name in names)
        left = (SEEDS - len(contest.results(name)) for name in names)
        return sum(x * runs for x, runs in zip(ms, left, strict=True)) * LONGER * contest.plan.steps / 6e4

    large = f"batches of {LARGE}; with 500 no number of runs gives a verdict"
    sizes = {size: x for size, x in resnet_batches.by_size().items() if size > BATCHES["resnet18"]}
    of_sizes = sum(
        times[name] * slower(size) * (SEEDS - len(x.results(name))) * x.plan.steps / 6e4
        for size, x in sizes.items()
        for name in ("AID-KFAC", "AID-CG-3")
    )
    return {
        "resnet-cifar": Missing(of(("AID-KFAC", "AID-CG-3", "AmIGO")), f"AID and AmIGO with and without KFAC, {large}"),
        "trade-off": Missing(of(("AID-KFAC", *CHEAPEST)), f"KFAC and {', '.join(CHEAPEST)}, {large}"),
        "batch-resnet": Missing(of_sizes, f"batches of {', '.join(map(str, sizes))}; smaller ones can tell nothing"),
        "ekfac-resnet": Missing(of(["AID-KFAC", *SHARED]), f"at least: EKFAC's steps are counted as KFAC's; {large}"),
    }


def _linear() -> dict[str, Missing]:
    contest = linear_contest.Contest(Lines(linear_contest.RESULT).rows)
    found = {}
    for name, study in linear_page.STUDIES.items():
        total, runs = 0.0, 0
        for line, variant in linear_page.needed(contest, name):
            tasks = contest.trials(line) if variant == line.variants[0] else []
            tried = sum(x.steps for x in tasks if key(x) not in contest.done)
            kept = contest.plan.kept * STEPS if tasks and contest.winner(line) is None else 0
            finals = max(0, SEEDS - len(contest.results(line, variant))) * STEPS
            total, runs = total + _pace(contest, line) * (tried + kept + finals) / 6e4, runs + finals // STEPS
        found[study.recipe] = Missing(total, f"{runs} runs of {STEPS} outer steps, and the trials before them")
    return found


def _pace(contest: linear_contest.Contest, line: linear_contest.Line) -> float:
    """GPU milliseconds of a step with the method and batch of a line: the median of all final runs recorded."""
    batch = line.fixed.get("batch")
    own = [x for x in contest.done.values() if x["test"] and x["method"] == line.method]
    return linear_page.milliseconds([x for x in own if x["setting"].get("batch") == batch]) or UNKNOWN


UNKNOWN = 5.0
"""Of a step that was never timed."""


DEEP = ("7", "12")
"""Tuned layers, beside one."""
LONGEST = {"trec": 41, "youtube": 100, "semeval": 100}
"""Tokens of the longest text, to which batches are padded on a GPU; MPNet's steps were timed with 40."""


def _mpnet(result: Result) -> Missing:
    """SAMA, KFAC and CG with the last layer tuned, by the smaller plan of :mod:`experiments.paper.encoder_length`; and
    what one run of each on TREC would take with seven and with twelve layers.
    """
    prices, timed = result.figures["prices"], result.settings["case"]["tokens"]
    grids = encoder_length.around(Lines(encoder_length.RESULT).rows)
    done = {encoder_length.key(row) for row in Lines(encoder_length.MPNET).rows}
    seeds = {(dataset, name, seed) for dataset, name, _, seed in done}
    todo = [pair for pair, rates in grids.items() for rate in rates if (*pair, rate, 0) not in done]
    todo += [pair for pair in grids for seed in range(1, SEEDS) if (*pair, seed) not in seeds]

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
    long = _long().get(name)
    return None if short is None and long is None else (short or 0.0) + (long or 0.0)


def _workers(command: str) -> float:
    """Processes that shared the device; the mean where a command was called with several numbers of them.

    Example:
        >>> _workers("run x --workers 8"), _workers("run x"), _workers("run x --workers 5, later --workers 7")
        (8.0, 1.0, 6.0)
    """
    found = [float(x) for x in re.findall(r"--workers (\d+)", command)]
    return statistics.fmean(found) if found else 1.0


def _long() -> dict[str, float]:
    """Of the runs at the paper's length; those of ResNet-18 with the usual and the large batches count for figure 2."""
    decide, cnn = (BATCHES["resnet18"], LARGE), (BATCHES["cnn"], LARGE)
    others = [size for size in resnet_batches.SIZES if size not in decide]
    files = {
        "resnet-cifar": [image_contest.result_of(batch) for batch in decide],
        "batch-resnet": [image_contest.result_of(batch) for batch in others],
        "cnn-cifar": [image_contest.result_of(batch, "cnn") for batch in cnn],
    }
    found: dict[str, Any] = {
        name: sum(row["seconds"] / row["workers"] for file in of for row in Lines(file).rows) / 60
        for name, of in files.items()
    }
    found["encoder"] = _encoder(Lines(encoder_length.RESULT).rows, ENCODER_SECONDS)
    found["encoder-base"] = _encoder(Lines(encoder_length.MPNET).rows, 0.0)  # of its first three the time is not known
    for row in (row for row in Lines(linear_contest.RESULT).rows if row.get("device") != "cpu"):
        recipe = linear_page.STUDIES[study_of(row)].recipe
        found[recipe] = found.get(recipe, 0.0) + row["seconds"] / row.get("workers", FIRST_WORKERS) / 60
    return found


def _encoder(rows: Sequence[Mapping[str, Any]], unknown: float) -> float:
    """Minutes of the runs of an encoder; ``unknown``: GPU seconds of one whose record has no time."""
    return sum(row["seconds"] / row["workers"] if "seconds" in row else unknown for row in rows) / 60


FIRST_WORKERS = 13
"""Of the first runs of the linear model, which do not say."""


def study_of(row: Mapping[str, Any]) -> str:
    """The study that a run of the linear model was made for."""
    setting = row["setting"]
    if "decay" in setting:
        return "averages"
    if "refresh" in setting:
        return "intervals"
    return "batches" if "batch" in setting else "figure 5"
