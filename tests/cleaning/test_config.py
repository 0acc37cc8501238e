"""Settings become plain values, which every run can record."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from blobs import blobs, quicken
from hyperkron.cleaning import CleanConfig, clean
from hyperkron.cleaning.fields import Fields


def test_settings_are_plain_values() -> None:
    config = CleanConfig(seed=np.int64(3), epochs=np.int32(2), budget=np.float32(1.5), device=torch.device("cpu"))  # type: ignore[arg-type]
    found = json.loads(json.dumps(asdict(config)))
    assert (found["seed"], found["epochs"], found["budget"], found["device"]) == (3, 2, 1.5, "cpu")


def test_settings_are_read_as_they_were_recorded() -> None:
    for config in (CleanConfig(), CleanConfig(seed=2**60 + 1, epochs=3, budget=0.1, compare=(), encoder="a", layers=1)):
        found = json.loads(json.dumps(asdict(config)))
        assert Fields(found, Path("config.json")).into(CleanConfig) == config


def test_no_limit_may_be_said_by_infinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    data, config = blobs(rows=60), CleanConfig(epochs=1, compare=(), budget=float("inf"))
    assert config.budget is None
    assert clean(data.train, data.trusted, config=config, out=tmp_path / "run").chosen == "hyperkron"
    assert (tmp_path / "run" / "config.json").exists()
