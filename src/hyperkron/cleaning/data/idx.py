"""The IDX format of MNIST and its relatives, read without any other package."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hyperkron.cleaning.data.limits import ReadOptions, read_bounded
from hyperkron.solution import HyperkronError

_DTYPES = {
    0x08: torch.uint8,
    0x09: torch.int8,
    0x0B: torch.int16,
    0x0C: torch.int32,
    0x0D: torch.float32,
    0x0E: torch.float64,
}


def read_idx(path: str | Path, max_bytes: int = ReadOptions.max_bytes) -> Tensor:
    """The array of an IDX file, gzip-compressed or not.

    The file holds two zero bytes, a code of the element type, the number of dimensions, the dimensions as big-endian
    32-bit integers, and the elements, big-endian, in row-major order.

    Args:
        path: of the file.
        max_bytes: of the file once decompressed.

    Reference: LeCun, Cortes & Burges, "The MNIST database of handwritten digits" (1998).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "labels"
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
        >>> read_idx(path)
        tensor([7, 2, 1], dtype=torch.uint8)
    """
    content = read_bounded(Path(path), ReadOptions(max_bytes=max_bytes))
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES:
        raise HyperkronError(f"path={str(path)!r} is not an IDX file: it starts with {content[:4].hex() or 'nothing'}.")
    dtype, start = _DTYPES[content[2]], 4 + 4 * content[3]
    if len(content) < start:
        raise HyperkronError(f"path={str(path)!r} ends within its header; fetch it again.")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    size = torch.empty((), dtype=dtype).element_size()
    if len(content) != start + size * prod(shape):
        raise HyperkronError(
            f"path={str(path)!r} holds {len(content) - start} bytes of elements but its shape {shape} needs "
            f"{size * prod(shape)}; fetch it again."
        )
    if prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8)
    return raw.view(-1, size).flip(1).contiguous().view(dtype).view(shape)


@dataclass(frozen=True)
class MNIST:
    """The images (N, 784) in [0, 1] and labels (N,) of MNIST's two parts."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def mnist(folder: str | Path) -> MNIST:
    """MNIST, or a dataset of the same form (Fashion-MNIST, KMNIST), from its four IDX files.

    Args:
        folder: holds ``train-images-idx3-ubyte`` and the other three, each with or without ``.gz``.
    """
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    images, labels, test_images, test_labels = (read_idx(find_idx(Path(folder), f"{name}-ubyte")) for name in names)
    for x, y in ((images, labels), (test_images, test_labels)):
        if len(x) != len(y):
            raise HyperkronError(f"folder={str(folder)!r} holds {len(x)} images but {len(y)} labels; fetch it again.")
    return MNIST(images.flatten(1) / 255, labels.long(), test_images.flatten(1) / 255, test_labels.long())


def find_idx(folder: Path, name: str) -> Path:
    """A file of MNIST, compressed or not."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise HyperkronError(f"folder={str(folder)!r} has neither {name} nor {name}.gz; put MNIST's four files there.")
