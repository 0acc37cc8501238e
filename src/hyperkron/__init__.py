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
    from hyperkron._public_names import *  # noqa: F403
    from hyperkron._public_names import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """A part of the package, or one of its public names."""
        from importlib import import_module
        from importlib.util import find_spec

        if name == "__all__":
            return import_module(f"{__name__}._public_names").__all__
        if not name.startswith("_") and name.isidentifier():
            if find_spec(f"{__name__}.{name}") is not None:
                return import_module(f"{__name__}.{name}")
            for part, names in _NAMES.items():
                if name in names.split():
                    globals()[name] = getattr(import_module(f"{__name__}.{part}"), name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")} - {"TYPE_CHECKING", "annotations"})

    _NAMES = {
        "problem": "BilevelProblem",
        "hyper": "SampleWeights MetaWeightNet DomainWeights LabelCorrection WeightDecay Augmentation as_hyper",
        "hypergradient": "Implicit kfac ekfac cg pcg neumann gradient_descent identity sama "
        "unrolled truncated one_step",
        "algorithms": "AID",
        "training": "fit Box Ball Simplex Run InnerLoop Checkpoint",
        "attribution": "attribute Attribution",
        "cleaning": "clean load CleanConfig CleanResult",
        "solution": "HypergradientResult Status HyperkronError HyperkronWarning NonFiniteError",
    }
    """Where each name lives; _public_names.py has the same for type checkers."""
