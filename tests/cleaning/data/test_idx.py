"""The IDX reader."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from hyperkron.cleaning.data import mnist, read_idx
from hyperkron.solution import HyperkronError


def _idx(code: int, shape: tuple[int, ...], elements: bytes) -> bytes:
    return bytes([0, 0, code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + elements


@pytest.mark.parametrize(
    ("code", "form", "dtype"),
    [(0x08, "B", torch.uint8), (0x0B, "h", torch.int16), (0x0C, "i", torch.int32), (0x0E, "d", torch.float64)],
)
def test_elements_are_big_endian_and_row_major(tmp_path: Path, code: int, form: str, dtype: torch.dtype) -> None:
    (tmp_path / "x").write_bytes(_idx(code, (2, 3), struct.pack(f">6{form}", 1, 2, 3, 4, 5, 120)))
    found = read_idx(tmp_path / "x")
    assert found.dtype is dtype
    assert found.tolist() == [[1, 2, 3], [4, 5, 120]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file"),
        (b"PNG!", "is not an IDX file"),
        (_idx(0x08, (3,), b"ab"), "needs 3"),
        (_idx(0x08, (3,), b"abcd"), "needs 3"),
        (bytes([0, 0, 8, 2, 0, 0]), "header"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(HyperkronError, match=message):
        read_idx(tmp_path / "x")


def _write_mnist(folder: Path, labels: bytes = b"\x07\x02") -> None:
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(_idx(8, (2, 2, 2), bytes([0, 255, 51, 0, 0, 0, 0, 102])))
        packed = gzip.compress(_idx(8, (len(labels),), labels))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(packed)


def test_mnist_compressed_or_not(tmp_path: Path) -> None:
    _write_mnist(tmp_path)
    data = mnist(tmp_path)
    torch.testing.assert_close(data.images, torch.tensor([[0, 1, 0.2, 0], [0, 0, 0, 0.4]]))
    assert data.test_labels.tolist() == [7, 2]
    assert data.labels.dtype is torch.int64


def test_mnist_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(HyperkronError, match="has neither train-images"):
        mnist(tmp_path)
    _write_mnist(tmp_path, b"\x01")
    with pytest.raises(HyperkronError, match="2 images but 1 labels"):
        mnist(tmp_path)
