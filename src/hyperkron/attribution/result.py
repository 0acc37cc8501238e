"""What an attribution found: a score for every pair of a query and a training example."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hyperkron.solution import HyperkronError
from hyperkron.validation import check_whole


@dataclass(frozen=True)
class Attribution:
    """Scores of training examples for queries.

    Attributes:
        scores: (queries, examples). ``scores[q, n]`` estimates by how much the loss of query q would rise if example n
            were left out of the training set: positive for examples that speak for the query, negative for those that
            speak against it. With ``out=`` it lies on disk and is read as needed.
        stats: how it was computed: the ``way``, the worst ``status`` of all solves, ``products`` with A, the largest
            ``residual`` where it is known, and the number of ``models`` where there are several.

    Example:
        >>> import torch
        >>> found = Attribution(torch.tensor([[0.125, -0.5, 0.25]]))
        >>> found.helpful(0, 2)
        [(2, 0.25), (0, 0.125)]
        >>> found.harmful(0, 1)
        [(1, -0.5)]
    """

    scores: Tensor
    stats: dict[str, Any] = field(default_factory=dict)

    def helpful(self, query: int = 0, count: int = 10) -> list[tuple[int, float]]:
        """The training examples that most lower the loss of a query, as (row, score), the strongest first."""
        return self._top(query, count, largest=True)

    def harmful(self, query: int = 0, count: int = 10) -> list[tuple[int, float]]:
        """The training examples that most raise the loss of a query, as (row, score), the strongest first."""
        return self._top(query, count, largest=False)

    def _top(self, query: int, count: int, *, largest: bool) -> list[tuple[int, float]]:
        check_whole("count", count, 0)
        queries, examples = self.scores.shape
        if not -queries <= query < queries:
            raise HyperkronError(f"query={query} is not one of the {queries} queries; count from 0.")
        values, rows = torch.topk(self.scores[query], min(count, examples), largest=largest)
        pairs = zip(rows.tolist(), values.tolist(), strict=True)
        return [(row, value) for row, value in pairs if (value > 0) == largest and value != 0]

    def __repr__(self) -> str:
        queries, examples = self.scores.shape
        return f"Attribution({queries} queries × {examples} examples, {self.stats.get('way', '')})"
