"""Processes that wait for each other outside a collective."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from hyperkron import collectives, solution
from hyperkron.collectives import Group


def two() -> list[Group]:
    found = [Group(), Group()]
    for rank, group in enumerate(found):
        group.rank, group.size = rank, 2
    return found


@pytest.mark.filterwarnings("error")
def test_processes_meet_again_and_again() -> None:
    store, met = dist.HashStore(), list[Any]()

    def work(group: Group) -> None:
        for number in range(3):
            group.meet("Run.save", store)
            met.append(number)

    threads = [threading.Thread(target=work, args=(group,)) for group in two()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert met == [0, 0, 1, 1, 2, 2]
    Group().meet("Run.save")  # one process waits for nobody


def test_a_process_that_is_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SECONDS_ALONE", 0.01)
    monkeypatch.setattr(solution, "_warned", set())
    with pytest.warns(solution.HyperkronWarning, match=r"process 0 is alone in Run.save.* others are over 0.01 s late"):
        two()[0].meet("Run.save", dist.HashStore())
