"""Training examples and queries by row number: tensors, or a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from hyperkron.batch_tensors import map_tensors
from hyperkron.evaluation.point import Level, Point
from hyperkron.problem import rows, shares
from hyperkron.solution import HyperkronError, NonFiniteError
from hyperkron.trees import Tree, is_finite, unstacked, widened

COMPARED = 16
"""Examples in the first batch, on which gradients are compared; losses on as many from all over the set."""


class ExampleRows:
    """Examples of the argument ``name``, given out as batches of consecutive ones on the model's device.

    ``given`` is a tensor, a tuple, list or dictionary of tensors with one row per example, or a map-style dataset,
    whose items ``collate`` makes batches of.

    Attributes:
        channels_last: whether images (N, C, H, W) are given out with their channels last in memory.
    """

    channels_last = False

    def __init__(
        self, name: str, given: Any, device: torch.device, collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        self.given, self.device, self.collate = given, device, collate
        columns = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else ()
        if any(type(column).__module__ == "numpy" for column in columns):
            raise HyperkronError(f"{name} holds numpy arrays; pass tensors: torch.from_numpy(x).")
        self.tensors = _tensors(given)
        if self.tensors:
            counts = {len(x) if x.ndim else 0 for x in self.tensors}
            if len(counts) > 1:
                raise HyperkronError(f"{name} has tensors of {sorted(counts)} rows; give one row per example in each.")
            self.count = counts.pop()
        elif odd := _beside_tensors(given):
            raise HyperkronError(
                f"{name} holds a {odd} beside or in place of tensors; give tensors alone, each with one row per "
                "example (leave out what is None, unpack what is nested), or a dataset of items."
            )
        elif _is_dataset(given):
            self.count = len(given)
        else:
            loader = hasattr(given, "dataset")
            other = "its .dataset, with collate=" if loader else "a dataset with len() and [i]"
            raise HyperkronError(
                f"{name} is a {type(given).__name__}; pass tensors with one row per example, such as (x, y), or "
                f"{other}."
            )
        if not self.count:
            raise HyperkronError(f"{name} has no examples; pass at least one.")

    def __len__(self) -> int:
        return self.count

    def batch(self, start: int, stop: int) -> Any:
        """The examples ``start`` ≤ i < ``stop``."""
        if self.tensors:
            return map_tensors(lambda x: self._placed(x[start:stop]), self.given)
        return map_tensors(self._placed, self.collate(self._items(range(start, min(stop, self.count)))))

    def chosen(self, rows: Sequence[int]) -> Callable[[slice], Any]:
        """The examples ``rows``, of which slices are given out as :meth:`batch` does; each is fetched only once."""
        if self.tensors:
            return lambda some: map_tensors(lambda x: self._placed(x[list(rows[some])]), self.given)
        items = self._items(rows)
        return lambda some: map_tensors(self._placed, self.collate(items[some]))

    def _items(self, rows: Sequence[int]) -> list[Any]:
        fetch = getattr(self.given, "__getitems__", None)  # as DataLoader does: many items at once, where that is known
        return [self.given[i] for i in rows] if fetch is None else list(fetch(list(rows)))

    def _placed(self, x: Tensor) -> Tensor:
        image = self.channels_last and x.dim() == 4 and x.is_floating_point()
        return x.to(self.device, memory_format=torch.channels_last if image else torch.preserve_format)


class Parts:
    """The batches of ``rows``, each made when it is asked for; ``spans`` has the first row of each and its end.

    The first batch has ``first`` rows, if that is less than ``size``.
    """

    def __init__(self, rows: ExampleRows, size: int, first: int | None = None) -> None:
        self.rows, self.size = rows, size
        starts = [0, *range(min(first or size, size), len(rows), size)]
        self.spans = list(pairwise([*starts, len(rows)]))

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows.batch(*span) for span in self.spans)


def batch_shares(point: Point, parts: Parts, level: Level = "inner") -> list[float]:
    """What each batch counts in the loss of all: by its rows (examples, or tokens) that are not masked.

    Which of them count is known only after a forward pass over the data.
    """
    if len(parts) == 1:
        return [1.0]

    def counted(start: int, stop: int) -> tuple[float, ...]:  # with gradients, which the loss may be made of
        return rows(point.evaluate(level, parts.rows.batch(start, stop)).terms, stop - start)

    return shares([counted(*span) for span in parts.spans])


def weighed(pieces: Iterable[tuple[Tensor, tuple[float, ...]]]) -> Tensor:
    """What belongs to the loss of all examples, from its pieces for the loss of each batch, which are overwritten, and
    the rows that count in these losses."""
    found, counts = zip(*((widened({"": piece})[""], counted) for piece, counted in pieces), strict=True)
    return finite(torch.cat([x.mul_(share) for x, share in zip(found, shares(list(counts)), strict=True)], 1))


def finite(scores: Tensor, first: int = 0) -> Tensor:
    """``scores`` (queries, examples) from row ``first`` of the training examples on, refused if they are not finite."""
    if not bool((fine := scores.sum(0).isfinite()).all()):
        raise _not_finite(f"the scores of row {first + int(fine.logical_not().nonzero()[0])} of train are")
    return scores


@contextmanager
def named_rows(name: str, first: int | None, gradients: Tree) -> Iterator[None]:
    """Where a solve for stacked ``gradients`` refuses them, say which row of the argument ``name`` is not finite.

    ``first`` is the row of the first of them, or ``None`` for the mean over all rows.
    """
    try:
        yield
    except NonFiniteError as error:
        bad = next((i for i, one in enumerate(unstacked(gradients)) if not is_finite(one)), None)
        if bad is None:
            raise
        raise _not_finite(f"the gradient of {'' if first is None else f'row {first + bad} of '}{name} is") from error


def _not_finite(what: str) -> NonFiniteError:
    return NonFiniteError(
        f"{what} not finite; look for extreme values there, and for infinite derivatives in the loss or the model, "
        "such as that of sqrt at 0."
    )


def _tensors(given: Any) -> list[Tensor]:
    """The tensors of a tuple, list or dictionary that has nothing else; an empty list for anything else."""
    if isinstance(given, Tensor):
        return [given]
    values = list(given.values()) if isinstance(given, Mapping) else given
    if isinstance(values, (tuple, list)) and values and all(isinstance(x, Tensor) for x in values):
        return list(values)
    return []


def _beside_tensors(given: Any) -> str:
    """The type of what is not a tensor in a dictionary, or beside tensors in a tuple or list; empty if nothing is."""
    values = list(given.values()) if isinstance(given, Mapping) else given
    mixed = isinstance(values, (tuple, list)) and any(isinstance(x, Tensor) for x in values)
    numbered = isinstance(given, Mapping) and set(given) == set(range(len(given)))  # items by number, as a dataset has
    if numbered or not (mixed or isinstance(given, Mapping)):
        return ""
    return next((type(x).__name__ for x in values if not isinstance(x, Tensor)), "")


def _is_dataset(given: Any) -> bool:
    """Whether it has items by number: a DataLoader has not, and an iterable dataset only if it says how."""
    if isinstance(given, IterableDataset) and type(given).__getitem__ is Dataset.__getitem__:
        return False
    known = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    return known and not isinstance(given, (str, bytes))
