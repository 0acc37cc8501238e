"""Files made to do harm: none may run code, fill the memory, or read what lies elsewhere."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hyperkron.cleaning.data import ReadOptions, read, read_idx
from hyperkron.solution import HyperkronError


class _Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    bombs = np.array([_Bomb(trace), _Bomb(trace)], dtype=object)
    np.savez(tmp_path / "a.npz", x=bombs, y=np.array([0, 1]))
    with pytest.raises(HyperkronError, match=r"holds Python objects under 'x.npy'"):
        read(tmp_path / "a.npz")
    assert not trace.exists()


def test_pickled_cifar_is_refused_by_name(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(_Bomb(trace)))
    with pytest.raises(HyperkronError, match="cifar-10-binary"):
        read(tmp_path)
    hundred = tmp_path / "hundred"
    hundred.mkdir()
    for name in ("train", "test", "meta"):
        (hundred / name).write_bytes(pickle.dumps(_Bomb(trace)))
    with pytest.raises(HyperkronError, match="binary version"):
        read(hundred)
    assert not trace.exists()


# --- files that grow ---------------------------------------------------------------------------------------

SMALL = ReadOptions(max_bytes=10_000)


def test_npz_that_grows(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 10)), y=np.arange(1000) % 2)
    assert (tmp_path / "a.npz").stat().st_size < 5000
    with pytest.raises(HyperkronError, match="more than max_bytes=10000; if you trust"):
        read(tmp_path / "a.npz", options=SMALL)


def test_npz_that_lies_about_its_shape(tmp_path: Path) -> None:
    """A header that claims 8 TB, on 16 bytes."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(16)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", member)
        archive.writestr("y.npy", member)
    with pytest.raises(HyperkronError, match=r"claims shape \(1000000000000,\) of float64 but holds 16 bytes"):
        read(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz"])
def test_gzip_that_grows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"a,b\n" * 100_000))
    with pytest.raises(HyperkronError, match="more than max_bytes=10000"):
        read(tmp_path / name, options=SMALL)


def test_idx_that_grows(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, 100_000) + bytes(100_000)))
    with pytest.raises(HyperkronError, match="more than max_bytes=10000"):
        read_idx(tmp_path / "x", max_bytes=10_000)


def test_parquet_that_grows(tmp_path: Path) -> None:
    table = pa.table({"text": [str(i) * 20 for i in range(2000)], "label": ["x", "y"] * 1000})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(HyperkronError, match="more than max_bytes=10000"):
        read(tmp_path / "a.parquet", options=SMALL)


def _png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its pixels do not have."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_pictures_that_grow(tmp_path: Path, side: int) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(_png(side, side))
    with pytest.raises(HyperkronError, match=r"'a/1.png' is too large to be decoded safely .*max_pixels=67108864"):
        read(tmp_path)


def test_many_pictures_that_grow(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("L", (100, 100)).save(tmp_path / name / "1.png")
    with pytest.raises(HyperkronError, match=r"2 images of shape .* need more than max_bytes=10000"):
        read(tmp_path, options=SMALL)


# --- paths that lead elsewhere -----------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "inside"
    (folder / "sub").mkdir(parents=True)
    Image.new("L", (2, 2), 7).save(tmp_path / "secret.png")
    Image.new("L", (2, 2), 9).save(folder / "own.png")
    return folder


@pytest.mark.parametrize("path", ["../secret.png", "sub/../../secret.png", "{secret}", "link.png", "linked/secret.png"])
def test_paths_may_not_leave_the_folder(pictures: Path, path: str) -> None:
    (pictures / "link.png").symlink_to(pictures.parent / "secret.png")
    (pictures / "linked").symlink_to(pictures.parent)
    name = path.format(secret=pictures.parent / "secret.png")
    (pictures / "a.csv").write_text(f"image,label\n{name},x\nown.png,y\n")
    with pytest.raises(HyperkronError, match="leads out of the folder"):
        read(pictures / "a.csv")


def test_odd_paths_inside_are_fine(pictures: Path) -> None:
    (pictures / "a.csv").write_text(f"image,label\nsub/../own.png,x\n{pictures / 'own.png'},y\n")
    assert read(pictures / "a.csv").inputs[:, 0, 0, 0].tolist() == [9, 9]


def test_links_out_of_class_folders(pictures: Path) -> None:
    for name in "ab":
        (pictures / name).mkdir()
        (pictures / name / "1.png").symlink_to(pictures.parent / "secret.png")
    with pytest.raises(HyperkronError, match="leads out of the folder"):
        read(pictures)


def test_a_pipe_is_no_picture(pictures: Path) -> None:
    os.mkfifo(pictures / "pipe.png")
    (pictures / "a.csv").write_text("image,label\npipe.png,x\nown.png,y\nown.png,x\n")
    assert read(pictures / "a.csv").rows.tolist() == [1, 2]


@pytest.mark.parametrize("decoder", ["EPS", "PCX"])
def test_only_common_decoders_are_used(pictures: Path, decoder: str) -> None:
    """PostScript would start another program; the rare formats are where decoders have their faults."""
    Image.new("L", (2, 2)).save(buffer := io.BytesIO(), decoder)
    (pictures / "odd.png").write_bytes(buffer.getvalue())
    (pictures / "a.csv").write_text("image,label\nodd.png,x\nown.png,y\nown.png,x\n")
    assert read(pictures / "a.csv").rows.tolist() == [1, 2]


def test_nothing_in_a_table_is_evaluated(tmp_path: Path) -> None:
    texts = ["=cmd|' /C calc'!A0", "<script>alert(1)</script>", "__import__('os').system('x')", "{0.__class__}"]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f'"{text}",{i % 2}\n' for i, text in enumerate(texts)))
    assert read(tmp_path / "a.csv").inputs == texts
