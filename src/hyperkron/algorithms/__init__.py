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
from hyperkron.algorithms.amigo import AmIGO
from hyperkron.algorithms.base import Algorithm, State, StepReport
from hyperkron.algorithms.bome import BOME
from hyperkron.algorithms.bsg import BSG1
from hyperkron.algorithms.bvfsm import BVFSM
from hyperkron.algorithms.darts import DARTS
from hyperkron.algorithms.f2sa import F2SA
from hyperkron.algorithms.fsla import FSLA
from hyperkron.algorithms.inner_loop import InnerLoop
from hyperkron.algorithms.inner_only import InnerOnly
from hyperkron.algorithms.meha import MEHA
from hyperkron.algorithms.mrbo import MRBO
from hyperkron.algorithms.pbgd import PBGD
from hyperkron.algorithms.pzobo import PZOBO
from hyperkron.algorithms.saba import SABA
from hyperkron.algorithms.sama import SAMA
from hyperkron.algorithms.scalebio import ScaleBiO
from hyperkron.algorithms.soba import SOBA
from hyperkron.algorithms.srba import SRBA
from hyperkron.algorithms.stocbio import StocBiO
from hyperkron.algorithms.sustain import SUSTAIN
from hyperkron.algorithms.t1t2 import T1T2
from hyperkron.algorithms.tgda import TGDA
from hyperkron.algorithms.ttsa import BSA, TTSA
from hyperkron.algorithms.unroll import Unroll
from hyperkron.algorithms.vrbo import VRBO
from hyperkron.batches import BatchSources, Examples, Fixed, Source, as_source
from hyperkron.hypergradient.stochastic_neumann import StochasticNeumann, hia
from hyperkron.optimizers import Rate, Updates

__all__ = [
    "AID",
    "Algorithm",
    "AmIGO",
    "BOME",
    "BSA",
    "BSG1",
    "BVFSM",
    "DARTS",
    "BatchSources",
    "Examples",
    "F2SA",
    "FSLA",
    "Fixed",
    "InnerLoop",
    "InnerOnly",
    "MEHA",
    "MRBO",
    "PBGD",
    "PZOBO",
    "Rate",
    "SABA",
    "SAMA",
    "SOBA",
    "SRBA",
    "SUSTAIN",
    "ScaleBiO",
    "Source",
    "State",
    "StepReport",
    "StocBiO",
    "StochasticNeumann",
    "T1T2",
    "TGDA",
    "TTSA",
    "Unroll",
    "Updates",
    "VRBO",
    "aid_cg",
    "aid_ekfac",
    "aid_fp",
    "aid_ggn_cg",
    "aid_ggn_neumann",
    "aid_kfac",
    "aid_neumann",
    "as_source",
    "hia",
]
