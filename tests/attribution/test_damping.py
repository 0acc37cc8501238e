"""The damping that a training of finite length amounts to."""

import pytest
import torch

import hyperkron as hk
from hyperkron.attribution import training_damping


def test_it_is_one_over_the_time_of_the_training():
    assert training_damping([0.1, 0.3], momentum=0.5) == pytest.approx(1 / (0.4 / 0.5))


def test_a_direction_that_was_hardly_learnt_counts_as_gradient_descent_says():
    """Along curvature h, gradient descent for the time τ moves by h⁻¹(1 − e^(−hτ)), within 30 % of (h + 1/τ)⁻¹."""
    rates = [0.01] * 500
    delta = training_damping(rates)
    for h in (1e-3, 1e-2, 0.1, 1.0, 10.0):
        moved = torch.zeros(())
        for rate in rates:
            moved = moved + rate * (1 - h * moved)
        assert 0.7 < float(moved) * (h + delta) < 1.31


@pytest.mark.parametrize(
    ("rates", "momentum", "message"),
    [
        ([], 0.0, "add up to 0"),
        ([0.0], 0.0, "add up to 0.0"),
        ([0.1, -1.0], 0.0, "rates=-1.0"),
        ([0.1], 1.0, "momentum"),
    ],
)
def test_trainings_that_make_no_sense_are_refused(rates, momentum, message):
    with pytest.raises(hk.HyperkronError, match=message):
        training_damping(rates, momentum=momentum)
