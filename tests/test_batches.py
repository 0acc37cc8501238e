"""Loaders as sources of batches: orders of epochs, samplers, workers, and what continues after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

import hyperkron as hk
from hyperkron.batches import Loader


@pytest.mark.parametrize("served", [1, 2, 5])
def test_loaders_that_share_a_generator_continue_with_the_same_batches(served: int) -> None:
    def make() -> hk.algorithms.BatchSources:
        generator, rows = torch.Generator().manual_seed(1), TensorDataset(torch.arange(9))
        return hk.algorithms.BatchSources(
            DataLoader(rows, 2, shuffle=True, generator=generator),
            DataLoader(rows, 3, sampler=RandomSampler(rows, generator=generator)),
        )

    def take(count: int, batches: hk.algorithms.BatchSources) -> list[list[int]]:
        return [batch[0].tolist() for _ in range(count) for batch in (batches.inner(), batches.outer())]

    first, again = make(), make()
    take(served, first)
    again.load_state_dict(first.state_dict())
    assert take(9, again) == take(9, first)


@pytest.mark.parametrize("used", [False, True], ids=["new loader", "used loader"])
@pytest.mark.parametrize("served", [1, 4, 7])
def test_loaders_whose_workers_persist_continue_with_the_same_batches(used: bool, served: int) -> None:
    """Their later epochs draw no seed for workers, so the order comes from other numbers than in the first epoch."""

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(
            range(6),  # type: ignore[arg-type]
            2,
            shuffle=True,
            generator=generator,
            num_workers=1,
            persistent_workers=True,
        )

    source, resumed = Loader(loader()), Loader(loader())
    for _ in range(served):
        source.next()
    for _ in range(5 if used else 0):
        resumed.next()
    resumed.load_state_dict(source.state_dict())
    for _ in range(8):
        assert resumed.next().tolist() == source.next().tolist()


@pytest.mark.parametrize("elsewhere", [lambda loader: Loader(loader).next(), list], ids=["a level", "an evaluation"])
def test_a_loader_whose_workers_persist_is_not_shared(elsewhere: Any) -> None:
    """Its one iterator begins again for whoever asks; batches were left out or repeated, silently."""
    loader: Any = DataLoader(range(8), 2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    source = Loader(loader, "inner_data")
    for _ in range(2):
        source.next()
    elsewhere(loader)
    with pytest.raises(hk.HyperkronError, match=r"inner_data is a DataLoader with persistent_workers=True.* make a "):
        source.next()


def test_a_loader_that_continues_inside_an_epoch_is_taken() -> None:
    """As loaders do whose own state was restored: their iterators count on."""

    class Continued(list[int]):
        def __iter__(self) -> Iterator[int]:
            return Counted(self[2:])

    class Counted:
        def __init__(self, left: list[int]) -> None:
            self.left, self._num_yielded = iter(left), 2

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            found = next(self.left)
            self._num_yielded += 1
            return found

    source = Loader(Continued([0, 1, 2, 3]))
    assert [source.next() for _ in range(3)] == [2, 3, 2]


def sampled(kind: str) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(12))
    if kind == "distributed":  # of one of two processes
        return DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=0))  # type: ignore[arg-type]
    order = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    if kind == "batches":
        return DataLoader(data, batch_sampler=BatchSampler(order, 2, False))
    return DataLoader(data, 2, sampler=order)


@pytest.mark.parametrize("kind", ["distributed", "examples", "batches"])
def test_samplers_have_a_new_order_in_every_epoch_and_are_resumed_in_it(kind: str) -> None:
    """``DistributedSampler`` repeats its order unless it is told the epoch; others draw from their own generator."""
    source, seen, length = Loader(sampled(kind)), [], len(sampled(kind))
    for count in range(3 * length):
        resumed = Loader(sampled(kind))
        resumed.load_state_dict(source.state_dict())
        (rows,) = source.next()
        assert resumed.next()[0].tolist() == rows.tolist(), count
        seen.append(rows.tolist())
    assert len({str(seen[i : i + length]) for i in range(0, len(seen), length)}) == 3


def test_a_loader_begins_at_the_epoch_that_its_sampler_was_told() -> None:
    """A loop of one's own calls ``set_epoch`` before each ``fit``; a resumed run counts on from there."""
    orders = []
    for epoch in range(3):
        loader = sampled("distributed")
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        source = Loader(loader)
        resumed = Loader(sampled("distributed"))
        resumed.load_state_dict(source.state_dict())
        orders.append([source.next()[0].tolist() for _ in range(2 * len(loader))])
        assert [resumed.next()[0].tolist() for _ in range(2 * len(loader))] == orders[-1]
    assert orders[0][3:] == orders[1][:3] != orders[0][:3]
    assert orders[1][3:] == orders[2][:3] != orders[1][:3]
