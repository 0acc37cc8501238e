"""Whether a source still holds the rows that it held, in every format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hyperkron.cleaning.data import row_hashes
from hyperkron.solution import HyperkronError

Rows = list[tuple[str, int]]
ROWS: Rows = [("one, two", 0), ("three", 1), ("four", 0), ("five", 1)]


def _csv(folder: Path, rows: Rows) -> Path:
    (folder / "a.csv").write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows))
    return folder / "a.csv"


def _jsonl(folder: Path, rows: Rows) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in rows))
    return folder / "a.jsonl"


def _json(folder: Path, rows: Rows) -> Path:
    (folder / "a.json").write_text(json.dumps([{"text": t, "label": n} for t, n in rows]))
    return folder / "a.json"


def _parquet(folder: Path, rows: Rows) -> Path:
    pq.write_table(pa.table({"text": [t for t, _ in rows], "label": [n for _, n in rows]}), folder / "a.parquet")
    return folder / "a.parquet"


def _npz(folder: Path, rows: Rows) -> Path:
    x = np.array([[float(len(text)), 1.0] for text, _ in rows])
    np.savez(folder / "a.npz", x=x, y=np.array([n for _, n in rows]))
    return folder / "a.npz"


def _wrench(folder: Path, rows: Rows) -> Path:
    (folder / "label.json").write_text('{"0": "no", "1": "yes"}')
    lines = [json.dumps({"text": t, "label": n, "weak_labels": [n, -1]}) for t, n in rows]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def _wrench_json(folder: Path, rows: Rows) -> Path:
    (folder / "label.json").write_text('{"0": "no", "1": "yes"}')
    entries = {i: {"label": n, "weak_labels": [n], "data": {"text": t}} for i, (t, n) in enumerate(rows)}
    (folder / "train.json").write_text(json.dumps(entries))
    return folder


def _pictures(folder: Path, rows: Rows) -> Path:
    for i, (text, label) in enumerate(rows):
        (folder / "pictures" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), len(text)).save(folder / "pictures" / str(label) / f"{i}.png")
    return folder / "pictures"


def _idx(folder: Path, rows: Rows) -> Path:
    pixels = b"".join(bytes([len(text)] * 4) for text, _ in rows)
    head = struct.pack(">4B3I", 0, 0, 8, 3, len(rows), 2, 2)
    (folder / "train-images-idx3-ubyte").write_bytes(head + pixels)
    labels = struct.pack(">4BI", 0, 0, 8, 1, len(rows)) + bytes(n for _, n in rows)
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)
    return folder


WRITERS = [_csv, _jsonl, _json, _parquet, _npz, _wrench, _wrench_json, _pictures, _idx]


@pytest.mark.parametrize("write", WRITERS)
def test_every_change_of_the_rows_is_seen(write: Callable[[Path, Rows], Path], tmp_path: Path) -> None:
    changed = {
        "the same": ROWS,
        "shuffled": [ROWS[i] for i in (2, 0, 3, 1)],
        "another text": [("changed", 0), *ROWS[1:]],
        "another label": [("one, two", 1), *ROWS[1:]],
        "fewer": ROWS[:-1],
        "more": [*ROWS, ("six six", 1)],
    }
    found = {}
    for name, rows in changed.items():
        (tmp_path / name).mkdir()
        found[name] = row_hashes(write(tmp_path / name, rows))
    (tmp_path / "again").mkdir()
    assert row_hashes(write(tmp_path / "again", ROWS)) == found["the same"]
    assert len({hashes.sha256 for hashes in found.values()}) == len(changed)
    before = found["the same"]
    assert before.difference(found["another text"]).startswith("1 row of 4 differs: row 0") or write is _pictures
    assert "4 rows and are 3 now" in before.difference(found["fewer"])


@pytest.mark.parametrize("write", [_csv, _jsonl, _json, _parquet, _npz, _wrench])
def test_a_shuffled_source_is_called_so(write: Callable[[Path, Rows], Path], tmp_path: Path) -> None:
    before = row_hashes(write(tmp_path, ROWS))
    after = row_hashes(write(tmp_path, ROWS[::-1]))
    assert before.difference(after) == "the same 4 rows stand in another order"


def test_fields_are_not_run_together(tmp_path: Path) -> None:
    """What moves from one field to the next is another row."""
    (tmp_path / "a.csv").write_text("text,label\nab,c\n")
    (tmp_path / "b.csv").write_text("text,label\na,bc\n")
    assert row_hashes(tmp_path / "a.csv").sha256 != row_hashes(tmp_path / "b.csv").sha256


def test_line_ends_and_quotes_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\na,c\n")
    (tmp_path / "b.csv").write_bytes(b'text,label\r\n"a",c\r\n')
    assert row_hashes(tmp_path / "a.csv") == row_hashes(tmp_path / "b.csv")


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HyperkronError, match="does not exist"):
        row_hashes(tmp_path / "a.csv")
