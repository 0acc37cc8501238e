"""Solvers of (A + δI) v = b: the A⁻¹ ∂_θ J_out of the hypergradient.

===================  =========================  =======================  ========================
solver               products                   uses                     answer
===================  =========================  =======================  ========================
``Direct``           none                       an invertible curvature  exact
``CG``               1 per iteration            start, preconditioner    best in the Krylov space
``Neumann``          1 per term (+ step)                                 truncated series
``GradientDescent``  1 per iteration (+ step)   start, preconditioner    fixed-step iterate
===================  =========================  =======================  ========================

A solver is a frozen configuration without state. It returns a :class:`~hyperkron.solution.Solution`, whose
status says how it went.
"""

from __future__ import annotations

from hyperkron.solvers.base import Solver
from hyperkron.solvers.cg import CG
from hyperkron.solvers.direct import Direct
from hyperkron.solvers.gradient_descent import GradientDescent
from hyperkron.solvers.neumann import Neumann
from hyperkron.solvers.spectrum import Spectrum, power_iteration

__all__ = ["CG", "Direct", "GradientDescent", "Neumann", "Solver", "Spectrum", "power_iteration"]
