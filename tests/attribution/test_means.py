"""Losses of batches that are not means over examples, and the loss of all queries in batches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import hyperkron as hk
import oracles

Batch = tuple[Tensor, ...]


def mean(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def total(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    return mean(model, batch) * len(batch[1])


def plain_total(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def weighted(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 5.0]).to(batch[0]))


def contrastive(model: nn.Module, batch: Batch) -> hk.losses.Loss:
    z = model(batch[0])
    return hk.losses.cross_entropy(z @ z.T, torch.arange(len(z)))


def made(*shape: int) -> tuple[nn.Module, Batch, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    rows = [(torch.randn(n, *shape, 5, dtype=torch.float64), torch.randint(0, 3, (n, *shape))) for n in (20, 10)]
    return model, *rows


@pytest.mark.parametrize("loss", [total, plain_total, weighted, contrastive])
@pytest.mark.parametrize("batch_size", [5, 256])
def test_a_loss_that_is_no_mean_is_refused(loss: Any, batch_size: int) -> None:
    model, train, queries = made()
    options = {"method": hk.identity(), "batch_size": batch_size}
    with pytest.raises(hk.HyperkronError, match=r"^loss is .* not a mean over examples, .* divide sums"):
        hk.attribute(loss, model, train, queries, query_loss=mean, **options)
    with pytest.raises(hk.HyperkronError, match=r"^loss is .* not a mean over examples"):
        hk.attribution.self_influence(loss, model, train, **options)


def test_random_numbers_and_saturated_networks_are_no_reason_to_refuse() -> None:
    model, train, _ = made()
    model, train = model.float(), (train[0].float(), train[1])
    noisy = lambda m, b: mean(m, (b[0] + torch.randn_like(b[0]), b[1]))  # noqa: E731
    hk.attribute(noisy, model, train, train, method=hk.identity())
    of_numpy = lambda m, b: mean(m, (b[0] + torch.from_numpy(np.random.randn(*b[0].shape)).to(b[0]), b[1]))  # noqa: E731
    hk.attribute(of_numpy, model, train, train, method=hk.identity())
    model[2].weight.data.mul_(300)
    sure = train[0], model(train[0]).argmax(1)
    assert mean(model, sure).item() < 1e-3
    hk.attribute(mean, model, sure, sure, method=hk.identity())


class Disturbed(Dataset[Any]):
    """Augmented at random, by Python's generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((5,), float(i) + random.gauss(0, 9), dtype=torch.float64), i % 3


def test_data_that_is_augmented_at_random_is_no_reason_to_refuse() -> None:
    model, train, _ = made()
    for _ in range(3):
        hk.attribute(mean, model, Disturbed(), train, method=hk.identity())
        hk.attribution.self_influence(mean, model, Disturbed(), method=hk.identity())

    def masked(items: list[Any]) -> Batch:  # as collators of masked language models do
        x, y = torch.utils.data.default_collate(items)
        return x * torch.from_numpy(np.random.rand(*x.shape) < 0.7), y

    hk.attribute(mean, model, list(zip(*train, strict=True)), train, method=hk.identity(), collate=masked)


def test_examples_from_all_over_the_set_are_compared() -> None:
    """Class weights of torch are normalised over the batch, which the first rows of a sorted set do not show."""
    model, (x, _), queries = made()
    y = torch.arange(20) // 7
    with pytest.raises(hk.HyperkronError, match="not a mean over examples"):
        hk.attribute(weighted, model, (x.repeat(3, 1), y.repeat_interleave(3)), queries, method=hk.identity())


def test_criteria_with_different_masks_have_no_loss_of_all_batches() -> None:
    model, train, queries = made(4)
    masked = queries[1].clone()
    masked[:3, 1:] = -100

    def two(model: nn.Module, batch: Batch) -> hk.losses.Loss:
        z, first, second = model(batch[0]), *batch[1:]
        return hk.losses.cross_entropy(z, first) + hk.losses.cross_entropy(z, second, ignore_index=-100)

    options = {"query_loss": two, "method": hk.identity(), "aggregate": True}
    rows = (queries[0], queries[1], masked)
    with pytest.raises(hk.HyperkronError, match=r"aggregate=True .* same mask.* With batch_size=10 or more"):
        hk.attribute(mean, model, train, rows, batch_size=3, **options)
    assert hk.attribute(mean, model, train, rows, batch_size=10, **options).scores.isfinite().all()


@pytest.mark.parametrize("batch_size", [3, 256])
@pytest.mark.parametrize("way", ["layers", "forward"])
def test_aggregated_queries_are_those_of_one_batch(batch_size: int, way: Any) -> None:
    model, train, (x, y) = made(4)
    y[torch.arange(4) > torch.arange(10)[:, None] % 4] = -100  # one to four tokens each
    params = list(model.parameters())

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        return oracles.gradient(F.cross_entropy(model(x).flatten(0, -2), y.flatten()), params).detach()

    examples = torch.stack([gradient(*one) for one in zip(*train, strict=True)]) / 20
    options = {"method": hk.identity(), "batch_size": batch_size, "way": way}
    found = hk.attribute(mean, model, train, (x, y), aggregate=True, **options).scores
    torch.testing.assert_close(found[0], examples @ gradient(x, y), rtol=1e-9, atol=1e-14)


def test_an_aggregated_sum_is_refused_in_batches() -> None:
    model, train, queries = made()
    options = {"query_loss": plain_total, "method": hk.identity(), "aggregate": True}
    with pytest.raises(hk.HyperkronError, match=r"^query_loss is .* scores would depend on batch_size"):
        hk.attribute(mean, model, train, queries, batch_size=4, **options)
    whole, average = (
        hk.attribute(mean, model, train, queries, **{**options, "query_loss": f}).scores for f in (plain_total, mean)
    )
    torch.testing.assert_close(whole, 10 * average)


def test_queries_whose_weights_are_normalised_over_the_batch_are_scored_as_if_alone() -> None:
    model, train, (x, y) = made()
    x, y = x.repeat(5, 1), y.repeat(5)
    weights = torch.ones(50, dtype=torch.float64)
    weights[40:] = torch.rand(10, dtype=torch.float64) + 0.1  # not among the first, which are compared

    def normalised(model: nn.Module, batch: Batch) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=batch[2]) / batch[2].mean()

    options = {"query_loss": normalised, "method": hk.identity(), "way": "layers"}
    found = hk.attribute(mean, model, train, (x, y, weights), **options).scores
    torch.testing.assert_close(found[40:], found[:10], rtol=1e-9, atol=1e-14)
