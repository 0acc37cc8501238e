"""Why SAMA and KFAC differ: steps to half of the gain, and cosines with the converged hypergradient."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import records
from experiments.paper import encoder_length, encoder_why
from experiments.paper.encoder_cleaning import Source
from experiments.paper.text_cleaning import TextCase
from experiments.paper.texts import MADE_UP
from experiments.pieces import Lines


def recorded(method: str, rate: float, errors: list[float]) -> dict[str, Any]:
    curve = {"step": [10.0 * (i + 1) for i in range(len(errors))], "second_error": errors}
    return {"dataset": "a", "method": method, "rate": rate, "seed": 0, "curve": curve}


def test_steps_to_half_of_the_gain() -> None:
    rows = [recorded("Baseline", 0.0, [0.6, 0.5]), recorded("KFAC", 1.0, [0.5, 0.3, 0.1])]
    rows += [recorded("SAMA", 1.0, [0.5, 0.5]), recorded("SAMA", 100.0, [0.3, 0.2])]
    found = encoder_why.steps_needed(rows, "a")  # half: 0.3
    place = encoder_length.RATES.index
    assert found["KFAC"][place(1.0)] == 20 and found["SAMA"][place(100.0)] == 10
    assert math.isnan(found["SAMA"][place(1.0)]) and all(math.isnan(x) for x in found["CG-3"])


@pytest.mark.long
def test_cosines_along_a_run() -> None:
    """Three iterations of preconditioned CG are closer to the converged hypergradient than the identity is."""
    pytest.importorskip("transformers")
    case = TextCase(batch=16, inner_steps=2, steps=4, looks=2, tokens=16)
    row = encoder_why.cosines(Source(MADE_UP, None, torch.device("cpu"), case.tokens), MADE_UP, case, 0, looks=(2,))
    assert json.loads(json.dumps(row))["looks"] == [2]
    assert all(-1.001 <= x <= 1.001 for values in row["cosines"].values() for x in values)
    assert all(x > 0 for values in row["norms"].values() for x in values)
    assert min(row["cosines"]["PCG-3"]) > max(row["cosines"]["identity"])


@pytest.mark.long
def test_the_figures_show_every_dataset(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = Lines(encoder_why.RESULT).rows
    made = encoder_why.figures(Lines(encoder_length.RESULT).rows, measured, tmp_path)
    assert [path.name for path in made] == ["encoder-steps.svg", "encoder-cosines.svg"]
    steps, cosines = (path.read_text("utf-8") for path in made)
    assert all(f">{name}</text>" in steps for name in ("trec", "youtube", "semeval"))
    assert all(f">{row['dataset']}</text>" in cosines for row in measured)
    assert all((records.PAGES / "figures" / "paper" / path.name).exists() for path in made)


def test_the_page_has_the_recorded_cosines() -> None:
    page = (records.PAGES / "encoder-length.md").read_text("utf-8")
    for row in Lines(encoder_why.RESULT).rows:
        for name, values in row["cosines"].items():
            assert f"| {name} | {', '.join(f'{x:.2f}'.replace('-', '−') for x in values)} |" in page
