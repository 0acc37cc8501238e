"""The names of the package ``hyperkron``: what most users need. Everything else is in its parts.

The parts are ``losses`` (J), ``curvature`` (A), ``solvers`` (A⁻¹b), ``hypergradient`` (the whole formula),
``algorithms`` (the λ update) and ``training`` (running it). Their base classes are public too.
"""

from __future__ import annotations

from hyperkron import algorithms, curvature, hypergradient, losses, solvers, training
from hyperkron.algorithms import AID
from hyperkron.attribution import Attribution, attribute
from hyperkron.cleaning import CleanConfig, CleanResult, clean, load
from hyperkron.hyper import (
    Augmentation,
    DomainWeights,
    LabelCorrection,
    MetaWeightNet,
    SampleWeights,
    WeightDecay,
    as_hyper,
)
from hyperkron.hypergradient import (
    Implicit,
    cg,
    ekfac,
    gradient_descent,
    identity,
    kfac,
    neumann,
    one_step,
    pcg,
    sama,
    truncated,
    unrolled,
)
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HypergradientResult, HyperkronError, HyperkronWarning, NonFiniteError, Status
from hyperkron.training import Ball, Box, Checkpoint, InnerLoop, Run, Simplex, fit

__all__ = [
    "BilevelProblem",
    "losses",
    "SampleWeights",
    "MetaWeightNet",
    "DomainWeights",
    "LabelCorrection",
    "WeightDecay",
    "Augmentation",
    "as_hyper",
    "kfac",
    "ekfac",
    "cg",
    "pcg",
    "neumann",
    "gradient_descent",
    "identity",
    "sama",
    "unrolled",
    "truncated",
    "one_step",
    "Implicit",
    "fit",
    "AID",
    "Box",
    "Ball",
    "Simplex",
    "Run",
    "InnerLoop",
    "Checkpoint",
    "attribute",
    "Attribution",
    "clean",
    "load",
    "CleanConfig",
    "CleanResult",
    "HypergradientResult",
    "Status",
    "HyperkronError",
    "HyperkronWarning",
    "NonFiniteError",
    "curvature",
    "solvers",
    "hypergradient",
    "algorithms",
    "training",
]
