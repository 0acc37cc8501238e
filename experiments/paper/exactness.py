"""How near hypergradients are to the exact one: computed at the same point, on the same batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from hyperkron.hypergradient import Hypergradient, pcg


class Nearness(NamedTuple):
    """Of a hypergradient the cosine with the exact one, and its norm relative to that."""

    name: str
    cosine: float
    norm: float


def exact(at: tuple[Any, ...], damping: float, iterations: int) -> tuple[torch.Tensor, float]:
    """(GGN + δ)⁻¹ by preconditioned CG to a relative residual of 1e-3 or at most ``iterations``; and the residual."""
    found = pcg(iterations, damping, tolerance=1e-3).compute(*at)
    return _flat(found.grads), float(found.stats["residual"])


def nearness(at: tuple[Any, ...], truth: torch.Tensor, methods: Mapping[str, Hypergradient]) -> Iterator[Nearness]:
    """Of every method, at the arguments ``at`` of ``compute``."""
    for name, method in methods.items():
        given = _flat(method.compute(*at).grads)
        cosine = float(torch.cosine_similarity(given, truth, dim=0))
        yield Nearness(name, cosine, float(given.norm() / truth.norm()))


def _flat(grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.flatten() for x in grads.values()]).double()
