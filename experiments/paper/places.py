"""Every table and figure of the paper, so that the page leaves none out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experiments.paper.page import Section
from experiments.paper.printed import printed
from experiments.paper.recipe import Judgement, Table, Verdict


@dataclass(frozen=True)
class Place:
    """A table or figure of the paper, and how to print its numbers where no recipe does."""

    name: str
    title: str
    tables: Callable[[], list[Table]] = list


def _text(value: object) -> str:
    return "–" if value is None else str(value)


def _plain(table: str, title: str) -> Callable[[], list[Table]]:
    def tables() -> list[Table]:
        found = printed(table)
        columns = [str(column).replace("_", " ") for column in found["columns"]]
        return [Table(title, columns, [[_text(x) for x in row] for row in found["rows"]])]

    return tables


def _encoder() -> list[Table]:
    found = printed("table_bert_hypercleaning")
    columns = ["method", *(f"{name} {what}" for name in ("TREC", "SemEval", "Youtube") for what in ("%", "s"))]
    return [
        Table(
            f"Printed accuracy (± standard deviation) and seconds, {key.replace('_', ' ')} tuned",
            columns,
            [[name, *(x for a, d, s, _ in row for x in (f"{a} ± {d}", _text(s)))] for name, row in found[key].items()],
        )
        for key in ("1_layer", "7_layers", "12_layers")
    ]


PLACES = (
    Place("Table 1", "Relative error of inverses as the dimension grows"),
    Place("Figure 1, top", "Accuracy against time of AID under CG, Neumann and KFAC"),
    Place("Figure 1, bottom", "Memory by tuned layers"),
    Place("Figure 2", "ResNet-18 on CIFAR-10: test loss by time and by iteration"),
    Place("Figure 3", "Batch sizes"),
    Place("Table 2", "KFAC against EKFAC, and how long a curvature serves"),
    Place("Table 3", "Long-tailed CIFAR"),
    Place("Figure 4", "Encoder hypercleaning: accuracy against time"),
    Place("Table 4", "Continued pretraining"),
    Place("Table 5", "Data poisoning", _plain("table_data_poisoning", "Printed accuracy drops in % and hours")),
    Place("Table 6", "Unlearnable examples", _plain("table_unlearnable", "Printed test accuracy in % and hours")),
    Place("Table 7", "Encoder hypercleaning in numbers", _encoder),
    Place("Figure 5", "Linear model on MNIST and CNN on CIFAR-10"),
    Place("Figure 6", "Moving averages of the factors"),
    Place("Figure 7", "Curves by batch size"),
    Place("Appendix C", "One step and infinite unrolling"),
)
"""In the order of the paper. A recipe covers a place when the place's name is in the recipe's ``place``."""


def missing(covered: list[str]) -> list[Section]:
    """Sections for the places that no recipe covers."""
    return [
        Section(
            place.title,
            place.name,
            Judgement(Verdict.NO_RECIPE, "Nobody has written one yet; nothing is said about the claim."),
            tables=place.tables(),
        )
        for place in PLACES
        if not any(_covers(place.name, text) for text in covered)
    ]


def _covers(name: str, text: str) -> bool:
    return name in [part.strip() for part in text.split(";")]


def order(place: str) -> int:
    """Where a section with this place belongs on the page."""
    first = place.split(";")[0].strip()
    return next((i for i, x in enumerate(PLACES) if x.name == first), len(PLACES))
