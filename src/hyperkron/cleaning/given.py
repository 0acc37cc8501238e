"""The training rows as the user gave them, and where those that were used stand among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hyperkron.cleaning.data import Labelled
from hyperkron.cleaning.data.files import np
from hyperkron.solution import HyperkronError

USED = "used"
"""The status of a row that was used."""
UNLABELLED = "unlabelled"
"""The status of a row that was used, but on which no annotator voted."""


@dataclass(frozen=True)
class Given:
    """The rows that a user gave as ``train``.

    Attributes:
        rows: positions (n,) of those that were used.
        left_out: for each reason, the positions of others.
        index: the pandas index of all; None where they have none.
        unlabelled: positions of those that were used but have no label.

    Example:
        >>> given = Given(torch.tensor([1, 2]), {"no label": torch.tensor([0])})
        >>> given.spread(torch.tensor([0.5, 0.25]), float("nan"), "weight").tolist(), given.status().tolist()
        ([nan, 0.5, 0.25], ['no label', 'used', 'used'])
    """

    rows: Tensor
    left_out: Mapping[str, Tensor] = field(default_factory=dict)
    index: Any = None
    unlabelled: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @classmethod
    def of(cls, train: Any, part: Labelled) -> Given:
        """Of what was given to ``clean`` and what was read from it; ``Labelled`` rows count as they are."""
        silent = torch.as_tensor(part.labels) < 0
        if isinstance(train, Labelled):
            return cls(torch.arange(len(part)), unlabelled=silent.nonzero()[:, 0])
        left_out = {why: torch.as_tensor(rows) for why, rows in part.left_out.items()}
        rows = torch.as_tensor(part.rows)
        found = cls(rows, left_out, _index(train), rows[silent])
        assert found.index is None or len(found.index) == len(found), "rows were lost without a reason"
        return found

    def __len__(self) -> int:
        return len(self.rows) + sum(len(rows) for rows in self.left_out.values())

    def spread(self, values: Tensor, otherwise: float, name: str) -> Any:
        """A number for each given row, ``otherwise`` for those left out: a tensor, or a Series with their index."""
        found = torch.full((len(self),), otherwise, dtype=values.dtype)
        found[self.rows] = values
        return self._as_given(found, name)

    def status(self) -> Any:
        """For each given row ``used``, ``unlabelled``, or why it was left out: an array of texts, or a Series."""
        found = np.full(len(self), USED, dtype=object)
        found[self.unlabelled.numpy()] = UNLABELLED
        for why, rows in self.left_out.items():
            found[rows.numpy()] = why
        return self._as_given(found, "status")

    def _as_given(self, values: Any, name: str) -> Any:
        if self.index is None:
            return values
        import pandas

        return pandas.Series(values.numpy() if isinstance(values, Tensor) else values, self.index, name=name)


def _index(train: Any) -> Any:
    """The pandas index of the rows: of a DataFrame, or of the Series and DataFrames among columns or in a pair."""
    parts = [train]
    if isinstance(train, Mapping):
        parts = list(train.values())
    elif isinstance(train, (tuple, list)) and len(train) == 2:
        parts = list(train)
    found = [part.index for part in parts if hasattr(part, "iloc")]
    if any(not index.equals(found[0]) for index in found):
        raise HyperkronError(
            "train: its Series and DataFrames have different indexes, so it is not clear which of their rows belong "
            "together; align them, or pass x.reset_index(drop=True) of each."
        )
    return found[0] if found else None
