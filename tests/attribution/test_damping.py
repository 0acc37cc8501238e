"""The damping that a training of finite length amounts to, and that which agrees with an exact solve."""

import pytest
import torch

import hyperkron as hk
from hyperkron.attribution import Attribution, agreeing_damping, training_damping


def test_it_is_one_over_the_time_of_the_training():
    assert training_damping([0.1, 0.3], momentum=0.5) == pytest.approx(1 / (0.4 / 0.5))


def test_rates_may_be_any_numbers_one_after_the_other():
    wanted = pytest.approx(1 / 1.5)
    assert training_damping(torch.full((3,), 0.5)) == wanted
    assert training_damping(0.5 for _ in range(3)) == wanted


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
        (0.5, 0.0, r"rates=0.5 is not a list; .* \[rate\] \* steps"),
        (torch.tensor(0.5), 0.0, r"rates=0.5 is not a list"),
    ],
)
def test_trainings_that_make_no_sense_are_refused(rates, momentum, message):
    with pytest.raises(hk.HyperkronError, match=message):
        training_damping(rates, momentum=momentum)


def test_the_damping_that_agrees_is_that_of_the_scores_most_like_the_exact_ones():
    """Scores Σ_i c_i d_i / (h_i + δ): among others, the same with δ agrees fully, whatever its scale and its mean."""
    generator = torch.Generator().manual_seed(0)
    queries, rows = torch.randn(4, 6, generator=generator), torch.randn(6, 30, generator=generator)
    curvature = torch.logspace(-4, 1, 6)

    def scored(delta):
        return Attribution((queries / (curvature + delta)) @ rows)

    for wanted in (1e-2, 1e-3, 1e-4):
        assert agreeing_damping(scored, Attribution(3 * scored(wanted).scores + 5)) == wanted
        small = Attribution(1e-12 * scored(wanted).scores)
        assert agreeing_damping(lambda delta: Attribution(1e-12 * scored(delta).scores), small) == wanted


def test_ekfac_of_a_linear_model_agrees_with_an_exact_solve_at_the_same_damping():
    torch.manual_seed(0)
    x, model = torch.randn(40, 5) * torch.logspace(-2, 1, 5), torch.nn.Linear(5, 1, bias=False)
    train, few = (x, torch.randn(40, 1)), (x[:3], torch.randn(3, 1))

    def scored(method):
        return hk.attribute(lambda m, b: hk.losses.mse(m(b[0]), b[1]), model, train, few, method=method)

    exact = scored(hk.cg(20, curvature=hk.curvature.GGN(1e-3)))
    assert agreeing_damping(lambda d: scored(hk.kfac(d, fisher="type-2")), exact, [1.0, 1e-1, 1e-3]) == 1e-3


@pytest.mark.parametrize(("fast", "exact", "named"), [(torch.nan, 1.0, r"scored\(0\.1\)"), (1.0, torch.inf, "exact")])
def test_scores_that_are_not_finite_agree_with_nothing(fast, exact, named):
    with pytest.raises(hk.HyperkronError, match=f"{named} has scores that are not finite"):
        agreeing_damping(lambda _: Attribution(torch.full((1, 3), fast)), Attribution(torch.full((1, 3), exact)), [0.1])


@pytest.mark.parametrize(
    ("dampings", "message"),
    [([], "dampings is empty"), ([-1.0], "dampings=-1.0"), ([0.1], "shape .2, 3., and exact of .1, 3.")],
)
def test_what_cannot_be_compared_is_refused(dampings, message):
    with pytest.raises(hk.HyperkronError, match=message):
        agreeing_damping(lambda delta: Attribution(torch.zeros(2, 3)), Attribution(torch.zeros(1, 3)), dampings)
