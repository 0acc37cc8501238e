"""What is shown of how far a run is, with trees among its networks."""

from __future__ import annotations

import pytest
import torch

from blobs import Watch, blobs, quicken
from hyperkron.cleaning import CleanConfig, clean
from hyperkron.cleaning.config import BOOSTED, FOREST
from hyperkron.cleaning.progress import BarProgress
from hyperkron.cleaning.trainer import updates
from hyperkron.cleaning.work import fit_steps


def test_fits_of_trees_move_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    data, watch, moved = blobs(rows=60), Watch(), dict[str, int]()
    advance = watch.advance

    def counting(steps: int, stage: str) -> None:
        moved[stage] = moved.get(stage, 0) + steps
        advance(steps, stage)

    monkeypatch.setattr(watch, "advance", counting)
    clean(data.train, data.trusted, config=CleanConfig(epochs=1, compare=("forest", "boosted")), progress=watch)
    views = 5
    assert moved["judging boosted"] == (views - 1) * fit_steps(BOOSTED, 84, 3)  # nothing is shown after the last
    assert moved["boosted trees of cleaned labels"] >= 2 * (1 + views) * fit_steps(BOOSTED, 42, 3)
    assert moved["forest expert"] >= (2 + views) * fit_steps(FOREST, 60, 3)
    assert 0.6 < watch.steps / watch.totals[0] <= 1.0 and len(watch.totals) == 1


def test_many_classes_make_boosting_long() -> None:
    assert fit_steps(BOOSTED, 500, 60) == 30 * fit_steps(BOOSTED, 500, 2) * 2
    assert fit_steps(FOREST, 10**6, 2) == fit_steps(FOREST, 10**5, 60)  # a tree has 10,000 rows at most


def test_a_bar_says_which_trees_are_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    bar = BarProgress()
    bar.start(100)
    bar.advance(1, "noisy expert")
    capsys.readouterr()
    bar.advance(0, "boosted trees of cleaned labels")
    assert "boosted trees of cleaned labels" in capsys.readouterr().err
    bar.stop()


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9, 20])
def test_the_shortest_training_has_a_schedule(steps: int) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = updates(optimizer, steps).scheduler
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert all(0 < rate <= 1 for rate in rates) and (max(rates) > 0.9 or steps == 1)
