"""hyperkron: gradient-based bilevel optimization whose hypergradients know curvature.

    dΦ/dλ = ∂_λ J_out − ∂²_λθ J_in · A⁻¹ · ∂_θ J_out

The pieces of the formula are the parts of the package: ``losses`` and ``BilevelProblem`` (J), curvatures (A),
solvers (A⁻¹b), the cross term, and the hypergradients that put them together.
"""

from hyperkron import algorithms, losses
from hyperkron.algorithms import *  # noqa: F403 - every algorithm, by its paper's name
from hyperkron.curvature import EKFAC, GGN, KFAC, AdamDiagonal, Coverage, Hessian, Identity
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
    Hypergradient,
    Implicit,
    Unrolled,
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
from hyperkron.solution import (
    CoverageError,
    FactorizationError,
    HypergradientResult,
    HyperkronError,
    HyperkronWarning,
    NonFiniteError,
    Solution,
    Status,
)
from hyperkron.solvers import CG, Direct, GradientDescent, Neumann
from hyperkron.training import (
    Ball,
    Box,
    Callback,
    Checkpoint,
    CheckpointError,
    DamagedCheckpoint,
    EarlyStopping,
    Every,
    History,
    InnerLoop,
    Interrupted,
    Run,
    Simplex,
    fit,
)

__version__ = "0.1.0"

__all__ = [
    *algorithms.__all__,
    "Augmentation",
    "Ball",
    "Box",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpoint",
    "DomainWeights",
    "EarlyStopping",
    "Every",
    "History",
    "Interrupted",
    "Run",
    "Simplex",
    "fit",
    "CG",
    "EKFAC",
    "GGN",
    "KFAC",
    "AdamDiagonal",
    "BilevelProblem",
    "Coverage",
    "CoverageError",
    "Direct",
    "FactorizationError",
    "GradientDescent",
    "Hessian",
    "Hypergradient",
    "HypergradientResult",
    "HyperkronError",
    "HyperkronWarning",
    "Identity",
    "Implicit",
    "InnerLoop",
    "Neumann",
    "LabelCorrection",
    "MetaWeightNet",
    "NonFiniteError",
    "SampleWeights",
    "Solution",
    "Status",
    "Unrolled",
    "WeightDecay",
    "as_hyper",
    "cg",
    "ekfac",
    "gradient_descent",
    "identity",
    "kfac",
    "losses",
    "neumann",
    "one_step",
    "pcg",
    "sama",
    "truncated",
    "unrolled",
]
