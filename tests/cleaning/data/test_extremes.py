"""Numbers too large for float32: named with their column, never taken for rows that are all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobs import blobs, quicken
from hyperkron.cleaning import CleanConfig, clean
from hyperkron.cleaning.data import read, read_pair
from hyperkron.solution import HyperkronError

LABELS, HUGE = [0, 1, 0, 1], [1e300, 2e300, 3e300, 4e300]
TRUSTED = {"a": [5e300, 6e300], "b": [0.5, 0.7], "label": [0, 1]}


@pytest.mark.parametrize(
    "kind", [list, np.array, lambda values: [f"{v:g}" for v in values]], ids=["list", "array", "text"]
)
def test_a_column_of_them_is_refused_by_name(kind: Any) -> None:
    train = {"a": kind(HUGE), "b": [1.0, 2.0, 3.0, 4.0], "label": LABELS}
    with pytest.raises(
        HyperkronError, match=r"column 'a' holds no number between .* 4 values such as 1e\+300; rescale"
    ):
        read_pair(train, TRUSTED, features=["a", "b"])
    with pytest.raises(HyperkronError, match=r"column 'a' .* such as 1e\+300"):
        read_pair({"a": kind(HUGE), "label": LABELS}, {"a": TRUSTED["a"], "label": [0, 1]})


@pytest.mark.parametrize("extreme", [1e300, -3.1e38, float("inf"), "1e400", "-inf", 10**400], ids=lambda x: str(x)[:9])
def test_some_of_them_are_missing_and_said(extreme: Any) -> None:
    train = {"a": [extreme, 1.0, 2.0, 4.0], "b": [1.0, 2.0, 3.0, 4.0], "label": LABELS}
    trusted = {"a": [5.0, extreme], "b": [0.5, 0.7], "label": [0, 1]}
    parts = read_pair(train, trusted, features=["a", "b"])
    shown = "inf" if isinstance(extreme, int) else f"{float(extreme):g}"
    for part, row in zip(parts, (0, 1), strict=True):
        [told] = [message for message in part.messages if "extreme values" in message]
        assert f"extreme values in 1 column, taken as missing: 'a' (1, such as {shown})" in told and "rescale" in told
        assert np.flatnonzero(np.isnan(part.inputs[:, 0])).tolist() == [row]
        assert np.isfinite(part.standardised()).all()


def test_rows_that_differ_are_not_the_same_row() -> None:
    """Rows count as equal where their numbers are, not where all of them are too large."""
    train, _ = read_pair(
        {"a": [1e300, 2e300, 7.0, 8.0], "b": [1.0, 1.0, 1.0, 2.0], "label": LABELS},
        {"a": [1e300, 3e300], "b": [1.0, 1.0], "label": [0, 1]},
    )
    assert train.rows.tolist() == [1, 2, 3] and not any("repeat" in message for message in train.messages)


def test_names_that_read_like_infinity_are_no_numbers() -> None:
    found = read({"town": ["inf", "Rome", "Oslo", "Rome"], "label": LABELS})
    assert not any("extreme" in message for message in found.messages)


def test_clean_says_which_column(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quicken(monkeypatch, least=8)
    data = blobs(rows=40)
    far = [(x.double() * 1e300, y) for x, y in (data.train, data.trusted)]
    with pytest.raises(HyperkronError, match=r"column 'x0' holds no number between .* rescale the column"):
        clean(*far, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    result = clean(data.train, data.trusted, config=CleanConfig(epochs=1, compare=()))
    for value in (1e300, float("inf")):
        rows = data.test[0].double().numpy()
        rows[3, 1] = value
        with pytest.raises(HyperkronError, match=r"column 'x1' holds .* in row 3, which is too extreme"):
            result.predict(rows)
    assert bool(torch.isfinite(result.predict(data.test[0].numpy())).all())
