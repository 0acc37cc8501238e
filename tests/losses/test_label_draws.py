"""Labels are drawn with the probabilities of their classes, independently of each other, and survive rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyperkron.losses import classification, cross_entropy
from hyperkron.losses.base import BatchPlace
from hyperkron.losses.label_draws import SEEDS, _mixed, drawn_classes, first_to_arrive

PIECE = 2**20


def seeds(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(*SEEDS, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def z_score(counts: Tensor, p: Tensor) -> float:
    """χ² of counts against probabilities, as a standard normal number (Wilson and Hilferty, 1931)."""
    expected, k = p.double() * counts.sum(), len(counts) - 1
    ratio = float(((counts - expected).square() / expected).sum()) / k
    return (ratio ** (1 / 3) - (1 - 2 / (9 * k))) / (2 / (9 * k)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 5, 40])
def test_frequencies_are_the_probabilities(classes: int, dtype: torch.dtype) -> None:
    p = torch.randn(classes, generator=torch.Generator().manual_seed(1), dtype=dtype).softmax(-1)
    rows = 400_000 // classes
    found = drawn_classes(p.expand(rows, classes), seeds(rows, 2), PIECE)
    for drawn in found.T:  # each sample by itself
        assert abs(z_score(torch.bincount(drawn, minlength=classes), p)) < 4
    pairs = (classes * found[:, 0] + found[:, 1]).bincount(minlength=classes**2)
    assert abs(z_score(pairs, torch.outer(p, p).flatten())) < 4


def test_of_many_classes_none_is_preferred() -> None:
    classes, rows = 8000, 4000
    p = torch.full((1, 1), 1 / classes).expand(rows, classes)
    drawn = torch.cat([drawn_classes(p[:100], seeds(100, 1, seed=i), PIECE) for i in range(rows // 100)])
    for group in (drawn // 400, drawn % 20):
        assert abs(z_score(torch.bincount(group.flatten(), minlength=20), torch.full((20,), 0.05))) < 4


def test_numbers_of_neighbours_are_independent() -> None:
    bits = _mixed(seeds(1000, 1) + _mixed(torch.arange(1, 501, dtype=torch.int32).mul_(-0x61C88647)))
    for first, second in ((bits[:, :-1], bits[:, 1:]), (bits[:, :-7], bits[:, 7:]), (bits[:-1], bits[1:])):
        for places in (27, 16, 0):  # the highest bits, and some that count where numbers are small
            cells = 32 * (first >> places & 31) + (second >> places & 31)
            assert abs(z_score(torch.bincount(cells.flatten(), minlength=1024), torch.full((1024,), 2.0**-10))) < 4


def test_rounding_of_logits_changes_few_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2.5 * torch.randn(400, 32_000, generator=generator)
    logits[:, :4] += 9  # a few likely classes, and many unlikely ones
    exact, rounded = logits.softmax(-1), logits.bfloat16().float().softmax(-1)
    found = [drawn_classes(p, seeds(400, 1), PIECE) for p in (exact, rounded)]
    assert (found[0] != found[1]).float().mean() < 0.03
    uniform = torch.rand(400, 1, generator=generator)  # by the cumulated probabilities
    searched = [torch.searchsorted(p.cumsum(-1), uniform * p.sum(-1, keepdim=True)) for p in (exact, rounded)]
    assert (searched[0] != searched[1]).float().mean() > 0.2


@pytest.mark.parametrize("edge", [-(2**31), -1, 0, 2**31 - 1])
def test_extreme_numbers_draw_a_possible_class(edge: int) -> None:
    p = torch.tensor([[0.0, 1.0, 0.0], [1e-44, 1e-30, 1.0]])
    bits = torch.full((2, 1, 3), edge, dtype=torch.int32)
    assert first_to_arrive(p, bits).flatten().tolist() == [1, 2]


def test_pieces_samples_and_ranks_draw_the_same_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 4, 50, generator=torch.Generator().manual_seed(0))

    def drawn(rows: slice = slice(None), place: BatchPlace | None = None) -> Tensor:
        term = cross_entropy(logits[rows], torch.zeros(6, 4, dtype=torch.long)[rows]).terms[0]
        object.__setattr__(term, "place", place)
        return torch.stack([v.argmin(-1) for v in term.vectors("mc", 3, torch.Generator().manual_seed(7))])

    whole = drawn()
    counts = torch.tensor([2, 4])
    parts = [drawn(rows, BatchPlace(counts, rank)) for rank, rows in enumerate((slice(2), slice(2, 6)))]
    assert torch.equal(torch.cat(parts, 1), whole)
    monkeypatch.setattr(classification, "PIECE", 70)  # one row, and one sample, at a time
    assert torch.equal(drawn(), whole)
