"""``clean`` answers about the rows it was given: one entry for each, in their places, under their pandas index."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from blobs import Blobs, blobs, quicken
from hyperkron.cleaning import CleanConfig, CleanResult, clean
from hyperkron.cleaning.arguments import read_parts
from hyperkron.cleaning.data import InputForm, ReadOptions, read_pair
from hyperkron.cleaning.given import Given
from hyperkron.cleaning.models import HASHED
from hyperkron.solution import HyperkronError

CONFIG = CleanConfig(epochs=1, compare=())
ROWS, OVERLAP, UNLABELLED = 130, (0, 1, 2, 40, 41, 77, 129), (5, 60, 128)  # 10 of 130 are left out
KEPT = [i for i in range(ROWS) if i not in OVERLAP + UNLABELLED]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture(scope="module")
def data() -> Blobs:
    """Training rows of which some are in the trusted set: at the start, in the middle, at the end."""
    made = blobs(rows=ROWS)
    x = made.x.clone()
    x[list(OVERLAP)] = made.trusted[0][: len(OVERLAP)]
    return Blobs(x, made.true, made.noisy, made.wrong, made.trusted, made.test)


def labels(data: Blobs, missing: float | None = float("nan")) -> list[Any]:
    return [missing if i in UNLABELLED else y for i, y in enumerate(data.noisy.tolist())]


def texts(data: Blobs) -> tuple[list[str], list[str]]:
    """Words that say which class a row is of, and a number that tells rows apart."""
    words = (("good", "fine", "nice"), ("bad", "poor", "awful"), ("late", "slow", "never"))

    def told(true: list[int], first: int) -> list[str]:
        return [f"{' '.join(words[k])} {words[k][i % 3]} {i}" for i, k in enumerate(true, first)]

    train, trusted = told(data.true.tolist(), 0), told(data.trusted[1].tolist(), ROWS)
    for i, row in enumerate(OVERLAP):
        train[row] = trusted[i]
    return train, trusted


def as_arrays(data: Blobs) -> tuple[Any, Any]:
    return (data.x.numpy(), np.array(labels(data))), tuple(t.numpy() for t in data.trusted)


def as_tensors(data: Blobs) -> tuple[Any, Any]:
    return (data.x, torch.tensor(labels(data))), data.trusted


def as_dataset(data: Blobs) -> tuple[Any, Any]:
    return TensorDataset(data.x, torch.tensor(labels(data))), TensorDataset(*data.trusted)


def as_texts(data: Blobs) -> tuple[Any, Any]:
    train, trusted = texts(data)
    return (train, labels(data, None)), (trusted, data.trusted[1].tolist())


def as_frame(data: Blobs) -> tuple[Any, Any]:
    pandas = pytest.importorskip("pandas")
    index = [f"id-{3 * i % ROWS}" for i in range(ROWS)]
    train = pandas.DataFrame({"a": data.x[:, 0], "b": data.x[:, 1], "label": labels(data)}, index=index)
    x, y = data.trusted
    return train, pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": y})


def as_series(data: Blobs) -> tuple[Any, Any]:
    frame, trusted = as_frame(data)
    return (frame[["a", "b"]], frame["label"]), (trusted[["a", "b"]], trusted["label"])


def as_columns(data: Blobs) -> tuple[Any, Any]:
    frame, trusted = as_frame(data)
    return {name: frame[name] for name in frame}, {name: trusted[name] for name in trusted}


FORMS: dict[str, Callable[[Blobs], tuple[Any, Any]]] = {
    "arrays": as_arrays,
    "tensors": as_tensors,
    "dataset": as_dataset,
    "frame": as_frame,
    "series": as_series,
    "columns": as_columns,
}


def expect_given_rows(found: CleanResult) -> None:
    """Every array has one entry for each of the given rows, and says what it says about that row."""
    gone = sorted(OVERLAP + UNLABELLED)
    for scores in (found.weights, found.error_probability, found.suggested, found.status, found.used):
        assert len(scores) == ROWS
    probability, suggested = np.asarray(found.error_probability), np.asarray(found.suggested)
    assert np.flatnonzero(np.isnan(probability)).tolist() == gone == np.flatnonzero(suggested == -1).tolist()
    assert np.flatnonzero(np.isnan(np.asarray(found.weights))).tolist() == gone
    np.testing.assert_allclose(np.asarray(found.weights)[KEPT], 1 - probability[KEPT])
    status = np.asarray(found.status)
    assert np.flatnonzero(status == "also in the trusted set").tolist() == list(OVERLAP)
    assert np.flatnonzero(status == "no label").tolist() == list(UNLABELLED)
    assert np.flatnonzero(np.asarray(found.used)).tolist() == np.flatnonzero(status == "used").tolist() == KEPT
    suspects = found.suspects.tolist()
    assert set(suspects) == set(np.flatnonzero(probability > 0.5)) and len(suspects) > 20
    assert np.all(np.diff(probability[suspects]) <= 0)


def expect_wrong_labels(found: CleanResult, data: Blobs) -> None:
    """The rows that are named are the wrong ones."""
    suspects, suggested = found.suspects.tolist(), np.asarray(found.suggested)
    assert float(data.wrong[suspects].double().mean()) > 0.9  # the share of the rows named that are wrong
    assert np.mean(suggested[KEPT] == data.true[KEPT].numpy()) > 0.9


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.long
def test_every_array_is_about_the_given_rows(data: Blobs, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, least=24, forest=6)  # enough to find nearly all wrong labels
    train, trusted = FORMS[form](data)
    found = clean(train, trusted, config=CONFIG)
    expect_given_rows(found)
    expect_wrong_labels(found, data)
    if form in ("frame", "series", "columns"):
        frame = as_frame(data)[0]
        for scores in (found.weights, found.error_probability, found.suggested, found.status, found.used):
            assert scores.index.equals(frame.index)
        assert frame.iloc[found.suspects].equals(frame.loc[found.suspect_labels])
        wrong = dict(zip(frame.index, data.wrong.tolist(), strict=True))
        assert np.mean([wrong[name] for name in found.suspect_labels]) > 0.9
        assert frame.assign(p=found.error_probability)["p"].notna().sum() == len(KEPT)
    else:
        assert isinstance(found.weights, Tensor) and found.suspect_labels is None


@pytest.mark.long
def test_lists_of_texts(data: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rows that are left out had not been there, but for their places."""
    quicken(monkeypatch, least=120)  # n-grams have no forest to help them
    hashing = import_module("hyperkron.cleaning.models.hashed_ngrams")
    monkeypatch.setattr(hashing, "_BUCKETS", 2**9)  # enough for a dozen words
    config = CleanConfig(epochs=1, compare=(), encoder=HASHED)
    (x, y), trusted = as_texts(data)
    found = clean((x, y), trusted, config=config)
    expect_given_rows(found)
    alone = clean(([x[i] for i in KEPT], [y[i] for i in KEPT]), trusted, config=config)
    assert found.suspects.tolist() == [KEPT[i] for i in alone.suspects.tolist()]
    assert torch.equal(found.weights[KEPT], alone.weights) and torch.equal(found.suggested[KEPT], alone.suggested)


@pytest.mark.long
def test_rows_left_out_first_shift_nothing(data: Blobs) -> None:
    """The first ten of 130 rows are in the trusted set: the answers are those about the others alone."""
    x = data.x.clone()
    x[:10] = data.trusted[0][:10]
    found = clean((x, data.noisy), data.trusted, config=CONFIG)
    alone = clean((x[10:], data.noisy[10:]), data.trusted, config=CONFIG)
    assert torch.equal(found.suspects, alone.suspects + 10)
    for one, other in ((found.weights, alone.weights), (found.suggested, alone.suggested)):
        torch.testing.assert_close(one[10:], other, rtol=0, atol=0, equal_nan=True)
    assert found.status[:11].tolist() == ["also in the trusted set"] * 10 + ["used"]


def test_rows_that_a_column_flags_as_trusted(data: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    quicken(monkeypatch, least=24, forest=6)
    x, y = (torch.cat([b, a]) for a, b in zip((data.x, data.noisy), data.trusted, strict=True))
    frame = pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": y, "ok": [True] * 24 + [False] * ROWS})
    found = clean(frame, trusted_column="ok", config=CONFIG)
    assert found.status.tolist()[:24] == ["trusted"] * 24 and len(found.weights) == 24 + ROWS
    assert int(found.suspects.min()) >= 24 and bool(found.weights[:24].isna().all())
    assert float(data.wrong[found.suspects - 24].double().mean()) > 0.9


def test_labelled_rows_count_as_they_are(data: Blobs) -> None:
    parts = read_pair(*({"x": x, "y": y} for x, y in as_arrays(data)))
    found = clean(*parts, config=CONFIG)
    assert len(found.weights) == len(parts[0]) == len(KEPT) and bool(found.used.all())
    assert float(data.wrong[parts[0].rows[found.suspects]].double().mean()) > 0.9
    kept = read_pair(*({"x": x, "y": y} for x, y in as_arrays(data)), options=ReadOptions(keep_overlap=True))[0]
    assert {why: rows.tolist() for why, rows in kept.left_out.items()} == {"no label": list(UNLABELLED)}


def test_indexes_that_contradict_each_other(data: Blobs) -> None:
    (x, y), trusted = as_series(data)
    with pytest.raises(HyperkronError, match=r"different indexes.*reset_index"):
        clean((x, y.reset_index(drop=True)), trusted, config=CONFIG)


@pytest.mark.long
def test_the_files_of_a_run_name_the_same_rows(data: Blobs, tmp_path: Path) -> None:
    found = clean(*as_tensors(data), out=tmp_path / "run", config=CONFIG)
    with (tmp_path / "run" / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["row"]) for row in rows] == KEPT
    for row in rows:
        at = int(row["row"])
        assert float(row["error_probability"]) == pytest.approx(float(found.error_probability[at]), abs=1e-6)
        assert int(row["suggested"]) == int(found.suggested[at]) and int(row["given"]) == int(data.noisy[at])
    lines = [json.loads(line) for line in (tmp_path / "run" / "suspects.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == found.suspects.tolist()
    for line in lines:
        assert line["features"]["x0"] == pytest.approx(float(data.x[line["row"], 0]), abs=1e-5)
    with (tmp_path / "run" / "left_out.csv").open(newline="") as file:
        gone = {int(row["row"]): row["why"] for row in csv.DictReader(file)}
    assert gone == {i: why for i, why in enumerate(found.status) if why != "used"}
    about = json.loads((tmp_path / "run" / "result.json").read_text())["data"]
    assert about["train_rows"] == len(KEPT) and about["left_out"] == {"no label": 3, "also in the trusted set": 7}


def test_images_that_cannot_be_read_leave_a_gap(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    lines = ["file,label"]
    for i in range(60):
        name = f"{i}.png"
        if i in (0, 7, 33):
            (tmp_path / name).write_bytes(b"broken")
        else:
            pixels = np.random.default_rng(i).integers(0, 60, (8, 8)) + 120 * (i % 2)
            image.fromarray(pixels.astype(np.uint8)).save(tmp_path / name)
        lines.append(f"{name},{1 - i % 2 if i % 9 == 4 and i < 40 else i % 2}")
    (tmp_path / "train.csv").write_text("\n".join(lines[:41]) + "\n")
    (tmp_path / "trusted.csv").write_text("\n".join(lines[:1] + lines[41:]) + "\n")
    found = clean(tmp_path / "train.csv", tmp_path / "trusted.csv", image="file", config=CONFIG)
    assert np.flatnonzero(found.status == "unreadable image").tolist() == [0, 7, 33] and len(found.weights) == 40
    assert all(row % 9 == 4 for row in found.suspects.tolist()) and len(found.suspects) >= 3


def test_test_rows_are_read_with_the_options_of_the_others(tmp_path: Path) -> None:
    files = []
    for name, count in (("train", 8), ("trusted", 4), ("test", 4)):
        rows = "".join(f"{name} été {i},{'oui' if i % 2 else 'à peine'}\n" for i in range(count))
        files.append(tmp_path / f"{name}.csv")
        files[-1].write_bytes(f"text,label\n{rows}".encode("latin-1"))
    parts = read_parts(*map(str, files), {"options": ReadOptions(charset="latin-1")})
    assert [part.inputs[0] for part in parts] == ["train été 0", "trusted été 0", "test été 0"]
    assert [len(part) for part in parts] == [8, 4, 4]


def test_numbers_in_bfloat16_are_read() -> None:
    x, y = torch.arange(12.0).reshape(6, 2).bfloat16(), torch.tensor([0, 1] * 3)
    parts = read_parts((x, y), (x + 0.5, y), TensorDataset(x + 20, y), {})
    assert parts[0].inputs.tolist() == x.tolist() and parts[2].inputs.tolist() == (x + 20).tolist()
    assert InputForm.of(parts[0]).read(x).inputs.tolist() == x.tolist()


def test_without_numpy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(HyperkronError, match=r"numpy is needed .*hyperkron\[data\]"):
        Given(torch.arange(2)).status()
