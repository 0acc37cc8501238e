"""Files that are all there or not there at all: hashed while written, flushed to the disk, verified before read."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyperkron.training.encoding import DTYPES, DamagedCheckpoint
from hyperkron.training.writing import in_words, open_ordinary, open_plain, whole_file

CHUNK = 2**20
MAX_HEADER = 100_000_000
"""Bytes of the description at the head of a tensor file; the limit of safetensors itself."""
MAX_JSON = 2**28
"""Bytes of a JSON file."""


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file durably, piece by piece; its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    descriptor = open_ordinary(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, follow=False)
    with os.fdopen(descriptor, "wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file durably, one tensor after the other; its size and SHA-256."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # aligns every one to its size
    header, end = {}, 0
    for name, x in ordered:
        begin, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for _, x in ordered:
            here = x.detach().cpu().contiguous()
            if here.numel():
                count = here.numel() * here.element_size()
                yield memoryview((ctypes.c_char * count).from_address(here.data_ptr())).cast("B")

    return write(path, pieces())


def put_tensors(path: Path, tensors: dict[str, Tensor], then: str = "") -> dict[str, Any]:
    """Put a safetensors file in place whole; its size and SHA-256. ``then`` is as for :func:`writing.in_words`."""
    needed = sum(x.numel() * x.element_size() for x in tensors.values())
    with in_words(path, needed, then), whole_file(path) as temporary:
        return write_tensors(temporary, tensors)


@contextlib.contextmanager
def _plain_file(path: Path, size: int | None) -> Iterator[BinaryIO]:
    """An ordinary file of the given size, not a link, a pipe or a folder, opened for reading."""
    try:
        with open_plain(path, follow=False) as file:
            found = os.fstat(file.fileno()).st_size
            if size is not None and found != size:
                raise DamagedCheckpoint(f"{path.name} has {found} bytes instead of {size}")
            yield file
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read ({error.strerror})") from error


def verify(path: Path, record: dict[str, Any]) -> None:
    """Refuse a file that is not, byte for byte, the one of ``record``."""
    found = hashlib.sha256()
    with _plain_file(path, record["size"]) as file:
        while data := file.read(CHUNK):
            found.update(data)
    if found.hexdigest() != record["sha256"]:
        raise DamagedCheckpoint(f"{path.name} has another SHA-256 than when it was written")


def read_json(path: Path, record: dict[str, Any] | None = None, limit: int = MAX_JSON) -> tuple[Any, bytes]:
    """The content of a JSON file and its bytes, verified if there is a record of it."""
    with _plain_file(path, None if record is None else record["size"]) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise DamagedCheckpoint(f"{path.name} is larger than {limit} bytes")
    if record is not None and hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise DamagedCheckpoint(f"{path.name} has another SHA-256 than when it was written")
    try:
        return json.loads(data.decode("ascii"), parse_constant=_refuse_constant), data
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path.name} is not JSON that hyperkron writes ({str(error)[:100]})") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class TensorFile:
    """The tensors of a verified safetensors file, each a copy of its own that outlives the file."""

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        verify(path, record)
        with _plain_file(path, record["size"]) as file:
            length = int.from_bytes(file.read(8), "little")
        if record["size"] < 8 or length > min(MAX_HEADER, record["size"] - 8):
            raise DamagedCheckpoint(f"{path.name} claims a header of {length} bytes in a file of {record['size']}")
        self._name = path.name
        try:
            self._file = safe_open(path, framework="pt", device="cpu").__enter__()
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{path.name} is not a safetensors file ({error})") from error

    def __call__(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor by its name, or these rows of it, as a copy."""
        try:
            return torch.clone(self._file.get_tensor(name) if rows is None else self._file.get_slice(name)[rows])
        except (SafetensorError, TypeError) as error:
            which = "" if rows is None else f"rows {rows.start}–{rows.stop} of "
            raise DamagedCheckpoint(f"{self._name} has no {which}tensor {name!r:.100}") from error

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self._file.__exit__(None, None, None)
