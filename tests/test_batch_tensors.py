"""Batches of every kind: their tensors, copies of their structure, and recordings that are filled with them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hyperkron.batch_tensors import map_tensors, tensors_of
from hyperkron.kernels.graphs import StaticBatch

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    x: Tensor
    more: Any = None
    count: int = field(default=0, init=False)


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    more: Any = None


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None, "name", 3),
    "namedtuple": lambda x: Pair(x, {"z": x + 1}),
    "dictionary": lambda x: {"x": x, "z": [x + 1, 0.5]},
    "ordered dictionary": lambda x: OrderedDict(x=x),
    "tokenizer's output": lambda x: UserDict(x=x),
    "read-only mapping": lambda x: MappingProxyType({"x": x}),
    "dataclass": lambda x: Record(x, [x + 1]),
    "frozen dataclass": lambda x: Frozen(x, Record(x + 1)),
}


def values(batch: Any) -> list[Any]:
    return [(name, x.tolist()) for name, x in tensors_of("batch", batch)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_is_filled_with_batches_of_every_kind(kind: str) -> None:
    made = KINDS[kind]
    first, second = made(torch.zeros(2)), made(torch.ones(2))
    static = StaticBatch(first)
    assert static.fits(first) and static.fits(second)
    static.fill(second)
    assert values(static.value) == values(second)
    assert values(first) == values(made(torch.zeros(2)))
    assert not static.fits(made(torch.ones(3))) and not static.fits(made(torch.ones(2).double()))


@pytest.mark.parametrize("other", ["other", 4, None, (1,)])
def test_values_beside_tensors_are_compared(other: Any) -> None:
    assert StaticBatch((torch.zeros(2), 3)).fits((torch.ones(2), np.int64(3)))
    assert not StaticBatch((torch.zeros(2), 3)).fits((torch.ones(2), other))


@pytest.mark.parametrize("unknown", [SimpleNamespace(x=torch.zeros(2)), np.zeros(2), object()])
def test_what_holds_unknown_things_is_not_replayed(unknown: Any) -> None:
    """A recording would keep reading the tensors that it held at first."""
    assert not StaticBatch((torch.zeros(2), None)).fits((torch.zeros(2), unknown))
    with pytest.raises(RuntimeError, match="may change unseen"):
        StaticBatch((torch.zeros(2), unknown))


def test_the_fields_of_dataclasses_are_named_and_mapped() -> None:
    batch = Frozen(torch.zeros(2), {"inner": Record(torch.ones(1), "text")})
    assert [name for name, _ in tensors_of("batch", batch)] == ["batch.x", "batch.more['inner'].x"]
    moved = map_tensors(lambda x: x + 1, batch)
    assert isinstance(moved, Frozen) and moved.more["inner"].more == "text"
    assert values(moved) == [("batch.x", [1.0, 1.0]), ("batch.more['inner'].x", [2.0])]
    assert float(batch.x.sum()) == 0.0
