"""WRENCH folders, in both forms."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperkron.cleaning.data import ReadOptions, export_rows, read, read_pair
from hyperkron.cleaning.data.sources import suffix_written
from hyperkron.solution import HyperkronError

ROWS = [("one", 1, [1, 1, 0]), ("two", 0, [2, 0, -1]), ("three", 2, [-1, -1, -1]), ("four", 2, [2, 1, 2])]


def _write(folder: Path, part: str, rows: list[tuple[str, Any, list[int]]], form: str, extra: Any = None) -> None:
    (folder / "label.json").write_text('{"0": "A", "2": "C", "1": "B"}')
    extra = extra or {}
    if form == "json":
        content = {
            str(i): {"label": y, "weak_labels": w, "data": {"text": t, **extra}} for i, (t, y, w) in enumerate(rows)
        }
        (folder / f"{part}.json").write_text(json.dumps(content))
    else:
        lines = [{"id": str(i), "text": t, "label": y, "weak_labels": w, **extra} for i, (t, y, w) in enumerate(rows)]
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (folder / f"{part}.jsonl.gz").write_bytes(gzip.compress(text))


@pytest.mark.parametrize("form", ["json", "jsonl.gz"])
def test_votes_train_and_gold_is_trusted(tmp_path: Path, form: str) -> None:
    _write(tmp_path, "train", ROWS, form)
    _write(tmp_path, "valid", [("five", 1, [0, 0, 0]), ("six", 2, [-1, 2, 2])], form)
    train, trusted = read_pair(tmp_path)
    assert train.inputs == ["one", "two", "three", "four"]
    assert train.classes == ("A", "B", "C")
    assert train.labels.tolist() == [1, 2, -1, 2]  # of a tie the source that agrees more often; no vote, no label
    assert train.gold is not None and train.gold.tolist() == [1, 0, 2, 2]
    assert train.votes is not None and train.votes.tolist() == [row[2] for row in ROWS]
    assert trusted.labels.tolist() == [1, 2]
    assert any("1 row without any vote is unlabelled" in message for message in train.messages)
    assert any("1 class absent from the trusted set: 'A'" in message for message in train.messages)
    assert read(f"{tmp_path}:valid").labels.tolist() == [1, 2]
    assert read(tmp_path).labels.tolist() == train.labels.tolist()


def test_parts_of_both_forms_are_exported_in_their_own(tmp_path: Path) -> None:
    _write(tmp_path, "train", ROWS, "json")
    _write(tmp_path, "valid", ROWS, "jsonl.gz")
    source = f"{tmp_path}:valid"
    assert suffix_written(source) == ".jsonl" and suffix_written(str(tmp_path)) == ".json"
    with pytest.raises(HyperkronError, match=r"written as \.jsonl or"):
        export_rows(source, [1], tmp_path / "out.json")
    assert json.loads(export_rows(source, [1], tmp_path / "out.jsonl").read_text())["text"] == "two"


def test_rows_without_votes_can_be_left_out(tmp_path: Path) -> None:
    _write(tmp_path, "train", ROWS, "json")
    found = read(tmp_path, options=ReadOptions(abstain="drop"))
    assert found.rows.tolist() == [0, 1, 3] and found.votes is not None and len(found.votes) == 3
    assert any("are left out" in message for message in found.messages)


def test_the_majority_vote_can_be_the_only_label(tmp_path: Path) -> None:
    _write(tmp_path, "train", ROWS, "json")
    found = read(tmp_path, options=ReadOptions(abstain="first"))
    assert found.labels.tolist() == [1, 0, 0, 2] and found.votes is None  # ties and silence go to the first class
    assert any("1 row without any vote go to the first class, 'A'" in message for message in found.messages)


def test_trec_test_texts_lose_their_fine_label(tmp_path: Path) -> None:
    rows = [("dist How far is it ?", 0, [0]), ("city What city ?", 1, [1])]
    _write(tmp_path, "train", [("how far ?", 0, [0]), ("count dracula ?", 1, [1])], "json")
    _write(tmp_path, "test", rows, "json")
    assert read(f"{tmp_path}:test").inputs == [row[0] for row in rows]  # the classes are not TREC's
    names = ["DESC", "ENTY", "HUM", "ABBR", "LOC", "NUM"]
    (tmp_path / "label.json").write_text(json.dumps(dict(enumerate(names))))
    found = read(f"{tmp_path}:test")
    assert found.inputs == ["How far is it ?", "What city ?"]
    assert any("fine label" in message and "2 texts" in message for message in found.messages)
    assert read(tmp_path).inputs == ["how far ?", "count dracula ?"]


def test_entities_are_marked(tmp_path: Path) -> None:
    _write(tmp_path, "train", [("aspirin blocks cox", 0, [0]), ("x stops y fully", 1, [1])], "json")
    spans = {"span1": [0, 1], "span2": [8, 9]}
    _write(tmp_path, "train", [("x stops y fully", 0, [0]), ("a helps b a lot", 1, [1])], "json", spans)
    found = read(tmp_path)
    assert found.inputs == ["[[ x ]] stops << y >> fully", "[[ a ]] helps << b >> a lot"]
    assert any("entities of 2 texts are marked" in message for message in found.messages)
    _write(tmp_path, "train", ROWS, "json", {"span1": [0, 99], "span2": [0, 1]})  # spans that do not fit are no spans
    assert read(tmp_path).inputs[0] == "one"


@pytest.mark.parametrize(
    ("rows", "label", "message"),
    [
        ([("a", 0, [3, 0])], None, "weak_labels must be from -1"),
        ([("a", 0, [True, 0])], None, "weak_labels must be from -1"),
        ([("a", 0, [1]), ("b", 0, [1, 2])], None, "all must have the same number"),
        ([("a", 7, [1])], None, "label=7 is not a class"),
        ([(3, 0, [1])], None, "lacks a text"),
        ([], None, "is empty"),
        (ROWS, '{"1": "B"}', "must be {"),
        (ROWS, "[", "is not JSON"),
    ],
)
def test_broken_folders(tmp_path: Path, rows: list[Any], label: str | None, message: str) -> None:
    _write(tmp_path, "train", rows, "json")
    if label is not None:
        (tmp_path / "label.json").write_text(label)
    with pytest.raises(HyperkronError, match=message):
        read(tmp_path)


def test_missing_parts(tmp_path: Path) -> None:
    _write(tmp_path, "train", ROWS, "json")
    with pytest.raises(HyperkronError, match=r"part='valid' is not in .*there is train"):
        read_pair(tmp_path)
    with pytest.raises(HyperkronError, match=r"name the folder with train.json"):
        read(tmp_path / "train.json")
    (tmp_path / "label.json").unlink()
    with pytest.raises(HyperkronError, match=r"has no label.json"):
        read(tmp_path)


def test_the_real_trec() -> None:
    """Two facts about TREC as WRENCH counts: the vote is wrong on 51 % of the rows, and 68 % go to the first class."""
    folder = Path(os.environ.get("HYPERKRON_DATA", Path(__file__).parents[3] / "data")) / "wrench" / "trec"
    if not folder.is_dir():
        pytest.skip("needs WRENCH's TREC in the folder that HYPERKRON_DATA names, or in data/")
    train, trusted = read_pair(folder, options=ReadOptions(abstain="first"))
    assert train.gold is not None
    assert round(float((train.labels != train.gold).mean()), 2) == 0.51
    assert round(float(np.mean(train.labels == 0)), 2) == 0.68
    assert (len(train), len(trusted)) == (5033, 500)
    assert read(f"{folder}:test", like=train).inputs[0] == "How far is it from Denver to Aspen ?"
