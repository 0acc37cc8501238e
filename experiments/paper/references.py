"""The lines to beat: what plain training reaches on the trusted rows, and with the noisy or the right ones added."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from experiments import trial
from experiments.paper import cleaning
from experiments.paper.cleaning import Budget, Case, Part, Split
from experiments.paper.recipe import Job
from experiments.paper.tuning import Grid, Search, Setting, settings_of, tune
from hyperkron import losses
from hyperkron.solution import HyperkronError

Kind = Literal["trusted only", "trusted + noisy", "trusted + correct"]
"""Validation part alone; with all training rows as labelled; with exactly the training rows whose label is right."""

KINDS: tuple[Kind, ...] = get_args(Kind)


def rows_of(split: Split, kind: Kind) -> Part:
    """The examples that a reference trains on.

    Example:
        >>> part = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
        >>> split = Split(part, part, part, part, torch.tensor([True, False]))
        >>> [len(rows_of(split, kind)[0]) for kind in KINDS]
        [2, 4, 3]
    """
    if kind == "trusted only":
        return split.validation
    if kind not in KINDS:
        raise HyperkronError(f"kind={kind!r} is unknown; choose one of {', '.join(KINDS)}.")
    chosen = torch.ones_like(split.clean) if kind == "trusted + noisy" else split.clean
    x, y = (torch.cat((a, b[chosen])) for a, b in zip(split.validation, split.train, strict=True))
    return x, y


def train(
    case: Case,
    split: Split,
    kind: Kind,
    setting: Setting,
    budget: Budget,
    seed: int,
    test: bool,
    *,
    looks: trial.Looks | None = None,
    graph: bool = False,
) -> list[dict[str, Any]]:
    """Plain SGD with the decay of the inner problem, looked at as the methods are unless ``looks`` says otherwise.

    A batch of all rows is not copied. ``graph`` is that of ``hk.fit``.
    """
    x, y = rows_of(split, kind)
    whole = case.batch >= len(x)
    model = cleaning.start(Case(case.network, case.batch, case.decay, 0, case.width), split, seed)
    looks = looks or cleaning.looks_at(split, budget, test)
    run = trial.train(
        model,
        lambda m, i: losses.cross_entropy(m(x), y) if whole else losses.cross_entropy(m(x[i]), y[i]),
        torch.zeros(1, device=x.device) if whole else _shuffled(len(x), case.batch, seed, x.device),
        torch.optim.SGD(model.parameters(), setting["inner"], setting["momentum"], weight_decay=2 * case.decay),
        10 * budget.steps,  # an outer step holds ten inner ones
        seconds=budget.seconds,
        callbacks=[looks],
        clock=trial.clock_of(x.device),
        record_failure=True,
        graph=graph,
    )
    return looks.of(run)


def _shuffled(count: int, batch: int, seed: int, device: torch.device) -> Callable[[], Tensor]:
    """Row numbers, each epoch in a new order; its last batch may be smaller."""
    generator = torch.Generator().manual_seed(seed)

    def forever() -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(count, generator=generator).to(device).split(batch)

    rows = forever()
    return lambda: next(rows)


def references(
    job: Job, case: Case, splits: Mapping[int, Split], grid: Grid, search: Search, budget: Budget
) -> dict[str, list[dict[str, Any]]]:
    """For each kind the test figures of every seed, where its second validation loss is lowest.

    The step size and momentum of each are tuned as those of the methods are, with at most as many trials.

    Args:
        job: its seeds are run.
        splits: by seed; that of seed 0 is for tuning.
        grid: with ``inner`` and ``momentum``.
    """
    count = math.prod(len(values) for values in grid.values())
    trials = Search(min(search.trials, count), min(search.kept, count), search.short)
    settings_of(grid, trials.trials)
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:

        def score(setting: Setting, share: float, kind: Kind = kind) -> float:
            rows = train(case, splits[0], kind, setting, budget.share(share), 0, test=False)
            return min(row["second_loss"] for row in rows)

        setting = tune(job, ["reference", kind], grid, trials, score).setting

        def one(seed: int, kind: Kind = kind, setting: Setting = setting) -> dict[str, Any]:
            rows = train(case, splits[seed], kind, setting, budget, seed, test=True)
            return {"best": min(rows, key=lambda row: row["second_loss"])}

        found[kind] = [job.cell(["reference", kind, seed], lambda s=seed: one(s)) for seed in job.seeds]  # type: ignore[misc]
    return found
