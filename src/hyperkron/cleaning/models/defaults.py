"""Which network a dataset gets if nobody names one, and how a user names their own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from hyperkron.cleaning.models.small import LARGEST, SMALLEST, linear, mlp, small_cnn
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_one_of

Kind = Literal["text", "table", "image"]
"""What the inputs are: texts (as embeddings), rows of numbers, or images."""

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)


def default_model(
    kind: Kind, inputs_shape: Sequence[int], classes: int, *, hidden: int | Sequence[int] | None = None
) -> Callable[[], nn.Module]:
    """A builder of the default network; every call makes a fresh one, initialised under the current seed of torch.

    Texts, as embeddings, get a linear head; tables a perceptron with one hidden layer of 128; square images of 16 to 64
    pixels :func:`small_cnn`, and other images a perceptron on their pixels.

    Args:
        kind: of the data.
        inputs_shape: shape of one example, without the batch: (d,) or (C, H, W).
        classes: how many there are.
        hidden: the hidden layers instead of the default: a size, several, or ``()`` for a linear model. For images
            one size is the width of the convolutional network; several, or ``()``, make a perceptron on the pixels.

    Example:
        >>> build = default_model("table", (20,), 3)
        >>> build()
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=20, out_features=128, bias=True)
          (2): ReLU()
          (3): Linear(in_features=128, out_features=3, bias=True)
        )
    """
    shape = tuple(int(n) for n in inputs_shape)
    check_one_of("kind", kind, ("text", "table", "image"))
    if len(shape) != (3 if kind == "image" else 1) or min(shape) < 1:
        form = "(channels, height, width)" if kind == "image" else "(features,)"
        raise HyperkronError(f"inputs_shape={shape} must be {form} for kind={kind!r}, the shape of one example.")
    if kind == "image" and (hidden is None or isinstance(hidden, int)) and _fits_small_cnn(shape):
        build = partial(small_cnn, shape[0], shape[1], classes, 32 if hidden is None else hidden)
    elif kind == "text" and hidden is None:
        build = partial(linear, shape[0], classes)
    else:
        build = partial(mlp, prod(shape), classes, 128 if hidden is None else hidden)
    with torch.device("meta"):  # bad sizes are met now; this makes nothing and draws no numbers
        build()
    return build


def _fits_small_cnn(shape: tuple[int, ...]) -> bool:
    return shape[1] == shape[2] and 2 * SMALLEST <= shape[1] <= LARGEST


def load_callable(name: str) -> Callable[..., Any]:
    """The object that ``"module:callable"`` names, imported.

    Importing runs the module's code, so the name must come from the person who runs the program (an argument in
    Python or on the command line), never from a configuration or data file.

    Args:
        name: such as ``"mypackage.models:build"``; letters, digits, ``_`` and ``.`` around one ``:``.

    Example:
        >>> load_callable("hyperkron.cleaning.models:resnet18").__name__
        'resnet18'
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
