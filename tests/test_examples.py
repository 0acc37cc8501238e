"""The examples run and keep their claims; here at a reduced size."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_digits(capsys: pytest.CaptureFixture[str]) -> None:
    """One split of three, fewer steps; the assertions inside are the claim."""
    found = load("digits").main(0, splits=1, steps=10, training=150)
    assert found["auroc"] > 0.9
    assert found["precision"] > 0.8
    assert found["trusted"] < found["cleaned"] < found["ideal"]
    printed = capsys.readouterr().out
    assert "AUROC" in printed
    assert f"{found['cleaned']:.1%}" in printed


def test_digits_are_split_without_overlap_and_corrupted_as_said() -> None:
    digits = load("digits").split(0)
    rows = torch.cat([digits.noisy[0], digits.trusted[0], digits.held_out[0], digits.test[0]])
    assert len(rows) == 1797
    assert len(rows.unique(dim=0)) == 1797
    assert torch.equal(digits.trusted[1].bincount(), torch.full((10,), 10))
    assert torch.equal(digits.held_out[1].bincount(), torch.full((10,), 5))
    assert float(digits.wrong.double().mean()) == pytest.approx(0.4 * 0.9, abs=0.03)


def test_poisoning_robustness(capsys: pytest.CaptureFixture[str]) -> None:
    """The added rows cost accuracy, and few rows besides them are suspected."""
    found = load("poisoning_robustness").main()
    assert found["poisoned"] < found["clean"] - 0.01
    printed = capsys.readouterr().out
    hits, suspects = (int(word) for word in printed.split() if word.isdecimal() and word != "90")
    assert f"poisoned {found['poisoned']:.1%}" in printed and hits > suspects / 2
