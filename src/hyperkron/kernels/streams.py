"""Work for a GPU that runs side by side, on streams of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")

WORKERS = 8
"""This many pieces of work for a GPU that wait for it in between are under way at once."""


@lru_cache
def _loaded(device: torch.device) -> None:
    """The library of decompositions, which torch loads when it is first called, and not from two threads at once."""
    torch.linalg.cholesky_ex(torch.ones(1, 1, device=device))


@lru_cache
def stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The same few streams for everything that runs beside the main one."""
    return torch.cuda.Stream(device)


def side_by_side(jobs: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """What ``jobs`` return, each tensors or containers of them; on a GPU several run at once.

    The library's eigendecomposition is a chain of small kernels with the host in between, which leaves most of the chip
    idle. They must not change global settings.
    """
    if device.type != "cuda" or len(jobs) < 2:
        return [job() for job in jobs]
    _loaded(device)
    here, count = torch.cuda.current_stream(device), min(WORKERS, len(jobs))
    branches = [stream(device, i) for i in range(count)]
    for branch in branches:
        branch.wait_stream(here)

    def work(number: int) -> T:
        with torch.no_grad(), torch.cuda.stream(branches[number % count]):
            return jobs[number]()

    with ThreadPoolExecutor(count) as workers:
        found = list(workers.map(work, range(len(jobs))))
    for branch in branches:
        here.wait_stream(branch)
    for x in pytree.tree_leaves(found):
        if isinstance(x, Tensor) and x.is_cuda:
            x.record_stream(here)
    return found
