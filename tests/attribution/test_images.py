"""Images: few queries without patches, and channels last in memory."""

import pytest
import torch
from torch import nn

import hyperkron as hk
from hyperkron.curvature import EKFAC


def loss(model, batch):
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


class Viewed(nn.Module):
    """Flattens by ``view``, which refuses channels that are last in memory."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(16, 3)

    def forward(self, x):
        z = self.inner(x)
        return self.head(z.view(len(z), -1))


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(2, 4, 3),
    "groups, stride": lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, bias=False),
    "circular": lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
}


def made(convolution):
    torch.manual_seed(0)
    net = nn.Sequential(convolution, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)).double()
    x, y = torch.randn(8, 2, 5, 5, dtype=torch.float64), torch.randint(0, 3, (8,))
    return net, (x[:6], y[:6]), (x[6:], y[6:])


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("count", [1, 2])
def test_few_queries_by_layers_are_those_of_forward_mode(name, count):
    model, train, queries = made(CONVOLUTIONS[name]())
    queries = tuple(part[:count] for part in queries)
    method = hk.ekfac(1e-2, fisher="type-2")
    layers, forward = (
        hk.attribute(loss, model, train, queries, method=method, way=way).scores for way in ("layers", "forward")
    )
    torch.testing.assert_close(layers, forward, rtol=1e-10, atol=1e-12)


def test_channels_are_last_in_memory_where_the_model_goes_through():
    model, train, queries = made(CONVOLUTIONS["plain"]())
    seen = []
    model[0].register_forward_hook(
        lambda _, given, __: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    method = hk.ekfac(1e-2, fisher="type-2")
    found = hk.attribute(loss, model, train, queries, method=method, aggregate=True)
    assert all(seen)
    assert found.stats["way"] == "layers"
    viewed = Viewed(nn.Sequential(*model[:3]))
    viewed.head = model[4]
    seen.clear()
    same = hk.attribute(loss, viewed, train, queries, method=method, aggregate=True)
    assert not all(seen[1:]) and same.stats["way"] == "forward"
    torch.testing.assert_close(same.scores, found.scores, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("way", ["forward", "auto"])
def test_group_norm_goes_forward_with_channels_first(way, channels):
    torch.manual_seed(0)
    model, *data = made(nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.GroupNorm(2, 4)))
    train, queries = ((x[:, :channels].contiguous(), y) for x, y in data)
    options = {
        "method": hk.Implicit(EKFAC(1e-2, fisher="type-2", fallback="zero"), hk.solvers.Direct()),
        "batch_size": 3,
    }
    found, layers = (hk.attribute(loss, model, train, queries, way=w, **options).scores for w in (way, "layers"))
    torch.testing.assert_close(found, layers, rtol=1e-10, atol=1e-12)


def test_group_norm_behind_frozen_layers_keeps_channels_first():
    """torch's backward pass ends the process if they are last and the input of the layer has no gradient."""
    model, train, queries = made(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)))
    model[0][0].requires_grad_(False)
    method = hk.kfac(1e-2, fisher="type-2")
    layers, forward = (
        hk.attribute(loss, model, train, queries, method=method, way=way).scores for way in ("layers", "forward")
    )
    torch.testing.assert_close(layers, forward, rtol=1e-10, atol=1e-12)
