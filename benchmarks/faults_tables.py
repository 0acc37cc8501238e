"""Tables that are wide, or small files that grow: each is to be refused or read within bounds of time and memory.

python benchmarks/faults_tables.py      what became of each of them
"""

from __future__ import annotations

import gzip
import io
import json
import resource
import signal
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import _resident
from forks import written

from hyperkron.cleaning.data import read
from hyperkron.solution import HyperkronError

SECONDS, BYTES = 10.0, 2**31
"""What reading a table may take: seconds of a processor, and bytes of resident memory, those of torch included."""
PATIENCE = 120
"""Seconds after which a table counts as one that does not end."""


# --- the tables --------------------------------------------------------------------------------------------


def _names(count: int) -> list[str]:
    return ["label", *(f"c{i}" for i in range(count - 1))]


def _csv(columns: int, rows: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        draw = np.random.default_rng(0)
        with (folder / "a.csv").open("w") as file:
            file.write(",".join(_names(columns)) + "\n")
            for i in range(rows):
                file.write(",".join(["ab"[i % 2], *(f"{x:.4f}" for x in draw.random(columns - 1))]) + "\n")
        return folder / "a.csv"

    return write


def _chunks(name: str, head: str, chunk: str, times: int, end: str = "\n") -> Callable[[Path], Path]:
    """A file that repeats a chunk; where it is compressed, the compressed chunk is repeated."""

    def write(folder: Path) -> Path:
        packed = gzip.compress if name.endswith(".gz") else bytes
        middle = packed(chunk.encode())
        with (folder / name).open("wb") as file:
            file.write(packed(head.encode()))
            for _ in range(times):
                file.write(middle)
            file.write(packed(end.encode()))
        return folder / name

    return write


def _text(name: str, make: Callable[[], Iterator[str]]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with (folder / name).open("w") as file:
            file.writelines(make())
        return folder / name

    return write


def _parquet(make: Callable[[], pa.Table], **how: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pq.write_table(make(), folder / "a.parquet", **how)
        return folder / "a.parquet"

    return write


def _repeated(size: int, rows: int) -> pa.Table:
    """One long text that is stored once and stands in every row."""
    indices = pa.array(np.zeros(rows, np.int32))
    text = pa.DictionaryArray.from_arrays(indices, pa.array(["y" * size]))
    return pa.table({"text": text, "label": pa.array(np.arange(rows) % 2)})


def _npz(shape: tuple[int, int], dtype: Any) -> Callable[[Path], Path]:
    """Arrays of zeros, compressed piece by piece."""

    def head(shape: tuple[int, ...]) -> bytes:
        buffer = io.BytesIO()
        about = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, about)
        return buffer.getvalue()

    def write(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, of in (("x", shape), ("y", shape[:1])):
                left = int(np.prod(of)) * np.dtype(dtype).itemsize
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    file.write(head(of))
                    while left > 0:
                        file.write(bytes(min(left, 2**20)))
                        left -= 2**20
        return folder / "a.npz"

    return write


MILLION = 10**6
TABLES: dict[str, Callable[[Path], Path]] = {
    "CSV of 5 000 columns": _csv(5_000, 20),
    "CSV of 10 000 columns": _csv(10_000, 20),
    "CSV of 20 000 columns": _csv(20_000, 20),
    "CSV of 49 999 columns": _csv(49_999, 10),
    "CSV of a million columns": _csv(MILLION, 2),
    "CSV with a field of 200 MB": _chunks("a.csv", "label,text\nx,", "y" * MILLION, 200),
    "CSV with a quote that does not end": _chunks("a.csv", 'label,text\nx,"', "y,z\n" * 250_000, 100),
    "CSV with a row of 40 million fields": _chunks("a.csv", "label,text\n", "12," * MILLION, 40),
    "CSV of 30 million short rows, compressed": _chunks("a.csv.gz", "label,x\n", "a,1\nb,2\n" * MILLION, 15),
    "CSV of 3 GB of spaces, compressed": _chunks("a.csv.gz", "label,x\na,", " " * (16 * MILLION), 190),
    "JSON lines, each with a name of its own": _text("a.jsonl", lambda: (f'{{"c{i}": 1}}\n' for i in range(60_000))),
    "JSON lines, one of 400 000 names": _text("a.jsonl", lambda: iter([json.dumps(dict.fromkeys(_names(400_000), 1))])),
    "JSON lines with a field of 100 MB": _chunks("a.jsonl", '{"label": 1, "text": "', "y" * MILLION, 100, '"}\n'),
    "JSON nested a million deep": _text("a.json", lambda: iter(["[" * MILLION, "]" * MILLION])),
    "JSON with a number of ten million digits": _text("a.json", lambda: iter(['[{"label": ', "1" * 10**7, "}]"])),
    "Parquet of ten million equal rows": _parquet(
        lambda: pa.table({"x": pa.array(np.zeros(10**7)), "label": pa.array(np.zeros(10**7, np.int8))})
    ),
    "Parquet of 100 000 columns": _parquet(lambda: pa.table({name: [0, 1] for name in _names(100_000)})),
    "Parquet with a megabyte in each of 100 000 rows": _parquet(lambda: _repeated(2**20, 10**5), store_schema=False),
    "Parquet with a category of a megabyte in 100 000 rows": _parquet(lambda: _repeated(2**20, 10**5)),
    "Parquet with 50 million values in one row": _parquet(
        lambda: pa.table({"x": pa.array([np.zeros(5 * 10**7, np.int8), [1]]), "label": ["a", "b"]})
    ),
    "npz of a million columns": _npz((2, MILLION), np.uint8),
    "npz of 1 GB of zeros": _npz((1000, MILLION), np.uint8),
    "npz of thirty million rows without columns": _npz((30 * MILLION, 0), np.uint8),
}


# --- judging them ------------------------------------------------------------------------------------------


def outcome(path: Path) -> str:
    """What became of reading a table in this process: how it ended, the seconds and the bytes."""
    limit = _resident("VmSize") + 2 * BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.alarm(PATIENCE)
    begin = time.process_time()
    try:
        read(path, label="label")
        how = "read"
    except HyperkronError as error:
        how = "refused" if len(str(error)) < 1000 else "a message without an end"
    except BaseException as error:
        how = type(error).__name__
    return json.dumps([how, time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024])


def tables(scratch: Path, say: bool = False) -> dict[str, Any]:
    """The row of ``faults.py``."""
    wrong, ended, seconds, memory = [], {"read": 0, "refused": 0}, 0.0, 0.0
    for name, write in TABLES.items():
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            path = Path(written(lambda write=write, folder=folder: str(write(Path(folder))), scratch / "told"))
            told = written(lambda path=path: outcome(path), scratch / "told")
        how, taken, held = json.loads(told) if told else ("it did not end", PATIENCE, 0)
        if say:
            print(f"{name:55} {how:10} {taken:6.2f} s {held / 2**30:5.2f} GB", flush=True)
        if how not in ended or taken > SECONDS or held > BYTES:
            wrong.append(f"{name}: {how}, {taken:.1f} s, {held / 2**30:.2f} GB")
        else:
            ended[how] += 1
            seconds, memory = max(seconds, taken), max(memory, held / 2**30)
    note = "; ".join(wrong) or (
        f"{ended['read']} read, {ended['refused']} refused; at most {seconds:.1f} s of a processor and {memory:.2f} GB"
    )
    return {
        "fault": "wide or bomb-like table",
        "tries": len(TABLES),
        "survived": len(TABLES) - len(wrong),
        "note": note,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        print(tables(Path(where), say=True)["note"])
