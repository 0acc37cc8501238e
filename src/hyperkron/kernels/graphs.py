"""Work of a GPU that is recorded once and replayed, so that Python does not launch it again.

A recording reads and writes the same memory every time. So batches are copied into a :class:`StaticBatch` before a
replay, and whatever else was read must still be where it was: :func:`places` tells where that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from hyperkron.batch_tensors import map_tensors, shapes_of, tensors_of

T = TypeVar("T")


def available(device: torch.device) -> bool:
    """Whether work on ``device`` can be recorded."""
    return device.type == "cuda"


class StaticBatch:
    """A batch in memory of its own (of its tensors unless ``own``) that others of its shape are copied into."""

    def __init__(self, batch: Any, own: bool = True) -> None:
        self.value = map_tensors(lambda x: x.detach().clone(), batch) if own else batch
        self._shapes = shapes_of(batch)

    def fits(self, batch: Any) -> bool:
        """Whether ``batch`` has the structure, shapes and dtypes of this one, and equal values outside tensors."""
        return bool(shapes_of(batch) == self._shapes)

    def fill(self, batch: Any) -> None:
        """Copy the tensors of ``batch``."""
        for (_, mine), (_, its) in zip(tensors_of("", self.value), tensors_of("", batch), strict=True):
            mine.copy_(its, non_blocking=True)


class Recording(Generic[T]):
    """What ``function()`` does on the GPU, recorded as a CUDA graph; the function itself has not been carried out yet.

    It launches work and waits for nothing; ``outputs`` is what it returned, in memory that every replay overwrites.
    Every replay goes on where the ``generators`` and the device's own one are. ``pool`` is memory shared with another
    recording, which must not be needed any more when this one is replayed, but for tensors that were alive when this
    one was recorded.
    """

    def __init__(
        self,
        function: Callable[[], T],
        *,
        generators: Iterable[torch.Generator] = (),
        pool: Any = None,
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        drawn = [*generators]
        for generator in drawn:
            self._graph.register_generator_state(generator)
        drawn.append(torch.cuda.default_generators[torch.cuda.current_device()])
        before = [generator.clone_state() for generator in drawn]
        try:
            with torch.cuda.graph(self._graph, pool=pool):
                self.outputs = function()
        except BaseException as error:  # generators would take the recording to go on for ever
            for generator, state in zip(drawn, before, strict=True):
                generator.graphsafe_set_state(state)
            raise _reason(error) from None

    @property
    def pool(self) -> Any:
        """Its memory, for another recording to share."""
        return self._graph.pool()

    def replay(self) -> T:
        """Carry it out."""
        self._graph.replay()
        return self.outputs


class _Place:
    """Bytes of a GPU's memory, as arrays of other libraries are handed over: whoever reads them does not own them."""

    def __init__(self, address: int, size: int) -> None:
        data = (address, False)
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": data, "version": 2}


def place_of(x: Tensor) -> Callable[[], Tensor]:
    """Makes tensors in the memory of ``x`` that do not keep it: what was recorded lies there though it was given back.

    So other recordings with the same ``pool`` may use it in between. On a CPU it is ``x`` that is made. To be called
    when nothing is being recorded.
    """
    if not x.is_cuda or not x.numel():
        return lambda: x
    shape, stride, dtype, device = x.shape, x.stride(), x.dtype, x.device
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    place = _Place(x.data_ptr(), (last + 1) * x.element_size())
    return lambda: torch.as_tensor(place, device=device).view(dtype).as_strided(shape, stride)


class GeneratorCopies:
    """Lets several parts of a recording draw the same random numbers, as the evaluations at one point do.

    A generator cannot be set back while a graph is recorded. So each part draws from a copy of the device's generator.
    Before a replay all copies are set to where that generator is; it does not move itself.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._own = self._generator
        self.copies: list[torch.Generator] = []
        self._begun = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, parts draw from copies; afterwards the generator is as it was, also if a recording has failed.

        The first time, as many copies are made as there are parts; a recording then uses these again.
        """
        self._own, self._begun = self._generator.graphsafe_get_state(), 0
        self._generator.graphsafe_set_state(self._own.clone_state())  # a recording that fails may spoil this one
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(self._own)

    def rewind(self) -> None:
        """The next part begins: it draws what the first one drew."""
        if self._begun == len(self.copies):
            self.copies.append(self._own.clone_state())
        self._generator.graphsafe_set_state(self.copies[self._begun])
        self._begun += 1

    def before_replay(self) -> None:
        """Set all copies to where the generator is."""
        now = self._generator.get_state()
        for copy in self.copies:
            copy.set_state(now)


def _reason(error: BaseException) -> BaseException:
    """What went wrong first: the end of a recording that failed raises an error of its own, which says nothing."""
    while error.__context__ is not None:
        error = error.__context__
    if isinstance(error, RuntimeError) and "copy between CPU and CUDA tensors" in str(error):
        return RuntimeError("a tensor made on the CPU is copied; make it on the device of the batch, or keep a buffer")
    return error


def places(*modules: nn.Module) -> tuple[object, ...]:
    """The parts of modules, what is switched on in them, and where their tensors lie: a recording is for these."""
    tensors = [x for m in modules for x in (*m.parameters(), *m.buffers())]
    parts = [part for m in modules for part in m.modules()]
    return (*((x.data_ptr(), x.requires_grad) for x in tensors), *map(id, parts), switches(parts))


def switches(parts: Sequence[nn.Module]) -> tuple[object, ...]:
    """What makes the same modules compute another function: modes, other attributes that are true or false, hooks."""
    return tuple(
        (
            len(part._forward_hooks),
            len(part._forward_pre_hooks),
            *(x for x in vars(part).values() if x is True or x is False),
        )
        for part in parts
    )
