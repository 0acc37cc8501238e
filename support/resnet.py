"""Residual networks of basic blocks (He et al., 2016), with a stem for small or for large images."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from hyperkron.solution import HyperkronError
from hyperkron.validation import check_whole

Stem = Literal["3x3", "7x7"]
"""What meets the image: one 3×3 convolution (CIFAR), or a 7×7 with stride 2 and a pooling (ImageNet)."""


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut: relu(x' + BN(conv(relu(BN(conv(x)))))).

    The shortcut x' is x itself, or a 1×1 convolution of it where the shape changes.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            projection = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) to (N, width, H/stride, W/stride)."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """A stem, stages of basic blocks that each double the width and halve the image, and a linear head.

    Args:
        blocks: how many blocks each stage has.
        classes: how many logits come out.
        stem: ``"3x3"`` for images of about 32 pixels, ``"7x7"`` for those of about 224.
        width: channels of the first stage.

    References:
        He, Zhang, Ren and Sun, 2016, "Deep residual learning for image recognition".
    """

    def __init__(
        self, blocks: tuple[int, ...] = (2, 2, 2, 2), classes: int = 10, stem: Stem = "3x3", width: int = 64
    ) -> None:
        super().__init__()
        for name, value in (("classes", classes), ("width", width)):
            check_whole(name, value)
        self.stem = _stem(stem, width)
        stages, channels = [], width
        for stage, count in enumerate(blocks):
            out = width * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (count - 1)
            inputs = [channels] + [out] * (count - 1)
            stages.append(nn.Sequential(*[BasicBlock(c, out, s) for c, s in zip(inputs, strides, strict=True)]))
            channels = out
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
        logits: Tensor = self.head(self.pool(self.stages(self.stem(x))).flatten(1))
        return logits


def resnet18(classes: int = 10, stem: Stem = "3x3", width: int = 64) -> ResNet:
    """ResNet-18: four stages of two basic blocks; with the 3×3 stem the usual network for CIFAR.

    Args:
        classes: how many logits come out.
        stem: ``"3x3"`` for images of about 32 pixels, ``"7x7"`` for those of about 224.
        width: channels of the first stage, 64 in the paper; less makes a smaller network of the same shape.

    Example:
        >>> import torch
        >>> model = resnet18(classes=10)
        >>> sum(p.numel() for p in model.parameters())
        11173962
        >>> resnet18(width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return ResNet((2, 2, 2, 2), classes, stem, width)


def _stem(stem: Stem, width: int) -> nn.Sequential:
    relu = nn.ReLU(inplace=True)
    if stem == "3x3":
        return nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), relu)
    if stem == "7x7":
        conv = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(width), relu, nn.MaxPool2d(3, stride=2, padding=1))
    raise HyperkronError(f'stem={stem!r} is unknown; use "3x3" for small images or "7x7" for large ones.')
