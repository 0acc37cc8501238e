"""Saves and restores everything that evaluating a model may change: buffers, modes, flags and random states."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hyperkron.kernels.graphs import GeneratorCopies, modules_of
from hyperkron.solution import HyperkronError, warn_once


class Snapshot:
    """Everything an evaluation may change: buffers, training modes, requires_grad flags, .grad, random states.

    Every evaluation gets new copies of the buffers. So the memory and version of the module's own buffers do not
    change, and graphs that the user or a solver keeps stay valid. Only embeddings with ``max_norm`` write their
    parameters; these are restored. Embeddings with ``sparse=True`` temporarily get dense gradients, which second
    derivatives and solvers need. An evaluation that is recorded as a CUDA graph draws the random numbers of the GPU
    from ``generator_copies``.
    """

    def __init__(
        self, model: nn.Module, hyper: nn.Module, device: torch.device, generator_copies: GeneratorCopies | None = None
    ) -> None:
        modules = modules_of(model, hyper)
        if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
            raise HyperkronError(
                "model or hyper has a part made by torch.jit.script or torch.jit.trace, whose layers cannot be looked "
                "into; pass the module it was made of (torch.compile works)."
            )
        self.training = [(m, m.training) for m in modules]
        self.flags = [(p, p.requires_grad) for m in modules for p in m._parameters.values() if p is not None]
        self.grads = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p, _ in self.flags if p.is_leaf]
        self.buffers = [(m, m._buffers.copy(), m._non_persistent_buffers_set.copy()) for m in modules if m._buffers]
        self.without_buffers = [m for m in modules if not m._buffers]
        by_dtype: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
        for _, own, _ in self.buffers:
            for buffer in own.values():
                if buffer is not None and not buffer.requires_grad:
                    by_dtype.setdefault((buffer.dtype, buffer.device), {})[id(buffer)] = buffer
        self.groups = [list(group.values()) for group in by_dtype.values()]
        normed = [m for m in modules if vars(m).get("max_norm") is not None]
        self.weights = [(p, p.detach().clone()) for m in normed for p in m.parameters(recurse=False)]
        self.sparse = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
        self.device = device
        self.host = HostRandomState()
        self.cpu = torch.get_rng_state()
        self.generator_copies = generator_copies
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" and generator_copies is None else None
        self.drew_on_host = False
        self._evaluated = False

    def rewind(self) -> None:
        """Restore random states, modes and the values of buffers before an evaluation."""
        if self._evaluated:
            self.rewind_random()
            self._rewind_modes()
        self._evaluated = True
        for embedding in self.sparse:
            embedding.sparse = False
        if self.generator_copies is not None:
            self.generator_copies.rewind()
        fresh: dict[int, Tensor] = {}  # one copy for a buffer that modules share
        for group in self.groups:
            fresh.update(zip(map(id, group), _copies(group), strict=True))
        for module, own, _ in self.buffers:
            for name, buffer in own.items():
                module._buffers[name] = fresh.get(id(buffer), buffer)

    def drawn(self, anywhere: bool = False) -> bool:
        """Whether the last evaluation drew random numbers from torch; ``anywhere``: or from Python or numpy."""
        moved = not torch.equal(torch.get_rng_state(), self.cpu)
        moved |= self.cuda is not None and not torch.equal(torch.cuda.get_rng_state(self.device), self.cuda)
        return moved or (anywhere and self.host.moved())

    def restore(self) -> None:
        """Restore everything, when the ``with`` block of the point ends."""
        self.rewind_random()
        self._rewind_modes()
        added: list[Any] = [(m, {}, set()) for m in self.without_buffers if m._buffers]
        for module, own, unsaved in (*self.buffers, *added):
            module._buffers.clear()
            module._buffers.update(own)
            module._non_persistent_buffers_set = unsaved
        for embedding in self.sparse:
            embedding.sparse = True
        for p, own_values in self.weights:
            p.data.copy_(own_values)
        for p, flag in self.flags:
            if p.requires_grad != flag:
                p.requires_grad_(flag)
        self._restore_grads()

    def _restore_grads(self) -> None:
        """Take away what an objective has added by a ``backward`` of its own; warn where it was added in place."""
        for p, grad, version in self.grads:
            if p.grad is not grad:
                p.grad = grad
            elif grad is not None and grad._version != version:
                warn_once(
                    "objective-backward",
                    f"an objective called backward() itself, which added to the .grad of a parameter of shape "
                    f"{tuple(p.shape)}; use backward(inputs=[x]) or torch.autograd.grad(loss, x) in objectives.",
                )

    def _rewind_modes(self) -> None:
        for module, mode in self.training:
            if module.training != mode:
                module.training = mode

    def rewind_random(self) -> None:
        """Restore the random states."""
        if self.cuda is not None and not self.drew_on_host:
            same = torch.equal(torch.get_rng_state(), self.cpu) and random.getstate() == self.host.python
            self.drew_on_host = not same
        self.host.restore()
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class HostRandomState:
    """The states of the global generators of Python and, if it is loaded, of numpy."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = NumpyRandomState() if "numpy" in sys.modules else None

    def moved(self) -> bool:
        """Whether a number was drawn, or perhaps drawn (:meth:`NumpyRandomState.moved`)."""
        return random.getstate() != self.python or (self.numpy is not None and self.numpy.moved())

    def restore(self) -> None:
        """Restore both generators."""
        random.setstate(self.python)
        if self.numpy is not None:
            self.numpy.restore()


class NumpyRandomState:
    """The state of numpy's global generator; it is read and written only if its memory has changed.

    Reading and writing take longer than evaluating a small model. The memory holds 624 words and a position, but not
    the normal number that ``numpy.random.randn`` may keep for its next call. If there is one, the state is always read
    and written.
    """

    known: ClassVar[tuple[bytes | None, Any]] = None, None
    """The memory of the last state that was read without such a number, and that state."""

    def __init__(self) -> None:
        self.memory, self.state = _numpy_memory(), self.known[1]
        if self.memory is None or self.memory != self.known[0]:
            self.state = sys.modules["numpy"].random.get_state()
            if self.memory is not None and self.state[3]:
                self.memory = None
            NumpyRandomState.known = self.memory, self.state

    def restore(self) -> None:
        """Restore the generator."""
        if self.moved():
            sys.modules["numpy"].random.set_state(self.state)

    def moved(self) -> bool:
        """Whether the state has changed; always true if its memory is not known."""
        return self.memory is None or _numpy_memory() != self.memory


def _numpy_memory() -> bytes | None:
    """The memory of numpy's global generator; ``None`` if it is not numpy's default generator."""
    generator: Any = getattr(sys.modules["numpy"].random, "get_bit_generator", lambda: None)()
    if type(generator).__name__ != "MT19937":
        return None
    return ctypes.string_at(generator.ctypes.state_address, 4 * 624 + 4)


def reseed(stream: int, device: torch.device) -> None:
    """Set all random states to number ``stream`` of a sequence that depends on the current state of torch."""
    seed = int(torch.randint(2**62, (), device="cpu")) + stream
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _copies(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Copies of tensors of one dtype, made in one launch for dtypes that can be multiplied by one."""
    if tensors[0].dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        return torch._foreach_mul(tensors, True)
    return [x.clone() for x in tensors]
