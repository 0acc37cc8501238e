"""Simple rules for which noisy rows to keep, given what other rows or models say of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NEIGHBOURS = 10
"""How many vote."""
CHUNK = 1024
"""Rows that are looked at together."""
MAX_VOTERS = 20_000
"""Rows among which neighbours are looked for at most."""


def neighbour_votes(x: Tensor, labels: Tensor, classes: int, count: int = NEIGHBOURS, *, seed: int = 0) -> Tensor:
    """What the nearest other rows say of each row: weighted shares of their labels (N, C).

        w_i = (d_K − d_i) / (d_K − d_1)   for the distances d_1 ≤ … ≤ d_K of the nearest K = count + 1 other rows

    ``x`` are vectors (N, d), and ``seed`` picks the rows that may vote where there are more than ``MAX_VOTERS``.

    References:
        Wilson, 1972, "Asymptotic properties of nearest neighbor rules using edited data".
        Dudani, 1976, "The distance-weighted k-nearest-neighbor rule".

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [0.3], [5.0], [5.1], [5.3]])
        >>> neighbour_votes(x, torch.tensor([0, 0, 1, 1, 1, 1]), 2, count=2).argmax(1).tolist()
        [0, 0, 0, 1, 1, 1]
    """
    x, rows = x.flatten(1).float(), torch.arange(len(x), device=x.device)
    voters = rows
    if len(x) > MAX_VOTERS:
        voters = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:MAX_VOTERS].to(x.device)
    asked, near = F.one_hot(labels[voters], classes).to(x), min(count + 1, len(voters) - 1)
    found = []
    for part in rows.split(CHUNK):
        distance = torch.cdist(x[part], x[voters]).masked_fill(part[:, None] == voters, torch.inf)
        d, which = distance.topk(near, largest=False)
        last, tiny = d[:, -1:], torch.finfo(d.dtype).tiny
        weight = (last - d + tiny) / (last - d[:, :1] + tiny)
        votes = torch.einsum("nk,nkc->nc", weight, asked[which])
        found.append(votes / votes.sum(1, keepdim=True))
    return torch.cat(found)


def confident(predicted: Tensor, given: Tensor) -> Tensor:
    """Positions of the rows that confident learning keeps.

    A class is confident in a row where p(k | x) ≥ t_k, the mean of p(k | x) over the rows labelled k. A row is left out
    where the likeliest of its confident classes is not its label. ``predicted`` are out-of-sample probabilities (N, C).

    References:
        Northcutt, Jiang & Chuang, 2021, "Confident learning: estimating uncertainty in dataset labels".
    """
    classes = predicted.shape[1]
    label = F.one_hot(given, classes).to(predicted)
    level = (predicted * label).sum(0) / label.sum(0).clamp(min=1)
    sure = (predicted >= level) & (label.sum(0) > 0)
    best = predicted.masked_fill(~sure, -1).argmax(1)
    return (~sure.any(1) | (best == given)).nonzero()[:, 0]
