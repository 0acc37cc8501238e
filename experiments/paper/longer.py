"""Runs of the paper's own length: which recipes have them, what they found, and the page that tells of them."""

from __future__ import annotations

from typing import NamedTuple

from experiments.paper import (
    encoder_length,
    linear_contest,
    linear_page,
    resnet_batches,
    resnet_length_page,
)
from experiments.paper.image_contest import BATCHES, result_of
from experiments.paper.recipe import Judgement
from experiments.pieces import Lines


class Longer(NamedTuple):
    """What the long runs of a recipe found, and the page that tells of them; their verdict is the one that counts."""

    judgement: Judgement
    page: str


def longer() -> dict[str, Longer]:
    """By the name of the recipe."""
    found = {"encoder": Longer(encoder_length.judgement(Lines(encoder_length.RESULT).rows), "encoder-length.md")}
    mpnet = Lines(encoder_length.MPNET).rows
    if any(row["method"] in encoder_length.METHODS for row in mpnet):  # reference lines alone say nothing
        found["encoder-base"] = Longer(encoder_length.judgement(mpnet, "MPNet"), "encoder-length.md")
    for name, place in (("resnet-cifar", "Figure 2"), ("trade-off", "Figure 1, top"), ("ekfac-resnet", "Table 2")):
        found[name] = Longer(resnet_length_page.judgement(place), "resnet-length.md")
    found["batch-resnet"] = Longer(resnet_batches.verdict(resnet_batches.by_size()), "resnet-length.md")
    batch = BATCHES["cnn"]
    if Lines(result_of(batch, "cnn")).rows:
        figure = resnet_length_page.judgement("Figure 5", batch=batch, network="cnn")
        found["cnn-cifar"] = Longer(figure, "cnn-length.md")
    contest = linear_contest.Contest(Lines(linear_contest.RESULT).rows)
    for study, x in linear_page.STUDIES.items():
        found[x.recipe] = Longer(linear_page.judgement(study, contest), "linear-length.md")
    return found
