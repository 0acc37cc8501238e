"""Bad input gets an error that names the argument, its value and the remedy: one table of them.

Its rows are in ``bad_problems.py``, ``bad_arguments.py`` and ``bad_combinations.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bad_arguments
import bad_combinations
import bad_problems
import hyperkron as hk
from hyperkron import solution
from spoiling import Given

PARTS = (bad_problems.TABLE, bad_arguments.TABLE, bad_combinations.TABLE)
TABLE = {name: row for part in PARTS for name, row in part.items()}
assert len(TABLE) == sum(map(len, PARTS)), "two rows have one name"


@pytest.mark.parametrize("name", list(TABLE))
def test_bad_input_is_named(name: str) -> None:
    spoil, error, fragments = TABLE[name]
    given = Given()
    with pytest.raises(error) as caught:
        spoil(given)
    message = str(caught.value)
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{missing} not in: {message}"
    hypers = list(given.hyper.parameters()) if isinstance(given.hyper, nn.Module) else []
    assert all(p.grad is None for p in hypers)


@pytest.mark.parametrize(
    "method",
    [hk.kfac, hk.ekfac, hk.cg, hk.pcg, hk.neumann, hk.gradient_descent, hk.identity, hk.sama, lambda: hk.one_step(0.1)],
)
def test_the_good_problem_is_good(method: Any) -> None:
    assert Given().run(method()).outer_loss > 0


def test_sama_says_when_the_gradients_it_needs_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", set())
    given = Given()
    optimizer = torch.optim.AdamW(given.model.parameters())
    given.run(hk.sama(optimizer))  # before the first step there is nothing to miss
    given.outer(given.model, None, given.held).backward()
    optimizer.step()
    given.run(hk.sama(optimizer))
    given.model.zero_grad()
    with pytest.warns(hk.HyperkronWarning, match="before zero_grad"):
        given.run(hk.sama(optimizer))
