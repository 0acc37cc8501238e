"""Copies of batches that autograd accepts, and which tensors of batches and modules an error comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hyperkron.batch_tensors import map_tensors, tensors_of
from hyperkron.solution import HyperkronError

EXTREME = {"model parameter": 1e4}
"""How large an entry must be to be named when a result is not finite; 1e6 for everything but θ."""

REMEDIES = {
    "model parameter": "θ has diverged: lower the inner learning rate or clip its gradients, and repair or restore θ",
    "hyper parameter": "λ has diverged: lower the outer learning rate or project λ (Box), and repair or restore it",
}
"""What to do about parameters that are not finite, or extreme."""


def differentiable_batch(batch: Any) -> Any:
    """``batch``, with tensors made in ``torch.inference_mode()`` replaced by copies that autograd accepts."""
    if not any(x.is_inference() for _, x in tensors_of("", batch)):
        return batch
    with torch.inference_mode(False):
        return map_tensors(lambda x: x.clone() if x.is_inference() else x, batch)


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
    found.sort(key=lambda pair: pair[0] in REMEDIES)  # data first: it may have spoilt the parameters
    spoilt = bad and found[0][0] not in REMEDIES and found[-1][0] in REMEDIES
    usual = f"remove or repair them{', and restore the parameters' if spoilt else ''}" if bad else "scale them down"
    remedy = REMEDIES.get(found[0][0], usual)
    return "; ".join([*(what for _, what in found[:3]), remedy])


@contextmanager
def explained(objective: str, argument: str, batch: Any) -> Iterator[None]:
    """An objective that fails on no batch at all, or on a whole dataset, says what it should have been given."""
    try:
        yield
    except HyperkronError:
        raise
    except (TypeError, ValueError) as error:
        if batch is None:
            raise HyperkronError(
                f"{objective} failed on a batch that is None ({error}); give {objective}_data."
            ) from error
        if isinstance(batch, (DataLoader, Dataset)):
            raise HyperkronError(
                f"{argument} is a {type(batch).__name__}, on which {objective} failed ({error}); "
                "pass one batch, such as next(iter(loader))."
            ) from error
        raise


def misplaced(
    error: RuntimeError, tensors: Iterable[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype
) -> str:
    """The first of the named tensors that differs from the model in device or dtype, if ``error`` is about that."""
    if isinstance(error, torch.OutOfMemoryError) or not ("device" in str(error) or "type" in str(error)):
        return ""
    named = list(tensors)
    for name, x in named:
        if x.device != device:
            return f"{name} is on {x.device} but the model is on {device}; use .to({str(device)!r})."
    named.sort(key=lambda pair: pair[0].startswith(("model ", "hyper ")))  # batches first, because λ may be wider
    for name, x in named:
        if x.is_floating_point() and x.dtype != dtype:
            return f"{name} is {x.dtype} but the model is {dtype}; use .to({dtype})."
    return ""
