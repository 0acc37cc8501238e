"""hyperkron: gradient-based bilevel optimization with curvature-aware hypergradients.

    dΦ/dλ = ∂_λ J_out − ∂²_λθ J_in · A⁻¹ · ∂_θ J_out

Each part of the formula is a part of the package: ``losses`` and ``BilevelProblem`` (J), curvatures (A), solvers
(A⁻¹b), the cross term, and the hypergradients that combine them.

A name is imported when it is first used (PEP 562), with the part of the package it lives in and what that needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # what a type checker sees; without __getattr__, so that it finds misspelt names
    from hyperkron import algorithms as algorithms
    from hyperkron import curvature as curvature
    from hyperkron import hypergradient as hypergradient
    from hyperkron import losses as losses
    from hyperkron import solvers as solvers
    from hyperkron import training as training
    from hyperkron.algorithms import AID as AID
    from hyperkron.attribution import Attribution as Attribution
    from hyperkron.attribution.attribute import attribute as attribute
    from hyperkron.cleaning import CleanConfig as CleanConfig
    from hyperkron.cleaning import CleanResult as CleanResult
    from hyperkron.cleaning import clean as clean
    from hyperkron.cleaning import load as load
    from hyperkron.hyper import Augmentation as Augmentation
    from hyperkron.hyper import DomainWeights as DomainWeights
    from hyperkron.hyper import LabelCorrection as LabelCorrection
    from hyperkron.hyper import MetaWeightNet as MetaWeightNet
    from hyperkron.hyper import SampleWeights as SampleWeights
    from hyperkron.hyper import WeightDecay as WeightDecay
    from hyperkron.hyper import as_hyper as as_hyper
    from hyperkron.hypergradient import Implicit as Implicit
    from hyperkron.hypergradient import cg as cg
    from hyperkron.hypergradient import diagnose as diagnose
    from hyperkron.hypergradient import ekfac as ekfac
    from hyperkron.hypergradient import gradient_descent as gradient_descent
    from hyperkron.hypergradient import identity as identity
    from hyperkron.hypergradient import kfac as kfac
    from hyperkron.hypergradient import neumann as neumann
    from hyperkron.hypergradient import one_step as one_step
    from hyperkron.hypergradient import pcg as pcg
    from hyperkron.hypergradient import sama as sama
    from hyperkron.hypergradient import truncated as truncated
    from hyperkron.hypergradient.unrolled import unrolled as unrolled
    from hyperkron.problem import BilevelProblem as BilevelProblem
    from hyperkron.solution import HypergradientResult as HypergradientResult
    from hyperkron.solution import HyperkronError as HyperkronError
    from hyperkron.solution import HyperkronWarning as HyperkronWarning
    from hyperkron.solution import NonFiniteError as NonFiniteError
    from hyperkron.solution import Status as Status
    from hyperkron.training import Ball as Ball
    from hyperkron.training import Box as Box
    from hyperkron.training import Checkpoint as Checkpoint
    from hyperkron.training import Run as Run
    from hyperkron.training import Simplex as Simplex
    from hyperkron.training.fit import fit as fit
else:

    def __getattr__(name: str) -> object:
        """A part of the package, or one of its public names."""
        from importlib import import_module
        from importlib.util import find_spec

        if not name.startswith("_") and name.isidentifier():
            if find_spec(f"{__name__}.{name}") is not None:
                return import_module(f"{__name__}.{name}")
            for part, names in _NAMES.items():
                if name in names.split():
                    globals()[name] = getattr(import_module(f"{__name__}.{part}"), name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_NAMES} - {"TYPE_CHECKING", "annotations", "__init__"})

    _NAMES = {
        "__init__": "losses curvature solvers hypergradient algorithms training",
        "problem": "BilevelProblem",
        "hyper": "SampleWeights MetaWeightNet DomainWeights LabelCorrection WeightDecay Augmentation as_hyper",
        "hypergradient": "Implicit kfac ekfac cg pcg neumann gradient_descent identity sama "
        "unrolled truncated one_step diagnose",
        "algorithms": "AID",
        "training": "fit Box Ball Simplex Run Checkpoint",
        "attribution": "attribute Attribution",
        "cleaning": "clean load CleanConfig CleanResult",
        "solution": "HypergradientResult Status HyperkronError HyperkronWarning NonFiniteError",
    }
    """Where each name lives; the imports above are the same for type checkers."""
    __all__ = [name for names in _NAMES.values() for name in names.split()]
