"""Waiting for the device: what is read at once, together, or after a replay."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hyperkron.kernels.execution import Execution, Pending, read

CPU = torch.device("cpu")


def queued() -> Execution:
    """As on a GPU, where every question waits for the device."""
    return Execution(torch.device("cuda"))


def failing(name: str):  # type: ignore[no-untyped-def]
    return lambda found: ValueError(f"{name} is {found}")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each copy to the host."""
    found: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: found.append(x.numel()) or tolist(x))
    return found


def test_numbers_are_read_in_one_copy(copies: list[int]) -> None:
    assert read(torch.tensor(1.5), torch.tensor(math.inf)) == [1.5, math.inf]
    assert copies == [2]


def test_a_cpu_answers_at_once_and_a_queue_does_not() -> None:
    assert not Execution(CPU).queued and queued().queued
    with pytest.raises(ValueError, match="two is nan"):
        Execution(CPU).check_finite(torch.tensor([1.0, math.nan]), failing("two"))


def test_pending_checks_are_read_together(copies: list[int]) -> None:
    step = queued()
    values = {"one": torch.ones(2), "two": torch.tensor([1.0, math.inf]), "three": torch.tensor(math.nan)}
    with patch.object(Execution, "settle"):
        for name, value in values.items():
            step.check_finite(value, failing(name))
    with pytest.raises(ValueError, match="two is infinite"):
        step.settle()
    step.settle()  # nothing is left
    assert copies == [5]


def test_eager_execution_reads_flags_at_once_and_other_numbers_when_they_are_waited_for() -> None:
    step, numbers = Execution(CPU), torch.tensor([1.0, 2.0])
    assert step.read_flags(torch.tensor([0, 3])) == [0, 3]
    later = step.later(numbers)
    numbers[0] = 5.0
    assert later.wait() == [5.0, 2.0]


@pytest.mark.parametrize(
    ("finite", "flag", "holds"), [(1.0, 0, True), (math.inf, 0, False), (math.nan, 0, False), (1.0, 1, False)]
)
def test_a_replay_is_refused_where_something_is_not_as_the_recording_took_it(
    finite: float, flag: int, holds: bool
) -> None:
    step = Execution(CPU, recorded=True)
    step.check_finite(torch.zeros(2), failing("recorded"))
    assert step.read_flags(torch.tensor([True, False])) == [0, 0]
    smaller = step.later(torch.zeros(3)).then(min)
    unread = step.unread()
    unread.copy_(torch.tensor([1.0, finite, flag, 0.0, 4.0, 3.0, 5.0]))  # a replay
    assert step.replayed(unread) == holds
    assert smaller.wait() == 3.0
    unread[4] = 2.0  # another
    step.replayed(unread)
    assert smaller.wait() == 2.0


def test_a_value_that_is_there_is_not_waited_for() -> None:
    assert Pending.ready("here").then(len).wait() == 4
