"""Which rows the simple filters keep, against loops over rows."""

from __future__ import annotations

import pytest
import torch

from hyperkron.cleaning import filters
from hyperkron.cleaning.filters import confident, neighbour_votes


def test_votes_of_neighbours_against_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperkron.cleaning.filters.CHUNK", 7)
    random = torch.Generator().manual_seed(0)
    x, labels = torch.randn(40, 3, generator=random), torch.randint(3, (40,), generator=random)
    found = neighbour_votes(x, labels, 3, count=5)
    for n in range(40):
        near = sorted((float((x[n] - x[m]).double().norm()), m) for m in range(40) if m != n)[:6]
        votes = torch.zeros(3)
        for distance, m in near:
            votes[labels[m]] += (near[-1][0] - distance) / (near[-1][0] - near[0][0])
        assert torch.allclose(found[n], votes / votes.sum(), atol=1e-4)


def test_a_row_never_votes_for_itself_and_equal_rows_count_the_same() -> None:
    x, labels = torch.zeros(4, 2), torch.tensor([0, 1, 1, 1])
    assert neighbour_votes(x, labels, 2, count=5)[0].tolist() == [0.0, 1.0]
    assert torch.allclose(neighbour_votes(x, labels, 2, count=5)[1], torch.tensor([1 / 3, 2 / 3]))


def test_few_of_many_rows_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = torch.arange(60.0)[:, None], torch.arange(60) // 30
    monkeypatch.setattr(filters, "MAX_VOTERS", 20)
    found = neighbour_votes(x, labels, 2, count=3)
    assert int((found.argmax(1) == labels).sum()) > 50 and found.shape == (60, 2)


def test_confident_learning_by_hand() -> None:
    predicted = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8], [0.8, 0.2], [0.55, 0.45]])
    given = torch.tensor([0, 0, 0, 1, 1, 1])
    # means of p(k) over rows labelled k: 0.6 and (0.8 + 0.2 + 0.45) / 3 = 0.483
    # row 2: class 1 is confident, not its label; row 4: class 0 is; row 5: none is
    assert confident(predicted, given).tolist() == [0, 1, 3, 5]
    assert confident(predicted, torch.zeros(6, dtype=torch.long)).tolist() == list(range(6))  # no rows of class 1
