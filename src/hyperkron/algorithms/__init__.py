"""The λ update: one paper, one file. ``base.py`` says how to add one; ``docs/algorithms.md`` compares them."""

from hyperkron.algorithms.aid import (
    AID,
    aid_cg,
    aid_ekfac,
    aid_fp,
    aid_ggn_cg,
    aid_ggn_neumann,
    aid_kfac,
    aid_neumann,
)
from hyperkron.algorithms.base import Algorithm, Facts, State, StepReport
from hyperkron.algorithms.draw import Draw, Examples, Fixed, Source, as_source
from hyperkron.algorithms.movers import Rate, Updates

__all__ = [
    "AID",
    "Algorithm",
    "Draw",
    "Examples",
    "Facts",
    "Fixed",
    "Rate",
    "Source",
    "State",
    "StepReport",
    "Updates",
    "aid_cg",
    "aid_ekfac",
    "aid_fp",
    "aid_ggn_cg",
    "aid_ggn_neumann",
    "aid_kfac",
    "aid_neumann",
    "as_source",
]
