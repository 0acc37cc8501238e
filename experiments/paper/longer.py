"""Runs of the paper's own length: which recipes have them, what they found, and the page that tells of them."""

from __future__ import annotations

from typing import NamedTuple

from experiments.paper import encoder_length
from experiments.paper.recipe import Judgement
from experiments.pieces import Lines


class Longer(NamedTuple):
    """What the long runs of a recipe found, and the page that tells of them; their verdict is the one that counts."""

    judgement: Judgement
    page: str


def longer() -> dict[str, Longer]:
    """By the name of the recipe."""
    return {"encoder": Longer(encoder_length.judgement(Lines(encoder_length.RESULT).rows), "encoder-length.md")}
