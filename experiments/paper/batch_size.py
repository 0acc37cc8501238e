"""Experiment 5: KFAC against CG at different batch sizes (figures 3 and 7)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.paper import contest_page, plots
from experiments.paper.cleaning import Budget, Case
from experiments.paper.compare import (
    CIFAR,
    MNIST,
    SMALL_CIFAR,
    SMALL_MNIST,
    Contest,
    Splits,
    clearly_below,
    mean,
    of_contest,
    runs,
    summary,
    tuned,
)
from experiments.paper.methods import ABSOLUTE, RELATIVE, WIDE, Rates, methods
from experiments.paper.recipe import Job, Judgement, Recipe, Result, Table, by_cases
from experiments.paper.tuning import Search

KFAC, CG = "AID-KFAC", "AID-CG-3"
COLUMNS = ("test loss", "lowest test loss", "error in %", "s to it", "steps", "ms a step", "setting")


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        batches: the batch sizes.
        contest: what is run at each.
        refresh: steps that KFAC's curvature serves.
        tuned_at: the batch size that settings are tuned at; ``None``: at each.
        inner_steps: of AID.
        relative: whether steps of λ are relative (:mod:`experiments.paper.image_entries`), so that one serves all batch
            sizes; otherwise they are in proportion to the batch.
    """

    batches: tuple[int, ...]
    contest: Contest
    refresh: int = 5
    tuned_at: int | None = None
    inner_steps: int = 10
    relative: bool = False

    def at(self, batch: int) -> Contest:
        """The contest at a batch size."""
        if self.relative:
            return replace(self.contest, case=replace(self.contest.case, batch=batch))
        return self.contest.with_batch(batch)


def work(job: Job) -> dict[str, Any]:
    """Both methods at every batch size, tuned at each or at one of them."""
    settings: Settings = job.settings
    splits = Splits(job, settings.contest)
    found: dict[str, dict[str, Any]] = {}
    for batch in settings.batches:
        contest = settings.at(batch)
        every = methods(contest.rates, inner_steps=settings.inner_steps, refresh=settings.refresh)
        choices = {name: _chosen(job, settings, splits, name, batch) for name in (KFAC, CG)}
        found[str(batch)] = {}
        for name, choice in choices.items():
            setting = choice["setting"]
            made = runs(job, [batch], contest, splits, every[name], setting, relative=settings.relative)
            found[str(batch)][name] = choice | summary(made)
    return {"batches": list(settings.batches), "found": found}


def _chosen(job: Job, settings: Settings, splits: Splits, name: str, batch: int) -> dict[str, Any]:
    """The setting for a batch size; where it was tuned at another one, an absolute step of λ is in proportion."""
    size = batch if settings.tuned_at is None else settings.tuned_at
    there = settings.at(size)
    method = methods(there.rates, inner_steps=settings.inner_steps, refresh=settings.refresh)[name]
    choice = tuned(job, [size], there, splits, method, relative=settings.relative)
    if size == batch or settings.relative:
        return choice
    return choice | {"setting": choice["setting"] | {"outer": choice["setting"]["outer"] * batch / size}}


def _gaps(result: Result) -> dict[str, float]:
    """CG's mean test loss less KFAC's, by batch size."""
    return {
        batch: mean(found[CG]["test_loss"]) - mean(found[KFAC]["test_loss"])
        for batch, found in result.figures["found"].items()
    }


def _text(gaps: dict[str, float]) -> str:
    return "CG's test loss less KFAC's: " + ", ".join(f"{gap:+.3f} at {batch}" for batch, gap in gaps.items())


def _below(result: Result) -> list[bool]:
    """Whether KFAC is clearly below CG, by batch size."""
    return [clearly_below(x[KFAC]["test_loss"], x[CG]["test_loss"]) for x in result.figures["found"].values()]


def verdict_linear(result: Result) -> Judgement:
    """KFAC is below CG where the 95 % interval of the difference of their test losses over seeds is. Reproduced: it is
    below at every batch size, and the gap at the smallest is larger than at the largest. In trend: it is below at the
    smallest and at more than half of them. Not reproduced: otherwise.
    """
    gaps, below = list(_gaps(result).values()), _below(result)
    text = f"{_text(_gaps(result))}; clearly below at {sum(below)} of {len(below)}."
    return by_cases(below, text, first=below[0], also=gaps[0] > gaps[-1])


def verdict_resnet(result: Result) -> Judgement:
    """KFAC is below CG where the 95 % interval of the difference of their test losses over seeds is. Reproduced: it is
    below at every batch size. In trend: at more than half of them. Not reproduced: otherwise.
    """
    below = _below(result)
    text = f"{_text(_gaps(result))}; clearly below at {sum(below)} of {len(below)}."
    return by_cases(below, text)


def tables(result: Result | None) -> list[Table]:
    """The paper shows a figure without numbers, so ours stand alone."""
    if result is None:
        return []
    rows = [
        [batch, name, *contest_page.cells(result, x, COLUMNS)]
        for batch, found in result.figures["found"].items()
        for name, x in found.items()
    ]
    return [Table(contest_page.TITLE, ["batch", "method", *COLUMNS], rows)]


def plot(result: Result, folder: Path) -> list[Path]:
    """Loss and time to it by batch size (figure 3), and curves of the first seed (figure 7)."""
    found, batches, name = result.figures["found"], result.figures["batches"], result.name

    def by_size(axes: Any) -> None:
        for axis, key, label in zip(
            axes, ("test_loss", "seconds_to_best"), ("test loss", "seconds to it"), strict=True
        ):
            lines = {m: (batches, [mean(found[str(b)][m][key]) for b in batches]) for m in (KFAC, CG)}
            plots.curves(axis, lines, "batch size", label, log_x=True)

    def curves(axes: Any) -> None:
        for axis, batch in zip(axes, batches, strict=True):
            of = {m: found[str(batch)][m]["curve"] for m in (KFAC, CG)}
            lines = {m: (c["seconds"], c["test_loss"]) for m, c in of.items()}
            plots.curves(axis, lines, f"seconds, batch {batch}", "test loss")

    return [
        plots.draw(folder / f"{name}.svg", 2, by_size),
        plots.draw(folder / f"{name}-curves.svg", len(batches), curves),
    ]


LINEAR = {
    "smoke": Settings(
        (50, 200),
        Contest("vectors", (400, 200, 200), Case(batch=100), ABSOLUTE, Search(2, 1, 0.5), Budget(60.0, 12, 3)),
    ),
    "small": Settings(
        (128, 500, 2000, 5000, 10_000),
        Contest("mnist", SMALL_MNIST, Case(batch=2000), ABSOLUTE, Search(48, 4, 0.2), Budget(4.0)),
    ),
    "paper": Settings(
        (128, 1000, 5000, 10_000, 50_000),
        Contest("mnist", MNIST, Case(batch=5000), Rates(), Search(36, 6, 0.1), Budget(3600.0, 1000, 100)),
        refresh=1,
    ),
}
RESNET = {
    "smoke": Settings(
        (32, 64),
        Contest("images", (128, 64, 64), Case("tiny", 32, 5e-4, 0), RELATIVE, Search(2, 1, 0.5), Budget(60.0, 3, 2)),
        tuned_at=32,
        inner_steps=2,
        relative=True,
    ),
    "small": Settings(
        (256, 1024, 2048, 5000),
        Contest(
            "cifar10",
            SMALL_CIFAR,
            Case("resnet18", 1024, 5e-4, 0, width=16),
            RELATIVE,
            Search(4, 1, 0.5),
            Budget(4.0, looks=4),
        ),
        tuned_at=1024,
        inner_steps=5,
        relative=True,
    ),
    "paper": Settings(
        (256, 512, 1024, 2048, 5000),
        Contest("cifar10", CIFAR, Case("resnet18", 1024, 5e-4, 0), WIDE, Search(36, 6, 0.1), Budget(3600.0, 1000, 100)),
        refresh=1,
        relative=True,
    ),
}

NOTE = (
    "All runs have the same time, where the paper gives all the same 1000 iterations; steps done and time for one are "
    "in the table. KFAC's factors serve five steps. "
)
LINEAR_NOTE = (
    "Steps of λ are in proportion to the batch, because the hypergradient of an example's weight is that of a mean "
    "over the batch. A first round of the linear model, with eight trials drawn at random from grids of 96 and 144 "
    "settings, gave other winners than this one, and different ones in two recipes at the same batch: with so few "
    "trials the draw decides. It was discarded and the grids made smaller and exhaustive after its test figures had "
    "been seen. The second round was run three times with the same settings, the last two for their time "
    "alone; the last is shown. KFAC was clearly below CG at no batch size in any of them, and the sign of the "
    "difference changed from one to the next at batches of 128, 500 and 2000: it is within the noise of tuning. "
)

RECIPES = (
    Recipe(
        name="batch-linear",
        title="Batch sizes, linear model on MNIST",
        place="Figure 3; Figure 7",
        experiment=5,
        settings=LINEAR,  # type: ignore[arg-type]
        work=work,
        verdict=verdict_linear,
        weights=of_contest,
        tables=tables,
        plot=plot,
        note=NOTE
        + LINEAR_NOTE
        + "Both methods are tuned anew at every batch size, over all 48 settings of their grids. At small scale 10 000 "
        "training examples stand for 50 000, and 10 000 is the full batch.",
        seeds={"smoke": 1, "small": 3, "paper": 5},
    ),
    Recipe(
        name="batch-resnet",
        title="Batch sizes, ResNet-18 on CIFAR-10",
        place="Figure 3; Figure 7",
        experiment=5,
        settings=RESNET,  # type: ignore[arg-type]
        work=work,
        verdict=verdict_resnet,
        weights=of_contest,
        tables=tables,
        plot=plot,
        note=NOTE
        + "Steps of λ are relative: the root mean square by which the weights of a batch move first, so that a "
        "setting serves all batch sizes. At small scale the network has 16 channels in its first stage in place of "
        "64, so that CG has time for a few steps at the largest batch, 10 000 training images are cut into 6 000, 2 "
        "000 and 2 000 (an outer batch holds 2 000 at most), AID makes 5 inner steps, a run lasts 4 seconds (a step "
        "that has begun is finished, however long it is), and both methods are tuned at a batch of 1024, over all "
        "four settings of their grids, for 2 seconds each. At paper scale CIFAR-10's 50 000 training images are split "
        "40k/5k/5k; the printed 50k/5k/5k is impossible.",
        gpu=("small", "paper"),
        seeds={"smoke": 1, "small": 3, "paper": 5},
    ),
)
