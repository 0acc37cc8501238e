"""Tables that are too wide, too long or too compressible are refused before they are expanded."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hyperkron.cleaning.data import InputForm, ReadOptions, export_rows, limits, read
from hyperkron.cleaning.data.checks import header_note
from hyperkron.cleaning.data.labelled import Frame, Roles
from hyperkron.cleaning.data.roles import _require, resolve
from hyperkron.cleaning.data.spreadsheets import refuse_repeated
from hyperkron.cleaning.data.values import Cells, as_number, gaps, is_missing, numbers
from hyperkron.solution import HyperkronError

SMALL = ReadOptions(max_columns=20, max_cells=200, max_field=1000)


def _csv(columns: int, rows: int, cell: str = "1") -> str:
    head = ",".join(["label", *(f"c{i}" for i in range(columns - 1))])
    return "\n".join([head, *(",".join(["ab"[i % 2], *[f"{cell}{i}"] * (columns - 1)]) for i in range(rows))]) + "\n"


# --- each name of a column is looked at once ---------------------------------------------------------------


class _Membership(Mapping[str, Any]):
    """Columns that can be asked for by name, and not gone through."""

    def __getitem__(self, name: str) -> Any:
        return {"a": 1}[name]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all names were gone through to find one")

    def __len__(self) -> int:
        return 1


def test_columns_are_found_without_going_through_all_of_them() -> None:
    _require("table", _Membership(), "label", "a")


def test_repeated_names_are_found_in_one_pass() -> None:
    with pytest.raises(HyperkronError, match="more than one column 'a', 'b'; rename"):
        refuse_repeated(iter(["b", "a", "c", "a", "b", "a"]), "x.csv")
    refuse_repeated(iter(["b", "a"]), "x.csv")


@pytest.mark.parametrize(
    "column",
    [
        ["1", "2.5", " 3 ", "-1e-3"],
        ["1", "nan", "inf", "1e300"],
        ["1", "", "n/a", "true"],
        ["1_000", "2"],
        ["1", "x"],
        [1, None, 2.5, True],
        ["١٢", "3"],
    ],
)
def test_a_column_parsed_at_once_is_one_parsed_cell_by_cell(column: list[Any]) -> None:
    one_by_one = [as_number(value) for value in column]
    for values in (column, Cells(column)):
        for _ in range(2):
            found, strange = numbers(values)
            wanted = [np.nan if x is None or abs(x) >= 3e38 else x for x in one_by_one]
            np.testing.assert_array_equal(found, wanted)
            assert strange == [value for value, x in zip(column, one_by_one, strict=True) if x is None]
            assert gaps(values).tolist() == [is_missing(value) for value in column]


# --- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", _csv(21, 2), "21 columns or more; at most max_columns=20"),
        ("a.csv", "label,a\nx,1\n" + "1," * 300, "300 columns or more"),
        ("a.csv", _csv(10, 21), "cells .* or more; at most max_cells=200"),
        ("a.csv", f"label,a\nx,{'y' * 1001}\n", "line 2 has a field of more than max_field=1000"),
        ("a.csv", f'label,a\nx,"{"y" * 1001}', "is a quote missing that ends it"),
        ("a.jsonl", json.dumps({f"c{i}": 1 for i in range(21)}), "21 columns or more"),
        ("a.jsonl", "\n".join(json.dumps({f"c{i}": 1}) for i in range(20)), "more; at most max_cells=200"),
        ("a.jsonl", json.dumps({"text": "y" * 1001, "label": 1}), "line 1 has a field"),
        ("a.json", json.dumps([{f"c{i}": 1 for i in range(21)}]), "21 columns or more"),
        ("a.json", json.dumps([{f"c{i}": 1} for i in range(20)]), "400 cells"),
        ("a.json", json.dumps([{"text": "y" * 1001, "label": 1}]), "max_field=1000"),
    ],
)
def test_texts_beyond_the_limits(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(HyperkronError, match=message) as told:
        read(tmp_path / name, options=SMALL)
    assert "ReadOptions(max_" in str(told.value)
    if name != "a.json":
        with pytest.raises(HyperkronError, match=message):
            export_rows(tmp_path / name, [0], tmp_path / f"b{(tmp_path / name).suffix}", options=SMALL)


def test_within_the_limits(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(_csv(20, 10))
    assert len(read(tmp_path / "a.csv", options=SMALL)) == 10


class _Name(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_names_of_a_wide_table_are_not_compared_each_with_each() -> None:
    """A set finds a name by its hash. Each of 50 000 names would be looked for in a list of 50 000."""
    names = [_Name(i) for i in range(1000)]
    columns = {name: [0.5, 2.5] for name in names}
    form = InputForm.of(read({**columns, "label": [0, 1]}))
    _Name.compared = 0
    assert "looks like a row" in header_note(columns)
    assert resolve(Frame("a.csv", {**columns, "label": [0, 1]}), Roles())[1] == []
    votes = {"a": ["p", "q"], "b": ["p", "q"]}
    assert resolve(Frame("a.csv", {**columns, **votes}), Roles(features=names, annotators=tuple(votes)))[1] == []
    assert form._from_columns(Frame("b.csv", columns), None, ReadOptions()).messages == ()
    assert _Name.compared < 20 * len(names)  # 11 each


@pytest.mark.parametrize("wide", [False, True])
def test_npz_beyond_the_limits(wide: bool, tmp_path: Path) -> None:
    shape = (2, 21) if wide else (200, 1)
    np.savez(tmp_path / "a.npz", x=np.random.rand(*shape), y=np.arange(shape[0]) % 2)
    with pytest.raises(HyperkronError, match="21 columns" if wide else "400 cells"):
        read(tmp_path / "a.npz", options=SMALL)


# --- bombs: small files that grow --------------------------------------------------------------------------


def _never(*args: Any, **more: Any) -> None:
    raise AssertionError("the table was expanded")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"x": pa.array(np.zeros(2_000_000)), "label": pa.array(np.zeros(2_000_000, np.int8))}), "a byte"),
        (pa.table({"x": pa.array([[0] * 3_000_000, [1]]), "label": pa.array(["a", "b"])}), "a byte"),
    ],
)
def test_a_parquet_file_of_millions_of_equal_rows(
    table: pa.Table, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 50_000
    monkeypatch.setattr(pq.ParquetFile, "read", _never)
    with pytest.raises(HyperkronError, match=message):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("schema", [True, False])
@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_one_long_text_that_is_repeated(schema: bool, kind: pa.DataType, tmp_path: Path) -> None:
    """A megabyte that is stored once stands in 5000 rows: 5 GB."""
    long = pa.array(["y" * 2**20], type=kind)
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(5000, np.int32)), long)
    pq.write_table(pa.table({"text": text, "label": ["a", "b"] * 2500}), tmp_path / "a.parquet", store_schema=schema)
    with pytest.raises(HyperkronError, match=r"max_bytes=\d+|times as many"):
        read(tmp_path / "a.parquet")


def test_columns_of_repeated_texts_are_still_read(tmp_path: Path) -> None:
    texts = [f"a text of words {i % 7}" for i in range(500)]
    for name, kind in (("s", pa.string()), ("l", pa.large_string()), ("d", pa.dictionary(pa.int32(), pa.string()))):
        column = pa.array(texts).cast(kind)
        pq.write_table(pa.table({"text": column, "label": ["a", "b"] * 250}), tmp_path / f"{name}.parquet")
        assert read(tmp_path / f"{name}.parquet").inputs == texts
        kept = pq.read_table(export_rows(tmp_path / f"{name}.parquet", [3], tmp_path / f"{name}2.parquet"))
        assert kept.schema.field("text").type == kind


def test_compressed_files_that_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FREE_BYTES", 2**18)
    monkeypatch.setattr(limits, "FREE_CELLS", 2**12)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"label,x\n" + b"a,1\nb,2\n" * 20_000))
    with pytest.raises(HyperkronError, match="16 cells a byte"):
        read(tmp_path / "a.csv.gz")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"label": 1, "x": "' + b" " * 2**20 + b'"}'))
    with pytest.raises(HyperkronError, match="over 200 times as many"):
        read(tmp_path / "b.jsonl.gz")
    np.savez_compressed(tmp_path / "c.npz", x=np.zeros((2**10, 2**10), np.uint8), y=np.zeros(2**10, np.uint8))
    monkeypatch.setattr(np.lib.format, "read_array", _never)
    with pytest.raises(HyperkronError, match="over 200 times as many"):
        read(tmp_path / "c.npz")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet", "npz"])
def test_a_pipe_is_not_waited_for(suffix: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"a.{suffix}")
    with pytest.raises(HyperkronError, match="not an ordinary file"):
        read(tmp_path / f"a.{suffix}")
