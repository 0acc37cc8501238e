"""What all tests and examples share: little work for the garbage collector, and quick examples of the cleaning tool."""

from __future__ import annotations

import gc

import pytest

gc.disable()  # until all tests are collected: little of what is made by then is garbage


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: collections of garbage, of which some tests ask for many, pass over them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _quick_examples(request: pytest.FixtureRequest) -> None:
    """Examples in the docstrings of the cleaning tool run with short trainings and small forests, as its tests do."""
    if isinstance(request.node, pytest.DoctestItem) and "cleaning" in request.node.path.parts:
        from blobs import quicken

        quicken(request.getfixturevalue("monkeypatch"))
