"""Where trees are clearly better, trees are delivered (as the cleaned model or another); elsewhere a network."""

from __future__ import annotations

import numpy as np
import pytest

from hyperkron.cleaning import OURS, CleanConfig, clean
from hyperkron.cleaning.models.trees import TreeEnsemble

ROWS, TRUSTED, TEST, IRRELEVANT = 600, 100, 1000, 20
CONFIG = CleanConfig(compare=("pooled", "boosted"), seed=0)


def _parts(y: np.ndarray, x: np.ndarray, random: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Noisy rows, of whose labels a fifth are drawn again, trusted rows and test rows."""
    drawn = np.where(random.random(len(y)) < 0.2, random.integers(3, size=len(y)), y)
    ends = (0, ROWS, ROWS + TRUSTED, ROWS + TRUSTED + TEST)
    labels = (drawn, y, y)
    return [(x[a:b], own[a:b]) for a, b, own in zip(ends, ends[1:], labels, strict=False)]


@pytest.mark.long
def test_trees_are_delivered_where_classes_are_boxes_in_a_few_of_many_columns() -> None:
    random = np.random.default_rng(1)
    x = random.uniform(size=(ROWS + TRUSTED + TEST, 4 + IRRELEVANT)).astype(np.float32)
    y = (x[:, :4] > np.array([0.35, 0.6, 0.5, 0.7])).sum(1) % 3
    noisy, trusted, test = _parts(y, x, random)
    found = clean(noisy, trusted, test=test, config=CONFIG, progress=False)
    scores = {c["name"]: c["test_accuracy"] for c in found.candidates}
    assert isinstance(found.model, TreeEnsemble)
    assert scores[found.chosen] > scores["pooled"] + 0.15 and scores[found.chosen] >= scores["boosted"]


@pytest.mark.long
def test_a_network_is_delivered_where_trees_are_worse() -> None:
    random = np.random.default_rng(1)
    x = random.normal(size=(ROWS + TRUSTED + TEST, 4 + IRRELEVANT)).astype(np.float32)
    y = (x @ random.normal(size=(4 + IRRELEVANT, 3))).argmax(1)  # all columns count a little
    noisy, trusted, test = _parts(y, x, random)
    found = clean(noisy, trusted, test=test, config=CONFIG, progress=False)
    scores = {c["name"]: c["test_accuracy"] for c in found.candidates}
    assert found.chosen == OURS and not isinstance(found.model, TreeEnsemble)
    assert scores[OURS] > scores["boosted"] + 0.05
