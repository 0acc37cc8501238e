"""hyperkron: gradient-based bilevel optimization with curvature-aware hypergradients.

    dΦ/dλ = ∂_λ J_out − ∂²_λθ J_in · A⁻¹ · ∂_θ J_out

Each part of the formula is a part of the package: ``losses`` and ``BilevelProblem`` (J), curvatures (A), solvers
(A⁻¹b), the cross term, and the hypergradients that combine them.

All names are listed in ``_public_names.py``, which is imported with the first of them (PEP 562), so that the command
line answers before torch is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # what a type checker sees; without __getattr__, so that it finds misspelt names
    from hyperkron._public_names import *  # noqa: F403
    from hyperkron._public_names import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """A part of the package, or one of its names; all names come with the first."""
        from importlib import import_module
        from importlib.util import find_spec

        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name.isidentifier() and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        public = import_module(f"{__name__}._public_names")
        names = {known: getattr(public, known) for known in public.__all__}
        globals().update(names, __all__=public.__all__)
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals().keys() - {"TYPE_CHECKING", "annotations"})
