"""The loops that are compared do the same work."""

from __future__ import annotations

import pytest
import torch
from bench_fit_overhead import METHODS, by_fit, by_hand, linear


@pytest.mark.parametrize("way", ["by hand", "losses of torch", "torch alone"])
def test_fit_and_the_loop_by_hand_reach_the_same_point(way: str) -> None:
    work, other = linear("cpu", False), linear("cpu", False)
    by_fit(work, METHODS["identity"](False), False).advance(3)
    step = by_hand(other, METHODS["identity"](False), False, way)
    for _ in range(3):
        step()
    for mine, its in ((work.model, other.model), (work.hyper, other.hyper)):
        for p, q in zip(mine.parameters(), its.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert not torch.equal(work.hyper.weight, linear("cpu", False).hyper.weight)
