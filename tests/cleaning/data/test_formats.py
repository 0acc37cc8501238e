"""Every format that ``read`` and ``read_pair`` know, on small files made here."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hyperkron.cleaning.data import Labelled, ReadOptions, read, read_pair
from hyperkron.cleaning.data.sources import split_source
from hyperkron.solution import HyperkronError

TEXTS = ["a fine day", 'she said "no, never"', "line one\nline two", "ünïcode 漢字", "007"]
NAMES = ["good", "bad", "good", "bad", "good"]


def _rows() -> list[dict[str, str]]:
    return [{"text": text, "label": name} for text, name in zip(TEXTS, NAMES, strict=True)]


def _csv(path: Path, delimiter: str = ",", charset: str = "utf-8") -> Path:
    quoted = [
        f'"{text.replace(chr(34), chr(34) * 2)}"{delimiter}{name}' for text, name in zip(TEXTS, NAMES, strict=True)
    ]
    path.write_bytes("\r\n".join([f"text{delimiter}label", *quoted, ""]).encode(charset))
    return path


def _jsonl(path: Path) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in _rows()).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def _json(path: Path) -> Path:
    path.write_text(json.dumps(_rows()), "utf-8")
    return path


def _parquet(path: Path) -> Path:
    pq.write_table(pa.table({"text": TEXTS, "label": pa.array(NAMES).dictionary_encode()}), path)
    return path


def _npz(path: Path) -> Path:
    np.savez(path, x=np.array(TEXTS), y=np.array(NAMES))
    return path


TEXT_FORMATS: dict[str, Callable[[Path], Path]] = {
    "a.csv": _csv,
    "a.tsv": lambda path: _csv(path, "\t"),
    "semicolon.csv": lambda path: _csv(path, ";"),
    "a.jsonl": _jsonl,
    "a.jsonl.gz": _jsonl,
    "a.json": _json,
    "a.parquet": _parquet,
    "a.npz": _npz,
}


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_texts_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    found = read(TEXT_FORMATS[name](tmp_path / name))
    assert found.kind == "text"
    assert found.inputs == TEXTS
    assert found.classes == ("bad", "good")
    assert found.labels.tolist() == [1, 0, 1, 0, 1] and found.labels.dtype == np.int64
    assert found.rows.tolist() == [0, 1, 2, 3, 4]
    assert found.counts() == [2, 3]
    assert bool(found.messages) == (name == "semicolon.csv"), found.messages


def test_other_charsets(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for charset in ("utf-16", "utf-8-sig"):
        _csv(path, charset=charset)
        assert read(path, options=ReadOptions(charset=charset)).inputs == TEXTS
    assert read(path).inputs == TEXTS  # the mark at the beginning is not a part of the first name


def test_memory(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"text": TEXTS, "label": [1, 0, 1, None, 0], "n": pandas.array([1, None, 3, 4, 5], dtype="Int64")}
    )
    found = read(frame)
    assert found.classes == ("0", "1")
    assert found.rows.tolist() == [0, 1, 2, 4]
    table = read(frame, features=["n"])
    assert table.inputs[:, 0].tolist() == [1, 3, 5]  # row 1 has no feature, row 3 no label
    assert read({"text": TEXTS, "label": NAMES}).inputs == TEXTS
    with pytest.raises(HyperkronError, match="source is a list; it must be a path"):
        read([1, 2])  # type: ignore[arg-type]


def test_one_class_list_and_numeric_order(tmp_path: Path) -> None:
    train, trusted = read_pair({"x": ["a", "b", "c"], "y": [10, 9, 2]}, {"x": ["d", "e"], "y": ["9.0", "2.0"]})
    assert train.classes == trusted.classes == ("2", "9", "10")
    assert train.labels.tolist() == [2, 1, 0] and trusted.labels.tolist() == [1, 0]


def test_a_column_flags_the_trusted_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label,ok\na,x,no\nb,y,\nc,x,YES\nd,y,1\n")
    train, trusted = read_pair(tmp_path / "a.csv", trusted_column="ok")
    assert (train.inputs, train.rows.tolist()) == (["a", "b"], [0, 1])
    assert (trusted.inputs, trusted.rows.tolist()) == (["c", "d"], [2, 3])


# --- inference of columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "kind", "used"),
    [
        ({"Sentence": ["p q", "r"], "Class": ["a", "b"], "n": [1, 2]}, "text", None),
        ({"remark": ["one two three", "four five six"], "label": ["a", "b"]}, "text", None),
        ({"id": [1, 2], "age": [3, 4], "town": ["R", "O"], "target": [0, 1]}, "table", ("age", "town=R", "town=O")),
        ({"text": [1.0, 2.0], "y": [0, 1]}, "table", ("text",)),
    ],
)
def test_roles_are_inferred(columns: dict[str, list[Any]], kind: str, used: tuple[str, ...] | None) -> None:
    found = read(columns)
    assert found.kind == kind
    assert (None if found.encoding is None else found.encoding.names) == used


def test_unused_columns_are_named() -> None:
    found = read({"text": ["a", "b"], "label": [0, 1], "n": [5, 6], "trusted": [0, 1]})
    assert any("columns not used: 'n', 'trusted'" in message for message in found.messages)
    assert any("pass trusted_column" in message for message in found.messages)


# --- pictures ----------------------------------------------------------------------------------------------


def _picture(path: Path, value: int, size: tuple[int, int] = (4, 3), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16") else (value, 0, 255)).save(path)


def test_folder_by_class(tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        for i, name in enumerate(["cat", "dog", "cat", "dog"]):
            _picture(tmp_path / part / name / f"{i}.png", 10 * i + ord(part[1]))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no picture")
    train, trusted = read_pair(tmp_path)
    assert train.inputs.shape == (4, 3, 3, 4) and train.inputs.dtype == np.uint8
    assert train.inputs[:, 0, 0, 0].tolist() == [114, 134, 124, 144]  # cat/0, cat/2, dog/1, dog/3
    assert train.inputs[0, 2].tolist() == [[255] * 4] * 3
    assert (train.classes, train.labels.tolist()) == (("cat", "dog"), [0, 0, 1, 1])
    assert trusted.inputs[:, 0, 0, 0].tolist() == [97, 117, 107, 127]
    assert trusted.messages == () and [m.partition(". ")[0] for m in train.messages] == [
        f"{tmp_path.name}: 1 file not read: 'cat/notes.txt'"
    ]
    assert train.ids == {"file": ["train/cat/0.png", "train/cat/2.png", "train/dog/1.png", "train/dog/3.png"]}
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"no picture")
    assert read_pair(tmp_path)[0].ids == {"file": train.ids["file"][1:]}  # a row that is left out takes its name along
    assert len(read(f"{tmp_path}:test", like=train)) == 4
    with pytest.raises(HyperkronError, match=r"part='dev' is not a folder of .*; there is train, valid, test"):
        read(f"{tmp_path}:dev")


def test_sizes_and_modes(tmp_path: Path) -> None:
    for i, size in enumerate([(8, 8), (8, 8), (16, 12)]):
        _picture(tmp_path / "ab"[i % 2] / f"{i}.png", 100 + i, size, "L")
    found = read(tmp_path)
    assert found.inputs.shape == (3, 1, 8, 8)
    assert any("2 sizes" in m and "8×8" in m for m in found.messages)
    assert read(tmp_path, options=ReadOptions(image_size=5)).inputs.shape == (3, 1, 5, 5)
    _picture(tmp_path / "b" / "deep.png", 0x1234, (8, 8), "I;16")
    assert read(tmp_path).inputs[-1].max() == 0x12


def test_column_of_paths(tmp_path: Path) -> None:
    for i in range(4):
        _picture(tmp_path / "pictures" / f"{i}.png", i)
    lines = [f"pictures/{i}.png,{'xy'[i % 2]}" for i in range(4)]
    (tmp_path / "a.csv").write_text("\n".join(["image,label", *lines]))
    found = read(tmp_path / "a.csv")
    assert found.kind == "image" and found.inputs[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert found.labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (np.zeros((2, 5, 4), np.uint8), (2, 1, 5, 4)),
        (np.zeros((2, 5, 4, 3), np.uint8), (2, 3, 5, 4)),
        (np.zeros((2, 3, 5, 4), np.uint8), (2, 3, 5, 4)),
        (np.zeros((2, 5, 4, 4), np.uint8), (2, 3, 5, 4)),
        (np.zeros((2, 5, 4), np.int64), (2, 1, 5, 4)),
    ],
)
def test_image_arrays(x: np.ndarray[Any, Any], shape: tuple[int, ...]) -> None:
    x.flat[0] = 200
    x[..., 3:] = 255 if x.ndim == 4 and x.shape[3] == 4 else x[..., 3:]  # opaque
    found = read({"x": x, "y": [0, 1]})
    assert found.inputs.shape == shape and found.inputs.dtype == np.uint8 and found.inputs.flat[0] == 200


def test_pixels_from_0_to_1() -> None:
    found = read({"x": np.array([[[0.0, 1.0]], [[0.2, 0.4]]]), "y": [0, 1]})
    assert found.inputs[:, 0, 0].tolist() == [[0, 255], [51, 102]]


def test_npz_parts_and_class_names(tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    np.savez(
        tmp_path / "a.npz", x_train=x[:4], y_train=[0, 1, 0, 1], x_test=x[4:], y_test=[1, 0], classes=["no", "yes"]
    )
    train, trusted = read_pair(tmp_path / "a.npz", f"{tmp_path}/a.npz:test")
    assert train.kind == "table" and train.encoding is not None
    assert train.classes == ("no", "yes") and trusted.labels.tolist() == [1, 0]
    np.testing.assert_array_equal(trusted.inputs, x[4:])
    np.testing.assert_allclose(train.standardised().mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(train.standardised().std(0), 1, rtol=1e-6)


def _idx(folder: Path, part: str, values: list[int]) -> None:
    images = struct.pack(">4B3I", 0, 0, 8, 3, len(values), 2, 2) + bytes(v for v in values for _ in range(4))
    (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
    labels = struct.pack(">4BI", 0, 0, 8, 1, len(values)) + bytes(v % 2 for v in values)
    (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def test_idx_folder(tmp_path: Path) -> None:
    _idx(tmp_path, "train", [3, 4, 5])
    _idx(tmp_path, "t10k", [7, 8])
    train, trusted = read_pair(tmp_path, f"{tmp_path}:test")
    assert train.inputs.shape == (3, 1, 2, 2) and train.inputs[:, 0, 0, 0].tolist() == [3, 4, 5]
    assert (train.classes, train.labels.tolist(), trusted.labels.tolist()) == (("0", "1"), [1, 0, 1], [1, 0])


def test_cifar_binary(tmp_path: Path) -> None:
    pixels = np.arange(3072, dtype=np.uint32).astype(np.uint8)
    for i in (1, 2):
        (tmp_path / f"data_batch_{i}.bin").write_bytes(bytes([i - 1]) + bytes(pixels + i))
    (tmp_path / "batches.meta.txt").write_text("airplane\ncar\n\n")
    found = read(tmp_path)
    assert (found.classes, found.labels.tolist()) == (("airplane", "car"), [0, 1])
    np.testing.assert_array_equal(found.inputs[1], (pixels + 2).reshape(3, 32, 32))
    hundred = tmp_path / "hundred"
    hundred.mkdir()
    (hundred / "train.bin").write_bytes(bytes([19, 0]) + bytes(3072) + bytes([11, 1]) + bytes([1]) * 3072)
    assert read(hundred).labels.tolist() == [0, 1]  # the fine ones


def test_sheets(tmp_path: Path) -> None:
    """Tile (r, c) of a sheet is image 100 r + c."""
    labels = np.arange(10_000) % 10
    np.savez(tmp_path / "labels.npz", train=np.concatenate([labels, labels[::-1]]), test=labels)
    tiles = np.stack([np.repeat(np.arange(100)[:, None], 100, 1), np.repeat(np.arange(100)[None], 100, 0)], -1)
    for name, blue in (("train_0", 10), ("train_1", 11), ("test", 12)):
        sheet = np.concatenate([tiles, np.full((100, 100, 1), blue)], -1).astype(np.uint8)
        Image.fromarray(sheet.repeat(2, 0).repeat(2, 1)).save(tmp_path / f"{name}.webp", lossless=True)
    found = read(tmp_path)
    assert found.inputs.shape == (20_000, 3, 2, 2)
    assert found.inputs[1234, :, 0, 1].tolist() == [12, 34, 10]
    assert found.inputs[10_001, :, 1, 0].tolist() == [0, 1, 11]
    assert found.classes[found.labels[3]] == "cat" and found.labels[10_000] == 9
    assert len(read(f"{tmp_path}:test", like=found)) == 10_000


# --- a test set like the training set ----------------------------------------------------------------------


def test_read_like(tmp_path: Path) -> None:
    train = read({"age": ["20", "40"], "town": ["Rome", "Oslo"], "label": ["b", "a"]})
    (tmp_path / "test.csv").write_text("town,label,age\nParis,b,60\nOslo,c,1\nOslo,a,30\n")
    test = read(tmp_path / "test.csv", like=train)
    assert test.classes == ("a", "b") and test.labels.tolist() == [1, 0] and test.rows.tolist() == [0, 2]
    assert any("unknown in training were left out ('c'): rows 1" in m for m in test.messages)
    assert test.left_out["label unknown in training"].tolist() == [1]
    np.testing.assert_allclose(test.standardised(), [[3, 0, 0], [0, 0, 1]])


def test_take() -> None:
    rows: Labelled = read({"x": ["a", "b", "c"], "y": [0, 1, 0]}).take([2, 0])
    assert (rows.inputs, rows.labels.tolist(), rows.rows.tolist()) == (["c", "a"], [0, 0], [2, 0])
    with pytest.raises(HyperkronError, match="for tables"):
        rows.standardised()


@pytest.mark.parametrize("kind", ["Int64", "UInt64", "int64[pyarrow]"])
def test_whole_numbers_with_gaps_keep_their_digits(kind: str) -> None:
    """pandas gives them as floats, which hold 53 bits."""
    pandas = pytest.importorskip("pandas")
    ids = [10**17 + 1, None, 10**17 + 2, 10**17 + 3]
    frame = pandas.DataFrame({"id": pandas.array(ids, dtype=kind), "n": pandas.array([1, None, 3, 4], dtype=kind)})
    frame = frame.assign(m=[5, 6, 7, 8], label=[*"abab"])
    train, _ = read_pair(frame, {"n": [5, 6], "m": [1, 2], "label": [*"ab"]}, id="id")
    assert train.ids == {"id": ids} and all(type(value) is int for value in ids if value is not None)
    assert train.inputs.dtype == np.float32 and train.inputs[[0, 2, 3], 0].tolist() == [1.0, 3.0, 4.0]
    assert np.isnan(train.inputs[1, 0])


def test_frames_of_other_libraries_and_old_sheets_have_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy:
        def to_pandas(self) -> None: ...

    with pytest.raises(
        HyperkronError, match=r"source is a Lazy; .* or a pandas DataFrame\. Pass source\.to_pandas\(\)"
    ):
        read(Lazy())  # type: ignore[arg-type]
    (tmp_path / "a.xls").write_bytes(b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HyperkronError, match=r"old form of Excel; save it as \.xlsx"):
        read(tmp_path / "a.xls")


def test_sheets_may_have_any_name() -> None:
    for name in ("My data", "2021-03", "a:b", "Sheet1"):
        assert split_source(f"dir/book.xlsx:{name}") == (Path("dir/book.xlsx"), name)
    assert split_source("dir/book.xls:My data") == (Path("dir/book.xls"), "My data")
    assert split_source("dir/a b:c d") == (Path("dir/a b:c d"), None)


def test_labels_that_mean_no_value_are_told() -> None:
    table = {"x": [1, 2, 3, 4], "label": ["NA", "DE", "FR", "n/a"]}
    assert "source: label='label' holds 'NA', 'n/a', taken as no label; rename it if it is a class." in (
        read(table).messages
    )
    assert not any(
        "taken as no label" in message for message in read({**table, "label": ["", "DE", "FR", None]}).messages
    )
