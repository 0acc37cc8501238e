"""Examples in the docstrings of the cleaning tool run with small forests, as its tests do."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _small_forests_in_examples(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem) and "cleaning" in request.node.path.parts:
        from hyperkron.cleaning.models import trees

        monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        monkeypatch.setattr(trees, "TREES", 12)
        monkeypatch.setattr(trees, "ROUNDS", 5)
