"""The IDX reader."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from hyperkron.cleaning.data import read_idx
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
