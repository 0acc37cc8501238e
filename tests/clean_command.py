"""`hyperkron clean` with a stand-in for the training, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_cleaning import FakeCleaning, install

Captured = pytest.CaptureFixture[str]
CLEAN = ["clean", "train.csv", "--trusted", "trusted.csv", "--text", "text", "--label", "label", "--out", "runs/mine"]
OUT = Path("runs/mine")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCleaning:
    return install(monkeypatch, FakeCleaning())
