"""CUDA graphs, as far as they can be tested without a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hyperkron.kernels.graphs import GeneratorCopies, Recording, memory_key, modules_of


class _Generator:
    """Stands for a CUDA generator."""

    def clone_state(self) -> int:
        return 7

    def graphsafe_set_state(self, state: int) -> None:
        assert state == 7


class _Graph:
    def register_generator_state(self, generator: Any) -> None:
        """Nothing to do."""


@contextmanager
def _capture(graph: Any, pool: Any = None) -> Any:
    """The end of a recording that failed raises an error of its own."""
    try:
        yield
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_the_first_error_is_told_and_the_remedy_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in (("CUDAGraph", _Graph), ("graph", _capture), ("current_device", lambda: 0)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "default_generators", [_Generator()])

    def failing() -> None:
        raise RuntimeError("nonzero waits for the device")

    with pytest.raises(RuntimeError, match="nonzero waits for the device"):
        Recording(failing)

    def copying() -> None:
        raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless it is pinned.")

    with pytest.raises(RuntimeError, match="made on the CPU is copied; make it on the device of the batch"):
        Recording(copying)


class _Shared:
    """A generator like those of CUDA: a handle of a state, which may be exchanged and copied."""

    def __init__(self, state: list[int]) -> None:
        self.state = state

    def graphsafe_get_state(self) -> _Shared:
        return _Shared(self.state)

    def graphsafe_set_state(self, other: _Shared) -> None:
        self.state = other.state

    def clone_state(self) -> _Shared:
        return _Shared([*self.state])

    def get_state(self) -> int:
        return self.state[0]

    def set_state(self, value: int) -> None:
        self.state[0] = value

    def draw(self) -> int:
        self.state[0] += 1
        return self.state[0]


def test_parts_of_a_recording_draw_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _Shared([10])
    monkeypatch.setattr(torch.cuda, "default_generators", [own])
    state, generator_copies = own.state, GeneratorCopies(torch.device("cuda", 0))

    def parts() -> list[int]:
        found = []
        for count in (2, 1, 3):
            generator_copies.rewind()
            found += [own.draw() for _ in range(count)]
        return found

    with generator_copies.active():
        assert parts() == [11, 12, 11, 11, 12, 13]
    assert own.state is state and state == [10] and len(generator_copies.copies) == 3
    own.draw()
    generator_copies.before_replay()
    with generator_copies.active():
        assert parts() == [12, 13, 12, 12, 13, 14]  # from where the generator is now, with the same copies
    assert own.state is state and state == [11] and len(generator_copies.copies) == 3


def test_a_recording_that_fails_leaves_the_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _Shared([10])
    monkeypatch.setattr(torch.cuda, "default_generators", [own])
    state, generator_copies = own.state, GeneratorCopies(torch.device("cuda", 0))

    def recording() -> None:
        with generator_copies.active():
            own.draw()  # by what is not an evaluation
            generator_copies.rewind()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        recording()
    assert own.state is state and state == [10]


def test_a_replaced_part_and_a_new_hook_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = memory_key(model)
    assert memory_key(model) == before
    model[1] = nn.Tanh()
    replaced = memory_key(model)
    model[1].register_forward_hook(lambda *_: None)
    assert before != replaced != memory_key(model)


def test_the_modules_of_several_roots_are_those_of_torch_each_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.ModuleList([shared, nn.ReLU()]), nn.TransformerEncoderLayer(4, 2, 4), shared)
    model.register_module("absent", None)
    hyper = nn.Sequential(shared, nn.Tanh())
    assert modules_of(model) == list(model.modules())
    assert modules_of(model, hyper) == list(dict.fromkeys([*model.modules(), *hyper.modules()]))
