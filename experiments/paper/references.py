"""The lines to beat: what plain training reaches on the trusted rows, and with the noisy or the right ones added."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from experiments import trial
from experiments.paper import cleaning
from experiments.paper.cleaning import Case, Part, Split
from experiments.paper.tuning import Setting
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
    case: Case, split: Split, kind: Kind, setting: Setting, steps: int, seed: int, looks: trial.Looks
) -> list[dict[str, Any]]:
    """Plain SGD for ``steps`` outer steps of ten with the decay of the inner problem; what ``looks`` has seen.

    A batch of all rows is not copied. Steps are recorded as a CUDA graph.
    """
    x, y = rows_of(split, kind)
    whole = case.batch >= len(x)
    model = cleaning.start(Case(case.batch, case.decay, 0), split, seed)
    run = trial.train(
        model,
        lambda m, i: losses.cross_entropy(m(x), y) if whole else losses.cross_entropy(m(x[i]), y[i]),
        torch.zeros(1, device=x.device) if whole else _shuffled(len(x), case.batch, seed, x.device),
        torch.optim.SGD(model.parameters(), setting["inner"], setting["momentum"], weight_decay=2 * case.decay),
        10 * steps,
        seconds=math.inf,
        callbacks=[looks],
        clock=trial.clock_of(x.device),
        record_failure=True,
        graph=True,
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
