"""Rows with the votes of several annotators, from the data to the report."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from blobs import Blobs, blobs, quicken
from hyperkron.cleaning import CleanConfig, CleanResult, clean, load
from hyperkron.cleaning.report import write_report

SILENT = 12
"""Rows at the beginning on which nobody votes."""


@pytest.fixture(scope="module")
def data() -> Blobs:
    return blobs()


@pytest.fixture(scope="module")
def found(data: Blobs, tmp_path_factory: pytest.TempPathFactory) -> CleanResult:
    """Two good annotators, and one that says 0 for every 1; the two vote on three quarters of the rows each."""
    x, _ = data.train
    random, true = np.random.default_rng(0), data.true.numpy()
    votes = np.stack([true, true, np.where(true == 1, 0, true)], axis=1)
    wrong = random.random((len(x), 2)) < 0.1
    votes[:, :2] = np.where(wrong, (votes[:, :2] + 1) % 3, votes[:, :2])
    votes[:, :2] = np.where(random.random((len(x), 2)) < 0.25, -1, votes[:, :2])
    votes[:SILENT] = -1
    out = tmp_path_factory.mktemp("votes") / "run"
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        return clean((x, votes), data.trusted, out=out, config=CleanConfig(epochs=2, compare=()))


def test_rows_without_a_vote_are_unlabelled(found: CleanResult) -> None:
    status = np.asarray(found.status)
    assert set(status[:SILENT]) == {"unlabelled"} and set(status[SILENT:]) == {"used"}
    assert bool(torch.isnan(found.error_probability[:SILENT]).all()) and bool((found.suggested[:SILENT] >= 0).all())
    assert not set(found.suspects.tolist()) & set(range(SILENT)) and not bool(found.used[:SILENT].any())
    assert not bool(torch.isnan(found.weights[SILENT:]).any())
    assert found.summary["unlabelled"] == SILENT
    assert any(f"{SILENT} rows without any vote are unlabelled" in m for m in found.summary["data"]["messages"])


def test_each_source_is_judged(found: CleanResult) -> None:
    assert found.sources[0]["name"] == "annotator 2"  # votes on all rows but the silent ones
    by_name = {source["name"]: source for source in found.sources}
    blind, good = by_name["annotator 2"], by_name["annotator 0"]
    assert (blind["said"], blind["meant"]) == ("0", "1") and blind["right"] < 0.75
    assert blind["low"] < blind["right"] < blind["high"]
    assert good["right"] > 0.8 and good["votes"] < blind["votes"]


def test_the_folder_says_the_same(found: CleanResult) -> None:
    assert found.folder is not None
    with (found.folder / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    empty = [row for row in rows if not row["given"]]
    assert len(empty) == SILENT and all(row["error_probability"] == row["weight"] == "" for row in empty)
    assert all(row["suggested"] and row["suspect"] == "false" for row in empty)
    assert json.loads((found.folder / "result.json").read_text())["sources"] == found.sources
    again = load(found.folder)
    assert again.sources == found.sources and again.status.tolist() == found.status.tolist()
    torch.testing.assert_close(again.error_probability, found.error_probability, atol=1e-6, rtol=0, equal_nan=True)


def test_the_report_has_a_table_of_annotators(found: CleanResult) -> None:
    assert found.folder is not None
    page = Path(write_report(found.folder)).read_text("utf-8")
    assert 'id="sources-title">Annotators<' in page and "annotator 2" in page and "says 0, is 1 (" in page
    assert f"{SILENT} rows without any vote are unlabelled" in page
