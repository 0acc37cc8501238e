"""The tensors of batches and modules: their names, copies that autograd accepts, and which of them are to blame."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

EXTREME = {"model parameter": 1e4}
"""How large an entry must be to be named when a result is not finite; 1e6 for everything but θ."""

REMEDIES = {
    "model parameter": "θ has diverged: lower the inner learning rate or clip its gradients, and repair or restore θ",
    "hyper parameter": "λ has diverged: lower the outer learning rate or project λ (Box), and repair or restore it",
}
"""What to do about parameters that are not finite, or extreme."""


def tensors_of(name: str, batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch of any kind, by the expression that reaches them."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, x in batch.items():
            yield from tensors_of(f"{name}[{key!r}]", x)
    elif isinstance(batch, (list, tuple)):
        for i, x in enumerate(batch):
            yield from tensors_of(f"{name}[{i}]", x)


def differentiable_batch(batch: Any) -> Any:
    """``batch``, with tensors made in ``torch.inference_mode()`` replaced by copies that autograd accepts."""
    if not _holds_inference(batch):
        return batch
    with torch.inference_mode(False):
        return map_tensors(lambda x: x.clone() if x.is_inference() else x, batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """``batch`` with ``function`` applied to its tensors; structure and types (a tokenizer's output) stay the same.

    Example:
        >>> map_tensors(lambda x: x[:1], {"x": torch.arange(3), "name": "train"})
        {'x': tensor([0]), 'name': 'train'}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        made = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        made.update({key: map_tensors(function, x) for key, x in batch.items()})
        return made
    if not isinstance(batch, (list, tuple)):
        return batch
    parts = [map_tensors(function, x) for x in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _holds_inference(batch: Any) -> bool:
    if isinstance(batch, Tensor):
        return batch.is_inference()
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return any(map(_holds_inference, parts))


def culprits(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Describes the named tensors that are empty or not finite (or extreme, if all are finite), with a remedy.

    Example:
        >>> culprits([("model parameter weight", torch.ones(2)), ("inner_batch[0]", torch.tensor([1.0, 1e30]))])
        'inner_batch[0] reaches 1e+30; scale them down'
        >>> culprits([("inner_batch[0]", torch.ones(2))])
        ''
    """
    bad: list[tuple[str, str]] = []
    large: list[tuple[float, str, str]] = []
    for name, x in tensors:
        kind = " ".join(name.split()[:2])
        if x.numel() == 0:
            bad.append((kind, f"{name} is empty"))
        elif count := int((~torch.isfinite(x.detach())).sum()):
            bad.append((kind, f"{name} holds {count} nan or infinite of {x.numel()} entries"))
        elif x.is_floating_point() and (size := float(x.detach().abs().max())) > EXTREME.get(kind, 1e6):
            large.append((size, kind, f"{name} reaches {size:.3g}"))
    found = bad or [(kind, what) for _, kind, what in sorted(large, reverse=True)]
    if not found:
        return ""
    usual = "remove or repair them" if bad else "scale them down"
    remedy = next((REMEDIES[kind] for kind, _ in found if kind in REMEDIES), usual)
    return "; ".join([*(what for _, what in found[:3]), remedy])
