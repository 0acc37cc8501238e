"""The networks of the cleaning experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from hyperkron.cleaning.models import resnet18
from hyperkron.solution import HyperkronError

Network = Literal["linear", "cnn", "resnet18", "tiny"]
"""``linear``: 784 → 10; ``cnn``: three convolutions; ``resnet18``: CIFAR's; ``tiny``: a small ResNet for smoke runs."""


def cnn(classes: int = 10, width: int = 32) -> nn.Sequential:
    """Three 3×3 convolutions, each followed by ReLU and a 2×2 pooling, and a linear head.

    Example:
        >>> cnn(width=4)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    layers: list[nn.Module] = []
    channels = 3
    for out in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, classes))


def make(network: Network, features: int, seed: int, width: int | None = None) -> nn.Module:
    """A network with the initial weights of ``seed``; those of ``linear`` are zero.

    Args:
        network: which.
        features: inputs of ``linear``.
        seed: of the initial weights; torch's own random state is left as it was.
        width: channels of the first layers; ``None`` for the usual number.
    """
    makers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(features, 10),
        "cnn": lambda: cnn(width=width or 32),
        "resnet18": lambda: resnet18(width=width or 64),
        "tiny": lambda: resnet18(width=width or 4),
    }
    if network not in makers:
        raise HyperkronError(f"network={network!r} is unknown; choose one of {', '.join(makers)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = makers[network]()
    if isinstance(model, nn.Linear):
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    return model
