"""The paper's experiments: typed recipes, and the page that sets their results beside the printed numbers.

    paper.recipes()                                   # all recipes by name
    paper.run("diagnostic", "smoke")                  # run one, or continue an interrupted run
    paper.report()                                    # experiments/pages/paper.md and figures/paper/*.svg

Tables and figures whose runs have the paper's length have a program instead (:mod:`experiments.paper.long_runs`).

How to add a recipe:

1. Write a module in this folder with a frozen dataclass of settings, one instance for each scale (``smoke`` must take
   seconds on one CPU thread and use made-up data: :func:`experiments.paper.cleaning.made_up`).
2. Write ``work(job) -> dict`` that does everything through ``job.cell(key, function)``: each cell is written to the
   cache at once, and a run that is interrupted, or stopped by ``limit_minutes``, continues at the first missing cell.
   Tune with :func:`experiments.paper.tuning.tune` (second validation part, the same ``Search`` for every method), then
   loop over ``job.seeds`` and run with the chosen settings. A run is one call of ``hk.fit``
   (:mod:`experiments.trial`). What ``work`` returns becomes ``figures`` of the result file; it must be computable for
   the first seeds alone.
3. Write ``verdict(result) -> Judgement`` with the rule in its docstring (the page prints it), ``tables(result)`` with
   the printed number (:func:`experiments.paper.printed.printed`) beside ours, and perhaps ``plot(result, folder)``.
   A comparison in several cases is judged by :func:`experiments.paper.recipe.by_cases`; where weights are learned,
   ``weights(result)`` says how often they were updated (:mod:`experiments.paper.visits`).
4. Put ``Recipe(...)`` into the module's ``RECIPES`` tuple and the module into :func:`recipes` below.
5. Test every verdict the rule can give, and a smoke run, in ``tests/experiments/test_paper_*.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments import records
from experiments.paper.recipe import Judgement, Recipe, Result, Scale, Table, Verdict
from experiments.pieces import OutOfTime
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    from experiments.paper.long_runs import Program

RESULTS = records.RESULTS / "paper"
PAGES = records.PAGES

__all__ = [
    "Judgement",
    "OutOfTime",
    "Recipe",
    "Result",
    "Scale",
    "Table",
    "Verdict",
    "programs",
    "recipes",
    "report",
    "run",
    "run_all",
]


def recipes() -> dict[str, Recipe]:
    """All recipes by name, in the order of their numbers.

    Example:
        >>> "diagnostic" in recipes()
        True
    """
    from experiments.paper import (
        diagnostic,
        encoder_cleaning,
        frozen_head,
        long_tail,
        memory,
        poisoning,
        pretraining,
        unlearnable,
        unrolling,
    )

    modules = (
        diagnostic,
        unrolling,
        memory,
        encoder_cleaning,
        frozen_head,
        poisoning,
        unlearnable,
        pretraining,
        long_tail,
    )
    found = [recipe for module in modules for recipe in module.RECIPES]
    return {recipe.name: recipe for recipe in sorted(found, key=lambda recipe: recipe.experiment)}


def programs() -> dict[str, Program]:
    """All programs by name.

    Example:
        >>> programs()["resnet-cifar"].place
        'Figure 2'
    """
    from experiments.paper.long_runs import programs as found

    return found()


def _recipe(name: str) -> Recipe:
    found = recipes()
    if name not in found:
        raise HyperkronError(f"name={name!r} is no recipe; choose one of {', '.join([*found, *programs()])}.")
    return found[name]


def run(
    name: str,
    scale: Scale = "smoke",
    seeds: int | None = None,
    device: str | torch.device = "cpu",
    folder: str | Path = "runs/paper",
    **options: Any,
) -> Result:
    """Run one recipe, or continue an interrupted run; the options are those of :meth:`Recipe.run`."""
    return _recipe(name).run(scale, seeds, device, folder, **options)


def meant_for(scale: Scale, device: str | torch.device) -> list[Recipe]:
    """The recipes to run at a scale on a device: on a GPU those that need one, else the others; at smoke scale all."""
    on_gpu = torch.device(device).type != "cpu"
    every = [recipe for recipe in recipes().values() if scale in recipe.scales]
    return [recipe for recipe in every if scale == "smoke" or (scale in recipe.gpu) == on_gpu]


def run_all(
    scale: Scale = "smoke",
    seeds: int | None = None,
    device: str | torch.device = "cpu",
    folder: str | Path = "runs/paper",
    *,
    limit_minutes: float | None = None,
    workers: int = 1,
    say: Callable[[str], None] = print,
    **options: Any,
) -> dict[str, Result]:
    """Run the recipes of :func:`meant_for` that have no complete result in ``folder`` yet.

    The time limit is for all of them together; what it cuts off is continued by the same call. ``workers`` is for those
    recipes whose work can be shared; further options are those of :meth:`Recipe.run`.
    """
    begin, found = time.monotonic(), {}
    for recipe in meant_for(scale, device):
        path = Path(folder) / f"{recipe.name}-{scale}.json"
        wanted = recipe.seeds.get(scale, 1) if seeds is None else seeds
        if path.exists() and (done := Result.read(path)).complete and len(done.seeds) >= wanted:
            found[recipe.name] = done
            continue
        left = None if limit_minutes is None else limit_minutes - (time.monotonic() - begin) / 60
        if left is not None and left <= 0:
            say(f"{recipe.name}: no time left; run the same command again to continue.")
            break
        say(f"{recipe.name}: {recipe.title}")
        own = {"limit_minutes": left, "workers": 1 if recipe.fill is None else workers, "say": say}
        try:
            found[recipe.name] = recipe.run(scale, seeds, device, folder, **own, **options)  # type: ignore[arg-type]
        except OutOfTime as error:
            say(f"{recipe.name}: {error}")
            break
    return found


def report(folder: str | Path = RESULTS, out: str | Path = PAGES) -> list[Path]:
    """Write ``out/paper.md``, the records ``out/paper/NAME.md`` and figures from the results.

    Args:
        folder: holds ``NAME-SCALE.json``; of each recipe the result at the largest scale is shown.
        out: where the page goes; its figures go to ``out/figures/paper``.
    """
    from experiments.paper import budget, encoder_length, page, places

    found, known = page.results([folder]), recipes()
    strangers = sorted(set(found) - set(known))
    if strangers:
        raise HyperkronError(f"folder={str(folder)!r} holds results of unknown recipes: {', '.join(strangers)}.")
    figures, longer = Path(out) / "figures" / "paper", encoder_length.longer()
    sections = [page.of_program(program) for program in programs().values()]
    for name, recipe in known.items():
        result = page.best(found.get(name))
        missing = budget.missing(result) if name == "encoder-base" and result is not None else None
        sections.append(page.section(recipe, result, figures, longer.get(name), missing))
    return page.write(sorted(sections, key=lambda x: places.order(x.place)), out)
