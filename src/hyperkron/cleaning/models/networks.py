"""Small networks, wholly covered by Kronecker blocks; which one a dataset gets, and how a user names their own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.solution import HyperkronError
from hyperkron.validation import check_whole

SMALLEST, LARGEST = 8, 64
"""Pixels on a side of the images that :func:`small_cnn` is made for."""


def linear(features: int, classes: int) -> nn.Sequential:
    """Multinomial logistic regression: logits W x + b, with W and b zero at first.

    Inputs have ``features`` numbers each; those of more dimensions are flattened.

    Example:
        >>> import torch
        >>> linear(4, 3)(torch.ones(2, 4))
        tensor([[0., 0., 0.],
                [0., 0., 0.]], grad_fn=<AddmmBackward0>)
    """
    _check(features=features, classes=classes)
    head = nn.Linear(features, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Flatten(), head)


def mlp(features: int, classes: int, hidden: int | Sequence[int] = 128) -> nn.Sequential:
    """A multilayer perceptron: linear layers with ReLU between them, of inputs as for :func:`linear`.

    ``hidden`` is the size of the hidden layer, or of each one; an empty sequence gives :func:`linear`.

    References:
        Initialised as in He et al., 2015, "Delving deep into rectifiers".

    Example:
        >>> import torch
        >>> mlp(4, 3, hidden=(16, 8))(torch.ones(2, 4)).shape
        torch.Size([2, 3])
    """
    sizes = tuple(hidden) if isinstance(hidden, Iterable) else (hidden,)
    _check(features=features, classes=classes, **{f"hidden[{i}]": size for i, size in enumerate(sizes)})
    if not sizes:
        return linear(features, classes)
    parts: list[nn.Module] = [nn.Flatten()]
    for size in sizes:
        parts += [_rectified(nn.Linear(features, size)), nn.ReLU()]
        features = size
    return nn.Sequential(*parts, _last(features, classes))


def small_cnn(channels: int, size: int, classes: int, width: int = 32) -> nn.Sequential:
    """A network of three convolutions for images of 8×8 to 64×64 pixels, to be trained from scratch on a CPU.

    Each stage is relu(maxpool(conv3×3(x))) and doubles the channels: width, 2·width, 4·width. Stages halve the image
    until it is 4×4 or less; an image of 64 pixels has a fourth stage, one of 8 pixels is not halved at first. A linear
    layer reads the flattened result. There is no normalisation: every parameter lies in a Kronecker block, and the
    logits of an example do not depend on the others of its batch, as batch normalisation would make them. Inputs
    should have a mean near 0 and a variance near 1. They have ``size`` pixels on a side, and the first stage has
    ``width`` channels.

    References:
        Initialised as in He et al., 2015, "Delving deep into rectifiers".

    Example:
        >>> import torch
        >>> small_cnn(3, 32, 10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    _check(channels=channels, classes=classes, width=width)
    if not SMALLEST <= size <= LARGEST:
        raise HyperkronError(
            f"size={size!r} must lie between {SMALLEST} and {LARGEST} pixels; scale the images, or pass your network."
        )
    parts: list[nn.Module] = [_PixelByPixel()]
    for stage, halve in enumerate(_halvings(size)):
        out = width * 2 ** min(stage, 2)
        parts.append(_rectified(nn.Conv2d(channels, out, 3, padding=1)))
        if halve:  # the maximum and ReLU commute, and ReLU is cheaper on the smaller image
            parts.append(nn.MaxPool2d(2))
            size //= 2
        parts.append(nn.ReLU())
        channels = out
    return nn.Sequential(*parts, nn.Flatten(), _last(channels * size * size, classes))


class _PixelByPixel(nn.Module):
    """The same images with the channels of a pixel side by side in memory, which convolutions on a CPU like best."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _halvings(size: int) -> list[bool]:
    """For each stage whether it halves the image: until it is 4 pixels or less, and three stages at least."""
    count = 0
    while size > 4:
        size, count = size // 2, count + 1
    return [False] * (3 - count) + [True] * count


def _rectified(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    """With weights that keep the variance through a ReLU."""
    assert layer.bias is not None
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


def _last(features: int, classes: int) -> nn.Linear:
    """A linear layer with small logits at first, so that the first loss is near log(classes)."""
    head = nn.Linear(features, classes)
    nn.init.normal_(head.weight, std=0.1 / features**0.5)
    nn.init.zeros_(head.bias)
    return head


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        check_whole(name, value)


_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)


def default_model(inputs_shape: Sequence[int], classes: int) -> Callable[[], nn.Module]:
    """A builder of the default network; every call makes a fresh one, initialised under the current seed of torch.

    Square images of 16 to 64 pixels get :func:`small_cnn`; other images, tables and embeddings of texts a perceptron
    with one hidden layer of 128. ``inputs_shape`` is that of one example, (d,) or (C, H, W).

    Example:
        >>> build = default_model((20,), 3)
        >>> build()
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=20, out_features=128, bias=True)
          (2): ReLU()
          (3): Linear(in_features=128, out_features=3, bias=True)
        )
    """
    shape = tuple(int(n) for n in inputs_shape)
    if len(shape) == 3 and shape[1] == shape[2] and 2 * SMALLEST <= shape[1] <= LARGEST:
        build = partial(small_cnn, shape[0], shape[1], classes)
    else:
        build = partial(mlp, prod(shape), classes)
    with torch.device("meta"):  # bad sizes are met now; this makes nothing and draws no numbers
        build()
    return build


def load_callable(name: str) -> Callable[..., Any]:
    """The object that a name such as ``"mypackage.models:build"`` stands for, imported.

    Importing runs the module's code, so the name must come from the person who runs the program (an argument in
    Python or on the command line), never from a configuration or data file.

    Example:
        >>> load_callable("hyperkron.cleaning.models:small_cnn").__name__
        'small_cnn'
    """
    if not isinstance(name, str) or not _NAME.match(name):
        raise HyperkronError(f'model={name!r:.100} must read "module:callable", such as "mypackage.models:build".')
    place, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(place)
    except ImportError as error:
        raise HyperkronError(
            f"model={name!r}: the module {place!r} cannot be imported ({error}); install it, or put its folder into "
            "PYTHONPATH."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise HyperkronError(f"model={name!r}: {part!r} does not exist in {found!r:.100}; check its spelling.")
        found = getattr(found, part)
    if not callable(found):
        raise HyperkronError(f"model={name!r} is a {type(found).__name__}; name something that returns a network.")
    call: Callable[..., Any] = found
    return call
