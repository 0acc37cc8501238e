"""Which candidate wins: Wilson's interval, the paired comparison, and the sentences for a person."""

from __future__ import annotations

import math

import pytest
import torch

from hyperkron.cleaning import ALTERNATIVES, OURS, CleanConfig
from hyperkron.cleaning.choice import (
    RATE_ERROR,
    Judged,
    Noise,
    advantage,
    choose,
    exceeds,
    first_verdict,
    judge,
    noise_of,
    verdict,
    wilson,
)
from hyperkron.solution import HyperkronError


@pytest.mark.parametrize(
    ("right", "rows", "low", "high"),
    [  # Wilson's interval without continuity correction, as published tables give it
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0000),
    ],
)
def test_wilson_against_known_values(right: int, rows: int, low: float, high: float) -> None:
    found = wilson(right / rows, rows)
    assert found == pytest.approx((low, high), abs=6e-5)
    mirrored = wilson(1 - right / rows, rows)
    assert found == pytest.approx((1 - mirrored[1], 1 - mirrored[0]), abs=1e-12)


def test_wilson_solves_its_equation() -> None:
    """The ends are the shares p with |p̂ − p| = 1.96 √(p (1 − p) / n)."""
    for end in wilson(17 / 20, 20):
        assert abs(17 / 20 - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / 20), rel=1e-9)


def candidate(name: str, right: list[int]) -> Judged:
    """One that answered these rows rightly (1) or wrongly (0)."""
    labels = torch.zeros(len(right), dtype=torch.long)
    predicted = torch.tensor([[0.9, 0.1] if r else [0.2, 0.8] for r in right])
    return judge(name, predicted, labels, torch.ones(2))


def test_classes_count_as_they_are_frequent_among_new_rows() -> None:
    """Two rows of class 1, half right, and one of class 2, right; class 0 has no trusted rows: (½ · .4 + .2) / .6."""
    predicted = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
    found = judge("x", predicted, torch.tensor([1, 1, 2]), torch.tensor([0.4, 0.4, 0.2]))
    assert (found.name, found.rows, found.right.tolist()) == ("x", 3, [True, False, True])
    assert found.accuracy == pytest.approx(2 / 3) and found.low < 2 / 3 < found.high
    rare = judge("x", predicted, torch.tensor([1, 1, 2]), torch.tensor([0.0, 0.9, 0.1]))
    assert rare.accuracy == pytest.approx(0.45 + 0.1)


def test_ours_is_kept_on_ties_and_where_the_difference_is_chance() -> None:
    """Won b rows and lost c: (b − c) / √(b + c − (b − c)²/n + 2) must be more than 1.64, for ten alternatives 2.58."""
    ours = candidate(OURS, [1] * 14 + [0] * 6)
    same = candidate("pooled", [1] * 14 + [0] * 6)
    assert choose([ours, same]) == choose([same, ours]) == OURS
    assert choose([ours, candidate("pooled", [1] * 16 + [0] * 4)]) == OURS  # two rows of twenty: 1.03
    assert choose([ours, candidate("pooled", [0] * 14 + [1] * 6)]) == OURS
    assert choose([ours, candidate("pooled", [1] * 10 + [0] * 4 + [1] * 6)]) == OURS  # six won, four lost
    assert advantage(candidate("pooled", [1] * 10 + [0] * 4 + [1] * 6), ours) == pytest.approx(2 / math.sqrt(11.8))


def test_an_alternative_that_is_better_is_delivered() -> None:
    ours = candidate(OURS, [1] * 14 + [0] * 6)
    assert choose([ours, candidate("noisy", [1] * 17 + [0] * 3)]) == OURS  # 1.41
    better, best = candidate("noisy", [1] * 19 + [0]), candidate("trusted", [1] * 20)  # 2.09 and 2.39
    assert choose([ours, better]) == "noisy"
    assert choose([ours, better, best]) == choose([best, ours, better]) == "trusted"
    rest = [candidate(f"other {i}", [0] * 20) for i in range(9)]
    assert choose([ours, best, *rest]) == OURS  # of ten alternatives one is this good by chance
    # a higher accuracy alone does not count: the chosen one must be better on the same rows
    ours, scattered = candidate(OURS, [1] * 10 + [0] * 10), candidate("pooled", [0] * 4 + [1] * 16)
    assert choose([ours, scattered, candidate("sama", [1] * 15 + [0] * 5)]) == "sama"


def test_more_alternatives_need_more_evidence_to_be_called_significant() -> None:
    ours, better = candidate(OURS, [1] * 14 + [0] * 6), candidate("noisy", [1] * 18 + [0] * 2)
    assert advantage(better, ours) == pytest.approx(4 / math.sqrt(5.2))  # 1.75; 1.64 for one, 1.96 for two
    assert exceeds(better, ours) and not exceeds(better, ours, 2) and not exceeds(ours, better)


def test_without_ours_the_most_accurate_is_taken() -> None:
    assert choose([candidate("noisy", [1, 0, 0]), candidate("trusted", [1, 1, 0])]) == "trusted"


NOISE = "About 23% of the 500 labels look wrong (21% to 25%); 101 rows are marked as suspects."


def told(chosen: str, candidates: list[Judged], classes: int = 2, test: tuple[int, int] | None = None) -> str:
    noise = Noise(0.231, 0.209, 0.251, 101, 500, 0.9)
    found = verdict(chosen, candidates, noise, classes=classes, test=test)
    assert found.endswith(NOISE)
    return found.removesuffix(NOISE).strip()


def test_the_spread_of_the_noise_is_that_of_the_views() -> None:
    doubt = torch.tensor([0.9, 0.8, 0.1, 0.2])
    same = noise_of(doubt, [doubt, doubt], 0.5)
    assert (same.rate, same.suspects, same.rows, same.stable) == (pytest.approx(0.5), 2, 4, 1.0)
    assert same.high - same.rate == pytest.approx(1.96 * RATE_ERROR)
    views = [torch.tensor([0.9, 0.2, 0.1, 0.2]), torch.tensor([0.9, 0.8, 0.9, 0.2])]  # rates 0.35 and 0.7
    found = noise_of(doubt, views, 0.5)
    assert found.stable == pytest.approx((1 / 2 + 2 / 3) / 2) and found.low == pytest.approx(1 - found.high)
    assert found.high - 0.5 == pytest.approx(1.96 * math.sqrt(0.35**2 / 4 + RATE_ERROR**2))
    assert str(found).endswith("Only 58% of them stay the same with another seed and other trusted rows.")
    assert noise_of(torch.zeros(3), [torch.zeros(3)], 0.5).stable == 1.0  # no suspects at all
    none = noise_of(torch.zeros(3), [torch.ones(3)], 0.5)
    assert none.stable == 0.0 and str(none).endswith("0 rows are marked as suspects.")


def test_a_single_suspect_is_one_row() -> None:
    assert str(Noise(0.01, 0.0, 0.06, 1, 260, 0.9)).endswith("(0% to 6%); 1 row is marked as a suspect.")
    assert "look wrong; 1 row is marked as a suspect. The" in first_verdict(0.01, 1, 2)


def test_the_verdict_says_where_the_cleaned_model_is_trees() -> None:
    ours, noise = candidate(OURS, [1] * 9 + [0]), Noise(0.231, 0.209, 0.251, 101, 500, 0.9)
    said = verdict(OURS, [ours], noise, classes=2, learner="boosted trees")
    assert said.startswith("The cleaned model (boosted trees) is right on 52.1% to 98.8% of new rows")


def test_the_verdict_is_about_classes_that_have_trusted_rows() -> None:
    ours, noise = candidate(OURS, [1] * 19 + [0]), Noise(0.231, 0.209, 0.251, 101, 500, 0.9)
    said = verdict(OURS, [ours], noise, classes=2, unseen=["z"])
    assert "of new rows of classes that have trusted rows (95%" in said and "not known how often on 'z'." in said
    assert "classes that" not in verdict(OURS, [ours], noise, classes=2)


def test_the_verdict_leads_with_the_interval() -> None:
    ours, alone = candidate(OURS, [1] * 9 + [0]), candidate("trusted", [1] * 8 + [0] * 2)
    first = "The cleaned model is right on 52.1% to 98.8% of new rows (95% interval, from 9 of 10 trusted rows it "
    assert told(OURS, [ours]) == f"{first}had not seen)."
    assert told(OURS, [ours, alone, candidate("noisy", [1] * 5 + [0] * 5)]) == (
        f"{first}had not seen). There is no significant difference to the best alternative ('trusted': 8 of 10)."
    )
    worse = candidate("noisy", [1] + [0] * 9)
    assert "It is significantly better than the best alternative ('noisy': 1 of 10)." in told(OURS, [ours, worse])
    found = told("trusted", [candidate(OURS, [1] * 2 + [0] * 8), alone])
    assert found.startswith("Train on the trusted set alone: its model is right on 42.5% to 96.1% of new rows")
    assert found.endswith(
        "It was significantly better than the cleaned model on trusted rows (8 against 2 of 10); the noisy rows make "
        "the model worse here."
    )
    assert "The alternative 'pooled' is right on at least 63.5%" in told(
        "pooled", [ours, candidate("pooled", [1] * 10)]
    )


def test_the_verdict_never_boasts_of_a_hundred_per_cent_and_concludes_nothing_from_few_rows() -> None:
    many = told(OURS, [candidate(OURS, [1] * 60)])  # whose interval ends at 1 up to rounding
    assert many.startswith("The cleaned model is right on at least 91.2% of new rows")
    whole, other = candidate(OURS, [1] * 10), candidate("noisy", [0] * 10)
    assert "100" not in told(OURS, [whole]).replace("10 of 10", "")
    found = told(OURS, [whole, other], classes=3)
    assert found == (
        "The cleaned model is right on 10 of 10 trusted rows it had not seen: too few to conclude anything about its "
        "accuracy, or about which model is best. Add trusted rows, at least 5 of each class."
    )


def test_the_verdict_explains_an_interval_that_does_not_hold_the_share_of_right_rows() -> None:
    """28 rows of a frequent class are all right, ten of a class that seems to be rare are all wrong."""
    labels = torch.tensor([0] * 28 + [1] * 10)
    answers = torch.tensor([[0.9, 0.1]]).expand(38, 2)
    found = told(OURS, [judge(OURS, answers, labels, torch.tensor([0.99, 0.01]))])
    assert "28 of 38 trusted rows it had not seen, each class counted as often as it seems to be among" in found
    assert "each class" not in told(OURS, [judge(OURS, answers, labels, torch.tensor([28.0, 10.0]))])


def test_with_a_test_set_the_verdict_leads_with_it() -> None:
    whole, other = candidate(OURS, [1] * 10), candidate("noisy", [1] * 9 + [0])
    assert told(OURS, [whole, other], classes=3, test=(463, 500)) == (
        "The cleaned model is right on 92.6% of the 500 test rows (90.0% to 94.6%). On trusted rows there is no "
        "significant difference to the best alternative ('noisy': 9 of 10)."
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compare": ("noisy", "magic")}, "compare='magic' is unknown; choose from noisy, trusted"),
        ({"epochs": 0}, "epochs=0 must be a whole number ≥ 1"),
        ({"epochs": 2.5}, "epochs=2.5 must be a whole number"),
        ({"layers": -1}, "layers=-1 must be a whole number ≥ 0"),
        ({"seed": True}, "seed=True must be a whole number"),
        ({"budget": 0}, "budget=0 must be a positive number; give seconds"),
        ({"budget": float("nan")}, "budget=nan must be a positive"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(HyperkronError) as error:
        CleanConfig(**settings)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_the_default_compares_with_everything() -> None:
    assert CleanConfig().compare == ALTERNATIVES and OURS not in ALTERNATIVES
