"""Every number that goes wrong ends in its documented status, and none in a silently wrong λ."""

from __future__ import annotations

import pytest

import numerics
from hyperkron.solution import Status


@pytest.mark.parametrize("name", numerics.CASES)
def test_each_ends_in_its_status_with_the_right_hyperparameters(name: str) -> None:
    for outcome in numerics.outcomes(name):
        assert outcome.seen == outcome.wanted.name
        assert outcome.error <= 1e-6, outcome
        assert outcome.right


def test_the_judge_sees_what_is_wrong() -> None:
    assert not numerics.Outcome(Status.SKIPPED, "DIRECT", 0.0, "").right
    assert not numerics.Outcome(Status.SKIPPED, "SKIPPED", 1e-3, "").right
    assert not numerics.Outcome(Status.DIVERGED, "DIVERGED", float("inf"), "").right


def test_statuses_that_are_fallbacks_say_so() -> None:
    for name, cases in numerics.CASES.items():
        assert len(cases) >= 1, name
    assert not any(
        status.ok
        for status in (Status.SKIPPED, Status.STALE, Status.COLLAPSED, Status.DIVERGED, Status.NONPOSITIVE_CURVATURE)
    )
