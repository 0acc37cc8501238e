"""From rows as they were read to what a network takes, and the network itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning.config import CleanConfig
from hyperkron.cleaning.data import InputForm, Labelled
from hyperkron.cleaning.data.files import np
from hyperkron.cleaning.models import HashedNgrams, TextEncoder, default_model
from hyperkron.cleaning.stages import Stages, Tensors
from hyperkron.cleaning.trainer import Dense, Inputs
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_device

if TYPE_CHECKING:
    from hyperkron.cleaning.models.encoder import Progress as TokenProgress


@dataclass(frozen=True)
class InputTransform:
    """Makes inputs of rows that are given in the form of ``Labelled.inputs``; the same for training and for new rows.

    Attributes:
        form: of the rows.
        vectors: makes vectors of texts.
        layers: how many of the encoder's last layers are trained.
        mean, deviation: of the training rows, per number of an embedding or channel of a picture; tables need none.
    """

    form: InputForm
    vectors: TextEncoder | HashedNgrams | None = None
    layers: int = 0
    mean: Tensor | float = 0.0
    deviation: Tensor | float = 1.0

    def __call__(self, rows: Any, device: torch.device, progress: TokenProgress | None = None) -> Inputs:
        """The inputs of rows, on a device."""
        if self.layers:
            assert isinstance(self.vectors, TextEncoder)
            return replace(self.vectors.prefix(list(map(str, rows)), self.layers, progress=progress), device=device)
        return self.scaled(self.raw(rows, device, progress), device)

    def scaled(self, values: Tensor, device: torch.device) -> Dense:
        """Standardised, on a device."""
        return Dense(((values - self.mean) / self.deviation).to(device))

    def fitted(self, values: Tensor) -> InputTransform:
        """With the mean and deviation of the training rows."""
        if self.form.kind == "table":  # already encoded
            return self
        if isinstance(self.vectors, HashedNgrams):  # what texts share least would count as much as what they share most
            return replace(self, mean=values.mean(0, keepdim=True))
        dims = (0,) if self.form.kind == "text" else (0, 2, 3)
        deviation = values.std(dims, keepdim=True).nan_to_num(1.0).clamp(min=1e-6)
        return replace(self, mean=values.mean(dims, keepdim=True), deviation=deviation)

    def raw(
        self, rows: Any, device: torch.device, progress: TokenProgress | None = None, cache: Path | None = None
    ) -> Tensor:
        """What is standardised; ``cache`` is a folder that keeps embeddings."""
        if self.form.encoding is not None:
            return _floats(self.form.encoding.standardise(np.asarray(rows)))
        if not isinstance(self.vectors, TextEncoder):
            return _floats(rows) if self.vectors is None else self.vectors(list(rows))
        encoder, texts = self.vectors.to(device), list(rows)
        key = hashlib.sha256(json.dumps([encoder.fingerprint, texts]).encode()).hexdigest()
        try:
            return Stages(cache, key)(f"embeddings-{key}", lambda: {"x": encoder.embed(texts, progress=progress)})["x"]
        finally:
            encoder.to("cpu")  # out of the way of training

    def tensors(self) -> Tensors:
        """What was learnt from the training rows, as far as it is numbers."""
        found = {"mean": torch.as_tensor(self.mean), "deviation": torch.as_tensor(self.deviation)}
        return found | (self.vectors.tensors() if isinstance(self.vectors, HashedNgrams) else {})

    @classmethod
    def load(cls, form: InputForm, tensors: Tensors, encoder: TextEncoder | None, layers: int) -> InputTransform:
        """From :meth:`tensors`, and the encoder if there was one."""
        hashed = HashedNgrams.from_tensors(tensors) if "components" in tensors else None
        return cls(form, encoder or hashed, layers, tensors["mean"], tensors["deviation"])


@dataclass(frozen=True)
class Prepared:
    """What training needs of the data: inputs of training and trusted rows, and of test rows; and what makes more."""

    inputs: Inputs
    test: Inputs | None
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    transform: InputTransform

    @contextmanager
    def threads(self, device: torch.device) -> Iterator[None]:
        """One thread for vectors, whose matrices are too small to share; images and encoders keep what there is."""
        before = torch.get_num_threads()
        small = device.type == "cpu" and isinstance(self.inputs, Dense) and self.inputs.values.dim() == 2
        torch.set_num_threads(1 if small else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def network_builder(
    transform: InputTransform, shape: tuple[int, ...], classes: int, model: Callable[[], nn.Module] | None = None
) -> Callable[[], nn.Module]:
    """What makes a fresh network: the user's own, the default for a shape, or the last layers of an encoder."""
    if transform.layers:
        assert isinstance(transform.vectors, TextEncoder)
        return partial(transform.vectors.with_head, classes, transform.layers)
    return model or default_model(shape, classes)


def refuse_early(parts: list[Labelled], config: CleanConfig, model: Callable[[], nn.Module] | None) -> None:
    """Meet settings that cannot work before anything is written."""
    if not isinstance(config, CleanConfig):
        raise HyperkronError(f"config={config!r:.60} is a {type(config).__name__}; pass hyperkron.CleanConfig(…).")
    if isinstance(model, nn.Module):
        raise HyperkronError(
            f"model is a {type(model).__name__}, but several are trained; pass a function that returns a new one."
        )
    check_device("device", config.device)
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

    Texts without an ``encoder`` get hashed n-grams; ``model`` makes a fresh network, None takes the default; ``cache``
    is a folder that keeps embeddings; ``progress`` is that of embedding.
    """
    classes, form, rows = len(parts[0].classes), InputForm.of(parts[0]), [part.inputs for part in parts]
    vectors: TextEncoder | HashedNgrams | None = encoder
    if form.kind == "text" and encoder is None:
        vectors = HashedNgrams(list(rows[0]))
    transform = InputTransform(form, vectors, config.layers)
    if config.layers:
        inputs: Inputs = transform([*rows[0], *rows[1]], device, progress)
        test: Inputs | None = transform(rows[2], device, progress) if len(rows) > 2 else None
        return Prepared(inputs, test, network_builder(transform, (), classes), (), transform)
    values = [transform.raw(part, device, progress, cache) for part in rows]
    transform, shape = transform.fitted(values[0]), tuple(values[0].shape[1:])
    build = network_builder(transform, shape, classes, model)
    inputs = transform.scaled(torch.cat(values[:2]), device)
    test = transform.scaled(values[2], device) if len(values) > 2 else None
    _refuse_misfit(build, inputs, classes, device)
    return Prepared(inputs, test, build, shape, transform)


def _floats(rows: Any) -> Tensor:
    return torch.as_tensor(rows).float()


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
