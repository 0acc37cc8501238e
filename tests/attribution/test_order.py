"""Losses and collate functions that put the examples of a batch in another order: scores must not go to other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

import hyperkron as hk

Batch = tuple[Tensor, ...]


def plain(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def by_size(batch: Batch) -> list[Tensor]:
    order = batch[0].flatten(1).sum(1).argsort()
    return [x[order] for x in batch]


def sorts(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    return plain(model, tuple(by_size(batch)))


def sorts_and_tells_no_rows(model: nn.Module, batch: Batch) -> Tensor:
    x, y = by_size(batch)
    return F.cross_entropy(model(x), y)


def flips_within(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0].flip(0)).flip(0), batch[1])


def made(*shape: int) -> tuple[nn.Module, Batch, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()
    x, y = torch.randn(40, *shape, 5, dtype=torch.float64), torch.randint(0, 3, (40, *shape))
    return model, (x[:32], y[:32]), (x[32:], y[32:])


def one_by_one(query_loss: Any, queries: Batch, **given: Any) -> Tensor:
    model, train, _ = made(*queries[1].shape[1:])
    alone = [tuple(part[q : q + 1] for part in queries) for q in range(len(queries[0]))]
    return torch.cat([hk.attribute(plain, model, train, q, query_loss=query_loss, **given).scores for q in alone])


class Experts(nn.Module):
    """Layers of which each is called only where an example is sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        sent = x[:, :3].argmax(1)
        chosen = [(sent == i, expert) for i, expert in enumerate(self.experts)]
        return sum(here[:, None] * expert(x) for here, expert in chosen if here.any())  # type: ignore[return-value]


def test_halves_of_a_batch_may_call_other_layers() -> None:
    """The first half of these rows goes to other experts than the second."""
    _, (x, y), queries = made()
    x = x[x[:, :3].argmax(1).argsort()]
    model = Experts().double()

    def tells_no_rows(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    found, wanted = (
        hk.attribute(loss, model, (x, y), queries, query_loss=plain, method=hk.identity()).scores
        for loss in (tells_no_rows, plain)
    )
    torch.testing.assert_close(found, wanted)


def test_picked_out_tokens_are_looked_at_in_every_batch_of_queries() -> None:
    """32 queries of two tokens, then one of one and one of three: four tokens, as of two queries with two each."""
    lengths = torch.tensor([2] * 32 + [1, 3])
    model, train, _ = made(4)
    x = torch.randn(len(lengths), 4, 5, dtype=torch.float64)
    y = torch.randint(0, 3, (len(lengths), 4)).masked_fill(torch.arange(4) >= lengths[:, None], -100)

    def picked(model: nn.Module, batch: Batch) -> hk.losses.Loss:
        there = batch[1] >= 0
        return hk.losses.cross_entropy(model(batch[0])[there], batch[1][there])

    options = {"query_loss": picked, "method": hk.identity()}
    found = hk.attribute(plain, model, train, (x, y), **options).scores[32:]
    torch.testing.assert_close(found, one_by_one(picked, (x[32:], y[32:]), method=hk.identity()))


@pytest.mark.parametrize("loss", [sorts, sorts_and_tells_no_rows, flips_within])
@pytest.mark.parametrize("batch_size", [2, 5, 256])
def test_another_order_in_the_loss_is_refused(loss: Any, batch_size: int) -> None:
    model, train, queries = made()
    train = tuple(part.flip(0) for part in by_size(train))  # so that no batch is in the order of the loss
    options = {"method": hk.identity(), "batch_size": batch_size}
    with pytest.raises(hk.HyperkronError, match="loss has the examples of a batch in another order"):
        hk.attribute(loss, model, train, queries, query_loss=plain, **options)
    with pytest.raises(hk.HyperkronError, match="loss has the examples of a batch in another order"):
        hk.attribution.self_influence(loss, model, train, **options)


def test_so_is_another_order_in_collate() -> None:
    model, train, queries = made()
    given = {"collate": lambda items: by_size(default_collate(items)), "method": hk.identity()}
    with pytest.raises(hk.HyperkronError, match=r"do not sort, shuffle or flip .* in collate"):
        hk.attribute(plain, model, list(zip(*train, strict=True)), queries, **given)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_queries_in_another_order_are_scored_as_if_alone(count: int) -> None:
    model, train, (x, y) = made()
    order = x.sum(1)[1:].argsort(descending=True) + 1  # the first query stays the first one, and the last the last
    queries = x[:count], y[:count]
    if count > 3:
        chosen = torch.cat([order[-1:], order[: count - 1]])
        queries = x[chosen], y[chosen]
    given = {"method": hk.identity(), "way": "layers"}
    found = hk.attribute(plain, model, train, queries, query_loss=sorts, **given).scores
    torch.testing.assert_close(found, one_by_one(sorts, queries, **given), rtol=1e-9, atol=1e-14)


def test_a_sum_whose_first_query_has_no_gradient_is_that_of_each_alone() -> None:
    model, train, (x, y) = made()
    queries = x.index_fill(0, torch.tensor(0), 0.0), y

    def total(model: nn.Module, batch: Batch) -> hk.losses.Loss:
        return plain(model, batch) * len(batch[1])

    given = {"method": hk.identity(), "way": "layers"}
    found = hk.attribute(plain, model, train, queries, query_loss=total, **given).scores
    torch.testing.assert_close(found, one_by_one(total, queries, **given), rtol=1e-9, atol=1e-14)


def selected(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    """A mean over the tokens that count, which are picked out: how many an example has is not told."""
    counts = batch[1] >= 0
    return hk.losses.cross_entropy(model(batch[0])[counts], batch[1][counts])


@pytest.mark.parametrize("lengths", [(1, 2, 1, 2), (2, 1, 3), (2, 2, 3, 3, 1, 1)])
def test_queries_whose_tokens_are_picked_out_are_scored_as_if_alone(lengths: tuple[int, ...]) -> None:
    model, train, (x, y) = made(4)
    y = y[: len(lengths)].masked_fill(torch.arange(4) >= torch.tensor(lengths)[:, None], -100)
    queries, given = (x[: len(lengths)], y), {"method": hk.identity(), "way": "layers"}
    found = hk.attribute(plain, model, train, queries, query_loss=selected, **given).scores
    torch.testing.assert_close(found, one_by_one(selected, queries, **given), rtol=1e-9, atol=1e-14)


def test_tokens_of_batches_that_are_padded_or_picked_out_are_no_other_order() -> None:
    model, (x, y), queries = made(4)
    lengths = torch.randint(1, 5, (32,))
    items = [(x[i, :n], y[i, :n]) for i, n in enumerate(lengths.tolist())]
    masked = x, y.masked_fill(torch.arange(4) >= lengths[:, None], -100)

    def padded(items: list[Batch]) -> Batch:
        inputs, labels = zip(*items, strict=True)
        return nn.utils.rnn.pad_sequence(inputs, True), nn.utils.rnn.pad_sequence(labels, True, -100)

    def flattened(model: nn.Module, batch: Batch) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    given = {"method": hk.identity(), "query_loss": plain, "batch_size": 10}
    wanted = hk.attribute(plain, model, masked, queries, **given).scores
    for loss, train in ((plain, items), (flattened, items), (selected, masked), (flattened, masked)):
        found = hk.attribute(loss, model, train, queries, collate=padded, **given).scores
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-14)
