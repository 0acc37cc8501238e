"""Activation checkpointing: every hypergradient and every step of θ is what it is without."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

import hyperkron as hk
import oracles
from hyperkron.kernels.checkpoints import differentiable_checkpoints

DOUBLE = torch.float64
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
METHODS = {
    "identity": lambda: hk.identity(),
    "forward": lambda: hk.identity(cross="forward"),
    "kfac": lambda: hk.kfac(0.1, fisher="type-2"),
    "ekfac": lambda: hk.ekfac(0.1, fisher="type-2"),
    "cg": lambda: hk.cg(20, 0.1),
    "pcg": lambda: hk.pcg(20, 0.1),
    "sama": lambda: hk.sama(alpha=1e-3),
    "unrolled": lambda: hk.unrolled(3),
}


class Net(nn.Module):
    """Two blocks, the first computed again in the backward pass if ``reentrant`` is not None; its weight is shared."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(DOUBLE)
        self.last = nn.Linear(3, 3).to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            hidden = self.first(x)
        else:
            hidden = checkpoint.checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.last(hidden + self.first(x))  # the same parameters inside and outside


def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X), Y, weight=hyper(torch.arange(6)))


def outer(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(X.flip(0)), Y)


PROBLEM = hk.BilevelProblem(inner, outer)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
@pytest.mark.parametrize("name", METHODS)
def test_hypergradients_are_those_without_checkpoints(name: str, reentrant: bool) -> None:
    weights = hk.SampleWeights(6).to(DOUBLE)
    wanted, found = (
        METHODS[name]().compute(PROBLEM, Net(kind), weights, None, None).grads for kind in (None, reentrant)
    )
    assert oracles.relative(found, wanted) < 1e-8


class Attending(Net):
    """The first block mixes the rows by attention, whose fused kernel has no second derivative, or under autocast."""

    def __init__(self, reentrant: bool | None, autocast: bool = False) -> None:
        super().__init__(reentrant)
        own, self.first = self.first, nn.Module()
        self.first.add_module("own", own)

        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                h = own[0](x)[None, None]
                return nn.functional.scaled_dot_product_attention(h, h, h)[0, 0].to(x.dtype)

        self.first.forward = forward


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_computed_again_takes_the_kernels_of_the_first_time(name: str, reentrant: bool) -> None:
    """Else torch finds other tensors than in the forward pass, or a kernel without a second derivative."""
    weights = hk.SampleWeights(6).to(DOUBLE)
    wanted, found = (
        METHODS[name]().compute(PROBLEM, Attending(kind), weights, None, None).grads for kind in (None, reentrant)
    )
    assert oracles.relative(found, wanted) < 1e-8


@pytest.mark.parametrize("name", ["kfac", "cg"])
def test_what_is_computed_again_stays_without_autocast(name: str) -> None:
    def single(objective: Any) -> Any:  # autocast leaves double precision alone
        return lambda model, hyper, batch: objective(lambda x: model(x.float()), hyper, batch)

    problem, weights = hk.BilevelProblem(single(inner), single(outer), autocast=False), hk.SampleWeights(6)
    wanted, found = (
        METHODS[name]().compute(problem, Attending(kind, autocast=True).float(), weights, None, None).grads
        for kind in (None, False)
    )
    assert oracles.relative(found, wanted) < 1e-6


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_fit_is_what_it_is_without_checkpoints(reentrant: bool) -> None:
    ends = []
    for kind in (None, reentrant):
        model, weights = Net(kind), hk.SampleWeights(6).to(DOUBLE)
        hk.fit(
            PROBLEM, model, weights, hk.AID(hk.cg(5, 0.1), 2), inner_data=(X,), outer_data=(X,), steps=3, progress=False
        )
        ends.append({**dict(model.named_parameters()), "w": weights.weight})
    assert oracles.relative(ends[1], ends[0]) < 1e-10


def test_a_perturbed_input_passes_too() -> None:
    """λ in front of the checkpoint, where forward mode and double backward go through it."""
    hyper = hk.as_hyper(torch.zeros_like(X))
    problem = hk.BilevelProblem(lambda m, h, b: hk.losses.cross_entropy(m(X + h()), Y), outer)
    wanted = hk.identity(cross="reverse").compute(problem, Net(None), hyper, None, None).grads
    for reentrant in (True, False):
        for cross in ("reverse", "forward", "difference"):
            found = hk.identity(cross=cross).compute(problem, Net(reentrant), hyper, None, None).grads
            assert oracles.relative(found, wanted) < 1e-5, (reentrant, cross)


def test_torch_is_left_as_it_was() -> None:
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    before = [getattr(checkpoint, name) for name in names]
    with suppress(RuntimeError), differentiable_checkpoints(), differentiable_checkpoints(keep=True):
        assert all(getattr(checkpoint, name) is not own for name, own in zip(names, before, strict=True))
        raise RuntimeError
    assert [getattr(checkpoint, name) for name in names] == before


def test_threads_may_leave_in_any_order() -> None:
    """The first to come may be the first to go: the other one still needs the stand-in, and torch is left as it was."""
    own = checkpoint.CheckpointFunction
    first, second = differentiable_checkpoints(), differentiable_checkpoints()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert checkpoint.CheckpointFunction is not own
    second.__exit__(None, None, None)
    assert checkpoint.CheckpointFunction is own


def test_forward_passes_of_other_threads_keep_their_activations_too() -> None:
    """``nn.DataParallel`` computes each part of a batch in a thread of its own; inner contexts do not change that."""
    calls, found = [], []

    def block(x: Tensor) -> Tensor:
        calls.append(x)
        return x.sin()

    def forward() -> None:
        with differentiable_checkpoints():
            found.append(checkpoint.checkpoint(block, X.clone().requires_grad_(), use_reentrant=False))

    for keep, count in ((True, 1), (False, 2)):
        calls.clear()
        with differentiable_checkpoints(keep=keep):
            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()
            found.pop().sum().backward()
        assert len(calls) == count


def test_a_model_that_changes_flags_is_refused_in_forward_mode_by_name() -> None:
    """torch.func, which forward mode needs where λ is in front of the model, cannot call requires_grad_()."""

    class Marks(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.requires_grad else x.clone().requires_grad_()).softmax(1)

    hyper = hk.as_hyper(torch.zeros_like(X))
    problem = hk.BilevelProblem(lambda m, h, b: hk.losses.cross_entropy(m(X + h()), Y), outer)
    with pytest.raises(hk.HyperkronError, match="cross='reverse' or cross='auto'"):
        hk.identity(cross="forward").compute(problem, Marks(None), hyper, None, None)
