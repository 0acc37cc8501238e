"""The methods of the map: each as an algorithm of ``hk.fit`` and as one hypergradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import hyperkron as hk
from experiments.which_method.problems import RATE
from hyperkron.algorithms import Algorithm, Unroll
from hyperkron.hypergradient import Hypergradient
from hyperkron.hypergradient.steps import SGD

DAMPING = 1e-2
"""Of every method that is damped."""
INNER = 10
"""Steps of θ for one of λ."""


class Method(NamedTuple):
    """How one hypergradient is made, and how λ is trained with it."""

    hypergradient: Callable[[torch.optim.Optimizer], Hypergradient]
    algorithm: Callable[[torch.optim.Optimizer], Algorithm]
    functional: bool = False
    """Whether θ moves by functional steps instead of an optimizer."""


def _aid(make: Callable[[torch.optim.Optimizer], Hypergradient]) -> Method:
    return Method(make, lambda optimizer: hk.AID(make(optimizer), INNER))


METHODS: dict[str, Method] = {
    "identity": _aid(lambda optimizer: hk.identity()),
    "SAMA": _aid(lambda optimizer: hk.sama(optimizer)),
    "KFAC": _aid(lambda optimizer: hk.kfac(DAMPING)),
    "EKFAC": _aid(lambda optimizer: hk.ekfac(DAMPING)),
    "CG-3": _aid(lambda optimizer: hk.cg(3, DAMPING)),
    "CG-20": _aid(lambda optimizer: hk.cg(20, DAMPING)),
    "PCG-3": _aid(lambda optimizer: hk.pcg(3, DAMPING)),
    "Neumann-10": _aid(lambda optimizer: hk.neumann(10, DAMPING)),
    "unrolled-10": Method(
        lambda optimizer: hk.unrolled(INNER, SGD(RATE)),
        lambda optimizer: Unroll(INNER, SGD(RATE)),
        functional=True,
    ),
}


def exact() -> Hypergradient:
    """What the others are compared with: preconditioned CG on the Gauss–Newton matrix until it has converged."""
    return hk.pcg(500, DAMPING, tolerance=1e-10)
