"""Processes that wait for each other outside a collective, and derivatives of what they add up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hyperkron import collectives, solution
from hyperkron.collectives import Group, replicated


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


class Twins(Group):
    """Two processes that hold the same, seen from one of them."""

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [2 * x for x in tensors]


def test_derivatives_of_every_order_are_those_of_the_sum_over_processes() -> None:
    """J = Σ_r exp θ: ‖∂J‖² = 4 exp 2θ has derivatives that pass through a gradient, whose own derivative is summed."""
    theta = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    here = replicated(Twins(), {"theta": theta})["theta"]
    (found,) = torch.autograd.grad(here.exp().sum(), theta, create_graph=True)
    found = found.square().sum()
    for order in (1, 2, 3):
        (slope,) = torch.autograd.grad(found, theta, create_graph=True)
        torch.testing.assert_close(slope, 4 * 2**order * (2 * theta).exp())
        found = slope.sum()
