"""From rows as they were read to what a network takes, and the network itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning.config import CleanConfig
from hyperkron.cleaning.data import Labelled
from hyperkron.cleaning.models import HashedNgrams, Hidden, TextEncoder, default_model
from hyperkron.cleaning.trainer import Dense, Inputs
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    from hyperkron.cleaning.models.encoder import Progress as TokenProgress

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
        transform: makes inputs of further rows, given in the form of ``Labelled.inputs``.
    """

    inputs: Inputs
    test: Inputs | None
    build: Callable[[], nn.Module]
    transform: Callable[[Any], Inputs]


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
    for name, value in (("layers", config.layers), ("encoder", config.encoder)):
        if value and parts[0].kind != "text":
            raise HyperkronError(f"{name}={value!r} is for texts, but these are {parts[0].kind} inputs; leave it out.")
    if config.layers and model is not None:
        raise HyperkronError(f"layers={config.layers} trains an encoder, so model= cannot be given; leave one out.")


def prepare(
    parts: list[Labelled],
    config: CleanConfig,
    device: torch.device,
    *,
    encoder: TextEncoder | None = None,
    model: Callable[[], nn.Module] | None = None,
    cache: Path | None = None,
    progress: TokenProgress | None = None,
) -> Prepared:
    """Inputs of [training, trusted] or [training, trusted, test] rows, all made in the same way.

    Args:
        parts: the rows.
        config: settings.
        device: where to compute.
        encoder: of texts; None takes hashed n-grams.
        model: makes a fresh network; None takes the default.
        cache: a folder that keeps embeddings.
        progress: of embedding.
    """
    refuse_early(parts, config, model)
    kind, classes = parts[0].kind, len(parts[0].classes)
    if kind == "text" and config.layers:
        assert encoder is not None
        return _trained_encoder(parts, config, encoder, device, progress)
    raw: Callable[[Any], Tensor] = _floats
    if kind == "text":
        values, raw = _text_vectors([list(part.inputs) for part in parts], encoder, device, cache, progress)
    elif kind == "image":
        values = [_floats(part.inputs) for part in parts]
    else:
        values = [_floats(part.standardised()) for part in parts]
        raw = partial(_encoded, parts[0].encoding)
    scale = _Scale.of(values[0], kind)
    hidden = TEXT_HIDDEN if kind == "text" else None
    build = model or default_model(kind, tuple(values[0].shape[1:]), classes, hidden=hidden)
    inputs = Dense(scale(torch.cat(values[:2])).to(device))
    test = Dense(scale(values[2]).to(device)) if len(values) > 2 else None
    _refuse_misfit(build, inputs, classes, device)
    return Prepared(inputs, test, build, lambda rows: Dense(scale(raw(rows)).to(device)))


@dataclass(frozen=True)
class _Scale:
    """Standardisation by the training rows: per number of an embedding, per channel of a picture, none for tables."""

    mean: Tensor | float = 0.0
    deviation: Tensor | float = 1.0

    @classmethod
    def of(cls, values: Tensor, kind: str) -> _Scale:
        if kind == "table":  # already encoded
            return cls()
        dims = (0,) if kind == "text" else (0, 2, 3)
        deviation = values.std(dims, keepdim=True).nan_to_num(1.0).clamp(min=1e-6)
        return cls(values.mean(dims, keepdim=True), deviation)

    def __call__(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.deviation


def _floats(rows: Any) -> Tensor:
    return torch.as_tensor(rows).float()


def _encoded(encoding: Any, rows: Any) -> Tensor:
    return _floats(encoding.standardise(rows))


def _text_vectors(
    texts: list[list[str]],
    encoder: TextEncoder | None,
    device: torch.device,
    cache: Path | None,
    progress: TokenProgress | None,
) -> tuple[list[Tensor], Callable[[Any], Tensor]]:
    """Vectors of each list of texts, and what makes vectors of further ones in the same way."""
    if encoder is None:
        hashed = HashedNgrams(texts[0])
        return [hashed(part) for part in texts], lambda rows: hashed(list(rows))
    flat = [text for part in texts for text in part]
    found = encoder.embed(flat, cache=cache, progress=progress).split([len(part) for part in texts])
    encoder.to("cpu")  # it waits there for further rows, out of the way of training

    def embed(rows: Any) -> Tensor:
        encoder.to(device)
        try:
            return encoder.embed(list(rows)).cpu()
        finally:
            encoder.to("cpu")

    return list(found), embed


def _refuse_misfit(build: Callable[[], nn.Module], inputs: Inputs, classes: int, device: torch.device) -> None:
    """Meet a network that does not take these inputs, or has another number of outputs, before any training."""
    two = torch.arange(min(2, len(inputs)), device=device)
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            shape = tuple(build().to(device).eval()(*inputs.batch(two)).shape)
        except (RuntimeError, TypeError, AttributeError) as error:
            raise HyperkronError(
                f"model does not take inputs of shape {tuple(inputs.batch(two)[0].shape[1:])}: {str(error)[:200]}"
            ) from error
    if shape != (len(two), classes):
        raise HyperkronError(
            f"model gives an output of shape {shape} for {len(two)} rows; it must be ({len(two)}, {classes}), one "
            f"logit for each of the {classes} classes."
        )


def _trained_encoder(
    parts: list[Labelled],
    config: CleanConfig,
    encoder: TextEncoder,
    device: torch.device,
    progress: TokenProgress | None,
) -> Prepared:
    def states(*some: Any, progress: TokenProgress | None = progress) -> States:
        texts = [str(text) for rows in some for text in rows]
        return States(encoder.prefix(texts, config.layers, progress=progress), device)

    inputs, classes = states(*(part.inputs for part in parts[:2])), len(parts[0].classes)
    test = states(parts[2].inputs) if len(parts) > 2 else None
    return Prepared(
        inputs,
        test,
        lambda: encoder.with_head(classes, config.layers),
        lambda rows: states(rows, progress=None),
    )
