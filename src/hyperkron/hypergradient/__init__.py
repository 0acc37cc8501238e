"""dΦ/dλ: implicit, unrolled, truncated, one-step."""

from hyperkron.hypergradient.base import Hypergradient
from hyperkron.hypergradient.diagnosis import Comparison, Diagnosis, diagnose
from hyperkron.hypergradient.implicit import Implicit
from hyperkron.hypergradient.named import cg, ekfac, gradient_descent, identity, kfac, neumann, pcg, sama
from hyperkron.hypergradient.unrolled import Unrolled, one_step, truncated, unrolled

__all__ = [
    "Comparison",
    "Diagnosis",
    "Hypergradient",
    "Implicit",
    "Unrolled",
    "cg",
    "diagnose",
    "ekfac",
    "gradient_descent",
    "identity",
    "kfac",
    "neumann",
    "one_step",
    "pcg",
    "sama",
    "truncated",
    "unrolled",
]
