"""From rows as they were read to what a network takes, and the network itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hyperkron.data import Labelled
from hyperkron.models import Hidden, TextEncoder, default_model, text_features
from hyperkron.solution import HyperkronError
from hyperkron.tasks.cleaning.config import CleanConfig
from hyperkron.tasks.cleaning.trainer import Dense, Inputs

if TYPE_CHECKING:
    from hyperkron.models.encoder import Progress as TokenProgress

TEXT_HIDDEN = 128
"""Units of the hidden layer on frozen embeddings."""


@dataclass(frozen=True)
class States:
    """Inputs of an encoder whose last layers are trained: the states that enter them."""

    hidden: Hidden
    device: torch.device

    def __len__(self) -> int:
        return len(self.hidden)

    def batch(self, rows: Tensor) -> tuple[Tensor, ...]:
        return self.hidden.batch(rows.cpu(), device=self.device)


@dataclass(frozen=True)
class Prepared:
    """What training needs of the data.

    Attributes:
        inputs: of the training rows, then the trusted ones.
        test: of the test rows, if there are some.
        build: makes a fresh network.
        messages: what a person should know.
    """

    inputs: Inputs
    test: Inputs | None
    build: Callable[[], nn.Module]
    messages: tuple[str, ...] = ()


def pick_device(name: str) -> torch.device:
    """``auto`` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise HyperkronError(f"device={name!r} is unknown; use auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HyperkronError(f"device={name!r}, but no GPU can be used here; use auto or cpu.")
    return device


def refuse_early(parts: list[Labelled], config: CleanConfig, model: Callable[[], nn.Module] | None) -> None:
    """Meet settings that cannot work before anything is written."""
    pick_device(config.device)
    if config.layers and parts[0].kind != "text":
        raise HyperkronError(
            f"layers={config.layers} is for texts, but these are {parts[0].kind} inputs; leave it out."
        )
    if config.layers and model is not None:
        raise HyperkronError(f"layers={config.layers} trains an encoder, so model= cannot be given; leave one out.")


def prepare(
    parts: list[Labelled],
    config: CleanConfig,
    device: torch.device,
    *,
    model: Callable[[], nn.Module] | None = None,
    cache: Path | None = None,
    progress: TokenProgress | None = None,
) -> Prepared:
    """Inputs of [training, trusted] or [training, trusted, test] rows, all made in the same way."""
    refuse_early(parts, config, model)
    kind, classes = parts[0].kind, len(parts[0].classes)
    if kind == "text" and config.layers:
        return _trained_encoder(parts, config, device, progress)
    messages: tuple[str, ...] = ()
    if kind == "text":
        texts = [list(part.inputs) for part in parts]
        found = text_features(texts, config.encoder, cache=cache, device=device, progress=progress)
        values, messages = list(found.parts), found.messages
        values = _standardised(values, dims=(0,))
    elif kind == "image":
        values = [torch.as_tensor(part.inputs).float() for part in parts]
        values = _standardised(values, dims=(0, 2, 3))
    else:
        values = [torch.as_tensor(part.standardised()).float() for part in parts]
    hidden = TEXT_HIDDEN if kind == "text" else None
    build = model or default_model(kind, tuple(values[0].shape[1:]), classes, hidden=hidden)
    inputs = Dense(torch.cat(values[:2]).to(device))
    test = Dense(values[2].to(device)) if len(values) > 2 else None
    return Prepared(inputs, test, build, messages)


def _standardised(values: list[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
    """With the mean and deviation of the first part."""
    mean = values[0].mean(dims, keepdim=True)
    deviation = values[0].std(dims, keepdim=True).nan_to_num(1.0)
    return [(value - mean) / deviation.clamp(min=1e-6) for value in values]


def _trained_encoder(
    parts: list[Labelled],
    config: CleanConfig,
    device: torch.device,
    progress: TokenProgress | None,
) -> Prepared:
    encoder = TextEncoder(config.encoder, device=device)
    both = [str(text) for part in parts[:2] for text in part.inputs]
    inputs = States(encoder.prefix(both, config.layers, progress=progress), device)
    test = None
    if len(parts) > 2:
        test = States(encoder.prefix([str(text) for text in parts[2].inputs], config.layers), device)
    classes = len(parts[0].classes)
    return Prepared(inputs, test, lambda: encoder.with_head(classes, config.layers))
