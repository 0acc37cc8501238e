"""The page of cleaning results is what its result file says."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    maker = load(ROOT / "docs" / "make_cleaning_page.py")
    assert maker.PAGE.read_text("utf-8") == maker.page()


@pytest.fixture(scope="module")
def table() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield load(ROOT / "benchmarks" / "cleaning_table.py")
    sys.path.remove(str(ROOT / "benchmarks"))


def test_scores_of_a_ranking_agree_with_scikit_learn(table: ModuleType) -> None:
    from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

    random = torch.Generator().manual_seed(0)
    wrong = torch.rand(200, generator=random) < 0.3
    score = torch.rand(200, generator=random) + wrong.float() * 0.4
    assert table.average_precision(wrong, score) == pytest.approx(average_precision_score(wrong, score), abs=1e-12)
    tied = (score * 10).round()
    assert table.auroc(wrong, tied) == pytest.approx(roc_auc_score(wrong, tied), abs=1e-12)
    assert table.f1(wrong, score > 0.7) == pytest.approx(f1_score(wrong, score > 0.7), abs=1e-6)


def test_noise_is_what_it_is_called(table: ModuleType) -> None:
    data = sys.modules["cleaning_data"]
    labels = torch.arange(10).repeat(2000)
    random = torch.Generator().manual_seed(0)
    moved = data.corrupt(labels, 10, "class-40", random)
    assert set(((moved - labels) % 10).tolist()) == {0, 1}
    assert float((moved != labels).float().mean()) == pytest.approx(0.4, abs=0.02)
    drawn = data.corrupt(labels, 10, "uniform-50", random)
    assert float((drawn != labels).float().mean()) == pytest.approx(0.45, abs=0.02)


def test_times_of_their_own_come_before_those_of_the_runs(table: ModuleType) -> None:
    import cleaning_report

    records = [json.loads(line) for line in table.RESULTS.open(encoding="utf-8")][:1]
    times = [{"setting": records[0]["setting"], "seconds": {"cleaning": c, "plain": 2.0}} for c in (3.0, 4.0)]
    usual, timed = cleaning_report.table(records), cleaning_report.table(records, times)
    assert usual != timed
    assert "1.8× on average, at most 1.8×; above 3× in 0 of 1" in timed  # the mean of 1.5 and 2
    assert usual == cleaning_report.table(records, [{**t, "setting": "another"} for t in times])
