"""Casts of weights that are made again in the backward pass: the same gradients from less memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyperkron.kernels.weight_casts import recast_in_backward
from storages import Storages

WIDTH, LAYERS = 256, 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [m for i in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0), nn.SiLU())]
    return nn.Sequential(*parts, nn.Conv1d(3, 2, 1))


def gradients(model: nn.Module, x: Tensor, again: bool, cache: bool = True) -> tuple[list[Tensor], int]:
    """Those of parameters, and the bytes that are alive before the backward pass."""
    with (
        recast_in_backward(model.parameters()) if again else nullcontext(),
        Storages([*model.parameters(), x]) as count,
    ):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = model(x).float().square().sum()
        alive = count.now
        return list(torch.autograd.grad(loss, list(model.parameters()))), alive


@pytest.mark.parametrize("cache", [True, False])
def test_gradients_are_the_same_from_less_memory(cache: bool) -> None:
    model, x = network(), torch.randn(2, 3, WIDTH, requires_grad=True)
    (plain, kept), (found, less) = (gradients(model, x, again, cache) for again in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert kept - less >= LAYERS * 2 * WIDTH**2  # the weights in bfloat16


def test_second_derivatives_are_the_same() -> None:
    model, x = network(), torch.randn(2, 3, WIDTH)

    def twice(again: bool) -> list[Tensor]:
        with recast_in_backward(model.parameters()) if again else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
            first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            return list(torch.autograd.grad(sum(g.square().sum() for g in first), list(model.parameters())))  # type: ignore[arg-type]

    assert all(torch.equal(a, b) for a, b in zip(twice(True), twice(False), strict=True))


def test_a_transposed_parameter_of_three_dimensions_is_kept() -> None:
    weight, x = torch.randn(3, 4, 5, requires_grad=True), torch.randn(5, 2, 4)
    with recast_in_backward([weight]):
        cast = weight.to(torch.bfloat16).transpose(0, 2)  # (5, 4, 3)
        loss = (x.to(torch.bfloat16) @ cast).float().square().sum()
    [found] = torch.autograd.grad(loss, [weight])
    cast = weight.to(torch.bfloat16).transpose(0, 2)
    [expected] = torch.autograd.grad((x.to(torch.bfloat16) @ cast).float().square().sum(), [weight])
    assert torch.equal(found, expected)


def test_inside_of_a_checkpoint_and_of_frozen_weights_nothing_changes() -> None:
    model, x = network(), torch.randn(2, 3, WIDTH, requires_grad=True)
    model[2].weight.requires_grad_(False)

    def found(again: bool) -> tuple[Tensor, ...]:
        with recast_in_backward(model.parameters()) if again else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(model[:4], x, use_reentrant=False)
            return torch.autograd.grad(model[4:](y).float().square().sum(), [x, model[0].weight, model[4].weight])

    assert all(torch.equal(a, b) for a, b in zip(found(True), found(False), strict=True))
