"""Losses that are means over rows (tokens, examples), of which some do not count: the others weigh alike in J_in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.attribution.layer_calls import BlockCall, QueryVectors
from hyperkron.curvature.base import Eigenbasis
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.grams import corrected


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(params=["tokens", "examples"])
def made(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    """Sequences sorted by length, so that batches have different numbers of tokens, or examples of which some have no
    label, and their gradients in J_in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    shape = (8,) if request.param == "tokens" else ()
    x, y = torch.randn(40, *shape, 5, dtype=torch.float64), torch.randint(0, 3, (40, *shape))
    if shape:
        y[torch.arange(8) >= torch.arange(1, 41)[:, None] // 5] = -100
        y[2:5, 0] = 1  # the first two have no token at all
    else:
        y[[4, 5, 6, 7, 9, 30]] = -100
    queries = x[:4].flip(1), torch.randint(0, 3, (4, *shape))

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(model(x), y, reduction="sum", ignore_index=-100)
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])

    shares = torch.stack([gradient(*one) for one in zip(x, y, strict=True)]) / (y != -100).sum()
    each = torch.stack([gradient(*one) for one in zip(*queries, strict=True)])
    return model, (x, y), queries, shares, each / queries[1][0].numel()


@pytest.mark.parametrize("way", ["layers", "forward"])
@pytest.mark.parametrize("batch_size", [7, 256])
def test_scores_do_not_depend_on_the_batches(made: tuple[Any, ...], way: Any, batch_size: int, tmp_path: Any) -> None:
    model, train, queries, shares, wanted = made
    options = {"method": hk.identity(), "way": way, "batch_size": batch_size}
    found = hk.attribute(loss, model, train, queries, **options).scores
    assert torch.allclose(found, wanted @ shares.T, rtol=1e-9, atol=1e-14)
    written = hk.attribute(loss, model, train, queries, **options, out=tmp_path).scores
    assert torch.allclose(written, found.float(), rtol=1e-5, atol=1e-9)
    selves = hk.attribution.self_influence(loss, model, train, method=hk.identity(), batch_size=batch_size)
    assert torch.allclose(selves, shares.square().sum(1) * 40, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("method", [hk.kfac(1e-2, fisher="type-2"), hk.cg(8, curvature=hk.curvature.GGN(1e-2))])
def test_curvature_and_kept_gradients_neither(made: tuple[Any, ...], method: hk.Implicit) -> None:
    model, train, queries, _, _ = made
    few, all_at_once = (
        hk.attribute(loss, model, train, queries, method=method, batch_size=size).scores for size in (7, 256)
    )
    assert torch.allclose(few, all_at_once, rtol=1e-6, atol=1e-12)


@pytest.fixture
def masked() -> tuple[BlockCall, Eigenbasis, Tensor, Tensor]:
    """A layer over tokens, of which many have no gradient, with a basis, and the dense gradients of the examples.

    The input of these tokens is infinite, so that a product with it is not a number.
    """
    torch.manual_seed(0)
    model = nn.Linear(5, 7).double()
    (block,) = plan(model, "diagonal").blocks.values()
    call = BlockCall(block, {name: p.detach() for name, p in model.named_parameters()})
    none = torch.rand(6, 4) < 0.5
    x, call.g = (torch.randn(6, 4, d, dtype=torch.float64).masked_fill(none[..., None], 0) for d in (5, 7))
    call.x = x.masked_fill(none[..., None], torch.inf)
    a, b = (torch.linalg.qr(torch.randn(1, d, d, dtype=torch.float64))[0] for d in (6, 7))
    weights, biases = torch.einsum("nso,nsi->noi", call.g, x), call.g.sum(1)
    return call, Eigenbasis(a, b, torch.rand(1, 7, 6, dtype=torch.float64) + 1), weights, biases


def in_basis(basis: Eigenbasis, weights: Tensor, biases: Tensor) -> Tensor:
    found: Tensor = basis.b[0].T @ torch.cat([weights, biases[..., None]], -1) @ basis.a[0]
    return found


def test_tokens_without_a_gradient_are_left_out_of_the_spectrum(masked: Any) -> None:
    call, basis, weights, biases = masked
    found = corrected(call.block, call.x, call.g, basis.a, basis.b)
    assert torch.allclose(found[0], in_basis(basis, weights, biases).square().sum(0), rtol=1e-12)


@pytest.mark.parametrize("queries", [1, 30])
def test_and_of_scores(masked: Any, queries: int) -> None:
    call, basis, weights, biases = masked
    tree = {"weight": torch.randn(queries, 7, 5).double(), "bias": torch.randn(queries, 7).double()}
    if queries == 1:  # from the vector itself, without a basis
        wanted = torch.einsum("qoi,noi->qn", tree["weight"], weights) + tree["bias"] @ biases.T
        assert torch.allclose(call.scores(QueryVectors(tree, {})), wanted, rtol=1e-12)
    coordinates, known = in_basis(basis, weights, biases), {call.block.name: basis}
    joint = torch.cat([tree["weight"], tree["bias"][..., None]], -1)
    wanted = torch.einsum("qoi,noi->qn", joint, coordinates)
    assert torch.allclose(call.scores(QueryVectors(tree, known)), wanted, rtol=1e-12)
    (made,) = call.coordinates(known)
    divided = coordinates / basis.spectrum[0]
    assert torch.allclose(made["weight"], divided[..., :5], rtol=1e-12)
    assert torch.allclose(made["bias"], divided[..., 5], rtol=1e-12)
