"""Where batches come from: one source for each level, and the state to resume it.

A batch is whatever the objectives take; a source gives a fresh one whenever an algorithm asks. ``as_source``
makes one of anything that holds data: a loader, a function, a fixed batch, or :class:`Examples`, the indexable
batches that finite-sum methods (SABA, SRBA, VRBO) need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hyperkron.evaluation.inputs import differentiable_batch
from hyperkron.hypergradient.unrolled import Batches
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_whole


class Source(ABC):
    """Gives batches for ever."""

    @abstractmethod
    def next(self) -> Any:
        """A fresh batch."""

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        if state:
            raise HyperkronError(f"{type(self).__name__} keeps no state, but one with {sorted(state)} was given.")


class Fixed(Source):
    """The same batch every time: full-batch training.

    Example:
        >>> Fixed((1, 2)).next()
        (1, 2)
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def next(self) -> Any:
        return self.batch


class FunctionSource(Source):
    """A function that returns a fresh batch at every call; its randomness is the caller's to seed."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def next(self) -> Any:
        try:
            batch = self.function()
        except StopIteration as end:
            raise HyperkronError(
                f"{getattr(self.function, '__name__', 'the function')} has no more batches (StopIteration), but a run "
                "may need any number; begin again there, or pass the loader itself."
            ) from end
        if isinstance(batch, Iterator):
            raise HyperkronError(
                f"{getattr(self.function, '__name__', 'the function')} returned a {type(batch).__name__}, an iterator "
                "over batches, but it is called for every batch; pass an object whose __iter__ is that function."
            )
        return batch


class Loader(Source):
    """Epoch after epoch of an iterable such as ``torch.utils.data.DataLoader``.

    To resume inside an epoch the random state at its start is remembered and the epoch replayed up to the same
    batch, so a loader shuffled by torch's generators continues with the batches it would have given. Samplers that
    want the number of an epoch, as ``DistributedSampler`` does for a new order, are told it, counted from the one
    that they have when the source is made.
    """

    def __init__(self, iterable: Iterable[Any], argument: str = "data") -> None:
        self.iterable, self.argument = iterable, argument
        told = [getattr(part, "epoch", 0) for part in self._parts().values() if hasattr(part, "set_epoch")]
        self.epoch, self.served = max([epoch for epoch in told if isinstance(epoch, int)], default=0), 0
        self._iterator: Iterator[Any] | None = None
        self._before = 0
        self._start: dict[str, Tensor] = {}
        self._draws_seed = True

    @property
    def _new_workers(self) -> bool:
        """Whether the next epoch begins with a seed for workers, drawn from the loader's generator: those of
        ``persistent_workers=True`` get one in the first epoch alone."""
        return not isinstance(self.iterable, DataLoader) or self.iterable._iterator is None

    def next(self) -> Any:
        """The next batch, from a new epoch where the last one is exhausted."""
        for attempt in range(2):
            if self._iterator is None:
                for part in self._parts().values():
                    if callable(told := getattr(part, "set_epoch", None)):
                        told(self.epoch)
                self._start, self._draws_seed = self._random(), self._new_workers
                self._iterator, self.served = iter(self.iterable), 0
                self._before = getattr(self._iterator, "_num_yielded", 0)  # some continue inside an epoch
            if getattr(self._iterator, "_num_yielded", self.served) - self._before != self.served:
                raise HyperkronError(
                    f"{self.argument} is a DataLoader with persistent_workers=True, whose one iterator was begun again "
                    "elsewhere in the middle of an epoch (by the other level, an evaluation or another run); make a "
                    "loader for each of them, or set persistent_workers=False."
                )
            try:
                batch = next(self._iterator)
            except StopIteration:
                if attempt == 1 or self.served == 0:
                    break
                self._iterator, self.epoch = None, self.epoch + 1
                continue
            self.served += 1
            return batch
        raise HyperkronError(
            f"{self.argument} ({type(self.iterable).__name__}) gave no batch at the start of an epoch; pass a loader "
            "that can be iterated again (a DataLoader, not an iterator over it) and is not empty: with drop_last=True "
            "it needs at least one full batch."
        )

    def _parts(self) -> dict[str, Any]:
        """The loader, what it takes its batches from, and what that takes its examples from."""
        batches = getattr(self.iterable, "batch_sampler", None)
        examples = getattr(batches, "sampler", getattr(self.iterable, "sampler", None))
        return {"own": self.iterable, "batch_sampler": batches, "sampler": examples}

    def _generators(self) -> dict[str, torch.Generator]:
        held = {name: getattr(part, "generator", None) for name, part in self._parts().items()}
        return {name: found for name, found in held.items() if isinstance(found, torch.Generator)}

    def _random(self) -> dict[str, Tensor]:
        own = {name: generator.get_state() for name, generator in self._generators().items()}
        return {"global": torch.get_rng_state(), **own}

    def _set_random(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["global"])
        for name, generator in self._generators().items():
            if name in state:
                generator.set_state(state[name])

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "served": self.served,
            "random": dict(self._start),
            "now": self._random(),
            "draws_seed": self._draws_seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterator, self.epoch, self.served = None, state["epoch"], 0
        if not state["random"]:
            return
        now, draws_seed = torch.get_rng_state(), state["draws_seed"]
        if self._new_workers and not draws_seed:
            iter(self.iterable)  # so that the workers are there already
        self._set_random(state["random"])
        if draws_seed and not self._new_workers:
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._generators().get("own"))
        for _ in range(state["served"]):
            self.next()
        self._set_random({**state["now"], "global": now})  # another loader may share a generator
        self._start, self._draws_seed = dict(state["random"]), draws_seed


class Examples(Source):
    """Tensors of examples cut into fixed batches that can be asked for by index, and as one full batch.

    Batches come in a new random order every epoch. Finite-sum methods ask for ``batch(i)``, of which there are
    ``len(source)``, and for ``full()``.

    Args:
        tensors: with the examples along the first dimension; a batch is the tuple of their slices.
        batch_size: examples in a batch; the last one may be smaller.
        seed: of the order of the batches.

    Example:
        >>> source = Examples(torch.arange(6.0), torch.arange(6), batch_size=4)
        >>> len(source), source.batch(1)
        (2, (tensor([4., 5.]), tensor([4, 5])))
        >>> source.share(1)  # this batch counts 2/6 where uniform sampling counts 1/2
        0.6666666666666666
    """

    def __init__(self, *tensors: Tensor, batch_size: int, seed: int = 0) -> None:
        if not tensors or any(len(x) != len(tensors[0]) for x in tensors):
            raise HyperkronError(
                f"tensors have lengths {[len(x) for x in tensors]}; pass at least one, all of one length."
            )
        if len(tensors[0]) == 0:
            raise HyperkronError("tensors hold 0 examples; pass at least one.")
        check_whole("batch_size", batch_size)
        check_whole("seed", seed, 0)
        self.tensors: tuple[Tensor, ...] = differentiable_batch(tensors)
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def __len__(self) -> int:
        return -(-len(self.tensors[0]) // self.batch_size)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """Batch number ``index``."""
        part = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return tuple(x[part] for x in self.tensors)

    def full(self) -> tuple[Tensor, ...]:
        """All examples."""
        return self.tensors

    def share(self, index: int) -> float:
        """What a batch's mean must be scaled by so that the uniform mean over batches is the full mean."""
        size = min(self.batch_size, len(self.tensors[0]) - index * self.batch_size)
        return size * len(self) / len(self.tensors[0])

    def index(self) -> int:
        """The number of the next batch, in random order without repetition."""
        if not self.order:
            self.order = torch.randperm(len(self), generator=self.generator, device="cpu").tolist()
        return self.order.pop()

    def next(self) -> tuple[Tensor, ...]:
        return self.batch(self.index())

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self.generator.get_state(),
            "order": torch.tensor(self.order, dtype=torch.int64, device="cpu"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order = state["order"].tolist()


def as_source(data: Any, argument: str = "data") -> Source:
    """``data`` as a source: a source itself, a fixed batch (tensor, tuple, dict, None), a function, a loader.

    ``argument`` is what messages call it.

    Example:
        >>> type(as_source(lambda: 3)).__name__, type(as_source((1, 2))).__name__
        ('FunctionSource', 'Fixed')
    """
    if isinstance(data, Source):
        return data
    if data is None or isinstance(data, (Tensor, tuple, Mapping)):
        return Fixed(data)
    if isinstance(data, list):
        raise HyperkronError(
            f"{argument} is a list, which may be one batch or many: pass a tuple (or "
            "hyperkron.algorithms.Fixed(batch)) for one batch, a DataLoader or "
            "hyperkron.algorithms.Examples(...) for many."
        )
    if isinstance(data, Iterable) and not (isinstance(data, (Iterator, str)) or hasattr(data, "shape")):
        return Loader(data, argument)
    if callable(data):
        return FunctionSource(data)
    raise HyperkronError(
        f"{argument} is a {type(data).__name__}; pass a DataLoader (or any re-iterable), a function () -> batch, "
        "a batch as tensor, tuple or dict, or hyperkron.algorithms.Examples(...)."
    )


class BatchSources:
    """Fresh batches for the two levels: ``batches.inner()`` and ``batches.outer()``.

    Args:
        inner: the data of J_in, anything :func:`as_source` accepts.
        outer: the data of J_out.
        curvature: the data of J_in that A is measured on; ``None`` for the inner batch of the cross term.

    Attributes:
        sources: by level, ``inner``, ``outer`` and, where there is one, ``curvature``.
    """

    def __init__(self, inner: Any, outer: Any, curvature: Any = None) -> None:
        given = {"inner": inner, "outer": outer, **({} if curvature is None else {"curvature": curvature})}
        self.sources = {level: as_source(data, f"{level}_data") for level, data in given.items()}

    def next(self, level: str) -> Any:
        """A fresh batch of the ``inner``, the ``outer`` or the ``curvature`` data."""
        return differentiable_batch(self.sources[level].next())

    def inner(self) -> Any:
        """A fresh batch of J_in."""
        return self.next("inner")

    def outer(self) -> Any:
        """A fresh batch of J_out."""
        return self.next("outer")

    def curvature(self) -> Any:
        """A fresh batch of J_in to measure A on, where it has data of its own."""
        return self.next("curvature")

    def inners(self, count: int) -> Any:
        """``count`` fresh batches of J_in; a plain batch where ``count`` is 1."""
        return self.inner() if count == 1 else Batches([self.inner() for _ in range(count)])

    def finite(self, algorithm: str) -> tuple[Examples, Examples]:
        """Both sources as finite sums, or an error that says why ``algorithm`` needs them to be."""
        for level in ("inner", "outer"):
            if not isinstance(source := self.sources[level], Examples):
                raise HyperkronError(
                    f"{algorithm} returns to batches by their index and to the full sum, which {level}_data "
                    f"({type(source).__name__}) cannot give; pass "
                    "hyperkron.algorithms.Examples(*tensors, batch_size=…)."
                )
        inner, outer = self.sources["inner"], self.sources["outer"]
        assert isinstance(inner, Examples) and isinstance(outer, Examples)
        return inner, outer

    def state_dict(self) -> dict[str, Any]:
        """Where all sources stand."""
        return {level: source.state_dict() for level, source in self.sources.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batches that would have followed."""
        for level, source in self.sources.items():
            if level in state:  # curvature data may be new
                source.load_state_dict(state[level])
