"""Networks of several experiments, and initial weights by seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.resnet import BasicBlock, ResNet

Made = TypeVar("Made", bound=nn.Module)


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


class PaddedShortcut(nn.Module):
    """Option A of He et al.: every second pixel, and zeros for the new channels, half of them on each side."""

    def __init__(self, new: int) -> None:
        super().__init__()
        self.new = new

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) to (N, channels + new, H/2, W/2)."""
        before = self.new // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.new - before))


def resnet32(classes: int = 10, width: int = 16, blocks: int = 5) -> ResNet:
    """CIFAR's ResNet-32: three stages of five basic blocks, shortcuts without parameters, weights by Kaiming's rule.

    Example:
        >>> sum(p.numel() for p in resnet32().parameters())
        464154
    """
    model = ResNet((blocks,) * 3, classes, "3x3", width)
    for part in model.modules():
        if isinstance(part, BasicBlock) and isinstance(part.shortcut, nn.Sequential):
            part.shortcut = PaddedShortcut(part.conv1.out_channels - part.conv1.in_channels)
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight)
    return model


def seeded(make: Callable[[], Made], seed: int, device: torch.device | str = "cpu") -> Made:
    """A network with the initial weights of ``seed``, drawn on the CPU; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(device)


def linear(features: int, classes: int = 10) -> nn.Linear:
    """A linear model whose parameters are zero.

    Example:
        >>> float(linear(3).weight.abs().sum())
        0.0
    """
    model = nn.Linear(features, classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model
