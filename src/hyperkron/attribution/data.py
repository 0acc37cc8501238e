"""Training examples and queries by row number: tensors, or a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hyperkron.solution import HyperkronError


class ExampleRows:
    """A collection of examples that gives out batches of consecutive ones, on the model's device.

    Args:
        name: the argument's name, for error messages.
        given: a tensor, a tuple, list or dictionary of tensors with one row per example, or a map-style dataset
            (``len`` and ``[i]``).
        device: where batches go.
        collate: makes a batch from a list of the dataset's items.
    """

    def __init__(
        self, name: str, given: Any, device: torch.device, collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        self.given, self.device, self.collate = given, device, collate
        self.tensors = _tensors(given)
        if self.tensors:
            counts = {len(x) if x.ndim else 0 for x in self.tensors}
            if len(counts) > 1:
                raise HyperkronError(f"{name} has tensors of {sorted(counts)} rows; give one row per example in each.")
            self.count = counts.pop()
        elif hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, (str, bytes)):
            self.count = len(given)
        else:
            raise HyperkronError(
                f"{name} is a {type(given).__name__}; pass tensors with one row per example, such as (x, y), or a "
                "dataset with len() and [i]."
            )
        if not self.count:
            raise HyperkronError(f"{name} has no examples; pass at least one.")

    def __len__(self) -> int:
        return self.count

    def batch(self, start: int, stop: int) -> Any:
        """The examples ``start`` ≤ i < ``stop``."""
        if self.tensors:
            return _map(self.given, lambda x: x[start:stop].to(self.device))
        rows = range(start, min(stop, self.count))
        fetch = getattr(self.given, "__getitems__", None)  # as DataLoader does: many items at once, where that is known
        items = [self.given[i] for i in rows] if fetch is None else fetch(list(rows))
        return _map(self.collate(items), lambda x: x.to(self.device))


class Parts(Sequence[Any]):
    """The batches of ``rows``, each made when it is asked for."""

    def __init__(self, rows: ExampleRows, size: int) -> None:
        self.rows, self.size = rows, size

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.rows.batch(*self.span(index))

    def span(self, index: int) -> tuple[int, int]:
        """First row and the one after the last of a batch."""
        return index * self.size, min((index + 1) * self.size, len(self.rows))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


def _tensors(given: Any) -> list[Tensor]:
    """The tensors of a tuple, list or dictionary that has nothing else; an empty list for anything else."""
    if isinstance(given, Tensor):
        return [given]
    values = list(given.values()) if isinstance(given, Mapping) else given
    if isinstance(values, (tuple, list)) and values and all(isinstance(x, Tensor) for x in values):
        return list(values)
    return []


def _map(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, function) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map(value, function) for value in batch)
    return batch
