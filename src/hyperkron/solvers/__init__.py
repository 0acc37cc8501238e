"""Solvers of (A + δI) v = b: the A⁻¹ ∂_θ J_out of the hypergradient.

``Direct`` applies the inverse of a curvature that has one; ``CG``, ``Neumann`` and ``GradientDescent`` take products
with A. A solver is a frozen configuration without state, and a :class:`~hyperkron.solution.Solution`'s status says how
it went.
"""

from __future__ import annotations

from hyperkron.solvers.base import LinearSystem, Solver
from hyperkron.solvers.cg import CG
from hyperkron.solvers.direct import Direct
from hyperkron.solvers.gradient_descent import GradientDescent
from hyperkron.solvers.neumann import Neumann
from hyperkron.solvers.spectrum import Spectrum, power_iteration

__all__ = ["CG", "Direct", "GradientDescent", "LinearSystem", "Neumann", "Solver", "Spectrum", "power_iteration"]
