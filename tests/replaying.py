"""Hypergradients that are replayed: a stand-in for CUDA graphs where there is no GPU, and a small problem."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hyperkron as hk
from hyperkron import solution
from hyperkron.hypergradient import replay
from hyperkron.kernels import graphs

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
Batch = tuple[Tensor, Tensor, Tensor]


class Rerun:
    """In place of a CUDA graph: the function is called again, and its results are written over the first ones."""

    made = 0

    def __init__(self, function: Callable[[], Any], *, generators: Any = (), pool: Any = None) -> None:
        type(self).made += 1
        self.function, self.pool = function, None
        self.point = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))[
            "point"
        ].cell_contents
        self.state = METHOD[0].state.curvature
        before = self._generator()
        self.outputs = function()
        self.kept = self._inverses()
        self._generator(before)

    def _inverses(self) -> Any:
        return {} if self.state.kept is None else self.state.tensors()

    def _generator(self, back: Tensor | None = None) -> Tensor | None:
        generator = getattr(self.state, "generator", None)
        if generator is not None and back is not None:
            generator.set_state(back)
        return None if generator is None else generator.get_state()

    def replay(self) -> Any:
        saved, cross = copy.copy(self.state), copy.copy(METHOD[0].state.cross)
        with self.point:
            new = self.function()
        self.point.execution.replayed(new[0])  # as the outputs' memory is looked for below
        fresh = self._inverses()
        vars(self.state).update(vars(saved))
        vars(METHOD[0].state.cross).update(vars(cross))
        _written(self.outputs, new)
        _written(self.kept, fresh)
        return self.outputs


class Rewinds:
    """In place of copies of a GPU's generator: a CPU's own is set back by the point."""

    def __init__(self, device: torch.device) -> None:
        self.copies: list[torch.Generator] = []

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rewind(self) -> None:
        """Nothing to do."""

    def before_replay(self) -> None:
        """Nothing to do."""


def _written(old: Any, new: Any) -> None:
    def tensors(x: Any) -> list[Tensor]:
        if isinstance(x, replay.Answer):
            return tensors((x.grads, x.solution.wait().value))
        if isinstance(x, tuple):
            return [t for part in x for t in tensors(part)]
        return [t for t in pytree.tree_flatten(x)[0] if isinstance(t, Tensor)]

    with torch.no_grad():
        for mine, its in zip(tensors(old), tensors(new), strict=True):
            if mine.shape == its.shape:
                mine.copy_(its)
            else:  # the function has found on the CPU, where it can, that something is wrong
                mine.fill_(torch.nan)


METHOD: list[hk.Implicit] = []


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    solution._warned.clear()
    Rerun.made = 0
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "available", lambda device: True)
        monkeypatch.setattr(replay, "Recording", Rerun)
        monkeypatch.setattr(replay, "GeneratorCopies", Rewinds)
    else:
        real = replay.Recording

        def counted(*args: Any, **options: Any) -> Any:
            Rerun.made += 1
            return real(*args, **options)

        monkeypatch.setattr(replay, "Recording", counted)
    yield request.param
    METHOD.clear()


def network(device: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 3)]
    return nn.Sequential(*parts).to(device)


def batch(i: int, device: str, size: int = 8) -> Batch:
    draw = torch.Generator().manual_seed(i)
    x, y = torch.randn(size, 1, 6, 6, generator=draw), torch.randint(3, (size,), generator=draw)
    return x.to(device), y.to(device), (torch.arange(size) + i).to(device)


def inner(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(b[0]), b[1], weight=weights(b[2]))


def outer(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(b[0]), b[1])


PROBLEM = hk.BilevelProblem(inner, outer)


def made(**options: Any) -> hk.Implicit:
    method = hk.kfac(1e-2, **options)
    METHOD[:] = [method]
    return method


def trained(
    method: hk.Implicit, device: str, steps: int = 8, size: Callable[[int], int] = lambda i: 8, dropout: float = 0.0
) -> list[Any]:
    """Hypergradients while θ moves, and the state of the model after each."""
    model, weights = network(device, dropout), hk.SampleWeights(40).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for i in range(steps):
        optimizer.zero_grad()
        inner(model, weights, batch(i, device)).backward()
        optimizer.step()
        before = {name: x.clone() for name, x in model.state_dict().items()}
        result = method.compute(PROBLEM, model, weights, batch(i, device, size(i)), batch(50 + i, device))
        for name, x in model.state_dict().items():
            assert torch.equal(x, before[name]), name
        found.append(result)
    return found


TOLERANCE = {"cpu": {"rtol": 0.0, "atol": 0.0}, "cuda": {"rtol": 1e-3, "atol": 1e-4}}
"""On a CPU the same code runs in the same order; in a CUDA graph factors are factorised by smaller leaves."""


def close(found: list[Any], expected: list[Any]) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert mine.outer_loss == pytest.approx(its.outer_loss, rel=1e-4)
        assert mine.status is its.status
        assert mine.stats.keys() == its.stats.keys()
        close = TOLERANCE[next(iter(its.grads.values())).device.type]
        torch.testing.assert_close(mine.grads, its.grads, **close)
        torch.testing.assert_close(mine.solution.value, its.solution.value, **close)
