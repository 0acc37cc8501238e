"""Tables and figures whose runs have the paper's length and are made by a program of their own.

A program chooses its own trials and winners, keeps one file of runs for several tables and figures, and continues it.
It ends in a page of ``experiments/pages``; the verdict is computed from the recorded runs.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.paper import (
    image_contest,
    linear_contest,
    linear_length,
    linear_page,
    linear_verdicts,
    resnet_batches,
    resnet_length,
    resnet_length_page,
)
from experiments.paper.image_contest import BATCHES, LARGE, OWN, SHARED
from experiments.paper.recipe import Judgement
from experiments.pieces import Lines


@dataclass(frozen=True)
class Program:
    """A table or figure of the paper that has a program.

    Attributes:
        name, title, place: as those of a recipe.
        main: of the program.
        arguments: with which it makes the runs of this table or figure.
        smoke: those of a run of seconds on made-up data.
        page: in ``experiments/pages``.
        judge: the verdict of the recorded runs.
        rule: by which it judges.
        spent: GPU minutes of the recorded runs that were made for it; ``None`` where they are those of figure 2.
        also: what else the command has to be called with.
    """

    name: str
    title: str
    place: str
    main: Callable[[list[str]], None]
    arguments: tuple[str, ...]
    smoke: tuple[str, ...]
    page: str
    judge: Callable[[], Judgement]
    rule: str
    spent: Callable[[], float] | None = None
    also: str = ""

    @property
    def command(self) -> str:
        """That makes its runs, or continues them."""
        return f"python -m {self.main.__module__} {shlex.join(self.arguments)} --device cuda --workers 8{self.also}"

    def try_out(self, folder: str | Path) -> str:
        """Run everything for seconds on made-up data, and say what happened."""
        out = Path(folder) / f"{self.name}-smoke.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        self.main([*self.smoke, "--out", str(out)])
        told = f"Everything ran ({len(Lines(out).rows)} runs in {out}); runs of the paper's length: {self.command}."
        return f"{told} The recorded ones: {self.judge().verdict.value}, experiments/pages/{self.page}."


def programs() -> dict[str, Program]:
    """All by name."""
    found = {x.name: x for x in (*_resnet(), _cnn(), *_linear())}
    return {name: found[name] for name in ORDER}


ORDER = (
    *("trade-off", "resnet-cifar", "batch-linear", "batch-resnet", "ekfac-resnet", "ekfac-linear"),
    *("linear-mnist", "cnn-cifar", "ema"),
)
"""That of the paper."""


RULES = {
    "Figure 1, top": resnet_length_page.verdict_solvers,
    "Figure 2": resnet_length_page.verdict,
    "Table 2": resnet_length_page.verdict_amortized,
}
PAIRS = tuple(dict.fromkeys(name for pair in resnet_length_page.PAIRS for name in pair))
TINY = ("--smoke", "--batch", "10", "--steps", "2", "--seeds", "1", "--arms", OWN)


def _resnet() -> list[Program]:
    def made(name: str, title: str, place: str, methods: Iterable[str], spent: Any = None) -> Program:
        few = ("--methods", *methods)
        large = ("--batch", str(LARGE), "--arms", OWN, *few)
        judge = partial(resnet_length_page.judgement, place)
        rule = _rule(RULES[place])
        return Program(
            name, title, place, resnet_length.main, large, (*TINY, *few), "resnet-length.md", judge, rule, spent
        )

    solvers = "AID under CG-T and Neumann-K, with the Hessian and the Gauss–Newton matrix, against KFAC"
    taus = "KFAC against EKFAC, and how long a curvature serves: ResNet-18 on CIFAR-10"
    usual = BATCHES["resnet18"]
    both = ("AID-KFAC", "AID-CG-3")
    return [
        made("trade-off", solvers, "Figure 1, top", ("AID-KFAC", *resnet_length_page.SOLVERS), None),
        made("resnet-cifar", "All methods, ResNet-18 on CIFAR-10", "Figure 2", PAIRS, lambda: _images((usual, LARGE))),
        Program(
            "batch-resnet",
            "Batch sizes, ResNet-18 on CIFAR-10",
            "Figure 3; Figure 7",
            resnet_length.main,
            ("--batch", "1250", "--arms", OWN, "--methods", *both),
            (*TINY, "--methods", *both),
            "resnet-length.md",
            lambda: resnet_batches.verdict(resnet_batches.by_size()),
            _rule(resnet_batches.verdict),
            lambda: _images(size for size in resnet_batches.SIZES if size not in (usual, LARGE)),
            also=f" (and with --batch {', '.join(str(size) for size in resnet_batches.SIZES if size != 1250)})",
        ),
        made("ekfac-resnet", taus, "Table 2", ("AID-KFAC", *SHARED), None),
    ]


def _cnn() -> Program:
    batch = BATCHES["cnn"]
    return Program(
        "cnn-cifar",
        "All methods, CNN on CIFAR-10",
        "Figure 5",
        resnet_length.main,
        ("--network", "cnn", "--arms", OWN, "--methods", *PAIRS),
        ("--network", "cnn", *TINY, "--rate", "0.3", "--methods", *PAIRS),
        "cnn-length.md",
        lambda: resnet_length_page.judgement("Figure 5", batch=batch, network="cnn"),
        _rule(resnet_length_page.verdict),
        lambda: _images((batch, LARGE), "cnn"),
    )


LINEAR: Mapping[str, tuple[str, str, str, Callable[..., Judgement]]] = {
    "batches": ("batch-linear", "Batch sizes, linear model on MNIST", "Figure 3; Figure 7", linear_verdicts.batches),
    "intervals": (
        "ekfac-linear",
        "KFAC against EKFAC, and how long a curvature serves: linear model on MNIST (not in the paper)",
        "Table 2",
        linear_verdicts.intervals,
    ),
    "figure 5": ("linear-mnist", "All methods, linear model on MNIST", "Figure 5", linear_verdicts.methods),
    "averages": ("ema", "Moving averages of the factors, linear model on MNIST", "Figure 6", linear_verdicts.averages),
}
"""Name, title, place and rule by study."""
SMALLEST = ("--smoke", "--rows", "60", "--steps", "2", "--short", "0.5", "--tried", "1", "--kept", "1", "--seeds", "1")


def _linear() -> list[Program]:
    return [
        Program(
            name,
            title,
            place,
            linear_length.main,
            ("--studies", study),
            (*SMALLEST, "--studies", study, *(("--methods", *linear_contest.COMPARED) if study == "figure 5" else ())),
            "linear-length.md",
            partial(_judge_linear, study),
            _rule(rule),
            partial(_minutes_of, study),
        )
        for study, (name, title, place, rule) in LINEAR.items()
    ]


def _judge_linear(study: str) -> Judgement:
    return linear_page.judgement(study, linear_contest.Contest(Lines(linear_contest.RESULT).rows))


def _rule(verdict: Callable[..., Judgement]) -> str:
    return " ".join((inspect.getdoc(verdict) or "").split())


def _images(batches: Iterable[int], network: Any = "resnet18") -> float:
    files = [image_contest.result_of(batch, network) for batch in batches]
    return sum(row["seconds"] / row["workers"] for file in files for row in Lines(file).rows) / 60


FIRST_WORKERS = 13
"""Processes of the first runs of the linear model, which do not say."""


def _minutes_of(study: str) -> float:
    rows = [row for row in Lines(linear_contest.RESULT).rows if row.get("device") != "cpu" and study_of(row) == study]
    return sum(row["seconds"] / row.get("workers", FIRST_WORKERS) for row in rows) / 60


def study_of(row: Mapping[str, Any]) -> str:
    """The study that a run of the linear model was made for."""
    setting = row["setting"]
    if "decay" in setting:
        return "averages"
    if "refresh" in setting:
        return "intervals"
    return "batches" if "batch" in setting else "figure 5"
