"""What the encoder experiment runs: its parts and the settings of its recipes, one for each encoder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from experiments.paper.encoder_page import BILEVEL
from experiments.paper.recipe import LISTED, Scale
from experiments.paper.references import KINDS
from experiments.paper.text_cleaning import TextCase, TextRates
from experiments.paper.texts import MADE_UP, Noise

PAIR = ("SAMA", "KFAC", "Baseline")
MAIN = ("SAMA", "KFAC", "KFAC-EMP", "CG", "Baseline")
NEUMANN = ("Neumann-3", "Neumann-10")
EVERY = (*MAIN, *NEUMANN, *KINDS)


@dataclass(frozen=True)
class Part:
    """A piece of the experiment: a dataset, a depth (``one``, ``middle``, ``all``), methods, and trusted rows.

    Attributes:
        trusted: how many trusted rows there are; ``None`` for all.
        noise: of the training labels.
        seeds: how many of the job's seeds; ``None`` for all.
    """

    dataset: str
    depth: str
    methods: tuple[str, ...]
    trusted: int | None = None
    noise: Noise = "weak"
    seeds: int | None = None


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        encoders: the first that is in the data folder is used.
        parts: in the order of their importance.
        case: batch, steps and so on, the same for all.
        rates: what the grids are made of; one of them for each depth that needs its own.
        deep_steps: outer steps of a full run with more than one tuned layer; ``None`` for those of ``case``.
        trials: settings tried of each method.
        short: steps of a trial as a share of a full run's.
        timed: outer steps that a price is measured over.
        again_deep: whether a fresh network is trained with the final weights also where more than one layer is tuned.
        priced: methods whose step is timed at every depth, whether they are run there or not, on the dataset of the
            first part of that depth.
    """

    encoders: tuple[str, ...]
    parts: tuple[Part, ...] = field(metadata=LISTED)
    case: TextCase
    rates: TextRates
    deep: TextRates
    trials: int = 4
    short: float = 1 / 3
    timed: int = 10
    deep_steps: int | None = None
    again_deep: bool = True
    priced: tuple[str, ...] = field(default=(), metadata=LISTED)

    def steps(self, layers: int) -> int:
        """Outer steps of a full run."""
        return self.case.steps if layers == 1 or self.deep_steps is None else self.deep_steps


RATES = TextRates()
DEEP = replace(RATES, inner=(5e-5,), plain=(1e-5, 2e-5, 5e-5, 1e-4))
ALL = ("trec", "youtube", "semeval")

SMALL = (
    Part("trec", "one", MAIN),
    Part("trec", "one", KINDS),
    Part("youtube", "one", MAIN),
    Part("semeval", "one", MAIN),
    Part("trec", "one", ("SAMA", "KFAC", "trusted only", "Baseline"), trusted=50),
    Part("youtube", "one", KINDS),
    Part("semeval", "one", KINDS),
    Part("trec", "all", PAIR, seeds=2),
    Part("youtube", "all", PAIR, seeds=2),
    Part("trec", "middle", PAIR, seeds=2),
    Part("trec", "one", NEUMANN, seeds=2),
    Part("trec", "one", PAIR, noise="uniform", seeds=2),
)

SMALL_BASE = (
    Part("trec", "one", MAIN),
    Part("trec", "all", PAIR),
    Part("youtube", "one", MAIN),
    Part("youtube", "all", PAIR),
    Part("trec", "middle", PAIR),
    Part("semeval", "one", MAIN),
    Part("semeval", "all", PAIR),
    Part("youtube", "middle", PAIR),
    Part("semeval", "middle", PAIR),
    *(Part(dataset, "one", KINDS) for dataset in ALL),
    Part("trec", "one", NEUMANN, seeds=2),
)

PAPER = (
    *(Part(dataset, depth, EVERY) for depth in ("one", "all", "middle") for dataset in ALL),
    *(Part(dataset, "one", (*MAIN, *KINDS), trusted=count) for dataset in ALL for count in (20, 50)),
    *(Part(dataset, "one", (*MAIN, *KINDS), noise="uniform") for dataset in ALL),
)

MINILM: dict[Scale, Settings] = {
    "smoke": Settings(
        (MADE_UP,),
        (
            Part(MADE_UP, "one", EVERY),
            Part(MADE_UP, "all", ("SAMA", "KFAC"), trusted=8),
            Part(MADE_UP, "one", ("SAMA", "KFAC"), noise="uniform"),
        ),
        TextCase(batch=16, inner_steps=2, steps=4, looks=2, tokens=16),
        replace(RATES, inner=(1e-2,), plain=(1e-2,)),
        replace(RATES, inner=(1e-2,), plain=(1e-2,)),
        trials=1,
        short=0.75,
        timed=1,
    ),
    "small": Settings(("minilm",), SMALL, TextCase(steps=200), RATES, DEEP, deep_steps=100),
    "paper": Settings(
        ("minilm",),
        PAPER,
        TextCase(steps=1000, looks=20, tokens=100),
        replace(RATES, inner=(1e-5, 1e-4), outer=(0.003, 0.01, 0.03, 0.1)),
        replace(DEEP, inner=(1e-5, 5e-5), outer=(0.003, 0.01, 0.03, 0.1)),
    ),
}
"""Of the recipe with the small encoder."""


def _base(scale: Scale, encoder: str, parts: tuple[Part, ...], **changes: Any) -> Settings:
    """Those of the small encoder, with what the large one has of its own."""
    own = {"encoders": (encoder,), "parts": parts, "again_deep": False, "priced": BILEVEL}
    return replace(MINILM[scale], **{**own, **changes})


BASE: dict[Scale, Settings] = {
    "smoke": _base("smoke", MADE_UP, (Part(MADE_UP, "one", PAIR), Part(MADE_UP, "all", ("SAMA", "KFAC")))),
    "small": _base("small", "mpnet", SMALL_BASE, case=TextCase(steps=100, tokens=40), deep_steps=40),
    "paper": _base("paper", "mpnet", PAPER),
}
"""Of the recipe with an encoder of BERT-base's size."""
