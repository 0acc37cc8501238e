"""CUDA graphs, as far as they can be tested without a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hyperkron.kernels.graphs import Recording


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


def test_the_first_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in (("CUDAGraph", _Graph), ("graph", _capture), ("current_device", lambda: 0)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "default_generators", [_Generator()])

    def failing() -> None:
        raise RuntimeError("nonzero waits for the device")

    with pytest.raises(RuntimeError, match="nonzero waits for the device"):
        Recording(failing)
