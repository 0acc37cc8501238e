"""Runs several jobs on a GPU at the same time, each on its own stream."""

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
"""The largest number of jobs that run at the same time."""


@lru_cache
def _load_library(device: torch.device) -> None:
    """Make torch load its library of decompositions, which is not safe from two threads at once."""
    torch.linalg.cholesky_ex(torch.ones(1, 1, device=device))


@lru_cache
def stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Side stream ``number`` of ``device``; the same stream on every call."""
    return torch.cuda.Stream(device)


def side_by_side(jobs: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """The results of ``jobs``, which are tensors or containers of tensors; on a GPU several jobs run at once.

    This is useful for eigendecompositions: the library runs them as many small kernels that wait for the host and leave
    most of the GPU idle. Jobs must not change global settings.
    """
    if device.type != "cuda" or len(jobs) < 2:
        return [job() for job in jobs]
    _load_library(device)
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
