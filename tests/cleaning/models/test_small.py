"""The small networks and the choice among them."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyperkron.cleaning.models import default_model, linear, load_callable, mlp, small_cnn
from hyperkron.curvature import KFAC
from hyperkron.solution import HyperkronError


@pytest.mark.parametrize(
    ("channels", "size", "flat"), [(1, 8, 128 * 4 * 4), (1, 28, 128 * 3 * 3), (3, 32, 128 * 4 * 4), (3, 64, 128 * 16)]
)
def test_small_cnn_takes_images_from_8_to_64(channels: int, size: int, flat: int) -> None:
    model = small_cnn(channels, size, 7)
    assert model[-1].in_features == flat
    x = torch.randn(5, channels, size, size)
    logits = model(x)
    assert logits.shape == (5, 7)
    assert sum(isinstance(m, nn.Conv2d) for m in model) == (4 if size == 64 else 3)
    torch.testing.assert_close(model(x[:2]), logits[:2], rtol=1e-4, atol=1e-5)  # no example depends on another


@pytest.mark.parametrize("size", range(8, 65))
def test_small_cnn_has_a_head_that_fits_at_every_size(size: int) -> None:
    assert small_cnn(1, size, 2, width=1)(torch.zeros(1, 1, size, size)).shape == (1, 2)


@pytest.mark.parametrize(
    "model",
    [linear(5, 3), mlp(5, 3), mlp(5, 3, (4, 4)), mlp(5, 3, np.array([4, 4])), small_cnn(3, 32, 10, width=4)],
    ids=["linear", "mlp", "mlp2", "mlp of an array", "cnn"],
)
def test_kronecker_blocks_cover_everything(model: nn.Module) -> None:
    coverage = KFAC().coverage(model)
    assert coverage.covered == 1.0
    assert not coverage.uncovered


def test_small_cnn_keeps_the_variance_and_starts_near_the_uniform_loss() -> None:
    torch.manual_seed(0)
    model = small_cnn(3, 32, 10)
    x = torch.randn(64, 3, 32, 32)
    before = model[:-1](x).detach()
    assert 0.2 < float(before.square().mean()) < 10
    loss = F.cross_entropy(model(x), torch.randint(10, (64,)))
    assert float(loss.detach()) == pytest.approx(math.log(10), rel=0.05)


def test_small_cnn_at_32_pixels_costs_what_it_should() -> None:
    """About 10 million multiplications forward, so that a CPU core trains it."""
    model, products = small_cnn(3, 32, 10), 0
    x = torch.zeros(1, 3, 32, 32)
    for layer in model:
        x = layer(x)
        if isinstance(layer, nn.Conv2d):
            products += layer.weight.numel() * x.shape[-1] ** 2
    assert 8e6 < products < 12e6


def test_small_cnn_lays_images_out_pixel_by_pixel_and_has_gradients_of_each_example() -> None:
    """The layout is that of the images, not of the parameters, which stay plain to save; vmap goes through."""
    model = small_cnn(3, 16, 4, width=4)
    x = torch.randn(5, 3, 16, 16)
    assert model[0](x).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model[0](x), x)
    assert all(p.is_contiguous() for p in model.parameters())

    def loss(parameters: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (image[None],)).square().sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    whole = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for got, expected in zip(each.values(), whole, strict=True):
        torch.testing.assert_close(got.sum(0), expected, rtol=1e-4, atol=1e-4)


def test_the_networks_learn() -> None:
    """Each fits a rule that the one before it cannot: a half-space, a product of signs, and an edge's direction."""
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    half, product = (x.sum(1) > 0).long(), (x.prod(1) > 0).long()
    assert _fit(linear(2, 2), x, half) > 0.97
    assert _fit(linear(2, 2), x, product) < 0.7
    assert _fit(mlp(2, 2, 32), x, product) > 0.95
    turned = torch.randint(2, (128,))
    stripes = (torch.arange(8) // 2 % 2).float().expand(8, 8) - 0.5
    images = torch.stack([stripes.T if t else stripes for t in turned])[:, None]
    images = images * torch.randn(128, 1, 1, 1).sign() + 0.3 * torch.randn(128, 1, 8, 8)
    assert _fit(small_cnn(1, 8, 2, width=8), images, turned) > 0.97


def _fit(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return float((model(x).argmax(1) == y).float().mean())


def test_default_model_by_shape() -> None:
    def kinds(build: object) -> list[type]:
        return [type(m) for m in build() if not isinstance(m, nn.Flatten)]  # type: ignore[operator]

    assert kinds(default_model((9,), 6)) == [nn.Linear, nn.ReLU, nn.Linear]
    assert nn.Conv2d in kinds(default_model((3, 32, 32), 10))
    assert nn.Conv2d not in kinds(default_model((3, 32, 24), 10))


def test_default_model_is_fresh_and_follows_the_seed_only() -> None:
    build = default_model((1, 8, 8), 3)
    torch.manual_seed(3)
    first, second = build(), build()
    torch.manual_seed(3)
    again = default_model((1, 8, 8), 3)()  # making the builder draws no random numbers
    assert first is not second
    assert not torch.equal(first[1].weight, second[1].weight)  # type: ignore[index]
    assert torch.equal(first[1].weight, again[1].weight)  # type: ignore[index]
    assert all(p.device.type == "cpu" for p in again.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(0, 2), "features=0"),
        (lambda: mlp(3, 2, (4, -1)), r"hidden\[1\]=-1"),
        (lambda: mlp(3, 2, True), r"hidden\[0\]=True"),
        (lambda: small_cnn(3, 7, 2), "size=7 must lie between 8 and 64"),
        (lambda: small_cnn(3, 65, 2), "size=65 must lie between 8 and 64"),
        (lambda: small_cnn(3, 32, 2, width=0), "width=0"),
        (lambda: default_model((0,), 2), "features=0"),
        (lambda: default_model((3,), 0), "classes=0"),
    ],
)
def test_bad_sizes_are_named(make: object, message: str) -> None:
    with pytest.raises(HyperkronError, match=message):
        make()  # type: ignore[operator]


def test_load_callable_finds_the_user_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_nets.py").write_text("class Nets:\n    @staticmethod\n    def build(): return 7\nsize = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_callable("my_own_nets:Nets.build")() == 7
    with pytest.raises(HyperkronError, match="is a int"):
        load_callable("my_own_nets:size")
    with pytest.raises(HyperkronError, match=r"'wrong' does not exist"):
        load_callable("my_own_nets:wrong")
    sys.modules.pop("my_own_nets")
    with pytest.raises(HyperkronError, match="'no_such_module_here' cannot be imported"):
        load_callable("no_such_module_here:build")


@pytest.mark.parametrize(
    "name", ["os", "os:", ":system", "os:sys tem", "os:system()", "../x:y", "a:b:c", "os:é", "a:b\n", 3]
)
def test_load_callable_refuses_odd_names(name: str) -> None:
    with pytest.raises(HyperkronError, match="must read"):
        load_callable(name)
