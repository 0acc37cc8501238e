"""CUDA graphs: work of a GPU that is recorded once and then replayed without Python.

A replay reads and writes the same memory every time. So batches are copied into a :class:`StaticBatch` before a replay,
and all other tensors must still be at the same address, which :func:`memory_key` checks.
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
    """A batch at a fixed address, into which other batches of its shape are copied.

    With ``copy=False`` it uses the memory of the given tensors. Refuses a batch into which none could be copied.
    """

    def __init__(self, batch: Any, copy: bool = True) -> None:
        self.value = map_tensors(lambda x: x.detach().clone(), batch) if copy else batch
        self._shapes = shapes_of(batch)
        if not self.fits(batch):
            raise RuntimeError(
                "a batch holds an object that may change unseen; use tensors, numbers, strings, and dictionaries, "
                "tuples, lists or dataclasses of these"
            )

    def fits(self, batch: Any) -> bool:
        """Whether ``batch`` has the structure, shapes and dtypes of this one, and equal values outside tensors."""
        return bool(shapes_of(batch) == self._shapes)

    def fill(self, batch: Any) -> None:
        """Copy the tensors of ``batch``."""
        for (_, target), (_, source) in zip(tensors_of("", self.value), tensors_of("", batch), strict=True):
            target.copy_(source, non_blocking=True)


class Recording(Generic[T]):
    """The GPU work of ``function()`` as a CUDA graph; recording does not run it.

    ``function`` must not wait for the device. ``outputs`` is its return value; every replay overwrites this memory.
    Every replay draws new random numbers from the ``generators`` and from the device's own generator. ``pool`` is the
    memory of another recording to share. A replay may overwrite the results of that recording, except tensors that
    were alive when this one was recorded.
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
        except BaseException as error:  # otherwise the generators would stay in recording mode
            for generator, state in zip(drawn, before, strict=True):
                generator.graphsafe_set_state(state)
            raise _reason(error) from None

    @property
    def pool(self) -> Any:
        """The memory pool of this recording, which another one can share."""
        return self._graph.pool()

    def replay(self) -> T:
        """Run the recorded work and return its outputs."""
        self._graph.replay()
        return self.outputs


class _DeviceMemory:
    """Bytes of GPU memory, described by the CUDA array interface; a tensor made of it does not own the memory."""

    def __init__(self, address: int, size: int) -> None:
        data = (address, False)
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": data, "version": 2}


def alias_of(x: Tensor) -> Callable[[], Tensor]:
    """A function that returns a tensor in the memory of ``x`` without keeping this memory alive.

    A replay writes its results there even if the allocator has the memory back, and other recordings of the same
    ``pool`` can use it in between. On a CPU the function returns ``x``. It must not be called while recording.
    """
    if not x.is_cuda or not x.numel():
        return lambda: x
    shape, stride, dtype, device = x.shape, x.stride(), x.dtype, x.device
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    memory = _DeviceMemory(x.data_ptr(), (last + 1) * x.element_size())
    return lambda: torch.as_tensor(memory, device=device).view(dtype).as_strided(shape, stride)


class GeneratorCopies:
    """Lets several evaluations in one recording draw the same random numbers.

    A generator cannot be rewound while a graph is recorded. So each evaluation draws from its own copy of the device's
    generator. Before a replay all copies get the state of that generator, which does not advance.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._original = self._generator
        self.copies: list[torch.Generator] = []
        self._used = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block, evaluations draw from copies; afterwards the generator is restored, also after an error.

        The first use (the warm-up) makes one copy per evaluation; the recording uses the same copies.
        """
        self._original, self._used = self._generator.graphsafe_get_state(), 0
        self._generator.graphsafe_set_state(self._original.clone_state())  # a failed recording may damage this one
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(self._original)

    def rewind(self) -> None:
        """Begin the next evaluation: it draws the same numbers as the first one."""
        if self._used == len(self.copies):
            self.copies.append(self._original.clone_state())
        self._generator.graphsafe_set_state(self.copies[self._used])
        self._used += 1

    def before_replay(self) -> None:
        """Set all copies to the current state of the generator."""
        now = self._generator.get_state()
        for copy in self.copies:
            copy.set_state(now)


def _reason(error: BaseException) -> BaseException:
    """The original error: ending a failed recording raises a second error, which does not name the cause."""
    while error.__context__ is not None:
        error = error.__context__
    if isinstance(error, RuntimeError) and "copy between CPU and CUDA tensors" in str(error):
        return RuntimeError("a tensor made on the CPU is copied; make it on the device of the batch, or keep a buffer")
    return error


def modules_of(*roots: nn.Module) -> list[nn.Module]:
    """The modules of ``roots``, each once, in the order of ``Module.modules``, in less than half of its time."""
    found: dict[nn.Module, None] = {}
    waiting = [*reversed(roots)]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            if module._modules:
                waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found)


def memory_key(*modules: nn.Module) -> tuple[object, ...]:
    """What a recording depends on: submodules, their switches and hooks, and the addresses of their tensors."""
    tensors = [x for m in modules for x in (*m.parameters(), *m.buffers())]
    parts = modules_of(*modules)
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
