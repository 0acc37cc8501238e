"""A recorded step of an optimizer is the step it would take now, whatever has changed since it was recorded."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hyperkron.algorithms import inner_loop
from hyperkron.algorithms.inner_loop import UNCHANGED_STEPS, RecordedStep

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
STEPS = 4 * UNCHANGED_STEPS


class Baked:
    """In place of a CUDA graph: the step with the settings and the memory of the time when it was recorded.

    Tensors on the CPU are among those settings, as a recording does not read them again. Hooks are not called.
    """

    made = 0

    def __init__(self, function: Callable[[], Any], *, generators: Any = (), pool: Any = None) -> None:
        type(self).made += 1
        self.optimizer = function.__self__  # type: ignore[attr-defined]
        self.state = defaultdict(dict, {p: dict(of) for p, of in self.optimizer.state.items()})
        groups = [self._plain(group) for group in self.optimizer.param_groups]
        self.settings = [{name: self._baked(value) for name, value in group.items()} for group in groups]

    @staticmethod
    def _plain(group: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in group.items() if name != "params"}

    @staticmethod
    def _baked(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and not value.is_cuda else value

    def replay(self) -> None:
        state, groups = self.optimizer.state, self.optimizer.param_groups
        settings = [self._plain(group) for group in groups]
        self.optimizer.state = self.state
        for group, baked in zip(groups, self.settings, strict=True):
            group.update(baked)
        type(self.optimizer).step.__wrapped__(self.optimizer)  # type: ignore[attr-defined]  # without hooks
        self.optimizer.state = state
        for group, own in zip(groups, settings, strict=True):
            group.update(own)


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    Baked.made = 0
    if request.param == "cpu":
        monkeypatch.setattr(inner_loop, "Recording", Baked)
    return str(request.param)


def trajectory(
    device: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], change: Any, recorded: bool
) -> tuple[list[Tensor], list[bool]]:
    """θ after every step, and whether each was followed by a recording; ``change(optimizer, t)`` before step t."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3, device=device)), nn.Parameter(torch.randn(2, 2, device=device))]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer = make(params)
    step = RecordedStep(optimizer)
    found, flags = [], []
    for t in range(STEPS):
        change(optimizer, t)
        for p in params:
            p.grad.copy_(p.detach() ** 3 + t)  # type: ignore[union-attr]
        step() if recorded else optimizer.step()
        found.append(torch.cat([p.detach().flatten().clone() for p in params]))
        flags.append(step.recorded)
    return found, flags


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1)


def nothing(optimizer: torch.optim.Optimizer, t: int) -> None:
    """The settings stay."""


def drop(optimizer: torch.optim.Optimizer, t: int) -> None:
    if t == 2 * UNCHANGED_STEPS:
        optimizer.param_groups[0]["lr"] = 0.001


def every_step(optimizer: torch.optim.Optimizer, t: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 / (t + 1)


def load(optimizer: torch.optim.Optimizer, t: int) -> None:
    if t == 2 * UNCHANGED_STEPS:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def clear(optimizer: torch.optim.Optimizer, t: int) -> None:
    if t == 2 * UNCHANGED_STEPS:
        optimizer.state.clear()


@pytest.mark.parametrize(
    ("change", "recordings"),
    [(nothing, 1), (drop, 2), (every_step, 0), (load, 2), (clear, 2)],
    ids=lambda x: str(x)[:20],
)
def test_steps_are_those_of_the_optimizer(device: str, change: Any, recordings: int) -> None:
    expected, _ = trajectory(device, momentum, change, recorded=False)
    found, flags = trajectory(device, momentum, change, recorded=True)
    torch.testing.assert_close(found, expected)
    assert flags[-1] == (recordings > 0)
    if device == "cpu":
        assert Baked.made == recordings


def test_a_step_that_counts_on_the_cpu_is_not_recorded(device: str) -> None:
    def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)

    _, flags = trajectory(device, adam, nothing, recorded=True)
    assert not any(flags)


def fill(optimizer: torch.optim.Optimizer, t: int) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.01 / (t // (2 * UNCHANGED_STEPS) + 1))


def test_a_step_size_in_a_tensor_on_the_cpu_is_a_setting(device: str) -> None:
    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=torch.tensor(0.01), momentum=0.9, foreach=False)

    expected, _ = trajectory(device, sgd, fill, recorded=False)
    found, flags = trajectory(device, sgd, fill, recorded=True)
    torch.testing.assert_close(found, expected)
    assert flags[-1] and not flags[2 * UNCHANGED_STEPS]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_step_size_in_a_tensor_on_the_gpu_is_read_by_the_recorded_step() -> None:
    def fused(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=torch.tensor(0.01, device="cuda"), momentum=0.9, fused=True)

    expected, _ = trajectory("cuda", fused, fill, recorded=False)
    found, flags = trajectory("cuda", fused, fill, recorded=True)
    torch.testing.assert_close(found, expected)
    assert flags[-1] and flags[2 * UNCHANGED_STEPS]


def test_memory_that_is_cleared_is_noticed_where_the_first_parameter_has_none(device: str) -> None:
    def unused_first(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.ones(1, device=device)), *params], lr=0.01, momentum=0.9)

    expected, _ = trajectory(device, unused_first, clear, recorded=False)
    found, _ = trajectory(device, unused_first, clear, recorded=True)
    torch.testing.assert_close(found, expected)


def test_a_hook_of_all_optimizers_is_called(device: str) -> None:
    called: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        trajectory(device, momentum, nothing, recorded=True)
    finally:
        handle.remove()
    assert len(called) == STEPS


def test_a_hook_that_comes_later_is_called(device: str) -> None:
    called = []

    def hook(optimizer: torch.optim.Optimizer, t: int) -> None:
        if t == 2 * UNCHANGED_STEPS:
            optimizer.register_step_post_hook(lambda *_: called.append(1))

    trajectory(device, momentum, hook, recorded=True)
    assert len(called) == STEPS - 2 * UNCHANGED_STEPS


def test_an_optimizer_with_hooks_steps_as_usual(device: str) -> None:
    called = []

    def hooked(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = momentum(params)
        made.register_step_post_hook(lambda *_: called.append(1))
        return made

    _, flags = trajectory(device, hooked, nothing, recorded=True)
    assert not any(flags)
    assert len(called) == STEPS
