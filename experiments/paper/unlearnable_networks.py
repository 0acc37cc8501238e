"""Networks of the unlearnable-examples experiment: the generator of perturbations, free noise, and the CNN."""

from __future__ import annotations

import copy
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 1000
"""Images that are perturbed at once."""


class UNet(nn.Module):
    """A perturbation for each image: radius · tanh(U-Net(x)), so that no pixel moves by more than ``radius``.

    Four levels of two 3×3 convolutions with BatchNorm and ReLU, average pooling down, bilinear interpolation up, and a
    1×1 convolution with BatchNorm at the end.

    Args:
        radius: ε, the largest change of a pixel.
        width: channels of the first level; each of the next three has twice as many.

    Reference: Liu et al., "Game-theoretic unlearnable example generator" (AAAI 2024).

    Example:
        >>> noise = UNet(8 / 255, width=2)(torch.rand(2, 3, 8, 8), torch.arange(2))
        >>> noise.shape, bool(noise.abs().max() <= 8 / 255)
        (torch.Size([2, 3, 8, 8]), True)
    """

    def __init__(self, radius: float, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.radius = radius
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(_double(a + b, a) for a, b in itertools.pairwise(widths))
        self.last = nn.Sequential(nn.Conv2d(width, 3, 1), nn.BatchNorm2d(3))

    def forward(self, images: Tensor, index: Tensor) -> Tensor:
        """The perturbations of images in [0, 1]; their ``index`` is not used."""
        x, skipped = channels_last(images), []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.avg_pool2d(x, 2))
            skipped.append(x)
        for level in (2, 1, 0):
            up = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = self.up[level](torch.cat([skipped[level], up], 1))
        return self.radius * self.last(x).tanh()


def channels_last(images: Tensor) -> Tensor:
    """The same images, on a GPU laid out as tensor cores take them."""
    return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images


class _ChannelsLast(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return channels_last(images)


def _double(channels: int, out: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for given in (channels, out):
        parts += [nn.Conv2d(given, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*parts)


class SampleNoise(nn.Module):
    """A free perturbation of each image, for error-minimising noise; starts uniform within ±radius.

    Example:
        >>> SampleNoise(5, (3, 4, 4), radius=0.1)(torch.zeros(2, 3, 4, 4), torch.tensor([0, 3])).shape
        torch.Size([2, 3, 4, 4])
    """

    def __init__(self, count: int, shape: tuple[int, ...], radius: float) -> None:
        super().__init__()
        self.radius = radius
        self.noise = nn.Parameter(torch.empty(count, *shape).uniform_(-radius, radius))

    def forward(self, images: Tensor, index: Tensor) -> Tensor:
        """The perturbations of the images with these numbers."""
        return self.noise[index]


@torch.no_grad()
def published(noise: nn.Module | None, images: Tensor) -> Tensor:
    """The images as they are published: perturbed and clamped to [0, 1]; ``None`` leaves them as they are.

    A generator's BatchNorm uses the statistics of all images, collected first, so that the perturbation of an image
    does not depend on the others in its batch.
    """
    if noise is None:
        return images
    made, index = copy.deepcopy(noise), torch.arange(len(images), device=images.device)
    layers = [layer for layer in made.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
    if layers:
        made.train()
        for part in index.split(CHUNK)[: max(1, len(index) // CHUNK)]:
            made(images[part], part)
    made.eval()
    return torch.cat([(images[part] + made(images[part], part)).clamp(0, 1) for part in index.split(CHUNK)])


def cnn(size: int, width: int = 64, hidden: int = 256, classes: int = 10) -> nn.Sequential:
    """Three 3×3 convolutions, each with ReLU and 2×2 pooling, and two linear layers; for images of ``size`` pixels.

    Example:
        >>> cnn(8, width=2, hidden=4)(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """
    parts: list[nn.Module] = [_ChannelsLast()]
    channels = 3
    for out in (width, 2 * width, 4 * width):
        parts += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = out
    last = nn.Linear(hidden, classes)
    parts += [nn.Flatten(), nn.Linear(channels * (size // 8) ** 2, hidden), nn.ReLU(), last]
    for layer in parts:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    nn.init.normal_(last.weight, std=0.1 / math.sqrt(hidden))
    return nn.Sequential(*parts)


def crop_and_flip(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Each image shifted by at most ``padding`` pixels, and mirrored with probability one half.

    Example:
        >>> x = torch.rand(2, 3, 8, 8)
        >>> crop_and_flip(x, 0, torch.Generator().manual_seed(0)).sum().allclose(x.sum())
        True
    """
    count, _, height, width = images.shape
    device = images.device

    def moved(length: int) -> Tensor:
        by = torch.randint(2 * padding + 1, (count, 1), generator=generator, device=device)
        return by + torch.arange(length, device=device)

    rows, columns = moved(height), moved(width)
    mirrored = torch.rand((count, 1), generator=generator, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = F.pad(images, (padding,) * 4)
    each = torch.arange(count, device=device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
