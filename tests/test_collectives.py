"""Processes that wait for each other outside a collective."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from hyperkron import collectives, solution
from hyperkron.collectives import Group, LostProcessError


def two() -> list[Group]:
    found = [Group(), Group()]
    for rank, group in enumerate(found):
        group.rank, group.size = rank, 2
    return found


def test_processes_meet_again_and_again() -> None:
    store, groups, met = dist.HashStore(), two(), list[Any]()

    def work(group: Group) -> None:
        for number in range(3):
            group.meet("Run.save", store)
            met.append(number)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(met) == [0, 0, 1, 1, 2, 2]
    Group().meet("Run.save")  # one process waits for nobody


def test_a_process_that_waits_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SECONDS_UNTIL_WARNING", 0.0)
    monkeypatch.setattr(collectives, "SECONDS_UNTIL_ERROR", 0.05)
    solution._warned.clear()
    alone = two()[0]
    with (
        pytest.warns(solution.HyperkronWarning, match=r"process 0 waits in Run.save, which all 2 processes must call"),
        pytest.raises(LostProcessError, match=r"others have not within"),
    ):
        alone.meet("Run.save", dist.HashStore())
