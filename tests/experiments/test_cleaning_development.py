"""The program to develop ``clean`` on: its tables, its splits, one setting from end to end, and its summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from blobs import quicken
from experiments.cleaning import development, trust_data
from experiments.cleaning.development import MADE, SOURCES, chosen, jobs, made, measure, split, summary
from hyperkron.cleaning.config import BOOSTED, FOREST, NETWORK
from hyperkron.cleaning.models import trees


@pytest.mark.parametrize("name", MADE)
def test_made_tables_have_all_classes_and_are_the_same_every_time(name: str) -> None:
    frame = made(name, 400)
    assert frame.equals(made(name, 400)) and frame["label"].value_counts(normalize=True).min() > 0.05


def test_no_set_is_one_that_the_trust_table_keeps_unseen() -> None:
    assert not set(SOURCES) & set(trust_data.UNSEEN)
    items = [source.item for source in SOURCES.values()]
    assert not {trust_data.SOURCES[name].item for name in trust_data.UNSEEN} & set(items)


def test_rows_are_split_and_spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_data, "PLACE", tmp_path)
    (tmp_path / "musk").mkdir()
    frame = pandas.DataFrame({"number": range(400), "label": ["a"] * 200 + ["b"] * 190 + ["rare"] * 10})
    frame.to_csv(tmp_path / "musk" / "pool.csv", index=False)
    noisy, trusted, test = split(("musk", "uniform-40", 100, 10), tmp_path)
    assert trusted["label"].value_counts().to_dict() == {"a": 10, "b": 10} and len(test) == 130
    numbers = np.concatenate([part["number"] for part in (noisy, trusted, test)])
    assert len(set(numbers.tolist())) == 390
    wrong = (noisy["label"] != np.where(noisy["number"] < 200, "a", "b")).mean()
    assert 0.1 < wrong < 0.3  # 40 % are drawn again, half of them to the same class
    assert (trusted["label"] == np.where(trusted["number"] < 200, "a", "b")).all()


@pytest.mark.long
def test_a_setting_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    quicken(monkeypatch)
    monkeypatch.setattr(trees, "ROUNDS", 5)
    monkeypatch.setattr(development, "ROWS", 200)
    found = measure(("boxes", "uniform-20", 100, 10), Path())
    assert set(found["test"]) == {NETWORK, FOREST, BOOSTED, "rival"} and chosen(found) in found["test"]
    for evidence in found["evidence"].values():
        assert all(len(pair) == 2 and pair[1] > 0 for pair in evidence.values())


def test_jobs_take_all_tables_in_turn() -> None:
    found = jobs(["a", "b"], ["class-40"], [100], [10, 50])
    assert found == [("a", "class-40", 100, 10), ("b", "class-40", 100, 10), ("a", "class-40", 100, 50),
                     ("b", "class-40", 100, 50)]  # fmt: skip


def test_the_summary_by_hand() -> None:
    def row(name: str, leads: tuple[float, float], *accuracies: float) -> dict[str, Any]:
        test = dict(zip((NETWORK, FOREST, BOOSTED, "rival"), accuracies, strict=True))
        evidence = {
            k: {"noisy": [v, 3.0], "trusted": [1.0, 4.0]} for k, v in zip((FOREST, BOOSTED), leads, strict=True)
        }
        return {"job": [name, "class-40", 100, 10], "test": test, "evidence": evidence}

    rows = [
        row("x", (20, 16), 0.5, 0.7, 0.6, 0.6),  # both trees lead by more than three times 5
        row("x", (12, -5), 0.9, 0.8, 0.7, 0.6),
        row("y", (10, 30), 0.6, 0.7, 0.5, 0.6),
    ]
    assert [chosen(one) for one in rows] == [FOREST, NETWORK, BOOSTED]
    text = summary(rows)
    assert "| x | 2 | 70.0 | 75.0 | 65.0 | 60.0 | 80.0 | 1, 1, 0 |" in text
    assert "All: trees in 2 of 3, +5.0" in text and "better in 1, worse in 1" in text
    assert "Below the best of the three: 6.67 points" in text  # 0, 0 and 20
