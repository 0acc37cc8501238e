"""Algorithms with random oracles come to rest at the optimum where the noise vanishes there."""

from __future__ import annotations

from typing import Any

import pytest

import hyperkron as hk
from fixed_points import Dense
from hyperkron.algorithms.base import Algorithm
from oracles import relative
from quadratic import Quadratic

REALIZABLE = Quadratic(direct=0.0, realizable=True)  # b = 0 at the optimum


def noisy(kind: Any, *first: Any, slower: float, steps: int, **options: Any) -> Any:
    """γ is smaller by ``slower``, the oracle's second moment in terms of its squared mean."""
    dense = Dense(REALIZABLE)
    algorithm = kind(*first, inner_rate=1 / dense.inner[1], outer_rate=1 / (slower * dense.outer[1]), **options)
    marks = pytest.mark.long if kind is hk.algorithms.TTSA else ()  # BSA has its inverse, SUSTAIN its single loop
    return pytest.param(algorithm, steps, id=kind.__name__, marks=marks)


ROUND = 1 / Dense(REALIZABLE).inner[1]
SPREAD = 3 * Dense(REALIZABLE).inner[1] / Dense(REALIZABLE).inner[0]  # K = 3 for HIA, κ for the single loop


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        noisy(hk.algorithms.TTSA, 3, ROUND, slower=SPREAD, steps=90),
        noisy(hk.algorithms.BSA, 3, ROUND, 5, slower=3, steps=50),
        noisy(hk.algorithms.SUSTAIN, slower=SPREAD, steps=90, terms=3, step_size=ROUND, momentum=0.5),
        noisy(hk.algorithms.PZOBO, 5, slower=1.4, steps=25),  # 1 + (dim λ + 1)/samples for Gaussian directions
    ],
)
def test_noise_that_vanishes_with_b_does_not_keep_it_from_the_optimum(algorithm: Algorithm, steps: int) -> None:
    """The random oracles themselves, where their variance is proportional to ‖b‖² and b = 0 at the optimum."""
    model, hyper = REALIZABLE.modules()
    state, batches = algorithm.init(REALIZABLE.problem(), model, hyper), REALIZABLE.batches()
    for _ in range(steps):
        algorithm.step(state, batches)
    assert relative(hyper().detach(), REALIZABLE.solution()) <= 1e-4
